"""A folder in which one process works at a time."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tepo.core.errors import InputError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not POSIX: there a folder is not held
    fcntl = None

LOCK = ".lock"
"""Name of the file in the folder whose lock stands for the whole of it; it stays when the lock is gone."""


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold an existing folder while the block runs; the lock is the system's, so it ends with the process, even killed.

    Where the system or the file system knows no such locks, nothing is held.

    Raises:
        InputError: another process (or this one, elsewhere) holds the folder, or nothing can be written there.
    """
    if fcntl is None:
        yield
        return
    try:
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written to: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is in use by {_holder(folder)}") from None
        except OSError:  # a network file system without locks
            pass
        _write_holder(folder, f"{os.getpid()} {platform.node()} {time.strftime('%Y-%m-%d %H:%M:%S')}")
        try:
            yield
        finally:
            _write_holder(folder, "")


def _write_holder(folder: Path, text: str) -> None:
    # Only for the message to others: a full disk does not matter here.
    with contextlib.suppress(OSError):
        (folder / LOCK).write_text(text, encoding="utf-8")


def _holder(folder: Path) -> str:
    """Return, in words, who wrote itself into the lock file."""
    try:
        number, machine, since = (folder / LOCK).read_text(encoding="utf-8").split(" ", 2)
    except (OSError, ValueError):
        return "another process"
    return (
        f"process {number} on {machine} since {since}: wait until it ends, or stop it with `kill {number}`, "
        "which lets it finish its step and save"
    )
