"""Rows one behind the other, and prompts computed once: the values and gradients of padded rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import float64_throughout

from tepo.core.errors import InputError
from tepo.policy import Policy, Scores, TokenSequence, packing, value_of_policy
from tepo.policy import passes as passes_module
from tepo.policy.batching import PADDED, Extent, Layout, extent_of
from tepo.policy.packing import Packed

Load = Callable[..., Policy]
ALL = frozenset({"entropy", "entropy_grad", "sum_p2", "sum_p2_logp"})
FIELDS = ("logp", "entropy", "sum_p2", "sum_p2_logp")
PACKED = Layout("always")
SHARED = Layout("always", "always")
BOTH = pytest.mark.parametrize("layout", [PACKED, SHARED], ids=["packed", "shared"])
FAMILIES = (
    "llama",
    "llama-tied",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gpt-neox",
    "gemma2",  # its own eager attention, as SDPA cannot cap scores
    "gemma2-window",
    "cohere",
    "granite",
    "phi",
    "opt",
)


def rows_of_groups(
    groups: Sequence[tuple[int, Sequence[int]]] = ((7, (9, 4, 1)), (2, (6, 3)), (5, (8,))), *, holes: bool = False
) -> list[TokenSequence]:
    """Return rows of random tokens, dealt in turn from groups: the length of each prompt, and of its responses."""
    generator = torch.Generator().manual_seed(3)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 99, (size,), generator=generator).tolist())

    dealt = []
    for prompt_length, lengths in groups:
        prompt = draw(prompt_length)
        masks = [tuple((place + length) % 3 > 0 for place in range(length)) if holes else None for length in lengths]
        dealt.append([TokenSequence(prompt, draw(length), mask) for length, mask in zip(lengths, masks, strict=True)])
    return [row for turn in itertools.zip_longest(*dealt) for row in turn if row is not None]


def loss_of(scores: Scores) -> torch.Tensor:
    assert scores.entropy is not None
    weights = torch.arange(scores.logp.numel(), dtype=torch.float64).cos().view_as(scores.logp)
    return (scores.logp * weights).sum() + (scores.entropy**2).sum()


def results(policy: Policy, rows: list[TokenSequence], layout: Layout, **options: Any) -> tuple[Scores, torch.Tensor]:
    policy.layout = layout
    scores = policy.score(rows, statistics=ALL, **options)
    found = torch.autograd.grad(loss_of(scores), policy.trainable_parameters(), allow_unused=True)
    return scores, torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def hold_equal(
    policy: Policy, rows: list[TokenSequence], layouts: Sequence[Layout] = (PACKED, SHARED), **options: Any
) -> None:
    with float64_throughout():
        padded, padded_gradient = results(policy, rows, PADDED, **options)
        for layout in layouts:
            found, gradient = results(policy, rows, layout, **options)
            assert torch.equal(padded.mask, found.mask)
            for field in FIELDS:
                torch.testing.assert_close(getattr(found, field), getattr(padded, field), rtol=1e-10, atol=1e-10)
            assert float((gradient - padded_gradient).norm() / padded_gradient.norm()) < 1e-10


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[Packed]:
    """Let a piece end after few tokens, and return a list that gets every pass."""
    seen: list[Packed] = []
    pack = passes_module.pack

    def kept(*arguments: Any, **options: Any) -> Packed:
        seen.append(pack(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(packing, "PIECE_TOKENS", 4)
    monkeypatch.setattr(passes_module, "pack", kept)
    return seen


def count_tokens(policy: Policy) -> list[int]:
    """Return a list that gets the number of tokens of every pass through the model from now on."""
    seen: list[int] = []
    policy.model.base_model.register_forward_pre_hook(
        lambda module, positional, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("head", ["chunked", "dense"])
def test_values_and_gradients_equal_those_of_padded_rows(load: Load, name: str, head: str) -> None:
    """Prompts of several lengths in one batch, sliding windows shorter than they are, responses of one token too."""
    policy = load(name, dtype="float64", head=head, head_chunk=4)
    assert policy.layout == Layout("auto", "auto", pass_tokens=128)
    hold_equal(policy, rows_of_groups(), temperature=0.7)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_either_attention(load: Load, attention: str) -> None:
    hold_equal(load("llama", dtype="float64", attention=attention), rows_of_groups())


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "gemma2-window"])
def test_in_several_pieces(load: Load, name: str, small_pieces: list[Packed]) -> None:
    """Rows whose lengths lie far apart attend in tables of their own; each of them reads the table of prompts."""
    policy = load(name, dtype="float64")
    small_pieces.clear()  # the probe's
    hold_equal(policy, rows_of_groups([(9, (20, 9, 4, 2)), (2, (19, 3)), (1, (1, 2))], holes=True))
    packed, shared = small_pieces
    assert [len(piece.lengths) for piece in packed.pieces] == [3, 2, 2, 1]
    assert [len(piece.lengths) for piece in shared.pieces] == [3, 2, 1, 2, 2]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of_groups(holes=True),
        rows_of_groups([(5, (6,)), (3, (2,)), (4, (7,))]),
        rows_of_groups([(6, (5, 5, 5, 5))]),
        rows_of_groups([(6, (1, 1)), (3, (1,))]),
        rows_of_groups([(1, (1,))]),
        [*rows_of_groups([(6, (4, 3))]), TokenSequence((5, 6), ())],
        [*rows_of_groups([(6, (1,))]), *rows_of_groups([(6, (1,))])],
        rows_of_groups([(7, (9, 4, 1, 2, 5, 8)), (2, (6, 3, 7)), (5, (8, 3, 3, 2, 1, 1, 4, 6))], holes=True),
    ],
    ids=[
        "holes",
        "one response a prompt",
        "equal lengths",
        "responses of one token",
        "two tokens",
        "an empty response",
        "equal rows",
        "sizes that recur",
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "mistral-window"])
def test_rows_of_every_shape(load: Load, name: str, rows: list[TokenSequence]) -> None:
    hold_equal(load(name, dtype="float64"), rows, width=9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "phi"])
def test_in_training_precisions(load: Load, name: str, dtype: str, tolerance: float) -> None:
    policy, rows = load(name, dtype=dtype), rows_of_groups()
    padded, padded_gradient = results(policy, rows, PADDED)
    for layout in (PACKED, SHARED):
        found, gradient = results(policy, rows, layout)
        assert float((found.logp - padded.logp).detach().norm() / padded.logp.detach().norm()) < tolerance
        assert float((gradient - padded_gradient).norm() / padded_gradient.norm()) < tolerance


def test_with_an_adapter(load: Load) -> None:
    policy = load("llama", dtype="float64", lora={"rank": 2})
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.normal_(std=0.3)
    rows = rows_of_groups()
    hold_equal(policy, rows)
    reference = policy.frozen_copy()
    with torch.no_grad(), float64_throughout():
        adapted = policy.score(rows).logp
        expected = replace_layout(reference, PADDED).score(rows).logp
        assert float((adapted - expected).abs().max()) > 0.1
        for layout in (PACKED, SHARED):
            found = replace_layout(reference, layout).score(rows).logp
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def replace_layout(policy: Policy, layout: Layout) -> Policy:
    policy.layout = layout
    return policy


def test_full_kl_against_a_reference_of_another_layout(load: Load) -> None:
    policy = load("llama", dtype="float64")
    reference = policy.frozen_copy()
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.1)
    rows, found = rows_of_groups(), []
    for ours, theirs in ((PADDED, PADDED), (PACKED, PADDED), (SHARED, PACKED), (PADDED, SHARED)):
        policy.layout, reference.layout = ours, theirs
        with float64_throughout():
            scores = policy.score(rows, statistics=frozenset({"kl_full"}), reference=reference)
        assert scores.kl_full is not None
        found.append(scores.kl_full)
    assert float(found[0].detach().max()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-10)


def test_values_of_a_critic(load: Load) -> None:
    critic = value_of_policy(load("qwen2", dtype="float64"))
    assert critic.layout == Layout("auto", "auto", pass_tokens=128)
    with torch.no_grad():
        critic.model["head"].weight.normal_()
    rows, found = rows_of_groups(holes=True), []
    for layout in (PADDED, PACKED, SHARED):
        critic.layout = layout
        with float64_throughout():
            values = critic.values(rows)
            gradients = torch.autograd.grad((values**2).sum(), critic.trainable_parameters())
        found.append((values, torch.cat([gradient.flatten() for gradient in gradients])))
    padded, gradient = found[0]
    for other, other_gradient in found[1:]:
        torch.testing.assert_close(other, padded, rtol=1e-10, atol=1e-10)
        assert float((other_gradient - gradient).norm() / gradient.norm()) < 1e-10


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_batches_give_the_same_bits_with_and_without_gradient(load: Load, layout: Layout, dtype: str) -> None:
    policy, rows = replace_layout(load("llama", dtype=dtype), layout), rows_of_groups()
    with torch.no_grad():
        old = policy.score(rows)
    assert torch.equal(old.logp, policy.score(rows).logp.detach())


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_what_fills_tables_up_changes_no_bit(
    load: Load, layout: Layout, dtype: str, name: str, small_pieces: list[Packed], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, rows = load(name, dtype=dtype), rows_of_groups([(7, (9, 4, 1)), (2, (6, 3)), (5, (8,)), (1, (2,))])
    scores, gradient = results(policy, rows, layout)
    assert torch.isfinite(gradient).all()
    pack = passes_module.pack

    def refilled(*arguments: Any, **options: Any) -> Packed:
        packed = pack(*arguments, **options)
        return replace(packed, pieces=tuple(refill(piece, len(packed.ids)) for piece in packed.pieces))

    def refill(piece: packing.Piece, count: int) -> packing.Piece:
        generator = torch.Generator().manual_seed(1)
        before = 0 if piece.prefixes is None else piece.prefixes.lengths[:, None]
        tables = []
        for table, own in ((piece.queries, piece.lengths[:, None]), (piece.keys, piece.lengths[:, None] + before)):
            other = torch.randint(count, table.shape, generator=generator)
            tables.append(torch.where(torch.arange(table.shape[1]) < own, table, other))
        return replace(piece, queries=tables[0], keys=tables[1])

    monkeypatch.setattr(passes_module, "pack", refilled)
    again, other_gradient = results(policy, rows, layout)
    assert torch.equal(again.logp, scores.logp)
    assert torch.equal(other_gradient, gradient)
    used, refilled_pieces = small_pieces[-2].pieces, small_pieces[-1].pieces
    assert len(used) == len(refilled_pieces) > 1


@BOTH
def test_a_row_that_is_no_number_reaches_no_other(load: Load, layout: Layout) -> None:
    policy, rows = replace_layout(load("llama"), layout), rows_of_groups()
    rows[0] = replace(rows[0], response=(99 - 1, *rows[0].response[1:]))
    assert sum(98 in row.prompt + row.response for row in rows) == 1
    with torch.no_grad():
        clean = policy.score(rows).logp
        policy.model.get_input_embeddings().weight[98] = torch.nan
        policy.model.get_output_embeddings().weight[98] = 0.0
        found = policy.score(rows).logp
        policy.layout = PADDED
        padded = policy.score(rows).logp
    assert found[0].isnan().any()
    assert torch.isfinite(found[1:]).all()
    torch.testing.assert_close(found[1:], padded[1:], rtol=1e-4, atol=1e-4)
    assert clean.shape == found.shape


def test_each_token_is_computed_once(load: Load) -> None:
    policy = load("llama")
    computed = count_tokens(policy)
    group = rows_of_groups([(20, (4, 3, 2))])
    policy.score(group)
    assert computed == [20 + 3 + 2 + 1]
    computed.clear()
    policy.score(rows_of_groups([(2, (20, 20)), (3, (20, 20))]))  # too little in common, and too little padding
    assert computed == [4 * 22]
    computed.clear()
    policy.score(rows_of_groups([(2, (20,)), (3, (5,))]))
    assert computed == [21 + 7]
    for layout, tokens in ((PADDED, 3 * 23), (PACKED, 23 + 22 + 21), (SHARED, 26)):
        computed.clear()
        replace_layout(policy, layout).score(group)
        assert computed == [tokens]


def test_auto_takes_what_computes_fewer_tokens() -> None:
    group = extent_of(rows_of_groups([(20, (4, 3, 2))]))
    assert group == Extent(rows=3, longest=23, tokens=66, prompt_tokens=20, response_tokens=6)
    assert (group.padded, group.shared) == (69, 26)
    auto = Layout("auto", "auto")
    assert [auto.way(group), Layout("auto").way(group), Layout("always").way(group)] == ["shared", "padded", "packed"]
    assert [each.tokens(group) for each in (auto, PADDED, PACKED, SHARED)] == [26, 69, 66, 26]
    assert [each.padding(group) for each in (auto, PADDED, PACKED, SHARED)] == [0, 3, 0, 0]
    assert Layout("auto").padding(group) == 3
    ninety_five = Extent(rows=4, longest=25, tokens=95, prompt_tokens=40, response_tokens=37)
    assert [auto.way(ninety_five), auto.way(replace(ninety_five, tokens=97))] == ["packed", "shared"]
    assert auto.way(replace(ninety_five, tokens=97, prompt_tokens=50)) == "padded"
    assert Layout("never", "auto").way(replace(ninety_five, tokens=90, prompt_tokens=50)) == "padded"


def test_rows_of_a_group_stay_together_where_that_computes_fewer_tokens() -> None:
    rows = rows_of_groups([(20, (9, 3, 3)), (20, (8, 3, 3))])  # dealt in turn
    assert PADDED.split(rows, range(6), 58) == [[0, 1], [2, 3], [4, 5]]
    assert Layout("auto", "auto").split(rows, range(6), 58) == [[0, 2, 4], [1, 3, 5]]
    short = rows_of_groups([(1, (30, 2)), (1, (30, 2))])
    assert Layout("never", "auto").split(short, range(4), 62) == [[0, 1], [2, 3]]  # padding would cost more


def test_a_batch_ends_where_its_padding_would_cost_more_than_a_pass() -> None:
    rows = rows_of_groups([(2, (40, 38, 30, 12, 10, 9))])  # 41, 39, 31, 13, 11 and 10 tokens without the last
    assert Layout(pass_tokens=16).split(rows, range(6), 1000) == [[0, 1, 2], [3, 4, 5]]
    assert Layout(pass_tokens=4).split(rows, range(6), 1000) == [[0, 1], [2], [3, 4], [5]]
    assert Layout(pass_tokens=1000).split(rows, range(6), 1000) == [list(range(6))]
    assert Layout(pass_tokens=4).split(rows, range(6), 0) == [list(range(6))]
    for layout in (PACKED, SHARED):  # no padding, no end
        assert replace(layout, pass_tokens=4).split(rows, range(6), 1000) == [list(range(6))]
    assert PADDED.padding(extent_of(rows)) == 6 * 41 - (41 + 39 + 31 + 13 + 11 + 10)


def test_a_budget_counts_the_tokens_that_are_computed() -> None:
    rows = rows_of_groups([(50, (10,) * 8)])
    parts = Layout("auto", "auto").split(rows, range(8), 50 + 4 * 9)
    assert [len(part) for part in parts] == [4, 4]
    assert [len(part) for part in PADDED.split(rows, range(8), 50 + 4 * 9)] == [1] * 8
    assert sorted(row for part in parts for row in part) == list(range(8))
    uneven = rows_of_groups([(1, (30, 2, 2)), (2, (30, 2, 2))])  # 31, 30 and 4 times 2 or 3 tokens
    assert PACKED.split(uneven, range(6), 71) == [[1, 0, 3, 5, 2, 4]]
    assert PADDED.split(uneven, range(6), 71) == [[1, 0], [3, 5, 2, 4]]


def test_scoring_in_turns_gives_the_values_of_one_pass(load: Load) -> None:
    policy = load("llama", dtype="float64", max_batch_tokens=24)
    computed, rows = count_tokens(policy), rows_of_groups()
    for layout, turns in ((PADDED, [15, 2 * 12, 3 * 7]), (PACKED, [15, 22, 18]), (SHARED, [18, 21])):
        policy.layout = layout
        with torch.no_grad():
            computed.clear()
            found = policy.score(rows).logp
            assert computed == turns
        torch.testing.assert_close(found, policy.score(rows).logp.detach(), rtol=1e-5, atol=1e-5)


def test_not_with_recomputed_activations(load: Load) -> None:
    assert load("llama", gradient_checkpointing=True).layout == Layout(pass_tokens=128)
    for field in ("packing", "share_prompts"):
        with pytest.raises(InputError, match=rf"{field}='always'.*gradient_checkpointing"):
            load("llama", gradient_checkpointing=True, **{field: "always"})


def test_what_is_switched_off_stays_off(load: Load) -> None:
    def switched(**fields: str) -> tuple[str, str]:
        layout = load("llama", **fields).layout
        return layout.packed, layout.share

    assert switched(share_prompts="never") == ("auto", "never")
    assert switched(packing="always") == ("always", "auto")
    assert switched(share_prompts="always") == ("auto", "always")
    assert switched(packing="never") == ("never", "never")
    with pytest.raises(InputError, match=r"share_prompts='always'.*packing='never'"):
        load("llama", packing="never", share_prompts="always")


def test_attention_that_cannot_be_exchanged_pads_and_says_so(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo.policy.load.use_attention", lambda model, *, blocks: False)
    said: list[str] = []
    policy = load("llama", dtype="float64", say=said.append)
    assert policy.layout == Layout(pass_tokens=128)
    assert any(line.startswith("rows of") and "not go through" in line for line in said)
    for field in ("packing", "share_prompts"):
        with pytest.raises(InputError, match=rf"{field}='always' does not work.*not go through"):
            load("llama", **{field: "always"})
    with torch.no_grad(), float64_throughout():
        rows = rows_of_groups()
        apart = [policy.score([row]).logp[0] for row in rows]
        together = policy.score(rows).logp
    for one, row in zip(apart, together, strict=True):
        torch.testing.assert_close(row[: len(one)], one, rtol=1e-10, atol=1e-10)


def test_a_model_that_computes_something_else_that_way_is_found_at_load(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = passes_module.pack

    def careless(*arguments: Any, **options: Any) -> Packed:
        packed = pack(*arguments, **options)
        return replace(packed, positions=torch.zeros_like(packed.positions))

    monkeypatch.setattr(passes_module, "pack", careless)
    said: list[str] = []
    assert load("llama", say=said.append).layout == Layout(pass_tokens=128)
    assert any("rows of" in line and "its states differ by" in line for line in said)
    for field in ("packing", "share_prompts"):
        with pytest.raises(InputError, match=rf"{field}='always' does not work"):
            load("llama", **{field: "always"})


def test_a_model_that_fails_that_way_pads_its_rows(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no tables")

    monkeypatch.setattr(passes_module, "packed_pass", refuse)
    said: list[str] = []
    assert load("llama", say=said.append).layout == Layout(pass_tokens=128)
    assert any("the model cannot: ValueError: no tables" in line for line in said)
