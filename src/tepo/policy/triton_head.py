"""A Triton kernel for a plain linear head: hidden states to log-probability and entropy, no logits in between.

The forward kernel multiplies tiles of hidden states and vocabulary and folds each product at once into running
statistics of its rows; several programs share a row's vocabulary and are joined afterwards. The backward kernel
multiplies again and writes the gradient in a chunk's logits, with which `LinearProducts` goes on. Statistics other than
these two, and heads that are no plain linear layer, take the chunked path.

Untested on hardware: the tests run the kernels in Triton's interpreter on a CPU (TRITON_INTERPRET=1), which shows that
they compute the right numbers, not that they compile or are fast on any GPU. Imported only where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tepo.policy.head import Post
from tepo.policy.products import LinearProducts

if TYPE_CHECKING:
    from tepo.policy.statistics import Request

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Rows, vocabulary entries and hidden dimensions of a tile. Small in the interpreter, so that tests cross their edges.
_TILE_N, _TILE_V, _TILE_D = (16, 32, 16) if _INTERPRETED else (64, 128, 64)
# Programs that share the vocabulary of one block of rows, enough to fill a GPU when there are few rows.
_SPLITS = 8


def fold(products: LinearProducts, hidden: Tensor, request: Request, found: Mapping[str, Tensor]) -> None:
    """Write log-probability, entropy if asked for, largest logit and sum of weights of each token into `found`."""
    rows, vocabulary = len(hidden), len(products.weight)
    splits = min(_SPLITS, triton.cdiv(vocabulary, _TILE_V))
    parts = torch.empty(4, splits, rows, dtype=torch.float32, device=hidden.device)
    columns = triton.cdiv(triton.cdiv(vocabulary, splits), _TILE_V) * _TILE_V
    grid = (triton.cdiv(rows, _TILE_N), splits)
    _fold_kernel[grid](*_operands(products, hidden, request), parts, columns, **_settings(products, request.head.post))
    tops, totals, dots, chosen = parts
    top = tops.amax(0)
    shift = (tops - top) / request.temperature
    weights = shift.exp()
    total = (totals * weights).sum(0)
    found["top"].copy_(top)
    found["total"].copy_(total)
    found["logp"].copy_((chosen.sum(0) - top) / request.temperature - total.log())
    if request.entropy:
        dot = ((dots + shift * totals) * weights).sum(0)
        found["entropy"].copy_(total.log() - dot / total)


def logit_gradient(
    products: LinearProducts, hidden: Tensor, request: Request, part: slice, upstream: Mapping[str, Tensor]
) -> Tensor:
    """Return the gradient [n, V] of sum(upstream * statistics) in the head's output for one chunk of tokens."""
    given = {name: value[part].contiguous() for name, value in upstream.items()}
    grad = torch.empty(len(hidden), len(products.weight), dtype=products.weight.dtype, device=hidden.device)
    grid = (triton.cdiv(grad.shape[0], _TILE_N), triton.cdiv(grad.shape[1], _TILE_V))
    nothing = torch.zeros_like(given["top"])
    _gradient_kernel[grid](
        *_operands(products, hidden, request, part),
        given["top"],
        given["total"],
        given["logp"],
        given.get("entropy", nothing),
        given.get("entropy_value", nothing),
        grad,
        **_settings(products, request.head.post),
    )
    return grad


def _operands(products: LinearProducts, hidden: Tensor, request: Request, part: slice = slice(None)) -> list[Any]:
    """Return the arguments both kernels begin with."""
    post, weight = request.head.post, products.weight
    bias = weight if products.bias is None else products.bias
    numbers = [len(hidden), *weight.shape, post.scale, post.cap or 1.0, 1.0 / request.temperature]
    return [
        hidden.to(weight.dtype).contiguous(),
        weight.contiguous(),
        bias,
        request.targets[part].contiguous(),
        *numbers,
    ]


