"""Row weights: how much a response counts, as a function of its group's lengths and of what the method learns.

Unlike an advantage transform a row weight may carry a gradient, to scalars of the state that are learned with the
policy; it is computed afresh in every micro-batch. What it needs of the other responses of the group it leaves on
each row while the whole rollout batch is at hand, so that no split of rows changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.regularizers import State

# Relative lengths are kept at least this large, so that every power of them is finite.
SMALLEST_LENGTH = 1e-6
# |lambda log h| is kept at most this large: e^20 and e^-20 are as good as all and nothing.
LARGEST_POWER = 20.0


class RowWeight(Protocol):
    """A factor on the policy loss of every response."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Return the whole rollout batch with what the weight needs of each row's group."""
        ...

    def __call__(self, batch: TokenBatch, state: State) -> Tensor:
        """Return weights `[B, 1]`, with a gradient to learnable entries of the state."""
        ...

    def init_state(self) -> dict[str, Tensor]:
        """Return the state at the start of a run."""
        ...

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the state after an optimizer step with these metrics; what is learned changes by its gradient."""
        ...


@dataclass(frozen=True)
class EvenRows:
    """Every response counts as it is."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch itself."""
        return batch

    def __call__(self, batch: TokenBatch, state: State) -> Tensor:
        """Return ones."""
        return torch.ones_like(batch.logp[:, :1])

    def init_state(self) -> dict[str, Tensor]:
        """Nothing changes on the way."""
        return {}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Nothing changes on the way."""
        return {}


@dataclass(frozen=True)
class LengthPreference:
    """f_i = G softmax_i(h^lambda), h_i = 1 + rho z_i, z_i the length in deviations from the group's mean (lambda-GRPO).

    lambda = 0 gives 1 everywhere, lambda > 0 prefers long responses, lambda < 0 short ones; equal lengths give 1.
    The deviation is the population's. Responses without tokens are not counted. lambda is the state's "lambda": name
    it in `Objective.learnable` to have it learned.
    """

    start: float = 0.0
    rho: float = 1 / 9
    needs: ClassVar[frozenset[str]] = frozenset({"group"})

    def __post_init__(self) -> None:
        if not self.rho >= 0:
            raise InputError(f"length_scale={self.rho}: expected a number >= 0")

    def prepare(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with `group_lengths` `[B, G]`: the row's own length first, then its group's, 0 for none."""
        index, n = group_index(require(batch, "group", "the length preference"))
        lengths = batch.lengths()
        order = torch.argsort(index, stable=True)
        size = torch.zeros(n, dtype=torch.long, device=index.device).index_add(0, index, torch.ones_like(index))
        start = size.cumsum(0) - size
        table = torch.zeros(n, int(size.max()) if n else 0, dtype=torch.long, device=index.device)
        table[index[order], torch.arange(len(index), device=index.device) - start[index[order]]] = lengths[order]
        return batch.replace(group_lengths=torch.cat([lengths[:, None], table[index]], dim=1))

    def __call__(self, batch: TokenBatch, state: State) -> Tensor:
        """Return f, `[B, 1]`."""
        dtype = batch.logp.dtype
        lengths = require(batch, "group_lengths", "the length preference (call prepare first)")
        members = lengths[:, 1:] > 0
        count = members.sum(dim=1, keepdim=True).clamp_min(1)
        held = lengths.to(dtype)
        mean = held[:, 1:].sum(dim=1, keepdim=True) / count
        deviation = torch.where(members, held[:, 1:] - mean, torch.zeros_like(mean))
        sigma = ((deviation**2).sum(dim=1, keepdim=True) / count).sqrt()
        z = torch.where(sigma > 0, (held - mean) / torch.where(sigma > 0, sigma, 1.0), torch.zeros_like(held))
        log_h = (1 + self.rho * z).clamp_min(SMALLEST_LENGTH).log()
        g = (state["lambda"].to(dtype) * log_h).clamp(-LARGEST_POWER, LARGEST_POWER).exp()
        used = held[:, :1] > 0
        # A row without tokens has no weight to find, and a softmax over nothing would have no gradient.
        others = torch.where(members, g[:, 1:], torch.where(used, float("-inf"), 0.0))
        total = torch.logsumexp(others, dim=1, keepdim=True)
        own = torch.where(used, g[:, :1], total)  # no exp of what is not among the others: it may be far larger
        return torch.where(used, count * (own - total).exp(), torch.ones_like(total))

    def init_state(self) -> dict[str, Tensor]:
        """Return lambda."""
        return {"lambda": torch.tensor(self.start)}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Lambda changes by its gradient alone."""
        return {}
