"""Rows leave, join and repeat in a key/value cache, and new columns are written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.rollout.cache import SPARE_COLUMNS, check_supported, empty_cache, gather


def columns(rows: int, first: int, count: int) -> Tensor:
    """Return states [rows, 1, count, 1] whose value says row and column: 100 * row + column."""
    return (100 * torch.arange(rows).view(-1, 1, 1, 1) + torch.arange(first, first + count).view(1, 1, -1, 1)).float()


def filled(rows: int, width: int, layers: int = 2) -> Any:
    cache = empty_cache()
    for layer in range(layers):
        cache.update(columns(rows, 0, width), -columns(rows, 0, width), layer)
    return cache


def seen(cache: Any, layer: int = 0) -> list[list[float]]:
    return cache.layers[layer].keys[:, 0, :, 0].tolist()


def test_columns_are_appended() -> None:
    cache = filled(2, 3)
    for column in range(3, 3 + 2 * SPARE_COLUMNS):
        keys, values = cache.update(columns(2, column, 1), -columns(2, column, 1), 0)
    assert torch.equal(keys, columns(2, 0, 3 + 2 * SPARE_COLUMNS))
    assert torch.equal(values, -keys)
    assert cache.get_seq_length() == 3 + 2 * SPARE_COLUMNS


def test_most_steps_write_in_place() -> None:
    cache = filled(2, 3)
    places = set()
    for column in range(3, 3 + 2 * SPARE_COLUMNS):
        keys, _ = cache.update(columns(2, column, 1), columns(2, column, 1), 0)
        places.add(keys.data_ptr())
    assert len(places) <= 3


def test_rows_of_several_caches_end_in_the_same_column() -> None:
    wide, narrow = filled(3, 4), filled(2, 2)
    joined = gather([(wide, torch.tensor([2, 0])), (narrow, torch.tensor([1, 1]))], 3)
    expected = [[201.0, 202.0, 203.0], [1.0, 2.0, 3.0], [0.0, 100.0, 101.0], [0.0, 100.0, 101.0]]
    assert seen(joined) == seen(joined, 1) == expected
    assert joined.layers[1].values[0, 0, :, 0].tolist() == [-201.0, -202.0, -203.0]


def test_a_gathered_cache_shares_nothing_with_its_sources() -> None:
    source = filled(2, 2)
    taken = gather([(source, torch.tensor([0]))], 2)
    taken.update(columns(1, 2, 1), columns(1, 2, 1), 0)
    taken.layers[0].keys.zero_()
    assert seen(source) == [[0.0, 1.0], [100.0, 101.0]]


def test_under_autocast_the_cache_holds_its_precision() -> None:
    cache = empty_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys, values = cache.update(columns(2, 0, 3), columns(2, 0, 3), 0)
        assert keys.dtype == values.dtype == torch.bfloat16
        keys, _ = cache.update(columns(2, 3, 1), columns(2, 3, 1), 0)
    assert keys.dtype == torch.bfloat16
    assert keys.shape == (2, 1, 4, 1)


def test_a_model_with_recurrent_state_is_refused() -> None:
    from transformers import LlamaConfig, Qwen3NextConfig

    check_supported(LlamaConfig())
    with pytest.raises(InputError, match="qwen3_next"):
        check_supported(Qwen3NextConfig())
