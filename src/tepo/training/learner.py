"""A learner: a model with its optimizer, schedule and what the objective learns on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tepo.core.errors import InputError
from tepo.objectives import Objective
from tepo.policy import Policy, Trained
from tepo.training.config import OptimConfig
from tepo.training.schedule import learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelLearner:
    """One model that training changes, with its optimizer and schedule. A trainer owns a list of them.

    `state` holds scalars that are tuned on the way; the `learnable` ones are parameters of a separate optimizer group.
    """

    def __init__(
        self,
        model: Trained,
        config: OptimConfig,
        *,
        updates_per_step: int,
        steps: int,
        name: str,
        state: Mapping[str, Tensor] | None = None,
        learnable: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.model = model
        self.updates = 0
        self.state: dict[str, Tensor] = {key: value.to(model.device) for key, value in (state or {}).items()}
        self._config = config
        self._updates_per_step = updates_per_step
        self._steps = steps
        self._learned = {key: nn.Parameter(self.state[key].detach().clone()) for key in learnable}
        self.state |= self._learned
        self._named = named_parameters(model)
        self.optimizer = self._make_optimizer()

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(
            self._config, update=self.updates, updates_per_step=self._updates_per_step, steps=self._steps
        )

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def apply_gradients(self) -> dict[str, float]:
        """Clip, step, and return `grad/norm` (before clipping), `lr` and whether the update was skipped.

        Gradients that are not finite leave weights and moments as they are; the schedule moves on all the same.
        """
        parameters = [*self._named.values(), *self._learned.values()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if norm > (self._config.grad_clip or math.inf):  # elsewhere torch would read and write all of them, times one
            nn.utils.clip_grads_with_norm_(parameters, self._config.grad_clip, torch.tensor(norm))
        lr = self.lr
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self._config.state_lr if group["learned"] else lr
            self.optimizer.step()
        self.zero_grad()
        self.updates += 1
        return {"grad/norm": norm, "lr": lr, "update/skipped": 0.0 if finite else 1.0}

    def weight_tensors(self) -> dict[str, Tensor]:
        """Return the trained weights by name."""
        return self.model.state_tensors()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return moments and step counts by parameter name, and the state."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._all_named().items():
            entry = self.optimizer.state.get(parameter, {})
            for key in (*_MOMENTS, "step"):
                if key in entry:
                    tensors[f"{key}/{name}"] = entry[key]
        return tensors | {f"state/{key}": value.detach() for key, value in self.state.items()}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], *, updates: int) -> None:
        """Continue from saved tensors. Raises `InputError` where they are another model's or objective's."""
        self.model.load_state_tensors(weights)
        self.updates = updates
        for key in self.state:
            saved = optimizer.get(f"state/{key}")
            if saved is None:
                raise InputError(f"the checkpoint has no state {key!r}, which the objective keeps for {self.name}")
            with torch.no_grad():
                self.state[key].copy_(saved)
        for name, parameter in self._all_named().items():
            entry: dict[str, Tensor] = {}
            for key in (*_MOMENTS, "step"):
                saved = optimizer.get(f"{key}/{name}")
                if saved is not None:
                    entry[key] = saved.to(parameter.device if key in _MOMENTS else saved.device).clone()
            if entry:
                self.optimizer.state[parameter] = self._placed(entry, parameter)

    def load_weights(self, weights: Mapping[str, Tensor], *, updates: int) -> None:
        """Start from saved weights with a fresh optimizer and state."""
        self.model.load_state_tensors(weights)
        self.updates = updates

    def _all_named(self) -> dict[str, nn.Parameter]:
        return {**self._named, **{f"learned.{key}": value for key, value in self._learned.items()}}

    def _placed(self, entry: dict[str, Tensor], parameter: nn.Parameter) -> dict[str, Tensor]:
        # Fused AdamW keeps its step count on the parameter's device.
        return {key: value.to(parameter.device) if self._fused else value for key, value in entry.items()}

    def _make_optimizer(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self._named.values() if parameter.dim() >= 2]
        others = [parameter for parameter in self._named.values() if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self._config.weight_decay, "learned": False},
            {"params": others, "weight_decay": 0.0, "learned": False},
            {"params": list(self._learned.values()), "weight_decay": 0.0, "learned": True},
        ]
        self._fused = self._config.fused and self.model.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self._config.lr,
            betas=self._config.betas,
            eps=self._config.eps,
            fused=self._fused,
        )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = self._placed(_first_state(parameter), parameter)
        return optimizer


class Learner(ModelLearner):
    """A policy and the objective that changes it; `state` is the objective's own."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: OptimConfig,
        *,
        updates_per_step: int,
        steps: int,
        name: str = "policy",
    ) -> None:
        super().__init__(
            policy,
            config,
            updates_per_step=updates_per_step,
            steps=steps,
            name=name,
            state=objective.init_state(),
            learnable=objective.learnable,
        )
        self.policy = policy
        self.objective = objective

    def update_state(self, metrics: Mapping[str, float]) -> None:
        """Let the objective tune its own state after an optimizer step."""
        updated = self.objective.update(self.state, metrics)
        self.state = {key: value.detach() for key, value in updated.items()} | self._learned


def _first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state before its first step.

    Made at once rather than by the first step, it does not come to lie between that step's gradients, whose places
    activations can then take over, all in one.
    """
    moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in _MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def named_parameters(model: Trained) -> dict[str, nn.Parameter]:
    """Return what training changes, by the names of `Trained.state_tensors`; tied weights once."""
    return {name: parameter for name, parameter in model.model.named_parameters() if parameter.requires_grad}
