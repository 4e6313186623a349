"""Prompts computed once for all their responses: the same values and gradients as each row by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_models import float64_throughout

from tepo.core.errors import InputError
from tepo.policy import Policy, Scores, TokenSequence, value_of_policy
from tepo.policy import passes as passes_module
from tepo.policy.batching import NEVER, Extent, Sharing, extent_of

Load = Callable[..., Policy]
ALL = frozenset({"entropy", "entropy_grad", "sum_p2", "sum_p2_logp"})
FIELDS = ("logp", "entropy", "sum_p2", "sum_p2_logp")
ALWAYS = Sharing("always")


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


def results(policy: Policy, rows: list[TokenSequence], sharing: Sharing, **options: Any) -> tuple[Scores, torch.Tensor]:
    policy.sharing = sharing
    scores = policy.score(rows, statistics=ALL, **options)
    found = torch.autograd.grad(loss_of(scores), policy.trainable_parameters(), allow_unused=True)
    return scores, torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def hold_equal(policy: Policy, rows: list[TokenSequence], **options: Any) -> None:
    with float64_throughout():
        plain, plain_gradient = results(policy, rows, NEVER, **options)
        shared, shared_gradient = results(policy, rows, ALWAYS, **options)
    assert torch.equal(plain.mask, shared.mask)
    for field in FIELDS:
        torch.testing.assert_close(getattr(shared, field), getattr(plain, field), rtol=1e-10, atol=1e-10)
    assert float((shared_gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-10


@pytest.fixture
def tokens_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of every pass through a model."""
    seen: list[int] = []
    pad = passes_module.padded

    def counted(rows: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
        ids = pad(rows, device)
        seen.append(ids.numel())
        return ids

    monkeypatch.setattr(passes_module, "padded", counted)
    return seen


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "qwen2", "qwen3", "gpt-neox", "gemma2", "gemma2-window", "cohere", "phi", "opt"]
)
@pytest.mark.parametrize("head", ["chunked", "dense"])
def test_values_and_gradients_equal_separate_prompts(load: Load, name: str, head: str) -> None:
    """Prompts of several lengths in one batch, longer than a sliding window, and responses of one token too."""
    policy = load(name, dtype="float64", head=head, head_chunk=4)
    assert policy.sharing == Sharing("auto", pass_tokens=128)
    hold_equal(policy, rows_of_groups(), temperature=0.7)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_either_attention(load: Load, attention: str) -> None:
    hold_equal(load("llama", dtype="float64", attention=attention), rows_of_groups())


@pytest.mark.parametrize(
    "rows",
    [
        rows_of_groups(holes=True),
        rows_of_groups([(5, (6,)), (3, (2,)), (4, (7,))]),
        rows_of_groups([(6, (5, 5, 5, 5))]),
        rows_of_groups([(6, (1, 1)), (3, (1,))]),
        [*rows_of_groups([(6, (4, 3))]), TokenSequence((5, 6), ())],
    ],
    ids=["holes", "one response a prompt", "equal lengths", "responses of one token", "an empty response"],
)
def test_rows_of_every_shape(load: Load, rows: list[TokenSequence]) -> None:
    hold_equal(load("qwen2", dtype="float64"), rows, width=9)


def test_with_an_adapter(load: Load) -> None:
    policy = load("llama", dtype="float64", lora={"rank": 2})
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.normal_(std=0.3)
    hold_equal(policy, rows_of_groups())
    reference = policy.frozen_copy()
    rows = rows_of_groups()
    expected = []
    for sharing in (NEVER, ALWAYS):
        reference.sharing = sharing
        with torch.no_grad(), float64_throughout():
            expected.append(reference.score(rows).logp)
    torch.testing.assert_close(expected[0], expected[1], rtol=1e-10, atol=1e-10)


def test_full_kl_against_a_reference_that_does_not_share(load: Load) -> None:
    policy = load("llama", dtype="float64")
    reference = policy.frozen_copy()
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.1)
    rows, found = rows_of_groups(), []
    for ours, theirs in ((NEVER, NEVER), (ALWAYS, NEVER), (NEVER, ALWAYS)):
        policy.sharing, reference.sharing = ours, theirs
        with float64_throughout():
            scores = policy.score(rows, statistics=frozenset({"kl_full"}), reference=reference)
        assert scores.kl_full is not None
        found.append(scores.kl_full)
    assert float(found[0].detach().max()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-10)


def test_values_of_a_critic(load: Load) -> None:
    critic = value_of_policy(load("qwen2", dtype="float64"))
    assert critic.sharing == Sharing("auto", pass_tokens=128)
    with torch.no_grad():
        critic.model["head"].weight.normal_()
    rows, found = rows_of_groups(holes=True), []
    for sharing in (NEVER, ALWAYS):
        critic.sharing = sharing
        with float64_throughout():
            values = critic.values(rows)
            gradients = torch.autograd.grad((values**2).sum(), critic.trainable_parameters())
        found.append((values, torch.cat([gradient.flatten() for gradient in gradients])))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-10)
    assert float((found[1][1] - found[0][1]).norm() / found[0][1].norm()) < 1e-10


