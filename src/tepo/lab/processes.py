"""Several commands at work at once, each in a process of its own with its own share of the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL = 0.1


@dataclass(frozen=True)
class Job:
    """A command, and the file that keeps what it says."""

    name: str
    command: tuple[str, ...]
    log: Path


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    threads: int,
    started: Callable[[str], None],
    ended: Callable[[str, int, float], None],
    stopping: Callable[[], None],
) -> bool:
    """Run the jobs in order, `at_once` at a time; return False when Ctrl-C stopped them early.

    `ended` is told name, exit code (negative: the signal that killed it) and seconds. The first Ctrl-C is told to
    `stopping` and lets every job finish its step and save, the second kills them.
    """
    waiting = list(jobs)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                started(job.name)
                running[job.name] = (_start(job, threads), time.monotonic())
            for name, (process, since) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[name]
                    _let_go(process)
                    ended(name, code, time.monotonic() - since)
            time.sleep(POLL)
    except KeyboardInterrupt:
        stopping()
        _stop([process for process, _ in running.values()])
        return False
    except BaseException:
        for process, _ in running.values():
            process.kill()
            process.wait()
        raise
    return True


def _start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with job.log.open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the others in order.
        return subprocess.Popen(
            job.command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask every process to finish its step, and wait; a second Ctrl-C kills them."""
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
            process.wait()
    for process in processes:
        _let_go(process)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def last_words(log: Path, lines: int = 5) -> str:
    """Return the last lines of a log that say something; an empty text where there is none."""
    if not log.exists():
        return ""
    text = log.read_bytes()[-8192:].decode("utf-8", errors="replace")
    return "\n".join(list(_spoken(text))[-lines:])


def _spoken(text: str) -> Iterator[str]:
    return (line.rstrip() for line in text.split("\n") if line.strip())
