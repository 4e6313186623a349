"""Ctrl-C asks a run to stop after its step; a second one stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupt:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def catch_interrupt(say: Callable[[str], None]) -> Iterator[Interrupt]:
    """Turn the first SIGINT into a request and the second into KeyboardInterrupt; the old handler comes back after.

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
        say("stopping after this step; Ctrl-C again stops at once, without saving")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
