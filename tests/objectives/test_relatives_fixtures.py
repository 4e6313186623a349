"""GRPO's relatives on a hand-computed batch: every number below was worked out without this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fixtures import CLIPS, SIX_DIGITS, first, in_mask, mask_of, padded
from torch import Tensor

import tepo
from tepo.objectives import HolderRatio, PrefixRatio, TokenBatch
from tepo.objectives.batch import clean

__all__ = ["first"]  # lengths 3, 4, 1; advantages 1, -1, 0.5; log-ratios 0.2 -0.1 0.8 / -0.1 -0.4 0 0.4 / 0.3

# A reducer at a time, with the vanilla surrogate (0.2, 0.28, dual 3).
VANILLA = [
    ("ppo-clip", CLIPS, 0.018803),
    ("ppo-clip", CLIPS | {"reducer": "sequence-mean"}, -0.242083),
    ("ppo-clip", CLIPS | {"reducer": "sequence-sum"}, 0.050141),
    ("ppo-clip", CLIPS | {"reducer": "sequence-sum", "max_length": 4}, 0.012535),
    ("grpo-passk", CLIPS, 0.018803),
    ("gdpo", CLIPS, -0.242083),
    ("gdpo", CLIPS | {"reducer": "token-mean"}, 0.018803),
]
# exp of the mean of the log-ratios clipped on one side: rows -1.181360, 0.975310, -0.674929; wide clips are GSPO's
GEOMETRIC = [
    ("gmpo", {}, -0.293660),
    ("gmpo", {"clip_low": 9.0, "clip_high": 9.0}, (-1.349859 + 0.975310 - 0.674929) / 3),
    ("luspo", {"clip_low": 0.2, "clip_high": 0.28}, -0.192920),
    ("luspo", {}, 0.161083),
    ("holder", {"p": 0.0, "clip_high": 0.28}, -0.314897),
    # h = 1.450594 1.016746 1.349859: (-1.28 + 1.016746 - 0.64) / 3
    ("holder", {"p": 1.0, "clip_high": 0.28}, -0.301085),
    # 1.556019 1.059906 1.349859
    ("holder", {"p": 2.0, "clip_high": 0.28}, -0.286698),
    # 1.264099 0.937357 1.349859
    ("holder", {"p": -1.0, "clip_high": 0.28}, -0.322247),
]
# sums of log p: -2.6 -3.4 -0.1
WEIGHTED = [
    ("gpg", {}, -0.093750),
    ("gpg", {"reducer": "sequence-mean"}, 0.022222),
    ("opo", {"reducer": "sequence-sum"}, -0.25),
    ("cispo", {"cap": "relative", "clip_low": 10.0, "clip_high": 0.2}, 0.019730),
    ("cispo", {}, 0.158399),
    ("sapo", {}, -0.553114),
    # W = 2.459603 0.904837 1.349859; phi = 0.075864 0.896125 0.637898; (0.197247 - 3.046827 + 0.031895) / 8
    ("vespo", {}, -0.352211),
    # p - p_old is 0.166 at token 3 of row 1 and 0.235 in row 3, both with A > 0
    ("dppo", {}, -0.183868),
    ("dppo", {"ratio_cap": 1.0}, (0.8 + 0.542902 - 0.271451 - 1.273608 - 0.7 - 0.5) / 8),
    # the binary KL is 0.076 and 0.209 there, over 0.05; 0.017 and 0.019 at the two falling tokens of row 2
    ("dppo", {"divergence": "kl"}, -0.183868),
    ("dppo", {"divergence": "kl", "threshold_low": 0.015, "threshold_high": 0.015}, 0.009264),
    # squares 0.04 0.01 0.64 / 0.01 0.16 0 0.16 / 0.09 sum to 1.11: (-0.75 + beta / 2 * 1.11) / 8
    ("dro", {}, -0.024375),
    ("dro", {"beta": 0.2}, -0.079875),
]
PREFIX = [1.221403, 1.051271, 1.349859, 0.904837, 0.778801, 0.846482, 0.975310, 1.349859]
PREFIXED = [
    ("pnpo", {}, -0.099004),
    ("pnpo", {"gradient": "prefix"}, -0.099004),
    # 1.349859 is rejected twice, 0.778801 and 0.846482 too
    ("pnpo", {"accept_low": 0.9, "accept_high": 1.3}, (-1.221403 - 1.051271 + 0.904837 + 0.975310) / 8),
    # 1.28 in place of 1.349859, 0.8 in place of 0.778801
    ("pnpo", {"surrogate": "clip"}, -0.083256),
]
# row 2 has A < 0 and lost 0.025 nats a token since it was sampled
DRIFTED = [
    ("dapo", CLIPS | {"off_policy_mask": 0.02}, (-1.221403 - 0.904837 - 1.28 - 0.64) / 8),
    ("dapo", CLIPS | {"off_policy_mask": 0.03}, 0.018803),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.28, "off_policy_mask": 0.02}, (-1.28 - 0.64) / 3),
]
LOSSES = [*VANILLA, *GEOMETRIC, *WEIGHTED, *PREFIXED, *DRIFTED]


@pytest.mark.parametrize(("name", "settings", "loss"), LOSSES, ids=str)
def test_loss_of_the_fixture(first: TokenBatch, name: str, settings: dict[str, Any], loss: float) -> None:
    assert float(tepo.objective(name, **settings)(first).loss) == pytest.approx(loss, abs=1.2e-6)


def test_prefix_ratios_of_the_fixture(first: TokenBatch) -> None:
    for gradient in ("prefix", "token"):
        ratio = PrefixRatio(gradient)(clean(first), 20.0)  # type: ignore[arg-type]
        assert in_mask(ratio.value, first) == pytest.approx(PREFIX, **SIX_DIGITS)


# -d loss / d logp; every coefficient is divided by the 8 tokens, or by the 3 rows and the row's length.
CREDIT: list[tuple[str, dict[str, Any], list[float]]] = [
    ("cispo", {}, [1.221403 / 8, 0.904837 / 8, 2.225541 / 8, *(-x / 8 for x in (0.904837, 0.670320, 1.0, 1.491825))]),
    ("cispo", {"cap": "relative", "clip_high": 0.2}, [1.2 / 8, 0.904837 / 8, 1.2 / 8, -0.904837 / 8]),
    # one token of row 1 is over 0.4: its gradient is gone, the others' is 1.181360 / (3 * 3)
    ("gmpo", {}, [0.131262, 0.131262, 0.0, *[-0.975310 / 12] * 4]),
    ("luspo", {"clip_low": 0.2, "clip_high": 0.28}, [0, 0, 0, *[-0.975310 / 3] * 4, 0]),
    ("vespo", {}, [*[0.075864 / 8] * 3, *[-0.896125 / 8] * 4, 0.637898 * 0.5 / 8]),
    ("dppo", {}, [1.221403 / 8, 0.904837 / 8, 0, *(-x / 8 for x in (0.904837, 0.670320, 1.0, 1.491825)), 0]),
    ("dro", {}, [(1 - 0.2) / 8, (1 + 0.1) / 8, (1 - 0.8) / 8, *((-1 - d) / 8 for d in (-0.1, -0.4, 0.0, 0.4))]),
    ("pnpo", {}, [x * a / 8 for x, a in zip(PREFIX, [1, 1, 1, -1, -1, -1, -1, 0.5], strict=True)]),
    # token 1 of row 1 hears from three positions: 1.221403 + 1.051271 / 2 + 1.349859 / 3 = 2.196992
    ("pnpo", {"gradient": "prefix"}, [2.196992 / 8, (0.525636 + 0.449953) / 8, 0.449953 / 8]),
    # shares of the gradient are r^p over their sum: 1.221403 0.904837 2.225541 of 4.351781; the sequence is not clipped
    ("holder", {"p": 1.0, "clip_high": 9.0}, [1.221403 / 9, 0.904837 / 9, 2.225541 / 9]),
    # sapo: A 4 s (1 - s) r / (3 * L), s = sigmoid(0.221403) = 0.555126 at the first token
    ("sapo", {}, [4 * 0.555126 * 0.444874 * 1.221403 / 9]),
    ("dapo", CLIPS | {"off_policy_mask": 0.02}, [1.221403 / 8, 0.904837 / 8, 0, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("name", "settings", "credit"), CREDIT, ids=str)
def test_credit_of_the_fixture(first: TokenBatch, name: str, settings: dict[str, Any], credit: list[float]) -> None:
    found = in_mask(tepo.credit(tepo.objective(name, **settings), first), first)
    assert found[: len(credit)] == pytest.approx(credit, abs=1.2e-6)


@pytest.mark.parametrize(
    ("name", "settings", "low", "high"),
    [
        ("cispo", {"cap": "relative", "clip_low": 0.2, "clip_high": 0.2}, 1 / 8, 4 / 8),
        ("gmpo", {}, 0, 1 / 8),
        ("gmpo", {"clip_low": 0.3}, 1 / 8, 1 / 8),
        ("holder", {"clip": "token"}, 1 / 8, 3 / 8),
        ("pnpo", {"accept_low": 0.9, "accept_high": 1.3}, 2 / 8, 2 / 8),
        ("dppo", {}, 0, 2 / 8),
    ],
    ids=str,
)
def test_clip_metrics_of_the_fixture(
    first: TokenBatch, name: str, settings: dict[str, Any], low: float, high: float
) -> None:
    metrics = tepo.objective(name, **settings)(first).metrics
    assert (metrics.get("clip/low", 0.0), metrics["clip/high"]) == pytest.approx((low, high))


def test_share_of_drifted_tokens(first: TokenBatch) -> None:
    assert tepo.objective("dapo", off_policy_mask=0.02)(first).metrics["mask/off_policy"] == 4 / 8
    assert tepo.objective("dapo", off_policy_mask=0.03)(first).metrics["mask/off_policy"] == 0
    assert "mask/off_policy" not in tepo.objective("dapo")(first).metrics


def test_a_power_mean_of_two_ratios() -> None:
    """Ratios 1 and 4: arithmetic 2.5, geometric 2, harmonic 1.6, quadratic sqrt(8.5)."""
    batch = TokenBatch(
        logp=padded([-1.0, -1.0]),
        old_logp=padded([-1.0, -2.3862943611198906]),
        mask=mask_of(2),
        advantage=padded([1, 1]),
    )
    for p, mean in [(1, 2.5), (0, 2.0), (-1, 1.6), (2, 8.5**0.5), (60, 4 * 0.5 ** (1 / 60)), (-60, 2 ** (1 / 60))]:
        assert float(HolderRatio(p)(clean(batch), 20.0).value[0, 0]) == pytest.approx(mean, rel=1e-12)


# --- advantages -------------------------------------------------------------------------------------------------


def prepared(name: str, rewards: Any, lengths: tuple[int, ...], groups: list[int], **settings: Any) -> Tensor:
    """Advantages of the first token of each response."""
    mask = mask_of(*lengths)
    batch = TokenBatch(
        logp=torch.full(mask.shape, -1.0, dtype=torch.float64),
        ref_logp=torch.full(mask.shape, -1.5, dtype=torch.float64),
        mask=mask,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(groups),
    )
    advantage = tepo.objective(name, **settings).prepare(batch).batch.advantage
    assert advantage is not None
    return advantage


EIGHT = [1.0, 0, 0, 1, 1, 0, 0, 0]
NAN = float("nan")
ADVANTAGES: list[tuple[str, dict[str, Any], Any, tuple[int, ...], list[int], list[float]]] = [
    # std 0.517549; the mean is 3/8
    ("ppo-clip", {"advantage_eps": 0.0}, EIGHT, (1,) * 8, [0] * 8, [1.207615 if r else -0.724569 for r in EIGHT]),
    ("ppo-clip", {"advantage": "centred"}, EIGHT, (1,) * 8, [0] * 8, [0.625 if r else -0.375 for r in EIGHT]),
    ("ppo-clip", {"advantage": "leave-one-out"}, EIGHT, (1,) * 8, [0] * 8, [5 / 7 if r else -3 / 7 for r in EIGHT]),
    # verl's: alpha = 8/3
    ("gpg", {"alpha": "rewards"}, EIGHT, (1,) * 8, [0] * 8, [5 / 3 if r else -1.0 for r in EIGHT]),
    # the paper's: one of three groups is silent, alpha = 3/2
    ("gpg", {}, [1.0, 0, 1, 1, 0, 2], (1,) * 6, [0, 0, 1, 1, 2, 2], [0.75, -0.75, 0, 0, -1.5, 1.5]),
    ("gpg", {"alpha": "none"}, [1.0, 0, 1, 1, 0, 2], (1,) * 6, [0, 0, 1, 1, 2, 2], [0.5, -0.5, 0, 0, -1, 1]),
    # verl's alpha with rewards of +1 and -1: all are not 0
    ("gpg", {"alpha": "rewards"}, [1.0, -1], (1, 1), [0, 0], [1.0, -1.0]),
    ("gpg", {}, [1.0, 1.0], (1, 1), [0, 0], [0.0, 0.0]),
    # the baseline is (3 * 1 + 4 * 0 + 1 * 0.5) / 8 = 0.4375
    ("opo", {}, [1.0, 0, 0.5], (3, 4, 1), [0, 0, 0], [0.5625, -0.4375, 0.0625]),
    ("opo", {}, [1.0, 0, NAN, 7.0], (3, 1, 4, 1), [0, 0, 0, 1], [0.25, -0.75, 0, 0]),
    # std 0.5, the lead is 0.5
    ("grpo-passk", {"advantage_eps": 0.0}, [1.0, 0, 0.5], (1,) * 3, [0] * 3, [1.0, 0, 0]),
    ("grpo-passk", {"divide_by_std": False}, [1.0, 0, 0.5], (1,) * 3, [0] * 3, [0.5, 0, 0]),
    ("grpo-passk", {}, [1.0, 0, 1.0], (1,) * 3, [0] * 3, [0.0, 0, 0]),
    ("grpo-passk", {"divide_by_std": False}, [NAN, 0, 2.0, 5.0], (1,) * 4, [0, 0, 0, 1], [0.0, 0, 2.0, 0]),
    # tokens 1 1 1 0 0 0 0 0.5: mean 0.4375, variance 0.245536
    ("reinforce++", {"kl_coef": 0}, [1.0, 0, 0.5], (3, 4, 1), [0, 1, 2], [1.135181, -0.882919, 0.126131]),
    # centred 0.5 -0.5 0 has the same spread
    ("reinforce++-baseline", {}, [1.0, 0, 0.5], (3, 4, 1), [0] * 3, [1.135181, -0.882919, 0.126131]),
    ("reinforce++-baseline", {}, [8.0, 7.0, 0.3, 0.3], (1,) * 4, [0, 0, 1, 1], [1.224745, -1.224745, 0, 0]),
    # columns (1 0 1) and (0 1 1) normalise to 0.577350 -1.154701 0.577350 and -1.154701 0.577350 0.577350
    (
        *("gdpo", {"advantage_eps": 0.0, "whiten": "none"}, [[1.0, 0], [0, 1], [1, 1]], (1,) * 3, [0] * 3),
        [-0.577350, -0.577350, 1.154701],
    ),
    (
        *("gdpo", {"advantage_eps": 0.0, "whiten": "none", "reward_weights": [2, 0.5]}, [[1.0, 0], [0, 1], [1, 1]]),
        *((1,) * 3, [0] * 3, [0.577350, -2.020726, 1.443376]),
    ),
    # their own standard deviation is 1: whitening changes nothing
    ("gdpo", {"advantage_eps": 0.0}, [[1.0, 0], [0, 1], [1, 1]], (1, 2, 1), [0] * 3, [-0.577350, -0.577350, 1.154701]),
    # over tokens: -0.577350 three times and 1.154701, mean -0.144338, variance 0.75
    (
        *("gdpo", {"advantage_eps": 0.0, "whiten": "tokens"}, [[1.0, 0], [0, 1], [1, 1]], (1, 2, 1), [0] * 3),
        [-0.5, -0.5, 1.5],
    ),
    # sums are equal, the first reward's are not; the second cannot score row 2
    (
        *("gdpo", {"advantage_eps": 0.0, "whiten": "none"}, [[1.0, 0], [0, NAN], [0.5, 1]], (1,) * 3, [0] * 3),
        [1 - 0.707107, -1.0, 0.707107],
    ),
]


@pytest.mark.parametrize(("name", "settings", "rewards", "lengths", "groups", "expected"), ADVANTAGES, ids=str)
def test_advantages_by_hand(
    name: str,
    settings: dict[str, Any],
    rewards: Any,
    lengths: tuple[int, ...],
    groups: list[int],
    expected: list[float],
) -> None:
    found = prepared(name, rewards, lengths, groups, **settings)
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1.2e-6)
    mask = mask_of(*lengths)
    assert torch.equal(found != 0, mask & (found[:, :1] != 0))


def test_returns_carry_the_kl_of_every_later_token() -> None:
    """old - ref is 0.5 a token: r = -0.05 -0.05 1 - 0.05 and -0.05; returns with gamma 0.5, then whitened."""
    found = prepared("reinforce++", [1.0, 0.0], (3, 1), [0, 1], kl_coef=0.1, gamma=0.5)
    returns = [-0.05 - 0.025 + 0.2375, -0.05 + 0.475, 0.95, -0.05]
    mean = sum(returns) / 4
    std = (sum((g - mean) ** 2 for g in returns) / 3 + 1e-8) ** 0.5
    expected = [(g - mean) / std for g in returns]
    assert [*found[0].tolist(), float(found[1, 0])] == pytest.approx(expected, rel=1e-12)
