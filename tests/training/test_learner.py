"""The learner: optimizer groups, and a state that survives a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives import KL, AdaptiveCoefficient, Objective, TokenBatch, objective
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.training.config import OptimConfig
from tepo.training.learner import Learner


@dataclass(frozen=True)
class LearnedPenalty:
    """A term whose coefficient is itself learned by gradient."""

    name: str = "penalty"
    norm: Literal["all", "masked"] = "all"
    current: bool = False
    needs: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset()

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        return batch.logp.detach() ** 2

    def tokens(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def coefficient(self, state: Mapping[str, Tensor]) -> Tensor:
        return state["scale"]

    def init_state(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor(1.0)}

    def update(self, state: Mapping[str, Tensor], metrics: Mapping[str, float]) -> dict[str, Tensor]:
        return {}


def learner(method: Objective, seed: int = 0, **optim: Any) -> Learner:
    policy = load_policy(PolicyConfig(path="builtin:tiny", device="cpu"), seed=seed)
    return Learner(policy, method, OptimConfig.model_validate({"lr": 1e-3, **optim}), updates_per_step=1, steps=10)


def push(policy: Policy) -> None:
    """Give every parameter a gradient."""
    for index, parameter in enumerate(policy.trainable_parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))


def test_the_fused_step_is_the_ordinary_one() -> None:
    weights = []
    for fused in (True, False):
        one = learner(objective("tepo"), weight_decay=0.1, fused=fused)
        for _ in range(3):
            push(one.policy)
            one.apply_gradients()
        weights.append(one.weight_tensors())
        assert one.optimizer.param_groups[0]["fused"] is fused
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-7)


def test_only_matrices_decay() -> None:
    groups = learner(objective("tepo"), weight_decay=0.1).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.dim() >= 2 for parameter in groups[0]["params"])
    assert all(parameter.dim() < 2 for parameter in groups[1]["params"])


@pytest.mark.parametrize(("limit", "share"), [(0.5, None), (0.0, 1.0), (1e6, 1.0)])
def test_gradients_are_clipped_and_the_norm_before_is_reported(limit: float, share: float | None) -> None:
    one = learner(objective("tepo"), grad_clip=limit)
    push(one.policy)
    norm = float(torch.cat([p.grad.flatten() for p in one.policy.trainable_parameters() if p.grad is not None]).norm())
    assert one.apply_gradients()["grad/norm"] == pytest.approx(norm, rel=1e-3)
    assert all(parameter.grad is None for parameter in one.policy.trainable_parameters())
    first = torch.cat(
        [value.flatten() for name, value in one.optimizer_tensors().items() if name.startswith("exp_avg/")]
    )
    seen = float(first.norm()) / (1 - one.optimizer.param_groups[0]["betas"][0])  # the gradient that the step saw
    assert seen == pytest.approx(limit if share is None else norm, rel=1e-3)


def test_moments_and_tuned_state_continue_where_they_were() -> None:
    method = dataclasses.replace(
        objective("grpo", kl_coef=0.1),
        regularizers=(KL(coef=0.5, target="old", adaptive=AdaptiveCoefficient(target=0.01)),),
    )
    first, second = learner(method), learner(method, seed=1)
    for _ in range(2):
        push(first.policy)
        first.apply_gradients()
        first.update_state({"kl/old": 1.0})
    assert float(first.state["kl_coef"]) == pytest.approx(0.5 * 1.02**2)
    weights = {name: value.clone() for name, value in first.weight_tensors().items()}
    moments = {name: value.clone() for name, value in first.optimizer_tensors().items()}
    second.load(weights, moments, updates=2)
    for one in (first, second):
        push(one.policy)
        one.apply_gradients()
        one.update_state({"kl/old": 1.0})
    assert torch.equal(first.state["kl_coef"], second.state["kl_coef"])
    for name, value in first.weight_tensors().items():
        assert torch.equal(value, second.weight_tensors()[name])
    for name, value in first.optimizer_tensors().items():
        assert torch.equal(value, second.optimizer_tensors()[name])


def test_what_an_objective_learns_is_its_own_parameter_group() -> None:
    method = Objective("learned", regularizers=(LearnedPenalty(),), learnable=("scale",))
    one = learner(method, state_lr=0.25)
    assert one.optimizer.param_groups[-1]["params"] == [one.state["scale"]]
    logp = torch.full((1, 2), -1.0, requires_grad=True)
    batch = TokenBatch(logp=logp, mask=torch.ones(1, 2, dtype=torch.bool), advantage=torch.zeros(1))
    method(batch, one.state).loss.backward()
    one.apply_gradients()
    one.update_state({})
    # The penalty is positive, so its coefficient falls, by state_lr at AdamW's first step.
    assert float(one.state["scale"].detach()) == pytest.approx(0.75, abs=1e-4)
    other = learner(method, state_lr=0.25)
    other.load(one.weight_tensors(), one.optimizer_tensors(), updates=1)
    assert torch.equal(other.state["scale"], one.state["scale"])
    assert other.optimizer.param_groups[-1]["params"] == [other.state["scale"]]


def test_another_objective_s_checkpoint_is_refused() -> None:
    plain = learner(objective("tepo"))
    tuned = learner(Objective("learned", regularizers=(LearnedPenalty(),)))
    with pytest.raises(InputError, match="scale"):
        tuned.load(plain.weight_tensors(), plain.optimizer_tensors(), updates=0)
