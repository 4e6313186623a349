"""Log-probabilities and entropies of given logits, in one pass over blocks of rows that stay in the processor's cache.

A block is centred on its largest logit and scaled to bits, b = (z - max z) / (temperature * ln 2), so that
p = 2**b / total with total = sum 2**b: a power of two costs a third of an exponential. From the same two buffers come

    log p_y   = (z_y - max z) / temperature - ln total
    H         = ln total - ln 2 * sum(2**b * b) / total
    d log p_y / dz_j = ([j = y] - p_j) / temperature
    d H       / dz_j = -p_j (log p_j + H) / temperature
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo.core.errors import InputError
from tepo.policy.blocks import each_block
from tepo.policy.compiler import use_threads_of_torch, why_no_compiler

LN2 = math.log(2.0)
# Far below every power of two that is not zero, in float64 too: keeps 0 * log 0 at 0 for entries at -inf.
_LOWEST = -2e4


def token_statistics_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, compiled: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution, both in nats, [...] each.

    Both are differentiable in the logits, exactly. Beside the results the forward pass holds one block of a few rows,
    the backward pass that and the gradient. float32 logits on a processor are read once by a compiled function where
    numba is installed (the extra `cpu`).

    Args:
        logits: [..., V] float; entries at -inf have probability 0.
        targets: [...] integers in [0, V).
        temperature: divides the logits.
        compiled: False computes by tensor operations in any case.

    Returns:
        (logp, entropy), float32 (float64 from float64).

    Raises:
        InputError: shapes that do not match, targets outside the vocabulary, a temperature that is not positive.
    """
    if logits.dim() < 1 or not logits.is_floating_point() or logits.shape[:-1] != targets.shape:
        raise InputError(
            f"logits {list(logits.shape)} of {logits.dtype} and targets {list(targets.shape)} do not match: expected"
            " floating-point logits [..., V] and targets [...]"
        )
    if not temperature > 0:
        raise InputError(f"temperature={temperature} cannot be scored; it must be greater than 0")
    vocabulary = logits.shape[-1]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise InputError(
            f"targets range from {int(targets.min())} to {int(targets.max())}; expected 0 to {vocabulary - 1},"
            " the size of the vocabulary less one. Fill unused places with any valid id and mask the result"
        )
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _LogitStatistics.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, vocabulary), targets.reshape(-1), temperature, compiled
    )
    return found[0].view(targets.shape), found[1].view(targets.shape)


@dataclass(frozen=True)
class Softmax:
    """The distributions of one block: p = weights / total. `bits` and `weights` are the buffers' own memory.

    Attributes:
        bits: [b, V], (z - top) / (temperature * ln 2), at least _LOWEST.
        weights: [b, V], 2**bits.
        top: [b], the largest logit.
        total: [b], the sum of the weights.
    """

    bits: Tensor
    weights: Tensor
    top: Tensor
    total: Tensor

    def entropy(self) -> Tensor:
        """Return the entropy [b] in nats; the bits are used up."""
        return self.total.log() - LN2 * self.bits.mul_(self.weights).sum(-1) / self.total

    def sum_p2(self) -> Tensor:
        """Return the sum of p^2 [b]."""
        return self.weights.square().sum(-1) / self.total.square()

    def sum_p2_logp(self) -> Tensor:
        """Return the sum of p^2 log p [b]."""
        square = self.weights.square()
        weighted = LN2 * (square * self.bits).sum(-1) - self.total.log() * square.sum(-1)
        return weighted / self.total.square()

    def kl(self, other: Softmax) -> Tensor:
        """Return KL(self || other) [b] in nats; the other's bits are used up."""
        lower = other.bits.sub_(self.bits).mul_(self.weights).sum(-1)
        return other.total.log() - self.total.log() - LN2 * lower / self.total


def softmax(
    logits: Tensor, temperature: float, bits: Tensor, weights: Tensor, *, known: tuple[Tensor, Tensor] | None = None
) -> Softmax:
    """Return the distributions of a block of logits [b, V], computed in two buffers of that shape.

    `known` is (top, total) of the same logits, from an earlier pass. The logits may lie in the first buffer.
    """
    wide = logits if logits.dtype == bits.dtype else bits.copy_(logits)
    top = wide.amax(-1) if known is None else known[0]
    torch.sub(wide, top[:, None], out=bits).mul_(1.0 / (temperature * LN2)).clamp_(min=_LOWEST)
    torch.exp2(bits, out=weights)
    return Softmax(bits, weights, top, weights.sum(-1) if known is None else known[1])


