"""Ctrl-C or SIGTERM asks a run to stop after its step; a second one stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def catch_interrupt(say: Callable[[str], None]) -> Iterator[Interrupt]:
    """Turn the first signal into a request, any further one into KeyboardInterrupt; the old handlers come back after.

    Outside the main thread signals cannot be caught and nothing changes.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        # A stream that the signal found in the middle of a write refuses another one; the request stands all the same.
        with contextlib.suppress(RuntimeError):
            say("stopping after this step; Ctrl-C (or SIGTERM) again stops at once, without saving")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
