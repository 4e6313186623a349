"""Token statistics from hidden states, without ever holding the logits of more than one chunk of tokens.

With logits z = post(head(h)) / temperature, p = softmax(z) and H = -sum p log p, the statistics of one token y are
log p_y, H, sum p^2, sum p^2 log p and KL = sum p (log p - log q). Their gradients in z are

    d log p_y / dz_j = [j = y] - p_j
    d H       / dz_j = -p_j (log p_j + H)
    d KL      / dz_j = p_j (log p_j - log q_j - KL)

so the backward pass turns a chunk's logits in place into their own gradient, and goes on through the head; any head
module works (tied, with a bias, with an adapter on it). The logits are computed again for it, except those of a plain
linear head that fit into `Head.keep_bytes`: those wait. Inside a chunk the float32 arithmetic runs over blocks of a few
rows (see `logits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo.policy.blocks import each_block
from tepo.policy.head import Head
from tepo.policy.logits import gradient, softmax
from tepo.policy.products import AutogradProducts, LinearProducts, products


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


def token_statistics(hidden: Tensor, request: Request, weight: Tensor | None = None) -> TokenStatistics:
    """Return the statistics of the target tokens from the hidden states [N, D] that predict them.

    Differentiable in the hidden states and the head's parameters: the log-probability and the full KL always, the
    entropy where `entropy_grad` is set; the other statistics are constants. `weight` [V, D] stands in for the head's
    first parameter and gets its gradient.
    """
    head = request.head
    parameters = head.parameters() if weight is None else [weight, *head.parameters()[1:]]
    keep = _kept_rows(head, request.targets.numel()) if torch.is_grad_enabled() else 0
    outputs: tuple[Any, ...] = _HeadStatistics.apply(hidden, request, keep, *parameters)  # type: ignore[no-untyped-call]
    return TokenStatistics(*outputs)


def _kept_rows(head: Head, rows: int) -> int:
    """Return how many tokens' raw logits may wait for the backward pass."""
    if head.kernel == "triton" or not head.is_plain:
        return 0
    return min(rows, head.keep_bytes // (len(head.parameters()[0]) * head.dtype.itemsize))


def _fused(head: LinearProducts | AutogradProducts, request: Request) -> LinearProducts | None:
    """Return the products if the Triton kernel covers this head and these statistics."""
    chosen = request.head.kernel == "triton" and not (request.sum_p2 or request.sum_p2_logp or request.reference)
    covered = isinstance(head, LinearProducts) and request.head.dtype in (torch.float32, torch.bfloat16)
    return head if chosen and covered and isinstance(head, LinearProducts) else None


class _HeadStatistics(torch.autograd.Function):
    """Chunked statistics; the backward pass uses the kept logits or computes one chunk of them at a time again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, request: Request, keep: int, *parameters: Tensor) -> tuple[Any, ...]:
        found, raw = _forward(hidden, request, keep, parameters)
        outputs = (
            found["logp"],
            found.get("entropy"),
            found.get("sum_p2"),
            found.get("sum_p2_logp"),
            found.get("kl_full"),
        )
        constants = [*outputs[2:4], *([] if request.entropy_grad else [outputs[1]])]
        ctx.mark_non_differentiable(*[output for output in constants if output is not None])
        ctx.set_materialize_grads(False)
        ctx.request = request
        ctx.kept, ctx.keep = [raw] if keep else [], keep
        # Saved, not read from the head later: an optimizer step in between is then an error, not a wrong gradient.
        ctx.save_for_backward(
            hidden, found["top"], found["total"], found.get("entropy"), found.get("kl_full"), *parameters
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        request: Request = ctx.request
        hidden, top, total, entropy, kl, *parameters = ctx.saved_tensors
        grad_logp, grad_entropy, _, _, grad_kl = grads
        upstream = {"logp": torch.zeros_like(top) if grad_logp is None else grad_logp, "top": top, "total": total}
        if grad_entropy is not None:
            upstream |= {"entropy": grad_entropy, "entropy_value": entropy}
        if grad_kl is not None:
            upstream |= {"kl_full": grad_kl, "kl_value": kl}
        kept, ctx.kept = ctx.kept, []  # overwritten below, so a second backward pass computes them again
        needs_hidden, _, _, *wanted = ctx.needs_input_grad
        grad_hidden, grad_parameters = _backward(
            hidden, request, parameters, upstream, (ctx.keep, kept), needs_hidden, wanted
        )
        return (grad_hidden, None, None, *grad_parameters)


def _forward(
    hidden: Tensor, request: Request, keep: int, parameters: tuple[Tensor, ...]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return every statistic [N] that the request needs, by name, and the raw logits of the last chunk."""
    head = products(request.head, parameters)
    reference = _reference(request)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = request.targets.numel()
    found = {name: hidden.new_empty(rows, dtype=wide) for name in _names(request)}
    raw = None
    if rows and (plain := _fused(head, request)):
        from tepo.policy import triton_head

        triton_head.fold(plain, hidden, request, found)
        return found, None
    for part in _parts(request, keep):
        raw = other = None  # before the next chunk is computed
        if keep and part.stop == rows and isinstance(head, LinearProducts):
            head.release()
        raw = head.raw(hidden[part].detach())
        other = None if reference is None else reference(part)
        _fold(raw, other, part, request, found)
    return found, raw


def _names(request: Request) -> list[str]:
    asked = {"entropy": request.entropy, "sum_p2": request.sum_p2, "sum_p2_logp": request.sum_p2_logp}
    with_reference = ["kl_full"] if request.reference is not None else []
    return ["logp", "top", "total", *(name for name, wanted in asked.items() if wanted), *with_reference]


def _backward(
    hidden: Tensor,
    request: Request,
    parameters: list[Tensor],
    upstream: dict[str, Tensor],
    last: tuple[int, list[Tensor]],
    needs_hidden: bool,
    wanted: list[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients in the hidden states and in the head's parameters (None where not wanted).

    `last` is how many rows the last part has, and its raw logits where they were kept; they are overwritten.
    """
    head = products(request.head, parameters, wanted)
    reference = _reference(request) if "kl_full" in upstream else None
    grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
    keep, kept = last
    parts = _parts(request, keep)
    for part in [*parts[-1:], *parts[:-1]] if kept else parts:  # what was kept first, which makes room for the others
        chunk = hidden[part].detach().requires_grad_(needs_hidden)
        other = None if reference is None else reference(part)
        if plain := _fused(head, request):
            from tepo.policy import triton_head

            raw = triton_head.logit_gradient(plain, chunk.detach(), request, part, upstream)
        else:
            raw = kept.pop() if kept else head.raw(chunk)
            _to_gradient(raw, other, part, upstream, request)
        of_hidden = head.push(chunk.detach(), raw, needs_hidden)
        if grad_hidden is not None and of_hidden is not None:
            grad_hidden[part] = of_hidden
        del raw, other  # before the next chunk is computed
    return grad_hidden, head.totals


def _fold(raw: Tensor, other_raw: Tensor | None, part: slice, request: Request, found: dict[str, Tensor]) -> None:
    """Write the statistics of one chunk of raw logits [n, V] into their places."""
    head, reference, temperature = request.head, request.reference, request.temperature
    into = {name: value[part] for name, value in found.items()}

    def fold(rows: slice, buffers: list[Tensor]) -> None:
        one = softmax(head.post.apply(raw[rows], buffers[0]), temperature, *buffers[:2])
        into["top"][rows], into["total"][rows] = one.top, one.total
        if other_raw is not None and reference is not None:
            other = softmax(reference.post.apply(other_raw[rows], buffers[2]), temperature, *buffers[2:])
            into["kl_full"][rows] = one.kl(other)
        if request.sum_p2:
            into["sum_p2"][rows] = one.sum_p2()
        if request.sum_p2_logp:
            into["sum_p2_logp"][rows] = one.sum_p2_logp()
        if request.entropy:
            into["entropy"][rows] = one.entropy()

    each_block(raw, fold, buffers=2 if other_raw is None else 4)
    chosen = head.post.apply(raw.gather(-1, request.targets[part, None]).squeeze(-1))
    into["logp"].copy_(chosen.sub_(into["top"]).div_(temperature).sub_(into["total"].log()))


def _to_gradient(
    raw: Tensor, other_raw: Tensor | None, part: slice, upstream: Mapping[str, Tensor], request: Request
) -> None:
    """Turn one chunk's raw logits [n, V] in place into the gradient of sum(upstream * statistics) in them."""
    post, reference, temperature = request.head.post, request.reference, request.temperature
    targets = request.targets[part]
    given = {name: value[part] for name, value in upstream.items()}

    def turn(rows: slice, buffers: list[Tensor]) -> None:
        at = {name: value[rows] for name, value in given.items()}
        z = post.apply(raw[rows], buffers[0])
        slope = post.slope(z)
        one = softmax(z, temperature, *buffers[:2], known=(at["top"], at["total"]))
        of_entropy = (at["entropy"], at["entropy_value"]) if "entropy" in at else None
        of_kl = None
        if other_raw is not None and reference is not None:
            other = softmax(reference.post.apply(other_raw[rows], buffers[2]), temperature, *buffers[2:])
            of_kl = (at["kl_full"], at["kl_value"], other)
        scale = (slope if isinstance(slope, float) else 1.0) / temperature
        grad = gradient(one, targets[rows], at["logp"], of_entropy, scale, of_kl)
        raw[rows] = grad if isinstance(slope, float) else grad.mul_(slope)

    each_block(raw, turn, buffers=2 if other_raw is None else 4)


def _reference(request: Request) -> Callable[[slice], Tensor] | None:
    """Return what gives the reference's raw logits of a chunk, without gradient."""
    if request.reference is None or request.reference_hidden is None:
        return None
    head, hidden = products(request.reference, request.reference.parameters()), request.reference_hidden
    return lambda part: head.raw(hidden[part].detach())


def _parts(request: Request, keep: int) -> list[slice]:
    """Return the chunks of tokens; the last one are the `keep` tokens whose logits wait for the backward pass."""
    rows = request.targets.numel()
    chunks = [slice(start, min(start + request.chunk, rows - keep)) for start in range(0, rows - keep, request.chunk)]
    return [*chunks, slice(rows - keep, rows)] if keep else chunks
