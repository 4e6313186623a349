"""The reward of the training-step benchmark, the same function for every side.

It has to differ between the responses of a group: where all are equal nothing is to be learnt, and a side that
leaves such groups out would be measured doing nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def one(text: str) -> float:
    """Return a number in [0, 1) that looks random and depends on the text alone."""
    return zlib.crc32(text.encode()) % 1009 / 1009


def score(problems: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """Reward as tepo calls it."""
    return [one(text) for text in responses]


def trl_reward(completions: Sequence[Any], **rest: Any) -> list[float]:
    """Reward as TRL calls it."""
    return [one(text if isinstance(text, str) else text[0]["content"]) for text in completions]
