"""The errors a user can act on, and the helper that suggests what they meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TepoError(Exception):
    """Base of every error `tepo` raises on purpose; its text says what was wrong and what to type next."""


class InputError(TepoError, ValueError):
    """Wrong usage or input, found before work starts; the command line exits with 2 and writes nothing."""


class WorkError(TepoError, RuntimeError):
    """A failure during the work; the command line exits with 1 and says what is safe on disk."""


class MissingExtra(InputError):  # noqa: N818 - reads as what it says
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {module!r}: pip install 'tepo[{extra}]'")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known name, or the sorted list where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."
