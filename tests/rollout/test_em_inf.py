"""EM-INF: the steps equal torch's Adam on the written objective; what it does to a distribution, and to a sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo.objectives import decoding_options
from tepo.policy import Policy
from tepo.rollout import EMInfConfig, SamplingConfig, sample
from tepo.rollout.em_inf import minimise_entropy


def entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def by_autograd(row: Tensor, config: EMInfConfig) -> Tensor:
    """One row of logits [V], with torch's own optimizer and derivatives."""
    z = row.clone().requires_grad_(True)
    start = row.log_softmax(-1)
    adam = torch.optim.Adam([z], lr=config.lr)
    for _ in range(config.steps):
        if float(entropy(z).detach()) < config.threshold:
            break
        kl = (start.exp() * (start - z.log_softmax(-1))).sum()
        adam.zero_grad()
        (entropy(z) + config.kl_coef * kl).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return z.detach()


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps": 15, "threshold": 0.1}, {"kl_coef": 2.0, "steps": 8}, {"lr": 0.5, "steps": 10, "threshold": 1.0}],
)
def test_the_steps_are_adam_s_on_the_objective(changes: dict[str, Any]) -> None:
    config = EMInfConfig(**changes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 20, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 6, 12)[:, None]
    found = minimise_entropy(rows, config)
    wanted = torch.stack([by_autograd(row, config) for row in rows])
    assert torch.allclose(found, wanted, atol=1e-9, rtol=0)


def test_one_step_by_hand() -> None:
    """p = (3/4, 1/4): dH/dz = -p (log p + H) has signs - and +, and Adam's first step is lr times the sign."""
    logits = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    found = minimise_entropy(logits, EMInfConfig(steps=1, lr=0.1, threshold=0.3, kl_coef=0.05))
    assert found[0].tolist() == pytest.approx([math.log(3.0) + 0.1, -0.1], abs=1e-6)


def test_decided_and_uniform_tokens_stay_as_they_are() -> None:
    decided = torch.tensor([[9.0, 0.0, 0.0], [float("-inf"), 0.0, 9.0]])
    assert torch.equal(minimise_entropy(decided, EMInfConfig()), decided)
    uniform = torch.zeros(1, 4, dtype=torch.float64)
    # A uniform distribution is a maximum of the entropy: its gradient is 0.
    assert torch.allclose(minimise_entropy(uniform, EMInfConfig()).softmax(-1), uniform.softmax(-1), atol=1e-6)


def test_entropy_falls_a_row_does_not_touch_another_and_nothing_becomes_of_minus_infinity() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 50, generator=generator)
    rows[:, 7] = float("-inf")
    found = minimise_entropy(rows, EMInfConfig(steps=10))
    assert bool((entropy(found.nan_to_num(neginf=-1e4)) < entropy(rows.nan_to_num(neginf=-1e4))).all())
    assert bool((found.softmax(-1)[:, 7] == 0).all())
    assert not bool(found.isnan().any())
    for index in range(6):
        alone = minimise_entropy(rows[index : index + 1], EMInfConfig(steps=10))
        assert torch.allclose(alone[0].softmax(-1), found[index].softmax(-1), atol=1e-6)
    untouched = torch.randn(6, 50, generator=generator)
    before = untouched.clone()
    minimise_entropy(untouched, EMInfConfig())
    assert torch.equal(untouched, before)


def drawn(policy: Policy, **settings: Any) -> list[Any]:
    config = SamplingConfig(max_tokens=12, **settings)
    groups = sample(policy, [[5, 6, 7], [9, 4]], samples=16, config=config, seed=0, purpose="test", draws=[0, 1])
    return [response for group in groups for response in group]


def test_an_option_of_the_sampler_that_records_the_policy_s_own_distribution(
    random_policy: Callable[..., Policy],
) -> None:
    policy = random_policy("llama")
    plain = drawn(policy)
    off = drawn(policy, em_inf=EMInfConfig(threshold=100.0))
    assert [response.token_ids for response in plain] == [response.token_ids for response in off]
    sharp = drawn(policy, em_inf=EMInfConfig(steps=30, lr=0.3, threshold=0.05, kl_coef=0.0))
    first = {response.token_ids[0] for response in sharp[:16]}
    assert len(first) < len({response.token_ids[0] for response in plain[:16]})
    hidden = policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
    for response in sharp[:16]:
        own = float(hidden.log_softmax(-1)[response.token_ids[0]])
        assert response.logp[0] == pytest.approx(own, abs=1e-4)
        assert response.entropy[0] == pytest.approx(float(entropy(hidden)), abs=1e-4)


def test_greedy_decoding_may_be_sharpened_too(random_policy: Callable[..., Policy]) -> None:
    policy = random_policy("llama")
    responses = drawn(policy, temperature=0.0, em_inf=EMInfConfig())
    assert len({response.token_ids for response in responses[:16]}) == 1


def test_sharpened_samples_are_not_the_policy_s() -> None:
    assert SamplingConfig(em_inf=EMInfConfig()).truncates
    assert not SamplingConfig().truncates


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"threshold": -1.0}, {"kl_coef": -0.1}, {"stepz": 1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EMInfConfig(**wrong)


def test_the_catalogue_tells_of_these_settings() -> None:
    (told,) = (option for option in decoding_options() if option.name == "em-inf")
    fields = EMInfConfig.model_fields
    assert [(setting.name, setting.default, setting.help) for setting in told.settings] == [
        (name, field.default, field.description) for name, field in fields.items()
    ]
    assert SamplingConfig(em_inf=EMInfConfig(steps=told.settings[0].default)).truncates
    assert told.section == "sampling.em_inf"
