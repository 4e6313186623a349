"""A reward of one's own: `kind = "examples/own_reward.py:digits_right"` in the [reward] section of a run."""

from collections.abc import Sequence

from tepo import Problem


def digits_right(problems: Sequence[Problem], responses: Sequence[str]) -> list[float | None]:
    """Score each response by the share of the answer's characters that it gets right, in place.

    One entry a response: a number, None where this reward cannot judge, or a dict of named numbers. A full score
    (1.0) counts as a pass. It is called in a worker process of its own, with limits of time and memory.
    """
    return [score(problem.answer, response.strip()) for problem, response in zip(problems, responses, strict=True)]


def score(answer: str | None, response: str) -> float | None:
    """Return the share of places in which two texts agree, the longer one's length counting."""
    if answer is None:
        return None
    right = sum(one == other for one, other in zip(answer, response, strict=False))
    return right / max(len(answer), len(response), 1)
