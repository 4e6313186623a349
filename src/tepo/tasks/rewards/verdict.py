"""What a scorer says about one response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A score (None: this scorer cannot judge this problem) and the answer found, in a canonical spelling."""

    score: float | None
    answer: str | None = None
