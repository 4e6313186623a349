"""Blocks of rows shared among threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from tepo.policy import blocks


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_every_row_is_taken_once_with_buffers_of_its_block(
    rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 8)
    monkeypatch.setattr(blocks, "threads_of", lambda device: threads)
    taken: list[int] = []
    held: list[tuple[int, ...]] = []

    def body(part: slice, buffers: list[Tensor]) -> None:
        taken.extend(range(part.start, part.stop))
        held.extend((buffer.dtype == torch.float32, *buffer.shape[1:]) for buffer in buffers)
        assert all(len(buffer) == part.stop - part.start <= 2 for buffer in buffers)

    blocks.each_block(torch.zeros(rows, 4, dtype=torch.bfloat16), body, buffers=3)
    assert sorted(taken) == list(range(rows))
    assert set(held) <= {(True, 4)}


def test_an_error_in_a_block_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "threads_of", lambda device: 2)
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 4)

    def body(part: slice, buffers: list[Tensor]) -> None:
        raise RuntimeError(f"row {part.start}")

    with pytest.raises(RuntimeError, match="row"):
        blocks.each_block(torch.zeros(4, 4), body, buffers=0)


def test_the_threads_leave_torchs_own_number_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this thread's, nor that of threads started later."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen: list[int] = []
        monkeypatch.setattr(blocks, "_BLOCK_CPU", 4)
        blocks.each_block(torch.zeros(12, 4), lambda part, _: seen.append(torch.get_num_threads()), buffers=0)
        assert set(seen) == {1}
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_inference_mode_holds_inside_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "threads_of", lambda device: 2)
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 4)
    with torch.inference_mode():
        total = torch.zeros(4)

        def body(part: slice, buffers: list[Tensor]) -> None:
            total[part] = 1.0

        blocks.each_block(torch.zeros(4, 4), body, buffers=0)
        assert total.tolist() == [1.0] * 4
