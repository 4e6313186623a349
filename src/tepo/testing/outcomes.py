"""What an objective makes of a batch (loss, gradients, metrics), computed whole or in micro-batches, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.objectives import Objective, Parts, TokenBatch

# Fields that the current policy (or critic) computes: an objective may send gradient through them. What the
# scorer must be asked for before it keeps the gradient stands beside.
CURRENT = {
    "logp": None,
    "entropy": "entropy_grad",
    "sum_p2": "sum_p2",
    "sum_p2_logp": "sum_p2_logp",
    "kl_full": "kl_full",
    "values": None,
}
# Fields of other policies, and what rewards say: constants of the update.
CONSTANT = (
    *("old_logp", "ref_logp", "rollout_logp", "other_logp", "old_entropy", "old_values"),
    *("rewards", "token_rewards", "advantage"),
)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss; gradient of every field `[B, T]` of the current policy and every learnable scalar; metrics."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]

    def map(self, change: Callable[[Tensor], Tensor]) -> Outcome:
        """Return the outcome with every token gradient `[B, T]` changed, e.g. its padding cut off."""
        gradients = {name: change(value) if value.dim() == 2 else value for name, value in self.gradients.items()}
        return Outcome(self.loss, gradients, self.metrics)


@dataclass(frozen=True)
class Difference:
    """A field of two outcomes that differs by more than allowed."""

    field: str
    size: float
    allowed: float
    where: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f" at {list(self.where)}" if self.where else ""
        return f"{self.field} differs by {self.size:.3g}{place}, allowed {self.allowed:.1g}"


def evaluate(objective: Objective, batch: TokenBatch, split: Sequence[Sequence[int]] | None = None) -> Outcome:
    """Return what the objective makes of the batch, in one call or summed over the micro-batches of a split.

    A split is a list of rows for every micro-batch; it goes the trainer's way: prepare and statistics see
    detached values, each micro-batch is cut to its own width and given the current values afresh.
    """
    wide = torch.promote_types(batch.logp.dtype, torch.float32)  # float64 arithmetic, where the batch asks for it
    state = {name: value.detach().clone().to(wide) for name, value in objective.init_state().items()}
    leaves = {f"state {name}": state[name].requires_grad_(True) for name in objective.learnable}
    tokens = {name: value.detach().clone().requires_grad_(True) for name, value in batch.present() if name in CURRENT}
    leaves |= tokens
    live = batch.replace(**tokens)
    if split is None:
        output = objective(live, state)
        return Outcome(output.loss.detach(), gradients_of(output.loss, leaves), output.metrics)
    prepared = objective.prepare(detached(live), state)
    statistics = objective.statistics(prepared.batch, state)
    total: Parts | None = None
    gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for rows in split:
        index, width = torch.tensor(rows, dtype=torch.long), used_width(batch.mask[list(rows)])
        fresh = live.take(index, width)
        current = {name: getattr(fresh, name) for name in CURRENT if getattr(fresh, name) is not None}
        micro = prepared.batch.take(index, width).replace(**current)
        parts = objective.partial(micro, statistics.take(index, width), state)
        for name, gradient in gradients_of(parts.loss, leaves).items():
            gradients[name] = gradients[name] + gradient
        parts = Parts(parts.loss.detach(), parts.sums)
        total = parts if total is None else total + parts
    if total is None:
        raise AssertionError("a split needs at least one micro-batch")
    return Outcome(total.loss, gradients, (prepared.metrics + total.sums).values())


def constants_that_move(objective: Objective, batch: TokenBatch) -> Iterator[Difference]:
    """Yield the fields that are constants of the update and yet receive a gradient."""
    constants = {
        name: value.detach().clone().requires_grad_(True)
        for name, value in batch.present()
        if name in CONSTANT and value.is_floating_point()
    }
    loss = objective(batch.replace(logp=batch.logp.detach().requires_grad_(True), **constants)).loss
    for name, gradient in gradients_of(loss, constants).items():
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        if size != 0:
            yield Difference(f"gradient of the constant {name}", size, 0.0)


def gradients_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return d loss / d leaf for every leaf; zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def detached(batch: TokenBatch) -> TokenBatch:
    """Return the batch without gradient."""
    return TokenBatch(**{name: value.detach() for name, value in batch.present()})


def used_width(mask: Tensor) -> int:
    """Return the columns up to the last response token, at least 1."""
    used = mask.any(dim=0).nonzero()
    return int(used.max()) + 1 if used.numel() else 1


def differences(
    expected: Outcome, got: Outcome, rtol: float, gradient_rtol: float | None = None
) -> Iterator[Difference]:
    """Yield every field of `got` that is further from `expected` than rounding allows.

    Losses and metrics may differ by rtol (1 + |expected|), gradients by `gradient_rtol` of their largest entry.
    """
    allowed = rtol * (1 + float(expected.loss.abs()))
    size = float((got.loss.double() - expected.loss.double()).abs())
    if not size <= allowed:
        yield Difference("loss", size, allowed)
    for name, wanted in expected.gradients.items():
        gap = (got.gradients[name].double() - wanted.double()).abs()
        if gap.numel() == 0:
            continue
        allowed = (gradient_rtol or rtol) * max(float(wanted.abs().max()), 1e-2)
        if not float(gap.max()) <= allowed:
            flat = int(torch.where(gap.isnan(), torch.full_like(gap, float("inf")), gap).argmax())
            where = tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), gap.shape))
            yield Difference(f"gradient of {name}", float(gap.flatten()[flat]), allowed, where)
    yield from metric_differences(expected.metrics, got.metrics, rtol)


def metric_differences(expected: dict[str, float], got: dict[str, float], rtol: float) -> Iterator[Difference]:
    """Yield the metrics that differ, or that only one side has."""
    for name in sorted(expected.keys() | got.keys()):
        if name not in expected or name not in got:
            yield Difference(f"metric {name!r} (missing on one side)", float("inf"), 0.0)
            continue
        allowed = rtol * (1 + abs(expected[name]))
        size = abs(got[name] - expected[name])
        if not size <= allowed:
            yield Difference(f"metric {name!r}", size, allowed)


def outside(outcome: Outcome, batch: TokenBatch) -> Iterator[Difference]:
    """Yield the token gradients that are not exactly zero outside the mask."""
    for name, gradient in outcome.gradients.items():
        if gradient.shape != batch.mask.shape:
            continue
        leak = torch.where(batch.mask, torch.zeros_like(gradient), gradient)
        if bool((leak != 0).any()) or bool(leak.isnan().any()):
            row, column = ((leak != 0) | leak.isnan()).nonzero()[0].tolist()
            yield Difference(f"gradient of {name} outside the mask", float(leak[row, column]), 0.0, (row, column))
