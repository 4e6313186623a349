"""Central differences of a loss whose gradient is stopped in places: what is detached is held where it was.

A method that says `weight.detach() * logp` means a gradient that the loss itself, as a function of logp, does not
have. Its derivative is taken with the detached values of the point itself: they are recorded in the order in which
they are made, and given again when the point is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tepo.objectives import Objective, TokenBatch

STEP = 1e-6


class HeldDetached(TorchFunctionMode):
    """Records what `detach` returns, or returns what was recorded."""

    def __init__(self, held: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self._held = held

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.detach:
            return result
        if self._held is not None:
            result = self._held[len(self.seen)]
        self.seen.append(result)
        return result


def central_differences(objective: Objective, batch: TokenBatch, field: str) -> Tensor:
    """Return d loss / d field `[B, T]` by moving one token at a time; statistics stay those of the point itself."""
    state = objective.init_state()
    prepared = objective.prepare(batch, state)
    statistics = objective.statistics(prepared.batch, state)

    def loss(moved: TokenBatch, held: Sequence[Tensor] | None) -> tuple[float, list[Tensor]]:
        with HeldDetached(held) as mode, torch.no_grad():
            parts = objective.partial(moved, statistics, state)
        return float(parts.loss), mode.seen

    _, held = loss(prepared.batch, None)
    slopes = torch.zeros_like(batch.logp)
    for row, column in batch.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            value = getattr(batch, field).clone()
            value[row, column] += sign * STEP
            ends.append(loss(prepared.batch.replace(**{field: value}), held)[0])
        slopes[row, column] = (ends[0] - ends[1]) / (2 * STEP)
    return slopes
