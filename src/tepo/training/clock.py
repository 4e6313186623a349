"""Seconds and tokens of a step, by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up seconds and tokens by phase until read. Its numbers never decide anything."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block as part of `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def count(self, phase: str, tokens: int) -> None:
        """Add tokens that `phase` worked on."""
        self._tokens[phase] = self._tokens.get(phase, 0) + tokens

    def seconds(self, phase: str) -> float:
        """Return the seconds of `phase` so far."""
        return self._seconds.get(phase, 0.0)

    def read(self) -> dict[str, float]:
        """Return `time/PHASE` in seconds and `speed/PHASE` in tokens a second, and start again."""
        result = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        for phase, tokens in self._tokens.items():
            seconds = self._seconds.get(phase, 0.0)
            if seconds > 0:
                result[f"speed/{phase}"] = tokens / seconds
        self._seconds, self._tokens = {}, {}
        return result
