"""A reward of one's own: `kind = "examples/own_reward.py:right_or_digits"` in the [reward] section of a run."""

from collections.abc import Sequence

from tepo import Problem


def right_or_digits(problems: Sequence[Problem], responses: Sequence[str]) -> list[dict[str, float]]:
    """Reward the right number, and a little every digit on the way there.

    One entry a response: a number, None where this reward cannot judge, or as here a dict of named numbers, which
    are added up and logged apart; the first decides whether a response passed. The function runs in a worker process
    of its own, with limits of time and memory.
    """
    return [
        {"right": float(response.strip() == problem.answer), "digits": 0.2 * share_of_digits(response.strip())}
        for problem, response in zip(problems, responses, strict=True)
    ]


def share_of_digits(text: str) -> float:
    """Return which part of a text's characters are digits, 0 for an empty one."""
    return sum(character.isdigit() for character in text) / max(1, len(text))
