"""The reasoning-gym family's own scorer; in a worker, since it may run the model's text as code.

What is judged is the text in the last <answer> tags, else the whole response. Families whose scorer evaluates the
text get it only when it is made of what their answers need: numbers, brackets, operators and known names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tepo.tasks.rewards.guard import guarded
from tepo.tasks.rewards.verdict import Verdict

# Families of reasoning-gym 0.1.25 that evaluate the answer as Python, and the names an answer there may hold.
# A lone letter is a variable; everything else with a name in it is not judged.
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "asin", "acos", "atan", "exp", "log", "ln",
     "sqrt", "pi", "Abs", "arcsin", "arccos", "arctan", "Integral"}
)  # fmt: skip
LITERALS = frozenset({"True", "False", "None"})
EVALUATING: Mapping[str, frozenset[str]] = {
    "n_queens": LITERALS,
    "binary_matrix": LITERALS,
    "string_insertion": LITERALS,
    "spiral_matrix": LITERALS,
    "countdown": frozenset(),
    "puzzle24": frozenset(),
    "polynomial_multiplication": FUNCTIONS,
    "simple_integration": FUNCTIONS,
    "intermediate_integration": FUNCTIONS,
}
# Families of the same version whose scorer passes any text at all (it takes the truth value of a string).
BY_TEXT = frozenset({"game_of_life_halting"})
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_EVALUATED = 2000  # characters; a longer text is no answer of these families


def answer_of(response: str) -> str:
    """Return the text that is judged."""
    found = ANSWER.findall(response)
    return str(found[-1]).strip() if found else response.strip()


def harmless(family: str, text: str) -> bool:
    """Return whether an evaluating family may see `text`: no attribute, no dunder, no unknown name."""
    if family not in EVALUATING:
        return True
    if len(text) > MAX_EVALUATED or "__" in text or re.search(r"\.\s*[^\W\d]|:=|[{}@;\\`]", text):
        return False
    unquoted = re.sub(r"'[A-Za-z0-9_ ]*'|\"[A-Za-z0-9_ ]*\"", "", text)
    if EVALUATING[family] is not LITERALS and unquoted != text:
        return False
    names = re.findall(r"[^\W\d]\w*", unquoted)
    plain_board = family in {"n_queens", "string_insertion"} and re.fullmatch(r"[A-Z_\s]*", text) is not None
    return plain_board or all(name in EVALUATING[family] or len(name) == 1 for name in names)


@lru_cache(maxsize=64)
def _dataset(family: str, options: str) -> Any:
    import json

    from tepo.tasks.gym import create

    return create(family, json.loads(options), 0, 1)


def score_entry(response: str, family: str, options: str, entry: Mapping[str, Any]) -> Verdict:
    """Score a response with the family's scorer; its value is between 0 and 1, and only 1 is a pass.

    `options` is JSON. A gold answer that the scorer rejects is no reason to reject an equal response: text equal
    to the entry's answer scores 1.
    """
    text = answer_of(response)
    if not text:
        return Verdict(0.0)
    gold = entry.get("answer")
    if gold is not None and text == str(gold).strip():
        return Verdict(1.0, text[:500])
    if family in BY_TEXT or not harmless(family, text):
        return Verdict(0.0, text[:500])
    dataset = _dataset(family, options)
    with guarded():
        value = float(dataset.score_answer(text, entry))
    return Verdict(value, text[:500])


def load() -> Any:
    """Return the worker's scorer, with the library imported before the first clock runs."""
    import reasoning_gym  # noqa: F401

    def score(payload: dict[str, Any]) -> dict[str, Any]:
        verdict = score_entry(payload["response"], payload["family"], payload["options"], payload["entry"])
        return {"score": verdict.score, "answer": verdict.answer}

    return score
