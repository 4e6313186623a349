"""Token statistics from hidden states, without ever holding the logits of more than one chunk of tokens.

With logits z = post(head(h)) / temperature, p = softmax(z) and H = -sum p log p, the statistics of one token y are
log p_y, H, sum p^2, sum p^2 log p and KL = sum p (log p - log q). Their gradients in z are

    d log p_y / dz_j = [j = y] - p_j
    d H       / dz_j = -p_j (log p_j + H)
    d KL      / dz_j = p_j (log p_j - log q_j - KL)

so the backward pass recomputes a chunk's logits, turns them in place into their own gradient, and goes on through
the head with autograd; any head module works (tied, with a bias, with an adapter on it). Inside a chunk the float32
arithmetic runs over blocks of a few rows, which stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo.policy.head import Head

# Below every log-probability whose exponential is not zero, in float64 too: keeps 0 * log 0 at 0 for vocabulary
# entries that a model sets to -inf.
_LOWEST = -1e4
# Logits in one float32 block: about a core's cache on a processor, a few launches on an accelerator.
_BLOCK_CPU = 1 << 18
_BLOCK_DEVICE = 1 << 26


@dataclass(frozen=True)
class Request:
    """What to compute: the head, the target tokens [N], and which statistics beside the log-probability.

    `reference` and `reference_hidden` [N, D'] give the second distribution of the full KL.
    """

    head: Head
    targets: Tensor
    temperature: float = 1.0
    chunk: int = 1024
    entropy: bool = False
    entropy_grad: bool = False
    sum_p2: bool = False
    sum_p2_logp: bool = False
    reference: Head | None = None
    reference_hidden: Tensor | None = None


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of N tokens, [N] each, float32 (float64 from float64); None where not asked for."""

    logp: Tensor
    entropy: Tensor | None
    sum_p2: Tensor | None
    sum_p2_logp: Tensor | None
    kl_full: Tensor | None


def token_statistics(hidden: Tensor, request: Request) -> TokenStatistics:
    """Return the statistics of the target tokens from the hidden states [N, D] that predict them.

    Differentiable in the hidden states and the head's parameters: the log-probability and the full KL always, the
    entropy where `entropy_grad` is set; the other statistics are constants.
    """
    outputs: tuple[Any, ...] = _HeadStatistics.apply(hidden, request, *request.head.parameters())  # type: ignore[no-untyped-call]
    return TokenStatistics(*outputs)


class _HeadStatistics(torch.autograd.Function):
    """Chunked statistics whose backward pass recomputes one chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, request: Request, *parameters: Tensor) -> tuple[Tensor | None, ...]:
        found = _forward(hidden, request, parameters)
        outputs = (
            found["logp"],
            found["entropy"] if request.entropy else None,
            found["sum_p2"] if request.sum_p2 else None,
            found["sum_p2_logp"] if request.sum_p2_logp else None,
            found.get("kl_full"),
        )
        constants = [*outputs[2:4], *([] if request.entropy_grad else [outputs[1]])]
        ctx.mark_non_differentiable(*[output for output in constants if output is not None])
        ctx.set_materialize_grads(False)
        ctx.request = request
        # Saved, not read from the head later: an optimizer step in between is then an error, not a wrong gradient.
        ctx.save_for_backward(hidden, found.get("entropy"), found.get("kl_full"), *parameters)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        request: Request = ctx.request
        hidden, entropy, kl, *parameters = ctx.saved_tensors
        grad_logp, grad_entropy, _, _, grad_kl = grads
        if grad_logp is None:
            grad_logp = torch.zeros(request.targets.shape, dtype=_wide(hidden), device=hidden.device)
        upstream = {"logp": grad_logp}
        if grad_entropy is not None:
            upstream |= {"entropy": grad_entropy, "entropy_value": entropy}
        if grad_kl is not None:
            upstream |= {"kl_full": grad_kl, "kl_value": kl}
        needs_hidden, _, *wanted = ctx.needs_input_grad
        grad_hidden, grad_parameters = _backward(hidden, request, parameters, upstream, needs_hidden, wanted)
        return (grad_hidden, None, *grad_parameters)


def _forward(hidden: Tensor, request: Request, parameters: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return every statistic [N] that the request needs, by name."""
    leaves = request.head.cast(parameters, differentiable=[False] * len(parameters))
    reference_leaves = _reference_leaves(request)
    kept: dict[str, list[Tensor]] = {}
    for part in _chunks(request):
        raw = request.head.raw(hidden[part], leaves)
        reference_raw = _reference_raw(request, part, reference_leaves)
        targets = request.targets[part]
        for block in _blocks(raw):
            other = None if reference_raw is None else reference_raw[block]
            for name, value in _statistics(raw[block], other, targets[block], request).items():
                kept.setdefault(name, []).append(value)
        del raw, reference_raw  # before the next chunk is computed
    if kept:
        return {name: torch.cat(values) for name, values in kept.items()}
    nothing = hidden.new_zeros(0, dtype=_wide(hidden))  # every token of the batch is masked
    names = ["logp", "entropy", "sum_p2", "sum_p2_logp", *(["kl_full"] if request.reference is not None else [])]
    return {name: nothing.clone() for name in names}


def _backward(
    hidden: Tensor,
    request: Request,
    parameters: list[Tensor],
    upstream: dict[str, Tensor],
    needs_hidden: bool,
    wanted: list[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients in the hidden states and in the head's parameters (None where not wanted)."""
    leaves = request.head.cast(parameters, differentiable=wanted)
    reference_leaves = _reference_leaves(request) if "kl_full" in upstream else {}
    totals = [torch.zeros_like(p) if want else None for p, want in zip(parameters, wanted, strict=True)]
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    for part in _chunks(request):
        chunk = hidden[part].detach().to(request.head.dtype).requires_grad_(needs_hidden)
        with torch.enable_grad():
            raw = request.head.raw(chunk, leaves)
        logits = raw.detach()
        _to_gradient(logits, part, upstream, reference_leaves, request)
        inputs = [*([chunk] if needs_hidden else []), *(leaf for leaf in leaves.values() if leaf.requires_grad)]
        found = iter(torch.autograd.grad(raw, inputs, logits, allow_unused=True))
        if grad_hidden is not None:
            grad_hidden[part] = next(found)
        for total in totals:
            if total is not None and (gradient := next(found)) is not None:
                total.add_(gradient)
    return grad_hidden, totals


def _statistics(raw: Tensor, reference_raw: Tensor | None, targets: Tensor, request: Request) -> dict[str, Tensor]:
    """Return the statistics of one block of raw logits [b, V]."""
    log_p = _log_softmax(raw, request.head, request.temperature)
    values = {"logp": log_p.gather(-1, targets[:, None]).squeeze(-1)}
    if not (request.entropy or request.sum_p2 or request.sum_p2_logp or reference_raw is not None):
        return values
    p = log_p.exp()
    log_p.clamp_(min=_LOWEST)
    if request.entropy:
        values["entropy"] = -torch.linalg.vecdot(p, log_p)
    if reference_raw is not None and request.reference is not None:
        log_q = _log_softmax(reference_raw, request.reference, request.temperature).clamp_(min=_LOWEST)
        values["kl_full"] = torch.linalg.vecdot(p, log_p - log_q)
    if request.sum_p2:
        values["sum_p2"] = torch.linalg.vecdot(p, p)
    if request.sum_p2_logp:
        values["sum_p2_logp"] = torch.linalg.vecdot(p.square(), log_p)
    return values


def _to_gradient(
    raw: Tensor,
    part: slice,
    upstream: Mapping[str, Tensor],
    reference_leaves: dict[str, Tensor],
    request: Request,
) -> None:
    """Turn one chunk's raw logits [n, V] in place into the gradient of sum(upstream * statistics) in them."""
    targets = request.targets[part]
    reference_raw = _reference_raw(request, part, reference_leaves) if "kl_full" in upstream else None
    for block in _blocks(raw):
        grads = {name: value[part][block] for name, value in upstream.items()}
        other = None if reference_raw is None else reference_raw[block]
        _gradient(raw[block], other, targets[block], grads, request)


def _gradient(
    raw: Tensor, reference_raw: Tensor | None, targets: Tensor, grads: Mapping[str, Tensor], request: Request
) -> None:
    """Overwrite one block of raw logits [b, V] with the gradient in them."""
    z = request.head.post.apply(raw)
    slope = request.head.post.slope(z)
    log_p = z.div_(request.temperature) if request.temperature != 1.0 else z
    log_p.sub_(log_p.logsumexp(dim=-1, keepdim=True))
    p = log_p.exp()
    factor = -grads["logp"][:, None]
    if "entropy" in grads or "kl_full" in grads:
        log_p.clamp_(min=_LOWEST)
    if "entropy" in grads:
        factor = factor - grads["entropy"][:, None] * (log_p + grads["entropy_value"][:, None])
    if "kl_full" in grads and reference_raw is not None and request.reference is not None:
        log_q = _log_softmax(reference_raw, request.reference, request.temperature).clamp_(min=_LOWEST)
        factor = factor + grads["kl_full"][:, None] * (log_p - log_q - grads["kl_value"][:, None])
    p.mul_(factor).scatter_add_(-1, targets[:, None], grads["logp"][:, None])
    if not (isinstance(slope, float) and slope == request.temperature):
        p.mul_(slope / request.temperature)
    raw.copy_(p)


def _log_softmax(raw: Tensor, head: Head, temperature: float) -> Tensor:
    """Return log-probabilities [b, V] after temperature; entries at -inf stay there."""
    z = head.post.apply(raw)
    if temperature != 1.0:
        z.div_(temperature)
    return z.sub_(z.logsumexp(dim=-1, keepdim=True))


def _reference_leaves(request: Request) -> dict[str, Tensor]:
    if request.reference is None:
        return {}
    parameters = request.reference.parameters()
    return request.reference.cast(parameters, differentiable=[False] * len(parameters))


def _reference_raw(request: Request, part: slice, leaves: dict[str, Tensor]) -> Tensor | None:
    if request.reference is None or request.reference_hidden is None:
        return None
    with torch.no_grad():
        return request.reference.raw(request.reference_hidden[part], leaves)


def _chunks(request: Request) -> list[slice]:
    rows = request.targets.numel()
    return [slice(start, min(start + request.chunk, rows)) for start in range(0, rows, request.chunk)]


def _blocks(raw: Tensor) -> list[slice]:
    rows, vocabulary = raw.shape
    size = max(1, (_BLOCK_CPU if raw.device.type == "cpu" else _BLOCK_DEVICE) // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)
