"""Inside a worker: what a foreign scorer may not do while it looks at a model's text.

Several public scorers evaluate the text as Python. The guard is an audit hook that refuses to write files, start
processes, open connections or send signals while a response is judged. It is a second fence, behind the names that a
text may use (see `rewards.gym`) and the worker's process limits; none of them makes running foreign code safe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

REFUSED = (
    "ctypes.dlopen", "ctypes.dlsym", "fcntl.", "os.chdir", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty",
    "os.kill", "os.killpg", "os.link", "os.mkdir", "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir",
    "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.unsetenv", "os.utime", "pty.spawn",
    "shutil.", "signal.pthread_kill", "socket.", "subprocess.Popen", "tempfile.", "urllib.Request", "webbrowser.open",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC

_state = {"installed": False, "active": False}


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Refuse the dangerous events, with PermissionError, until the block ends."""
    if not _state["installed"]:
        sys.addaudithook(_refuse)  # can never be removed, so it is installed once and switched
        _state["installed"] = True
    _state["active"] = True
    try:
        yield
    finally:
        _state["active"] = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _state["active"]:
        return
    if event == "open":
        _, mode, flags = arguments
        if isinstance(mode, str) and set(mode) & set("wax+"):
            raise PermissionError("a reward may not write files")
        if isinstance(flags, int) and flags & WRITING:
            raise PermissionError("a reward may not write files")
    elif event.startswith(REFUSED):
        raise PermissionError(f"a reward may not use {event}")
