"""Signals: the first asks, the second stops, and the handlers come back."""

from __future__ import annotations

import signal

import pytest

from tepo.training.interrupt import SIGNALS, catch_interrupt


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_asks_and_the_second_stops(first: signal.Signals, second: signal.Signals) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    said: list[str] = []
    with catch_interrupt(said.append) as interrupt:
        assert not interrupt.asked
        signal.raise_signal(first)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert len(said) == 1
    assert "stopping after this step" in said[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_stream_that_is_in_the_middle_of_a_write_loses_no_request() -> None:
    def say(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with catch_interrupt(say) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.asked