def test_equal_batches_give_the_same_bits_with_and_without_gradient(load: Load) -> None:
    policy, rows = load("llama", dtype="bfloat16"), rows_of_groups()
    policy.sharing = ALWAYS
    with torch.no_grad():
        old = policy.score(rows)
    assert torch.equal(old.logp, policy.score(rows).logp.detach())


def test_each_prompt_is_computed_once(load: Load, tokens_computed: list[int]) -> None:
    policy = load("llama")
    tokens_computed.clear()  # the probe's
    rows = rows_of_groups([(20, (4, 3, 2))])
    policy.score(rows)
    assert tokens_computed == [20, 3 * 3]
    tokens_computed.clear()
    policy.score(rows_of_groups([(2, (20, 20)), (3, (20, 20))]))  # too little in common
    assert tokens_computed == [4 * 23]


def test_auto_shares_where_at_most_four_fifths_of_the_tokens_are_left() -> None:
    group = extent_of(rows_of_groups([(20, (4, 3, 2))]))
    assert (group.separate, group.shared) == (3 * 24, 20 + 3 * 3)
    auto = Sharing("auto")
    assert auto.wanted(group)
    assert auto.tokens(group) == 29
    different = Extent(rows=4, prompts=4, longest=30, longest_prompt=20, longest_response=10)
    assert not auto.wanted(different)
    assert auto.tokens(different) == 120
    assert ALWAYS.tokens(different) == 4 * 20 + 4 * 9
    assert NEVER.tokens(group) == 72


def test_rows_of_a_group_stay_together_where_that_computes_fewer_tokens() -> None:
    rows = rows_of_groups([(20, (9, 3, 3)), (20, (8, 3, 3))])  # dealt in turn
    assert NEVER.split(rows, range(6), 60) == [[0, 1], [2, 3], [4, 5]]
    assert Sharing("auto").split(rows, range(6), 60) == [[0, 2, 4], [1, 3, 5]]
    short = rows_of_groups([(1, (30, 2)), (1, (30, 2))])
    assert Sharing("auto").split(short, range(4), 62) == [[0, 1], [2, 3]]


def test_a_batch_ends_where_its_padding_would_cost_more_than_a_pass() -> None:
    rows = rows_of_groups([(2, (40, 38, 30, 12, 10, 9))])  # 42, 40, 32, 14, 12 and 11 tokens with their prompt
    assert Sharing("never", pass_tokens=16).split(rows, range(6), 1000) == [[0, 1, 2], [3, 4, 5]]
    assert Sharing("never", pass_tokens=4).split(rows, range(6), 1000) == [[0, 1], [2], [3, 4], [5]]
    assert Sharing("never", pass_tokens=1000).split(rows, range(6), 1000) == [list(range(6))]
    assert Sharing("never", pass_tokens=4).split(rows, range(6), 0) == [list(range(6))]
    shared = extent_of(rows)
    assert ALWAYS.padding(shared) == 6 * 39 - (39 + 37 + 29 + 11 + 9 + 8)
    assert NEVER.padding(shared) == 6 * 42 - (42 + 40 + 32 + 14 + 12 + 11)


def test_a_budget_counts_the_tokens_that_are_computed() -> None:
    rows = rows_of_groups([(50, (10,) * 8)])
    parts = Sharing("auto").split(rows, range(8), 50 + 4 * 9)
    assert [len(part) for part in parts] == [4, 4]
    assert [len(part) for part in NEVER.split(rows, range(8), 50 + 4 * 9)] == [1] * 8
    assert sorted(row for part in parts for row in part) == list(range(8))


def test_not_with_recomputed_activations(load: Load) -> None:
    assert load("llama", gradient_checkpointing=True).sharing.mode == "never"
    with pytest.raises(InputError, match=r"gradient_checkpointing"):
        load("llama", gradient_checkpointing=True, share_prompts="always")
    assert load("llama", share_prompts="never").sharing.mode == "never"


def test_a_model_that_computes_something_else_with_a_cache_is_found_at_load(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(layer: Any, owners: torch.Tensor, shifts: list[int]) -> None:
        layer._owners = torch.zeros_like(owners)

    monkeypatch.setattr(passes_module.PromptLayer, "hand_out", careless)
    said: list[str] = []
    assert load("llama", say=said.append).sharing.mode == "never"
    assert any("computed for every response" in line for line in said)
    with pytest.raises(InputError, match=r"share_prompts='always'"):
        load("llama", share_prompts="always")


def test_a_model_without_a_cache_computes_every_prompt_by_itself(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no cache")

    monkeypatch.setattr(passes_module, "shared_prompts", refuse)
    said: list[str] = []
    assert load("llama", say=said.append).sharing.mode == "never"
    assert any("no cache" in line for line in said)