class _LogitStatistics(torch.autograd.Function):
    """The two statistics of logits [N, V]; the backward pass reads the logits once more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, compiled: bool) -> tuple[Tensor, ...]:
        served = compiled and logits.device.type == "cpu" and logits.dtype == torch.float32
        fold = _fold_compiled if served and why_no_compiler() is None else _fold
        tops, totals, entropy = fold(logits, temperature)
        logp = logits.gather(-1, targets[:, None]).squeeze(-1).sub(tops).div_(temperature).sub_(totals.log())
        ctx.save_for_backward(logits, targets, entropy, tops, totals)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(tops, totals)
        return logp, entropy, tops, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        logits, targets, entropy, tops, totals = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(entropy)
        upstream, grad = grad_logp, torch.empty_like(logits)

        def turn(rows: slice, buffers: list[Tensor]) -> None:
            found = softmax(logits[rows], ctx.temperature, *buffers, known=(tops[rows], totals[rows]))
            of_entropy = None if grad_entropy is None else (grad_entropy[rows], entropy[rows])
            grad[rows] = gradient(found, targets[rows], upstream[rows], of_entropy, 1.0 / ctx.temperature)

        each_block(logits, turn, buffers=2)
        return grad, None, None, None


def _fold(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of the weights and the entropy of each row of logits [N, V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    tops, totals, entropy = (logits.new_empty(len(logits), dtype=wide) for _ in range(3))

    def fold(rows: slice, buffers: list[Tensor]) -> None:
        found = softmax(logits[rows], temperature, *buffers)
        tops[rows], totals[rows] = found.top, found.total
        entropy[rows] = found.entropy()

    each_block(logits, fold, buffers=2)
    return tops, totals, entropy


def _fold_compiled(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for float32 logits on a processor."""
    from tepo.policy.compiled_softmax import fold

    use_threads_of_torch()
    tops = torch.empty(len(logits))
    totals, moments = torch.empty(2, len(logits), dtype=torch.float64)
    numbers = np.float32(1.0 / temperature), tops.numpy(), totals.numpy(), moments.numpy()
    fold(logits.detach().contiguous().numpy(), *numbers)
    return tops, totals.float(), (totals.log() - moments / totals).float()


def gradient(
    found: Softmax,
    targets: Tensor,
    grad_logp: Tensor,
    grad_entropy: tuple[Tensor, Tensor] | None,
    scale: float,
    grad_kl: tuple[Tensor, Tensor, Softmax] | None = None,
) -> Tensor:
    """Return `scale` times the gradient [b, V] of the upstream-weighted statistics in the tempered logits.

    `grad_entropy` is (upstream, entropy), `grad_kl` is (upstream, KL, the reference's distributions). Each term is
    p_j times something linear in the bits, so rows are scaled before anything is multiplied element by element. The
    buffers are used up, the result lies in the weights.
    """
    per_weight = scale / found.total
    constant, of_bits = -grad_logp, None
    if grad_entropy is not None:
        upstream, entropy = grad_entropy
        constant = constant - upstream * (entropy - found.total.log())
        of_bits = -upstream
    if grad_kl is not None:
        upstream, kl, other = grad_kl
        constant = constant + upstream * (other.total.log() - found.total.log() - kl)
        of_bits = upstream if of_bits is None else of_bits + upstream
        other.bits.mul_((upstream * per_weight * LN2)[:, None])
    constant = (constant * per_weight)[:, None]
    if of_bits is None:
        result = found.weights.mul_(constant)
    else:
        factor = found.bits.mul_((of_bits * per_weight * LN2)[:, None]).add_(constant)
        result = found.weights.mul_(factor if grad_kl is None else factor.sub_(grad_kl[2].bits))
    return result.scatter_add_(-1, targets[:, None], (grad_logp * scale)[:, None].to(result.dtype))
