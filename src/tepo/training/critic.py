"""The critic: a value model that learns beside the policy, from the same updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tepo.policy import Policy, TokenSequence, ValueModel, load_value_model, value_of_policy
from tepo.training.config import RunConfig
from tepo.training.learner import ModelLearner
from tepo.training.micro import Budget
from tepo.training.scoring import score_parts


class Critic(ModelLearner):
    """A value model with its optimizer."""

    def __init__(self, values: ValueModel, config: RunConfig) -> None:
        optim = config.optim if config.critic.lr is None else config.optim.model_copy(update={"lr": config.critic.lr})
        super().__init__(values, optim, updates_per_step=config.train.updates, steps=config.train.steps, name="critic")
        self.values = values.values
        self.layout = values.layout

    def old_values(
        self, sequences: Sequence[TokenSequence], *, rows: Sequence[Sequence[int]], width: int, budget: Budget
    ) -> Tensor:
        """Return the values `[B, width]` of a rollout batch, no gradient; `rows` as for `score_rows`."""
        found = score_parts(
            lambda part: {"values": self.values(part)},
            sequences,
            rows=rows,
            width=width,
            budget=budget,
            layout=self.layout,
        )
        return found["values"]

    def learn(self) -> dict[str, float]:
        """Apply the gradients and return `critic/*` metrics."""
        return {f"critic/{name}": value for name, value in self.apply_gradients().items()}


def load_critic(config: RunConfig, policy: Policy, say: Callable[[str], None]) -> Critic:
    """Return the critic that the configuration asks for."""
    path = config.critic.path
    values = value_of_policy(policy) if path == "start" else load_value_model(path, policy, config.model, say=say)
    trained = sum(parameter.numel() for parameter in values.trainable_parameters())
    origin = "a copy of the policy's backbone" if path == "start" else path
    say(f"critic: {origin}, {trained / 1e6:.1f} M parameters trained")
    return Critic(values, config)
