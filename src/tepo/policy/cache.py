"""Where built-in models are kept once they are fetched, and the lock that lets one process fetch at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_directory() -> Path:
    """Return the cache folder: $TEPO_CACHE, else $XDG_CACHE_HOME/tepo, else ~/.cache/tepo."""
    if named := os.environ.get("TEPO_CACHE"):
        return Path(named).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "tepo"
    return Path.home() / ".cache" / "tepo"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock file of `folder`, so that two processes do not fetch the same model twice.

    Where the platform has no such locks the block runs unlocked; results are renamed into place, so that only costs
    time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
