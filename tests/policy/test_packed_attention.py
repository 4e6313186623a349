"""Attention in tables of rows: that of a mask over all tokens of the pass, with its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tepo.policy import TokenSequence, packing
from tepo.policy.attention import attention
from tepo.policy.packed_attention import packed_attention
from tepo.policy.packing import Packed, pack

HEADS, GROUPS, SIZE, WIDE = 4, 2, 3, 5
ROWS = [
    TokenSequence((1, 2, 3), tuple(range(1, 13))),
    TokenSequence((1,), (2, 3, 4)),
    TokenSequence((1, 2, 3), (7, 8, 9)),
    TokenSequence((1, 2, 3), (7,)),
    TokenSequence((4, 5, 6, 7, 8), (1, 2)),
    TokenSequence((1,), (9, 8)),
]
WINDOWS = [None, 1, 3]


def packed_rows(share: bool) -> Packed:
    return pack(ROWS, share=share, device=torch.device("cpu"))


def drawn(packed: Packed, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query [1, H, N, D], key [1, K, N, D] and value [1, K, N, E], laid out as models lay them out."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, WIDE)]
    count = len(packed.ids)
    return [
        torch.randn(1, count, *shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for shape in shapes
    ]


def whose(packed: Packed, share: bool) -> tuple[list[int], dict[int, int]]:
    """Return the segment of every token of the pass, and the segment before a segment: its prompt's."""
    segments, before = [-1] * len(packed.ids), {}
    prompts = list(dict.fromkeys(row.prompt for row in ROWS))
    place = 0
    for number, prompt in enumerate(prompts if share else []):
        for _ in prompt:
            segments[place] = number
            place += 1
    for number, row in enumerate(ROWS, start=len(prompts)):
        start = int(packed.begins[number - len(prompts)]) - (0 if share else len(row.prompt))
        for own in range(len(row.response) - 1 + (0 if share else len(row.prompt))):
            segments[start + own] = number
        before[number] = prompts.index(row.prompt)
    assert min(segments) >= 0
    return segments, before if share else {}


def everything(packed: Packed, share: bool, window: int | None) -> Tensor:
    """Return which tokens of the pass see which, [N, N], by what they are, not by where they lie."""
    segments, before = whose(packed, share)
    behind = packed.positions[:, None] - packed.positions
    allowed = (behind >= 0) & (behind < (window or 99))
    related = [[one == other or before.get(one) == other for other in segments] for one in segments]
    return allowed & torch.tensor(related)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * SIZE**-0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return found.transpose(1, 2)


def in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return attention(query, key, value, mask).transpose(1, 2)


def run(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients in query, key and value."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    out = attend(*leaves)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("piece_tokens", [1, 6, 256])
@pytest.mark.parametrize("attend", [by_torch, in_blocks])
def test_tables_give_the_attention_of_a_mask_over_all_tokens(
    monkeypatch: pytest.MonkeyPatch, share: bool, window: int | None, piece_tokens: int, attend: Any
) -> None:
    monkeypatch.setattr(packing, "PIECE_TOKENS", piece_tokens)
    packed = packed_rows(share)
    if piece_tokens == 1:
        assert len(packed.pieces) > 2
    tensors, mask = drawn(packed), everything(packed, share, window)
    found = run(lambda *given: packed_attention(packed, *given, window=window, attend=attend), tensors)
    expected = run(lambda *given: dense(*given, mask), tensors)
    assert found[0].shape == (1, len(packed.ids), HEADS, WIDE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_derivatives_agree_with_differences(monkeypatch: pytest.MonkeyPatch, share: bool, window: int | None) -> None:
    monkeypatch.setattr(packing, "PIECE_TOKENS", 2)
    rows = [TokenSequence((1, 2), (3, 4, 5)), TokenSequence((1, 2), (6, 7)), TokenSequence((8,), (9, 1))]
    packed = pack(rows, share=share, device=torch.device("cpu"))
    inputs = [each.detach()[:, :2, :, :2].clone().requires_grad_() for each in drawn(packed)]

    def attended(*given: Tensor) -> Tensor:
        return packed_attention(packed, *given, window=window, attend=by_torch)

    assert torch.autograd.gradcheck(attended, inputs)


def test_gradients_are_those_that_are_needed() -> None:
    packed = packed_rows(share=True)
    query, key, value = drawn(packed)
    expected = run(lambda *given: packed_attention(packed, *given, window=None, attend=by_torch), [query, key, value])
    value.requires_grad_()
    out = packed_attention(packed, query, key, value, window=None, attend=by_torch)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
    assert value.grad is not None
    torch.testing.assert_close(value.grad, expected[3], rtol=1e-12, atol=1e-12)
    assert query.grad is None


def test_what_many_rows_say_of_a_prompt_is_added_up_in_float32() -> None:
    """A sum of bfloat16 halves would stop at 128 or 256, where the next half is rounded away."""
    rows = [TokenSequence((1,), (2, 3)) for _ in range(600)]
    packed = pack(rows, share=True, device=torch.device("cpu"))
    value = torch.ones(1, 1, len(packed.ids), 1, dtype=torch.bfloat16, requires_grad=True)
    still = torch.zeros(1, 1, len(packed.ids), 1, dtype=torch.bfloat16)
    packed_attention(packed, still, still, value, window=None, attend=by_torch).float().sum().backward()
    assert value.grad is not None
    assert value.grad[0, 0, 0, 0] == 1 + 600 / 2  # seen by itself, and by half by each response
    assert value.grad[0, 0, 1 : packed.count].unique().tolist() == [0.5]
    assert not value.grad[0, 0, packed.count :].any()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("attend", [by_torch, in_blocks])
def test_what_is_no_number_stays_in_its_row(share: bool, attend: Any) -> None:
    packed = packed_rows(share)
    tensors = drawn(packed)
    clean = packed_attention(packed, *tensors, window=None, attend=attend)
    segments, _ = whose(packed, share)
    mine = torch.tensor(segments) == segments[int(packed.begins[0])]
    for tensor in tensors:
        tensor[:, :, mine] = torch.nan
    found = packed_attention(packed, *tensors, window=None, attend=attend)
    assert found[:, mine].isnan().all()
    assert torch.equal(found[:, ~mine], clean[:, ~mine])
