"""Two hand-computed batches: every number below was worked out without this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tepo
from tepo.objectives import (
    KL,
    NoRatio,
    Objective,
    PolicyGradient,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    SequenceSumRatio,
    TokenBatch,
    TokenMean,
    TokenRatio,
)
from tepo.objectives.batch import clean
from tepo.objectives.regularizers import FallingEntropy, estimate_kl
from tepo.objectives.surrogates import PPOClip

SIX_DIGITS = {"abs": 6e-7}
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0}


def padded(*rows: list[float]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def mask_of(*lengths: int) -> Tensor:
    return torch.tensor([[t < length for t in range(max(lengths))] for length in lengths])


def in_mask(values: Tensor, batch: TokenBatch) -> list[float]:
    return [float(value) for value in values[batch.mask]]


# --- the first: lengths 3, 4, 1; advantages 1, -1, 0.5 ------------------------------------------------------------


def first_batch() -> TokenBatch:
    return TokenBatch(
        logp=padded([-0.8, -0.6, -1.2], [-0.3, -1.9, -0.7, -0.5], [-0.1]),
        old_logp=padded([-1.0, -0.5, -2.0], [-0.2, -1.5, -0.7, -0.9], [-0.4]),
        entropy=padded([0.9, 0.4, 1.6], [0.3, 1.2, 0.5, 1.0], [0.2]),
        old_entropy=padded([1.0, 0.4, 1.7], [0.3, 1.1, 0.6, 1.0], [0.3]),
        mask=mask_of(3, 4, 1),
        advantage=torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64),
    )


@pytest.fixture
def first() -> TokenBatch:
    return first_batch()


TEPO_WITHOUT_MARGIN = {"clip_dual": 3.0, "entropy_margin": 0.0, "kl_coef": 1.0}
FIRST: list[tuple[str, dict[str, Any], float]] = [
    ("dapo", CLIPS, 0.018803),
    ("grpo", CLIPS | {"kl_coef": 0}, -0.242083),
    ("dr-grpo", CLIPS | {"max_length": 4}, 0.012535),
    ("dr-grpo", CLIPS | {"max_length": 1}, 0.050141),
    ("gspo", CLIPS, -0.314897),
    ("gspo-token", CLIPS, -0.314897),
    ("gspo", {}, -0.166967),
    ("gspo-token", {}, -0.166967),
    ("tepo-markov", {"clip_dual": 3.0}, -0.072345),
    ("tepo-markov", {"clip_dual": 3.0, "ratio": "sequence-token"}, -0.072345),
    ("tepo-markov", {"clip_low": 3e-4, "clip_high": 4e-4}, 0.062175),
    ("tepo", {"kl_coef": 0}, -0.072345),
    ("tepo", TEPO_WITHOUT_MARGIN | {"kl_estimator": "abs"}, 0.090155),
    ("tepo", TEPO_WITHOUT_MARGIN | {"kl_estimator": "k2"}, -0.024220),
    ("tepo", TEPO_WITHOUT_MARGIN | {"kl_estimator": "k3"}, -0.033735),
    ("tepo", TEPO_WITHOUT_MARGIN | {"kl_estimator": "k3", "entropy_criterion": "sign"}, -0.033735),
    ("tepo", {"clip_dual": 3.0, "kl_estimator": "k3"}, -0.033735),  # every decrease here is 0.1, far over 1e-3
    ("reinforce", {}, -0.093750),
    ("reinforce", {"reducer": "sequence-mean"}, 0.022222),
    # -(1 * -2.6) = 2.6, -(-1 * -3.4) = -3.4, -(0.5 * -0.1) = 0.05; mean of three rows
    ("reinforce", {"reducer": "sequence-sum"}, -0.25),
    ("rloo", {"kl_coef": 0}, -0.25),
    # sums of D: 0.9, -0.1, 0.3; ratios 2.459603, 0.904837, 1.349859; clip 1.28: (-1.28 + 0.904837 - 0.64) / 3
    ("rloo", {"kl_coef": 0, "ratio": "sequence-sum", "clip_high": 0.28}, -0.338388),
]


@pytest.mark.parametrize(("name", "settings", "loss"), FIRST, ids=str)
def test_loss_of_the_first_fixture(first: TokenBatch, name: str, settings: dict[str, Any], loss: float) -> None:
    assert float(tepo.objective(name, **settings)(first).loss) == pytest.approx(loss, **SIX_DIGITS)


def test_ratios_of_the_first_fixture(first: TokenBatch) -> None:
    token = TokenRatio()(clean(first), 20.0).value
    expected = [1.221403, 0.904837, 2.225541, 0.904837, 0.670320, 1.0, 1.491825, 1.349859]
    assert in_mask(token, first) == pytest.approx(expected, **SIX_DIGITS)
    sequence = SequenceRatio()(clean(first), 20.0).value
    expected = [1.349859] * 3 + [0.975310] * 4 + [1.349859]
    assert in_mask(sequence, first) == pytest.approx(expected, **SIX_DIGITS)


def test_token_losses_of_the_first_fixture(first: TokenBatch) -> None:
    view = clean(first)
    losses = PPOClip(0.2, 0.28, 3.0)(TokenRatio()(view, 20.0), view.advantage, view)
    expected = [-1.221403, -0.904837, -1.28, 0.904837, 0.8, 1.0, 1.491825, -0.64]
    assert in_mask(losses.loss, first) == pytest.approx(expected, **SIX_DIGITS)
    assert in_mask(losses.clip_high, first) == [0, 0, 1, 0, 0, 0, 0, 1]
    assert in_mask(losses.clip_low, first) == [0, 0, 0, 0, 1, 0, 0, 0]
    assert in_mask(losses.clip_dual, first) == [0] * 8


@pytest.mark.parametrize(
    ("estimator", "mean"),
    [("k1", 0.1375), ("abs", 0.2875), ("k2", 0.069375), ("k3", 0.060171), ("k3-old", 0.083578)],
)
def test_kl_means_of_the_first_fixture(first: TokenBatch, estimator: Any, mean: float) -> None:
    values = estimate_kl(first.old_logp - first.logp, estimator)
    assert float(values[first.mask].mean()) == pytest.approx(mean, **SIX_DIGITS)
    alone = Objective("kl", ratio=NoRatio(), surrogate=PolicyGradient(), regularizers=(KL(1.0, "old", estimator),))
    silent = first.replace(advantage=torch.zeros(3, dtype=torch.float64))
    assert float(alone(silent).loss) == pytest.approx(mean, **SIX_DIGITS)


def test_tepo_mask_of_the_first_fixture(first: TokenBatch) -> None:
    view = clean(first)
    tokens_1_and_3_of_row_1_and_token_1_of_row_3 = [True, False, True, False, False, False, False, True]
    for criterion in ("realised", "sign"):
        mask = FallingEntropy(criterion, margin=0.0)(view)
        assert in_mask(mask, first) == tokens_1_and_3_of_row_1_and_token_1_of_row_3, criterion
    # With the old values the sign criterion holds nothing; token 1 of row 1 is an exact tie, log p + H = -1 + 1.
    old = view.replace(logp=view.old_logp, entropy=view.old_entropy)
    assert not FallingEntropy("sign")(old).any()
    assert tepo.objective("tepo", entropy_margin=0.0)(first).metrics["mask/kl"] == pytest.approx(3 / 8)


def test_metrics_of_the_first_fixture(first: TokenBatch) -> None:
    metrics = tepo.objective("dapo", **CLIPS)(first).metrics
    assert metrics["loss"] == metrics["loss/policy"] == pytest.approx(0.018803, **SIX_DIGITS)
    assert metrics["ratio/max"] == pytest.approx(2.225541, **SIX_DIGITS)
    assert metrics["ratio/min"] == pytest.approx(0.670320, **SIX_DIGITS)
    assert metrics["ratio/mean"] == pytest.approx(9.768622 / 8, **SIX_DIGITS)  # the eight ratios above
    assert metrics["clip/high"] == 2 / 8
    assert metrics["clip/low"] == 1 / 8
    assert metrics["clip/dual"] == 0
    assert metrics["kl/old"] == pytest.approx(0.060171, **SIX_DIGITS)
    assert "kl/ref" not in metrics
    assert metrics["entropy/new"] == pytest.approx(6.1 / 8)
    assert metrics["entropy/old"] == pytest.approx(6.4 / 8)
    assert metrics["entropy/change"] == pytest.approx(-0.3 / 8)
    assert metrics["advantage/mean"] == pytest.approx((3 - 4 + 0.5) / 8)
    assert metrics["advantage/max"] == 1
    assert metrics["advantage/min"] == -1
    assert "group/zero_std" not in metrics  # advantages were given, not rewards


# --- the second: log-ratios of both signs, and a dual clip that binds ------------------------------------------------
#
# row 1, A = 1.5     old -1.0 -2.0 -0.5    new -0.7 -2.5 -0.9    D  0.3 -0.5 -0.4   r 1.349859 0.606531 0.670320
# row 2, A = -2.0    old -1.5 -0.8         new -0.2 -1.4         D  1.3 -0.6        r 3.669297 0.548812
#
# clip 0.2/0.28, dual c = 2:
#   row 1  1.349859 > 1.28: -1.5 * 1.28 = -1.92, gradient 0;  -1.5 * 0.606531 = -0.909796;  -1.5 * 0.670320 = -1.005480
#   row 2  2 * 3.669297 = 7.338593 > c|A| = 4: 4, gradient 0 (without the dual clip 7.338593, gradient 7.338593);
#          0.548812 < 0.8: 2 * 0.8 = 1.6, gradient 0
#   token mean (-1.92 - 0.909796 - 1.005480 + 4 + 1.6) / 5 = 1.764724 / 5 = 0.352945; without dual 5.103317 / 5
#   sequence mean (-3.835276 / 3 + 5.6 / 2) / 2 = (-1.278425 + 2.8) / 2 = 0.760787
#   sequence sums / 4: (-3.835276 + 5.6) / 2 / 4 = 0.220590
# geometric means: exp(-0.6 / 3) = 0.818731, exp(0.7 / 2) = 1.419068
#   row 1 -1.5 * 0.818731 = -1.228096 a token; row 2 2 * 1.419068 = 2.838135 a token, or c|A| = 2.1 with c = 1.05
#   token mean (3 * -1.228096 + 2 * 2.838135) / 5 = 0.398396; with c = 1.05 (-3.684288 + 4.2) / 5 = 0.103142
#   mean of rows (-1.228096 + 2.838135) / 2 = 0.805019; with c = 1.05 0.435952
# products: exp(-0.6) = 0.548812 -> -0.823217; exp(0.7) = 2.013753 -> 4.027505; mean 1.602144


@pytest.fixture
def second() -> TokenBatch:
    return TokenBatch(
        logp=padded([-0.7, -2.5, -0.9], [-0.2, -1.4]),
        old_logp=padded([-1.0, -2.0, -0.5], [-1.5, -0.8]),
        ref_logp=padded([-0.9, -2.2, -0.6], [-1.2, -1.0]),
        entropy=padded([0.5, 1.2, 0.8], [0.4, 0.9]),
        old_entropy=padded([0.7, 1.1, 0.8], [0.9, 1.0]),
        mask=mask_of(3, 2),
        advantage=torch.tensor([1.5, -2.0], dtype=torch.float64),
    )


DUAL = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 2.0}
# k3 to the old policy at the one masked token (A > 0, entropy 0.5 < 0.7): exp(-0.3) + 0.3 - 1 = 0.040818
# k3 to the reference, d = -0.2 0.3 0.3 / -1.0 0.4: 0.018731 0.049859 0.049859 / 0.367879 0.091825
#   sequence mean (0.118448 / 3 + 0.459704 / 2) / 2 = 0.134667
SECOND: list[tuple[str, dict[str, Any], float]] = [
    ("dapo", DUAL, 0.352945),
    ("dapo", DUAL | {"clip_dual": None}, 1.020663),
    ("grpo", DUAL | {"kl_coef": 0}, 0.760787),
    ("grpo", DUAL | {"kl_coef": 0.5}, 0.760787 + 0.5 * 0.134667),
    ("dr-grpo", DUAL | {"max_length": 4}, 0.220590),
    ("tepo-markov", {}, 0.398396),
    ("tepo-markov", {"clip_dual": 1.05}, 0.103142),
    ("tepo-markov", {"clip_dual": 1.05, "ratio": "sequence-token"}, 0.103142),
    ("tepo", {}, 0.398396 + 0.040818 / 5),
    ("tepo", {"kl_norm": "masked"}, 0.398396 + 0.040818),
    ("tepo", {"kl_estimator": "abs"}, 0.398396 + 0.3 / 5),
    ("tepo", {"kl_estimator": "k2", "kl_coef": 2.0}, 0.398396 + 2 * 0.045 / 5),
    ("tepo", {"kl_estimator": "k1"}, 0.398396 + 0.3 / 5),
    ("tepo", {"kl_estimator": "k3-old"}, 0.398396 + (1.349859 - 1 - 0.3) / 5),
    ("tepo", {"kl_target": "reference"}, 0.398396 + 0.018731 / 5),
    ("gspo", {"clip_dual": 1.05}, 0.435952),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, 0.805019),
    ("gspo-token", {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.05}, 0.435952),
    ("reinforce", {}, 0.59),  # (1.5 * 4.1 - 2 * 1.6) / 5
    ("rloo", {"kl_coef": 0}, 1.475),  # (1.5 * 4.1 - 2 * 1.6) / 2
    ("rloo", {"kl_coef": 0, "ratio": "sequence-sum"}, 1.602144),
]


@pytest.mark.parametrize(("name", "settings", "loss"), SECOND, ids=str)
def test_loss_of_the_second_fixture(second: TokenBatch, name: str, settings: dict[str, Any], loss: float) -> None:
    assert float(tepo.objective(name, **settings)(second).loss) == pytest.approx(loss, abs=1.2e-6)


# -d loss / d logp
CREDIT: list[tuple[str, dict[str, Any], list[float]]] = [
    # 0.909796 / 5, 1.005480 / 5; clipped, capped and clipped tokens get nothing
    ("dapo", DUAL, [0, 0.181959, 0.201096, 0, 0]),
    ("dapo", DUAL | {"clip_dual": None}, [0, 0.181959, 0.201096, -7.338593 / 5, 0]),
    # 0.909796 / 6, 1.005480 / 6
    ("grpo", DUAL | {"kl_coef": 0}, [0, 0.151633, 0.167580, 0, 0]),
    # every token of a row: A s / N = 1.228096 / 5, -2.838135 / 5; the dual clip silences row 2
    ("tepo-markov", {}, [0.245619] * 3 + [-0.567627] * 2),
    ("tepo-markov", {"clip_dual": 1.05}, [0.245619] * 3 + [0, 0]),
    # the masked token is pulled back by (1 - exp(-0.3)) / 5 = 0.259182 / 5
    ("tepo", {"clip_dual": 1.05}, [0.245619 - 0.051836, 0.245619, 0.245619, 0, 0]),
    ("tepo", {"clip_dual": 1.05, "kl_estimator": "k1"}, [0.245619 - 0.2, 0.245619, 0.245619, 0, 0]),
    ("tepo", {"clip_dual": 1.05, "kl_estimator": "k2"}, [0.245619 - 0.06, 0.245619, 0.245619, 0, 0]),
    # a row's mean: 1.228096 / (2 * 3), -2.838135 / (2 * 2)
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, [0.204683] * 3 + [-0.709534] * 2),
    ("reinforce", {}, [0.3] * 3 + [-0.4] * 2),
    ("rloo", {"kl_coef": 0}, [0.75] * 3 + [-1.0] * 2),
    ("rloo", {"kl_coef": 0, "ratio": "sequence-sum"}, [0.823217 / 2] * 3 + [-4.027505 / 2] * 2),
]


@pytest.mark.parametrize(("name", "settings", "credit"), CREDIT, ids=str)
def test_credit_of_the_second_fixture(
    second: TokenBatch, name: str, settings: dict[str, Any], credit: list[float]
) -> None:
    found = tepo.credit(tepo.objective(name, **settings), second)
    assert in_mask(found, second) == pytest.approx(credit, abs=1.2e-6)
    assert float(found[~second.mask].abs().max()) == 0


def test_clip_metrics_of_the_second_fixture(second: TokenBatch) -> None:
    metrics = tepo.objective("dapo", **DUAL)(second).metrics
    assert (metrics["clip/high"], metrics["clip/low"], metrics["clip/dual"]) == pytest.approx((1 / 5, 1 / 5, 1 / 5))
    assert tepo.objective("tepo")(second).metrics["mask/kl"] == pytest.approx(1 / 5)


def test_metrics_of_dropped_rows(second: TokenBatch) -> None:
    """clip/* are shares of the policy term's tokens, mask/* of all tokens; the rest describes every token."""
    drop = {"truncated": "drop"}
    without_row_2 = second.replace(truncated=torch.tensor([False, True]))
    metrics = tepo.objective("dapo", **DUAL, **drop)(without_row_2).metrics
    assert (metrics["clip/high"], metrics["clip/low"], metrics["clip/dual"]) == pytest.approx((1 / 3, 0, 0))
    assert metrics["entropy/new"] == pytest.approx(3.8 / 5)
    assert metrics["entropy/old"] == pytest.approx(4.5 / 5)
    assert metrics["ratio/max"] == pytest.approx(3.669297, **SIX_DIGITS)
    assert tepo.objective("tepo", **drop)(without_row_2).metrics["mask/kl"] == pytest.approx(1 / 5)
    without_row_1 = second.replace(truncated=torch.tensor([True, False]))
    assert tepo.objective("tepo", **drop)(without_row_1).metrics["mask/kl"] == 0


# --- reducers by themselves ------------------------------------------------------------------------------------------


def test_reducers_of_the_first_fixture(first: TokenBatch) -> None:
    vanilla = {"ratio": TokenRatio(), "surrogate": PPOClip(0.2, 0.28, 3.0)}
    for reducer, loss in [
        (TokenMean(), 0.018803),
        (SequenceMean(), -0.242083),
        (SequenceSum(1.0), 0.050141),
        (SequenceSum(4.0), 0.012535),
    ]:
        assert float(Objective("v", reducer=reducer, **vanilla)(first).loss) == pytest.approx(loss, **SIX_DIGITS)
    # groups {1, 2} and {3}: the token mean inside each, (-3.406240 + 4.196662) / 7 and -0.64, then their mean
    grouped = first.replace(group=torch.tensor([5, 5, -2]))
    loss = Objective("v", reducer=TokenMean("group"), **vanilla)(grouped).loss
    assert float(loss) == pytest.approx((0.790422 / 7 - 0.64) / 2, abs=1.2e-6)


def test_sum_and_mean_of_log_ratios_are_two_things() -> None:
    """A difference of 0.012 on each of 100 tokens: the product is 3.3201, the geometric mean 1.01207."""
    batch = TokenBatch(
        logp=torch.full((1, 100), -1.0, dtype=torch.float64),
        old_logp=torch.full((1, 100), -1.012, dtype=torch.float64),
        mask=torch.ones(1, 100, dtype=torch.bool),
    )
    assert float(SequenceSumRatio()(clean(batch), 20.0).value[0, 0]) == pytest.approx(3.3201, abs=5e-5)
    assert float(SequenceRatio()(clean(batch), 20.0).value[0, 0]) == pytest.approx(1.01207, abs=5e-6)