def _settings(products: LinearProducts, post: Post) -> dict[str, Any]:
    return {
        "HAS_BIAS": products.bias is not None,
        "HAS_CAP": post.cap is not None,
        "WIDEN": _INTERPRETED,  # its dot takes the bits of a bfloat16 for an integer
        "TILE_N": _TILE_N,
        "TILE_V": _TILE_V,
        "TILE_D": _TILE_D,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    hidden, weight, bias, rows, columns, N, V, D, scale, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    TILE_N: tl.constexpr, TILE_V: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Return float32 logits [TILE_N, TILE_V] before temperature, and their slope in the head's output."""
    z = tl.zeros((TILE_N, TILE_V), dtype=tl.float32)
    for start in range(0, D, TILE_D):
        inner = start + tl.arange(0, TILE_D)
        mask_h = (rows[:, None] < N) & (inner[None, :] < D)
        mask_w = (columns[:, None] < V) & (inner[None, :] < D)
        h = tl.load(hidden + rows.to(tl.int64)[:, None] * D + inner[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight + columns.to(tl.int64)[:, None] * D + inner[None, :], mask=mask_w, other=0.0)
        if WIDEN:
            h, w = h.to(tl.float32), w.to(tl.float32)
        z += tl.dot(h, tl.trans(w), input_precision="ieee")
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    z *= scale
    slope = tl.full((TILE_N, TILE_V), 1.0, tl.float32) * scale
    if HAS_CAP:
        t = 1.0 - 2.0 / (tl.exp(2.0 * z / cap) + 1.0)  # tanh
        z = cap * t
        slope = slope * (1.0 - t * t)
    return z, slope


@triton.jit  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, N, V, D, scale, cap, inverse, parts, width,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    TILE_N: tl.constexpr, TILE_V: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """One block of rows and one share of the vocabulary: largest logit, sum of weights, their dot product, target."""
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    target = tl.load(targets + rows, mask=rows < N, other=-1)
    top = tl.full((TILE_N,), -1e30, tl.float32)  # below every logit, and finite, so that differences are numbers
    total = tl.zeros((TILE_N,), tl.float32)
    dot = tl.zeros((TILE_N,), tl.float32)
    chosen = tl.zeros((TILE_N,), tl.float32)
    first = tl.program_id(1) * width
    for start in range(first, tl.minimum(first + width, V), TILE_V):
        columns = start + tl.arange(0, TILE_V)
        z, _ = _tile(
            hidden, weight, bias, rows, columns, N, V, D, scale, cap, HAS_BIAS, HAS_CAP, WIDEN, TILE_N, TILE_V, TILE_D
        )
        chosen += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), axis=1)
        z = tl.where(columns[None, :] < V, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, axis=1))
        centred = tl.maximum((z - higher[:, None]) * inverse, -1e4)  # keeps 0 * log 0 at 0
        weights = tl.exp(centred)
        shift = (top - higher) * inverse
        dot = tl.exp(shift) * (dot + shift * total) + tl.sum(weights * centred, axis=1)
        total = tl.exp(shift) * total + tl.sum(weights, axis=1)
        top = higher
    place = parts + tl.program_id(1) * N + rows
    splits = tl.num_programs(1)
    tl.store(place, top, mask=rows < N)
    tl.store(place + splits * N, total, mask=rows < N)
    tl.store(place + 2 * splits * N, dot, mask=rows < N)
    tl.store(place + 3 * splits * N, chosen, mask=rows < N)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, N, V, D, scale, cap, inverse,
    tops, totals, grad_logp, grad_entropy, entropies, grad,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    TILE_N: tl.constexpr, TILE_V: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """One tile: the logits again, and the gradient in the head's output in their place."""
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    columns = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    z, slope = _tile(
        hidden, weight, bias, rows, columns, N, V, D, scale, cap, HAS_BIAS, HAS_CAP, WIDEN, TILE_N, TILE_V, TILE_D
    )
    inside = rows < N
    target = tl.load(targets + rows, mask=inside, other=-1)
    top = tl.load(tops + rows, mask=inside, other=0.0)
    total = tl.load(totals + rows, mask=inside, other=1.0)
    of_logp = tl.load(grad_logp + rows, mask=inside, other=0.0)
    of_entropy = tl.load(grad_entropy + rows, mask=inside, other=0.0)
    entropy = tl.load(entropies + rows, mask=inside, other=0.0)
    log_p = tl.maximum((z - top[:, None]) * inverse, -1e4) - tl.log(total)[:, None]
    p = tl.exp(log_p)
    found = -p * (of_logp[:, None] + of_entropy[:, None] * (log_p + entropy[:, None]))
    found += tl.where(columns[None, :] == target[:, None], of_logp[:, None], 0.0)
    found = found * slope * inverse
    place = grad + rows.to(tl.int64)[:, None] * V + columns[None, :]
    tl.store(place, found.to(grad.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < V))
