"""The helper itself: every method of the catalogue passes, and each kind of fault is caught and named."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tepo
from tepo.objectives import (
    EntropyBonus,
    GroupNormalized,
    NotTruncated,
    Objective,
    PolicyGradient,
    PPOClip,
    SequenceMean,
    TokenBatch,
    TokenMean,
    TokenRatio,
)
from tepo.objectives.ratios import RatioValue
from tepo.objectives.reducers import Weights
from tepo.objectives.surrogates import SurrogateValue
from tepo.testing import INVARIANCES, check_objective
from tepo.testing.draws import is_steady, steady_batch

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("tepo", {"kl_norm": "masked", "kl_estimator": "abs"}),
    ("tepo", {"entropy_criterion": "first-order", "kl_target": "reference", "kl_estimator": "full"}),
    ("tepo", {"entropy_criterion": "sign", "ratio": "sequence-token", "kl_estimator": "k1", "entropy_coef": 0.01}),
    ("tepo", {"truncated": "drop", "zero_variance": "drop", "kl_estimator": "k2", "clip_dual": 1.5}),
    ("grpo", {"kl_adapt_to": 0.1, "empty_rows": "count", "importance_weight": "truncate"}),
    ("grpo", {"kl_estimator": "k3-old", "importance_weight": "mask", "truncated": "drop"}),
    ("dapo", {"scope": "group", "clip_dual": 1.5, "zero_variance": "drop"}),
    ("dr-grpo", {"max_length": 8, "importance_weight": "sequence-mask", "entropy_coef": 0.1}),
    ("gspo", {"empty_rows": "count", "truncated": "drop"}),
    ("gspo-token", {"clip_low": 0.2, "clip_high": 0.28}),
    ("reinforce", {"reducer": "sequence-mean"}),
    ("reinforce", {"reducer": "sequence-sum", "zero_variance": "drop"}),
    ("rloo", {"ratio": "sequence-sum", "empty_rows": "count"}),
]


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_every_method_of_the_catalogue_passes_the_matrix(name: str) -> None:
    check_objective(name)


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_options_pass_the_matrix(name: str, settings: dict[str, Any]) -> None:
    check_objective(name, kinds=("plain", "first-update", "empty-row"), seeds=(1,), **settings)


# --- parts that future methods need: statistics of the whole mini-batch, random subsets, current transforms -----


@dataclass(frozen=True)
class TopEntropy:
    """The half of the mini-batch's tokens with the highest entropy carries the policy term."""

    denominator: str = "selected"
    terms: str = "policy"
    current: bool = True
    needs: frozenset[str] = frozenset({"entropy"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        values = batch.entropy[batch.mask]
        if values.numel() == 0:
            return batch.mask
        return batch.mask & (batch.entropy >= values.median())


@dataclass(frozen=True)
class RandomHalf:
    """Half of the tokens, by a hash of the row's id and the token's place among the row's tokens."""

    place: str = "token"
    denominator: str = "all"
    terms: str = "policy"
    current: bool = False
    needs: frozenset[str] = frozenset({"row_id"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        assert batch.row_id is not None
        columns = torch.arange(batch.mask.shape[1]).expand_as(batch.mask)
        position = batch.mask.cumsum(dim=1) if self.place == "token" else columns
        mixed = (batch.row_id[:, None] * 2654435761 + position * 40503 + 12345) % 65537
        return batch.mask & (mixed * 31 % 97 < 48)


@dataclass(frozen=True)
class EntropyWeighted:
    """Advantages times the token's entropy over the mini-batch's mean entropy."""

    current: bool = True
    needs: frozenset[str] = frozenset({"entropy"})
    scores: frozenset[str] = frozenset({"entropy"})

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        assert batch.entropy is not None
        return advantage * batch.entropy / batch.entropy[batch.mask].mean().clamp_min(1e-3)


@pytest.mark.parametrize(
    "parts",
    [
        {"selectors": (TopEntropy(),)},
        {"selectors": (RandomHalf(),)},
        {"transforms": (EntropyWeighted(),)},
        {"selectors": (TopEntropy(), RandomHalf()), "transforms": (EntropyWeighted(),), "reducer": SequenceMean()},
        {"selectors": (NotTruncated(denominator="all"),), "regularizers": (EntropyBonus(0.1),)},
    ],
    ids=["top-entropy", "random-half", "transform", "together", "counted"],
)
def test_compositions_with_mini_batch_statistics_pass(parts: dict[str, Any]) -> None:
    check_objective(Objective(name="composed", **parts))


# --- faults: each is caught under the right name --------------------------------------------------------------


@dataclass(frozen=True)
class PaddedMean:
    """Divides by the padded size."""

    needs: frozenset[str] = frozenset()

    def __call__(self, counted: Tensor, batch: TokenBatch) -> Weights:
        tokens = counted.to(batch.logp.dtype)
        return Weights(tokens, torch.full_like(tokens[:, 0], tokens.shape[1]))


@dataclass(frozen=True)
class Faulty:
    """A PPO clip with one fault."""

    fault: str
    fine: bool = False
    needs: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset()

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        value = PPOClip(0.2, 0.2)(ratio, advantage, batch)
        loss = value.loss
        match self.fault:
            case "micro-batch mean":
                loss = loss * ratio.value.detach()[batch.mask].mean()
            case "micro-batch extreme":
                loss = loss / (1 + ratio.value.detach().max())
            case "row order":
                loss = loss * torch.arange(1, len(loss) + 1)[:, None]
            case "global random":
                loss = loss * torch.rand(loss.shape[1], dtype=loss.dtype)
            case "cancellation":
                loss = loss * ((ratio.value.detach() + 1e4) - 1e4)
            case "constant moves":
                assert batch.old_logp is not None
                loss = loss + 0.1 * batch.old_logp * batch.logp
            case "undeclared gradient":
                assert batch.entropy is not None
                loss = loss - 0.1 * batch.entropy
            case "in place":
                assert batch.group is not None
                batch.group.add_(1)
            case "not finite":
                loss = loss / torch.where(loss == loss.max(), torch.zeros_like(loss), torch.ones_like(loss))
        return SurrogateValue(loss, value.clip_low, value.clip_high)


@dataclass(frozen=True)
class UndeclaredBonus(EntropyBonus):
    """An entropy bonus that does not tell the scorer about its gradient."""

    scores = frozenset({"entropy"})


class NaiveNormalized:
    """Group normalisation without a guard for equal rewards."""

    needs = frozenset({"rewards", "group"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        rewards, group = batch.rewards, batch.group
        assert rewards is not None
        assert group is not None
        result = torch.zeros_like(rewards)
        for name in group.unique():
            inside = group == name
            centred = rewards[inside].nan_to_num() - rewards[inside].nan_to_num().mean()
            result[inside] = centred / (centred.pow(2).sum().sqrt() + 1e-9)
        return result


def faulty(fault: str, **parts: Any) -> Objective:
    return Objective(name="faulty", surrogate=Faulty(fault), **parts)


def cases() -> Iterator[tuple[str, Objective, str]]:
    yield "padding-right", Objective(name="faulty", reducer=PaddedMean()), "gradient of logp"
    yield "padding-left", Objective(name="faulty", selectors=(RandomHalf("column"),)), "loss"
    yield "splits", faulty("micro-batch mean"), "loss"
    yield "splits", faulty("micro-batch extreme"), "gradient of logp"
    yield "permutation", faulty("row order"), "loss"
    yield "repeatable", faulty("global random"), "loss"
    yield "float32", faulty("cancellation"), "gradient of logp"
    yield "contract", faulty("constant moves"), "gradient of the constant old_logp"
    bonus = UndeclaredBonus(0.1)
    yield "contract", faulty("undeclared gradient", regularizers=(bonus,)), "needs.scores lacks 'entropy_grad'"
    yield "contract", faulty("not finite"), "not finite"
    yield "repeatable", faulty("in place"), "input group (changed in place)"
    yield "equal-rewards", Objective(name="faulty", advantage=NaiveNormalized()), "advantage of rewards all"


@pytest.mark.parametrize(("invariance", "objective", "words"), cases(), ids=lambda value: str(value)[:40])
def test_a_fault_is_caught_and_named(invariance: str, objective: Objective, words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_objective(objective, only={invariance}, kinds=("plain",))
    assert "objective 'faulty' is not invariant" in str(caught.value)
    assert f"  {invariance}, plain batch, seed 0: " in str(caught.value)
    assert words in str(caught.value)


def test_garbage_under_the_mask_is_traced_to_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault: cutting the padding off by multiplication."""
    room = importlib.import_module("tepo.objectives.objective")
    real = room.clean
    monkeypatch.setattr(room, "clean", lambda batch: real(batch).replace(logp=batch.logp * batch.mask))
    with pytest.raises(AssertionError, match=r"garbage nan, plain batch, seed 0: loss, with logp alone filled"):
        check_objective("tepo-markov", only={"garbage nan"}, kinds=("plain",))


def test_metrics_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import tepo.objectives.metrics as room

    real = room.over
    monkeypatch.setattr(room, "over", lambda values, where: (real(values, where)[0], torch.tensor(where.numel())))
    with pytest.raises(AssertionError, match="padding-right, plain batch, seed 0: metric 'ratio/mean' differs by"):
        check_objective("dapo", only={"padding-right"}, kinds=("plain",))


# --- the helper's own rules -------------------------------------------------------------------------------------


def test_an_undeclared_need_is_an_error_that_names_the_field() -> None:
    selector = TopEntropy(needs=frozenset())
    with pytest.raises((tepo.InputError, AssertionError)):
        check_objective(Objective(name="undeclared", selectors=(selector,)), kinds=("plain",))


def test_unknown_invariance_and_misplaced_settings_are_errors() -> None:
    with pytest.raises(tepo.InputError, match=r"'padding-rigth' is not in the matrix. Did you mean 'padding-right'"):
        check_objective("dapo", only={"padding-rigth"})
    with pytest.raises(tepo.InputError, match="clip_low"):
        check_objective(Objective(name="mine"), clip_low=0.1)


def test_the_matrix_has_every_invariance_by_name() -> None:
    assert set(INVARIANCES) == {
        *("contract", "repeatable", "permutation", "splits", "float32", "bfloat16"),
        *("padding-left", "padding-right", "padding-both"),
        *("garbage nan", "garbage +inf", "garbage -inf", "garbage 1e10"),
        *("extra-empty-row", "all-masked", "equal-rewards", "idle-rows"),
    }


def test_close_decisions_are_rejected() -> None:
    objective = Objective(name="clip", ratio=TokenRatio(), surrogate=PPOClip(0.2, 0.28), reducer=TokenMean())
    batch = steady_batch(objective, 0)
    assert is_steady(objective, batch)
    row, column = (int(index) for index in batch.mask.nonzero()[0])
    advantage = torch.ones_like(batch.logp)
    close = batch.logp.clone()
    for distance, steady in ((5e-4, False), (-5e-4, False), (3e-3, True)):
        close[row, column] = batch.old_logp[row, column] + torch.tensor(1.28).log() + distance
        assert is_steady(objective, batch.replace(logp=close, advantage=advantage)) is steady


def test_close_entropies_are_rejected() -> None:
    objective = tepo.objective("tepo")
    batch = steady_batch(objective, 0)
    assert is_steady(objective, batch)
    row, column = (int(index) for index in batch.mask.nonzero()[0])
    advantage = torch.ones_like(batch.logp)
    entropy = batch.entropy.clone()
    for distance, steady in ((5e-4, False), (-5e-4, False), (3e-3, True)):
        entropy[row, column] = batch.old_entropy[row, column] - 1e-3 + distance
        assert is_steady(objective, batch.replace(entropy=entropy, advantage=advantage)) is steady


def test_policy_gradient_alone_is_steady_everywhere() -> None:
    objective = Objective(name="pg", advantage=GroupNormalized(), surrogate=PolicyGradient())
    assert all(is_steady(objective, steady_batch(objective, seed)) for seed in range(3))
