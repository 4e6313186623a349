"""Token statistics from hidden states, without ever holding the logits of more than one chunk of tokens.

With logits z = post(head(h)) / temperature, p = softmax(z) and H = -sum p log p, the statistics of one token y are
log p_y, H, sum p^2, sum p^2 log p and KL = sum p (log p - log q). Their gradients in z are

    d log p_y / dz_j = [j = y] - p_j      dH / dz_j = -p_j (log p_j + H)      dKL / dz_j = p_j (log p_j - log q_j - KL)

so the backward pass recomputes a chunk's logits, turns them in place into their own gradient, and goes on through the
head with autograd; any head module works (tied, with a bias, with an adapter on it). Inside a chunk the float32
arithmetic runs over blocks of a few rows, which stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Far below every log-probability whose exponential is not zero in float64: keeps 0 * log 0 at 0 for vocabulary
# entries that a model sets to -inf.
_LOWEST = -1e4
# Logits in one float32 block: about the size of a core's cache on a processor, a few launches on an accelerator.
_BLOCK_CPU = 1 << 18
_BLOCK_DEVICE = 1 << 26


@dataclass(frozen=True)
class Post:
    """What a model does to the output of its head: logits = cap * tanh(scale * x / cap), or scale * x without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, raw: Tensor) -> Tensor:
        """Return float32-or-better logits from the head's output; always a new tensor."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d raw, given the logits before temperature."""
        if self.cap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.cap) ** 2)


