"""Scores of whole models against their own logits, one unpadded sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, dense_statistics, sequences

from tepo.core.errors import InputError
from tepo.policy import Policy, Scores, TokenSequence

Load = Callable[..., Policy]
ALL = frozenset({"entropy", "entropy_grad", "sum_p2", "sum_p2_logp"})


def _gradients(policy: Policy, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, policy.trainable_parameters(), allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found]


def _loss(scores: Scores) -> torch.Tensor:
    assert scores.entropy is not None
    kl = 0.0 if scores.kl_full is None else scores.kl_full.sum()
    return (scores.logp * scores.logp.detach().cos()).sum() + (scores.entropy**2).sum() + kl


def _dense_loss(
    policy: Policy, rows: Sequence[TokenSequence], temperature: float, other: Policy | None
) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        dense = dense_statistics(policy, row, temperature, other)
        total = total + (dense["logp"] * dense["logp"].detach().cos()).sum() + (dense["entropy"] ** 2).sum()
        total = total + (dense["kl_full"].sum() if other is not None else 0.0)
    return total


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("head", ["chunked", "dense"])
def test_values_and_gradients_equal_the_models_own_logits(load: Load, name: str, head: str) -> None:
    policy = load(name, head=head, head_chunk=5)
    rows = sequences()
    scores = policy.score(rows, temperature=0.8, statistics=ALL)
    for row, sequence in enumerate(rows):
        width = len(sequence.response)
        dense = dense_statistics(policy, sequence, 0.8)
        for field in ("logp", "entropy", "sum_p2", "sum_p2_logp"):
            torch.testing.assert_close(
                getattr(scores, field)[row, :width].double(), dense[field], rtol=1e-5, atol=1e-5, msg=field
            )
            assert (getattr(scores, field)[row, width:] == 0).all()
    ours = _gradients(policy, _loss(scores))
    theirs = _gradients(policy, _dense_loss(policy, rows, 0.8, None))
    scale = max(float(gradient.abs().max()) for gradient in theirs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox", "opt"])
def test_a_sequence_scores_the_same_alone_and_in_a_padded_batch(load: Load, name: str) -> None:
    policy = load(name)
    rows = sequences(6)
    together = policy.score(rows)
    for row, sequence in enumerate(rows):
        alone = policy.score([sequence])
        width = len(sequence.response)
        torch.testing.assert_close(alone.logp[0], together.logp[row, :width], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["chunked", "dense"])
def test_full_kl_against_a_reference(load: Load, head: str) -> None:
    policy = load("gemma2", head=head, head_chunk=4)
    reference = policy.frozen_copy()
    rows = sequences(3)
    start = policy.score(rows, statistics=frozenset({"kl_full"}), reference=reference)
    assert start.kl_full is not None
    assert start.kl_full.abs().max() < 1e-6
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    scores = policy.score(rows, statistics=ALL | {"kl_full"}, reference=reference, temperature=1.3)
    for row, sequence in enumerate(rows):
        dense = dense_statistics(policy, sequence, 1.3, reference)
        assert scores.kl_full is not None
        found = scores.kl_full[row, : len(sequence.response)].double()
        torch.testing.assert_close(found, dense["kl_full"], rtol=1e-5, atol=1e-5)
    ours = _gradients(policy, _loss(scores))
    theirs = _gradients(policy, _dense_loss(policy, rows, 1.3, reference))
    scale = max(float(gradient.abs().max()) for gradient in theirs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5 * scale)


def test_masked_tokens_are_not_scored_and_do_not_change_the_others(load: Load) -> None:
    policy = load("llama")
    whole = TokenSequence((5, 6), (7, 8, 9, 10))
    holes = TokenSequence((5, 6), (7, 8, 9, 10), (True, False, False, True))
    scores = policy.score([holes], width=6)
    assert scores.mask.tolist() == [[True, False, False, True, False, False]]
    reference = policy.score([whole], width=6)
    torch.testing.assert_close(scores.logp, reference.logp * scores.mask)


def test_the_width_pads_and_a_batch_without_scored_tokens_is_zero(load: Load) -> None:
    policy = load("llama")
    scores = policy.score([TokenSequence((5,), (7, 8), (False, False)), TokenSequence((5,), ())], width=3)
    assert scores.logp.shape == (2, 3)
    assert not scores.mask.any()
    scores.logp.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in policy.trainable_parameters())


def test_scoring_without_gradient_in_turns_keeps_the_order_of_rows(load: Load) -> None:
    rows = sequences(9)
    policy = load("llama")
    split = load("llama", max_batch_tokens=20)
    with torch.no_grad():
        left, right = policy.score(rows, statistics=ALL), split.score(rows, statistics=ALL)
    assert torch.equal(left.mask, right.mask)
    for field in ("logp", "entropy", "sum_p2", "sum_p2_logp"):
        torch.testing.assert_close(getattr(left, field), getattr(right, field), rtol=1e-5, atol=1e-5)
    assert not left.logp.requires_grad


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_in_every_mode(load: Load, name: str, checkpointing: bool) -> None:
    """The configurations ask for half of everything to be dropped."""
    policy = load(name, gradient_checkpointing=checkpointing)
    policy.model.train()
    rows = sequences()
    torch.testing.assert_close(policy.score(rows).logp, load(name).score(rows).logp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma2", "opt"])
def test_recomputed_activations_give_the_same_gradients_and_save_fewer(load: Load, name: str) -> None:
    rows = sequences()
    found: list[tuple[list[torch.Tensor], int]] = []
    for checkpointing in (False, True):
        policy = load(name, gradient_checkpointing=checkpointing)
        saved = [0]

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved[0] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = policy.score(rows, statistics=ALL)
        found.append((_gradients(policy, _loss(scores)), saved[0]))
    for left, right in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert found[1][1] < found[0][1] / 2


def test_layers_are_back_in_evaluation_mode_after_a_recomputing_pass(load: Load) -> None:
    policy = load("llama", gradient_checkpointing=True)
    policy.score(sequences())
    assert not any(module.training for module in policy.model.modules())


def test_bfloat16_is_near_float32_with_float32_weights_and_gradients(load: Load) -> None:
    rows = sequences()
    exact = load("llama").score(rows)
    policy = load("llama", dtype="bfloat16")
    scores = policy.score(rows)
    assert scores.logp.dtype == torch.float32
    torch.testing.assert_close(scores.logp, exact.logp, rtol=0.0, atol=0.15)
    scores.logp.sum().backward()
    for parameter in policy.trainable_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_the_bfloat16_reference_equals_the_policy_exactly_at_the_start(load: Load) -> None:
    policy = load("llama-tied", dtype="bfloat16")
    reference = policy.frozen_copy()
    with torch.no_grad():
        scores, other = policy.score(sequences()), reference.score(sequences())
    assert torch.equal(scores.logp, other.logp)


def test_float64_serves_exact_checks(load: Load) -> None:
    policy = load("llama-tied", dtype="float64")
    (row,) = sequences(1)
    scores = policy.score([row])
    assert scores.logp.dtype == torch.float64
    torch.testing.assert_close(scores.logp[0], dense_statistics(policy, row)["logp"], rtol=1e-12, atol=1e-12)


def test_a_reference_does_not_follow_the_policy_and_trains_nothing(load: Load) -> None:
    policy = load("llama-tied")
    reference = policy.frozen_copy()
    with torch.no_grad():
        before = reference.score(sequences()).logp
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.5)
        after = reference.score(sequences()).logp
    assert torch.equal(before, after)
    assert reference.trainable_parameters() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": []}, "at least one sequence"),
        ({"sequences": [TokenSequence((), (4,))]}, "sequence 0: the prompt is empty"),
        ({"sequences": [TokenSequence((3,), (4,), (True, True))]}, "loss_mask has 2 entries for 1 response"),
        ({"sequences": [TokenSequence((3,), (4, 99))]}, "token id 99 is outside the vocabulary of 99"),
        ({"sequences": [TokenSequence((3,), (4,) * 64)]}, "65 tokens, but the model has 64 positions"),
        ({"temperature": 0.0}, "must be greater than 0"),
        ({"statistics": frozenset({"entropi"})}, "Did you mean 'entropy'"),
        ({"statistics": frozenset({"kl_full"})}, "needs reference"),
        ({"width": 0}, "less than the longest response"),
    ],
)
def test_what_cannot_be_scored_is_named(load: Load, arguments: dict[str, Any], message: str) -> None:
    policy = load("llama")
    rows = arguments.pop("sequences", [TokenSequence((3,), (4,))])
    with pytest.raises(InputError, match=message):
        policy.score(rows, **arguments)
