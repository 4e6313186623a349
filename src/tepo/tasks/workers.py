"""Pools of killable reward workers: each task has a wall-clock limit, an overrun costs one worker and one score."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tepo.core.errors import InputError, WorkError
from tepo.tasks.worker import HEADER

START_S = 120.0  # importing a scorer's libraries from a cold disk
MAX_REPLY = 64 * 2**20


@dataclass(frozen=True)
class Outcome:
    """What became of one task: a value, or an error, or an overrun (also an error)."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False


class _Worker:
    """One child process and its half-read reply."""

    def __init__(self, load: Sequence[Any], timeout_s: float, memory_mb: int) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from tepo.tasks.worker import main; main()"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is the parent's; and a kill takes the worker's own children along
        )
        assert self.process.stdout is not None
        self.descriptor = self.process.stdout.fileno()
        os.set_blocking(self.descriptor, False)
        self.buffer = bytearray()
        self.task: int | None = None
        self.deadline = time.monotonic() + START_S
        self.ready = False
        self.send({"load": list(load), "limits": {"timeout_s": timeout_s, "memory_mb": memory_mb}})

    def send(self, request: dict[str, Any]) -> None:
        data = pickle.dumps(request)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker is seen by its closed output
            self.process.stdin.write(HEADER.pack(len(data)) + data)
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return a reply when one is complete; raise EOFError when the process is gone."""
        try:
            chunk = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return None
        if not chunk:
            raise EOFError
        self.buffer += chunk
        if len(self.buffer) > MAX_REPLY:
            raise EOFError
        line, newline, _ = bytes(self.buffer).partition(b"\n")
        if not newline:
            return None
        self.buffer.clear()  # one reply a request; anything after it was not asked for
        try:
            reply = json.loads(line)
        except ValueError:
            raise EOFError from None
        return reply if isinstance(reply, dict) else None

    def close(self) -> str:
        """End the process, with its children, and say how it ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class WorkerPool:
    """Workers that all load one scorer, started when there is work for them and then kept.

    `load` is the module whose `load(*arguments)` returns the scorer, with its arguments.
    """

    def __init__(self, load: Sequence[Any], *, workers: int, timeout_s: float, memory_mb: int) -> None:
        self.load = tuple(load)
        self.workers = workers
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._idle: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start one worker now; raise InputError when its scorer cannot be loaded."""
        if not self._idle:
            self.run([])

    def run(self, payloads: Sequence[Any]) -> list[Outcome]:
        """Score every payload; the order of outcomes is that of the payloads, whatever finished first."""
        outcomes: list[Outcome | None] = [None] * len(payloads)
        waiting = deque(range(len(payloads)))
        active: list[_Worker] = []
        try:
            with selectors.DefaultSelector() as selector:
                wanted = max(1, min(self.workers, len(payloads)))
                active = [self._take() for _ in range(wanted)]
                for worker in active:
                    selector.register(worker.descriptor, selectors.EVENT_READ, worker)
                while waiting or _at_work(active):
                    self._dispatch(active, waiting, payloads)
                    self._collect(active, selector, waiting, outcomes)
        except BaseException:
            for worker in active:
                worker.close()
            raise
        self._idle.extend(active)
        return [outcome if outcome is not None else Outcome(error="not run") for outcome in outcomes]

    def close(self) -> None:
        """End every worker."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.close()  # something outside ended it while it had nothing to do
        return self._new()

    def _new(self) -> _Worker:
        return _Worker(self.load, self.timeout_s, self.memory_mb)

    def _dispatch(self, active: list[_Worker], waiting: deque[int], payloads: Sequence[Any]) -> None:
        for worker in active:
            if worker.ready and worker.task is None and waiting:
                worker.task = waiting.popleft()
                worker.deadline = time.monotonic() + self.timeout_s
                worker.send({"payload": payloads[worker.task]})

    def _collect(
        self,
        active: list[_Worker],
        selector: selectors.BaseSelector,
        waiting: deque[int],
        outcomes: list[Outcome | None],
    ) -> None:
        busy = [worker.deadline for worker in active if worker.task is not None or not worker.ready]
        pause = max(0.0, min(busy) - time.monotonic()) if busy else 0.0
        for key, _ in selector.select(pause):
            worker: _Worker = key.data
            try:
                reply = worker.receive()
            except EOFError:
                self._lost(worker, active, selector, outcomes, again=bool(waiting))
                continue
            if reply is None:
                continue
            if not worker.ready:
                self._loaded(reply)
                worker.ready = True
            elif worker.task is not None:
                outcomes[worker.task] = Outcome(value=reply.get("value"), error=_error(reply))
                worker.task = None
                if reply.get("fatal"):
                    self._replace(worker, active, selector, again=bool(waiting))
        for worker in list(active):
            if time.monotonic() >= worker.deadline and (worker.task is not None or not worker.ready):
                if worker.task is None:
                    raise WorkError(f"the reward worker for {self._name} did not start within {START_S:g} s")
                outcomes[worker.task] = Outcome(error=f"ran longer than {self.timeout_s:g} s", timed_out=True)
                self._replace(worker, active, selector, again=bool(waiting))

    @property
    def _name(self) -> str:
        return str(self.load[-1])

    def _loaded(self, reply: dict[str, Any]) -> None:
        error = _error(reply)
        if error is None:
            return
        if reply.get("input"):
            raise InputError(error.partition(": ")[2])
        raise InputError(f"reward.kind: {self._name} cannot be loaded: {error}\n{reply.get('trace', '')}".rstrip())

    def _lost(
        self,
        worker: _Worker,
        active: list[_Worker],
        selector: selectors.BaseSelector,
        outcomes: list[Outcome | None],
        *,
        again: bool,
    ) -> None:
        task, started = worker.task, worker.ready
        how = self._replace(worker, active, selector, again=again and started)
        if not started:
            raise WorkError(f"the reward worker for {self._name} died while starting ({how})")
        if task is not None:
            outcomes[task] = Outcome(error=f"the worker died ({how}); memory limit {self.memory_mb} MB")

    def _replace(self, worker: _Worker, active: list[_Worker], selector: selectors.BaseSelector, *, again: bool) -> str:
        selector.unregister(worker.descriptor)
        how = worker.close()
        active.remove(worker)
        if again:
            fresh = self._new()
            active.append(fresh)
            selector.register(fresh.descriptor, selectors.EVENT_READ, fresh)
        return how


def _at_work(active: Sequence[_Worker]) -> bool:
    """Return whether a task is under way, or the first worker still loads; others may finish loading between runs."""
    return any(worker.task is not None for worker in active) or bool(
        active and not any(worker.ready for worker in active)
    )


def _error(reply: dict[str, Any]) -> str | None:
    return None if reply.get("error") is None else str(reply["error"])