@dataclass(frozen=True)
class Head:
    """A language-model head: the module from hidden states to raw logits, and what follows it.

    `dtype` is the precision of its matrix products: parameters and hidden states are cast to it, once a pass.
    `active` opens the context the head computes in (a reference that shares the model switches the adapter off there).
    """

    module: nn.Module
    post: Post = Post()
    dtype: torch.dtype = torch.float32
    active: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def names(self) -> list[str]:
        """Return the names of the head's parameters, in a fixed order."""
        return [name for name, _ in self.module.named_parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """Return the head's parameters in the order of `names`."""
        return [parameter for _, parameter in self.module.named_parameters()]

    def cast(self, parameters: Sequence[Tensor], *, differentiable: Sequence[bool]) -> dict[str, Tensor]:
        """Return the parameters in the compute precision as fresh leaves (no copy where the precision is the same)."""
        leaves = {}
        for name, parameter, wanted in zip(self.names(), parameters, differentiable, strict=True):
            value = parameter.detach()
            leaves[name] = (value.to(self.dtype) if value.is_floating_point() else value).requires_grad_(
                wanted
            )
        return leaves

    def raw(self, hidden: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        """Return the head's output [n, V] for hidden states [n, D], before `post`."""
        with self.active(), torch.autocast(hidden.device.type, enabled=False):
            output: Tensor = torch.func.functional_call(self.module, leaves, (hidden,))
        return output


@dataclass(frozen=True)
class Request:
    """What to compute: the head, the target tokens [N], and which statistics beside the log-probability."""

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
    """Statistics of N tokens, [N] float32 each (float64 for float64 hidden states); None where not asked for."""

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
    outputs = _HeadStatistics.apply(hidden, request, *request.head.parameters())
    return TokenStatistics(*outputs)


def _blocks(rows: int, vocabulary: int, device: torch.device) -> list[slice]:
    size = max(1, (_BLOCK_CPU if device.type == "cpu" else _BLOCK_DEVICE) // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _chunks(request: Request) -> list[slice]:
    rows = request.targets.numel()
    return [slice(start, min(start + request.chunk, rows)) for start in range(0, rows, request.chunk)]


def _log_softmax(raw: Tensor, post: Post, temperature: float) -> Tensor:
    """Return log-probabilities [b, V] after temperature; entries at -inf stay there."""
    z = post.apply(raw)
    if temperature != 1.0:
        z.div_(temperature)
    return z.sub_(z.logsumexp(dim=-1, keepdim=True))


def _reference_raw(request: Request, part: slice, leaves: dict[str, Tensor]) -> Tensor | None:
    if request.reference is None or request.reference_hidden is None:
        return None
    with torch.no_grad():
        return request.reference.raw(request.reference_hidden[part].to(request.reference.dtype), leaves)


def _reference_leaves(request: Request) -> dict[str, Tensor]:
    if request.reference is None:
        return {}
    parameters = request.reference.parameters()
    return request.reference.cast(parameters, differentiable=[False] * len(parameters))


def _forward_block(
    raw: Tensor, reference_raw: Tensor | None, targets: Tensor, request: Request
) -> dict[str, Tensor]:
    log_p = _log_softmax(raw, request.head.post, request.temperature)
    values = {"logp": log_p.gather(-1, targets[:, None]).squeeze(-1)}
    if not (request.entropy or request.sum_p2 or request.sum_p2_logp or reference_raw is not None):
        return values
    p = log_p.exp()
    log_p.clamp_(min=_LOWEST)
    if request.entropy or reference_raw is not None:
        values["entropy"] = -torch.linalg.vecdot(p, log_p)
    if reference_raw is not None and request.reference is not None:
        log_q = _log_softmax(reference_raw, request.reference.post, request.temperature).clamp_(min=_LOWEST)
        values["kl_full"] = torch.linalg.vecdot(p, log_p - log_q)
    if request.sum_p2 or request.sum_p2_logp:
        values["sum_p2"] = torch.linalg.vecdot(p, p)
    if request.sum_p2_logp:
        values["sum_p2_logp"] = torch.linalg.vecdot(p.square_(), log_p)
    return values


def _gradient_block(
    raw: Tensor, reference_raw: Tensor | None, targets: Tensor, grads: dict[str, Tensor], request: Request
) -> None:
    """Overwrite the raw logits [b, V] with the gradient of sum(grads * statistics) in them."""
    logits = request.head.post.apply(raw)
    slope = request.head.post.slope(logits)
    log_p = logits.div_(request.temperature) if request.temperature != 1.0 else logits
    log_p.sub_(log_p.logsumexp(dim=-1, keepdim=True))
    p = log_p.exp()
    factor: Tensor = -grads["logp"][:, None]
    if "entropy" in grads or "kl_full" in grads:
        log_p.clamp_(min=_LOWEST)
    if "entropy" in grads:
        factor = factor - grads["entropy"][:, None] * (log_p + grads["entropy_value"][:, None])
    if "kl_full" in grads and reference_raw is not None and request.reference is not None:
        log_q = _log_softmax(reference_raw, request.reference.post, request.temperature).clamp_(min=_LOWEST)
        factor = factor + grads["kl_full"][:, None] * (log_p - log_q - grads["kl_value"][:, None])
    p.mul_(factor).scatter_add_(-1, targets[:, None], grads["logp"][:, None])
    raw.copy_(p.mul_(slope).div_(request.temperature))


class _HeadStatistics(torch.autograd.Function):
    """Chunked statistics with a backward pass that recomputes one chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, request: Request, *parameters: Tensor) -> tuple[Tensor | None, ...]:
        head = request.head
        leaves = head.cast(parameters, differentiable=[False] * len(parameters))
        reference_leaves = _reference_leaves(request)
        kept: dict[str, list[Tensor]] = {}
        for part in _chunks(request):
            raw = head.raw(hidden[part].to(head.dtype), leaves)
            reference_raw = _reference_raw(request, part, reference_leaves)
            targets = request.targets[part]
            for block in _blocks(raw.shape[0], raw.shape[1], raw.device):
                values = _forward_block(
                    raw[block],
                    None if reference_raw is None else reference_raw[block],
                    targets[block],
                    request,
                )
                for name, value in values.items():
                    kept.setdefault(name, []).append(value)
            del raw, reference_raw
        found = {name: torch.cat(values) for name, values in kept.items()}
        if not found:
            found = _empty(hidden, request)
        outputs = (
            found["logp"],
            found["entropy"] if request.entropy else None,
            found["sum_p2"] if request.sum_p2 else None,
            found["sum_p2_logp"] if request.sum_p2_logp else None,
            found.get("kl_full"),
        )
        constant = [] if request.entropy_grad else [outputs[1]]
        constant += [outputs[2], outputs[3]]
        ctx.mark_non_differentiable(*[output for output in constant if output is not None])
        ctx.set_materialize_grads(False)
        ctx.request = request
        # The parameters go through save_for_backward so that an optimizer step in between is an error, not a wrong number.
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
        wanted = list(ctx.needs_input_grad[2:])
        needs_hidden = ctx.needs_input_grad[0]
        leaves = request.head.cast(parameters, differentiable=wanted)
        reference_leaves = _reference_leaves(request) if grad_kl is not None else {}
        totals: list[Tensor | None] = [
            torch.zeros_like(p) if w else None for p, w in zip(parameters, wanted, strict=True)
        ]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        for part in _chunks(request):
            chunk = hidden[part].detach().to(request.head.dtype).requires_grad_(needs_hidden)
            with torch.enable_grad():
                raw = request.head.raw(chunk, leaves)
            _to_gradient(raw.detach(), part, upstream, reference_leaves, request)
            inputs = [leaf for leaf in leaves.values() if leaf.requires_grad] + (
                [chunk] if needs_hidden else []
            )
            found = list(torch.autograd.grad(raw, inputs, raw.detach(), allow_unused=True))
            if grad_hidden is not None:
                grad_hidden[part] = found.pop()
            for place in (index for index, want in enumerate(wanted) if want):
                total, gradient = totals[place], found.pop(0)
                if total is not None and gradient is not None:
                    total.add_(gradient)
        return (grad_hidden, None, *totals)


def _to_gradient(
    raw: Tensor,
    part: slice,
    upstream: dict[str, Tensor],
    reference_leaves: dict[str, Tensor],
    request: Request,
) -> None:
    """Turn one chunk's raw logits [n, V] in place into the gradient of the loss in them."""
    targets = request.targets[part]
    reference_raw = _reference_raw(request, part, reference_leaves) if "kl_full" in upstream else None
    for block in _blocks(raw.shape[0], raw.shape[1], raw.device):
        grads = {name: value[part][block] for name, value in upstream.items()}
        _gradient_block(
            raw[block],
            None if reference_raw is None else reference_raw[block],
            targets[block],
            grads,
            request,
        )


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _empty(hidden: Tensor, request: Request) -> dict[str, Tensor]:
    """Return the statistics of no token at all: a batch whose tokens are all masked."""
    nothing = hidden.new_zeros(0, dtype=_wide(hidden))
    names = [
        "logp",
        "entropy",
        "sum_p2",
        "sum_p2_logp",
        *(["kl_full"] if request.reference is not None else []),
    ]
    return {name: nothing.clone() for name in names}
