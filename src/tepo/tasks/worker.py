"""The child process in which rewards run: reads requests on standard input, writes JSON lines to standard output.

Requests come pickled from the parent, which is trusted. Replies are JSON, because a scorer may have run a model's text
as code and what comes out of this process is not to be trusted with more than numbers and words.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import struct
import sys
import traceback
from typing import IO, Any

HEADER = struct.Struct("<Q")


def main() -> None:
    """Serve requests until standard input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(2, 1)  # what a reward prints goes to the terminal, not into the protocol
    os.close(quiet)
    sys.dont_write_bytecode = True
    scorer: Any = None
    limits: dict[str, Any] = {}
    while (request := _read(requests)) is not None:
        try:
            if "load" in request:
                limits = request["limits"]
                module, *arguments = request["load"]
                scorer = importlib.import_module(module).load(*arguments)
                _limit_memory(limits["memory_mb"])
                reply: dict[str, Any] = {"value": None}
            else:
                with _deadline(limits["timeout_s"]):
                    reply = {"value": scorer(request["payload"])}
        except MemoryError:
            reply = {"error": f"out of memory: more than {limits['memory_mb']} MB", "fatal": True}
        except RecursionError:
            reply = {"error": "RecursionError: the expression is nested too deeply"}
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are its errors too
            reply = {"error": f"{type(error).__name__}: {error}", "input": _is_input_error(error)}
            if "payload" not in request or not reply["input"]:
                reply["trace"] = traceback.format_exc(limit=-4)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _read(stream: IO[bytes]) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def _is_input_error(error: BaseException) -> bool:
    return type(error).__name__ in {"InputError", "MissingExtra"}


class _deadline(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a statement
    """Let the kernel end this process if the parent, which kills at the limit, is no longer there to do it."""

    def __init__(self, timeout_s: float) -> None:
        self.seconds = 2 * timeout_s + 5

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(memory_mb: int) -> None:
    """Allow `memory_mb` beyond what the loaded worker has mapped, and no core files."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: no such file, and address-space limits are not kept there either
        return
    limit = mapped + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
