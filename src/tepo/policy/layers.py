"""The norms and gated MLPs of Llama-type models with less kept for the backward pass; the same formulas.

Autograd keeps an input of every element-wise operation, although one or two tensors determine the rest. Here a norm
keeps its input or, where matrix products keep its output anyway, only that, and one number a row; an MLP keeps its
input, gate and up, and the rest is computed again. Under autocast a norm whose output goes to matrix products alone
casts it once, not once a product, and weights are cast where they are used: no copy of them waits for the backward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""`model_type` of configurations whose layers are the ones below, and how transformers' classes for them begin."""

# Norms whose output nothing but linear layers reads.
_BEFORE_PRODUCTS = ("input_layernorm", "post_attention_layernorm")


def fuse_layers(model: nn.Module) -> int:
    """Put the modules below in place of transformers' own, with the same parameters under the same names.

    Modules of any other class, with another activation than SiLU, or with hooks stay as they are.

    Returns:
        How many modules were replaced.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (fused := _fused(name, module)) is not None:
                setattr(parent, name, fused.train(module.training))
                replaced += 1
    return replaced


def count_fused(model: nn.Module) -> int:
    """Return how many modules of a model are the ones below."""
    return sum(isinstance(module, Norm | GatedMLP) for module in model.modules())


def _fused(name: str, module: nn.Module) -> nn.Module | None:
    kind = _kind(module)
    if kind is None or _has_hooks(module):
        return None
    if kind == "RMSNorm":
        return Norm(module, before_products=name in _BEFORE_PRODUCTS)
    return GatedMLP(module) if type(module.act_fn) in _silus() else None


def _kind(module: nn.Module) -> str | None:
    """Return "RMSNorm" or "MLP" for transformers' own classes of the families, None for any other."""
    found = type(module)
    for folder, family in FAMILIES.items():
        if found.__module__ == f"transformers.models.{folder}.modeling_{folder}":
            return {f"{family}RMSNorm": "RMSNorm", f"{family}MLP": "MLP"}.get(found.__name__)
    return None


def _silus() -> tuple[type, ...]:
    """Return the classes that transformers builds for the activation "silu"."""
    from transformers.activations import ACT2FN

    return nn.SiLU, type(ACT2FN["silu"])


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _is_product(module: nn.Module) -> bool:
    """Return whether a module is a matrix product and nothing more; an adapter may have wrapped it since."""
    return type(module) is nn.Linear and module.bias is None and not _has_hooks(module)


def _product_dtype(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """Return the precision in which `x` is multiplied by each of the weights here; None where that would fail."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype if all(weight.dtype == x.dtype for weight in weights) else None


class Norm(nn.Module):
    """A root-mean-square norm: weight * x / sqrt(mean(x^2) + epsilon), normalised in float32."""

    def __init__(self, source: Any, *, before_products: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = source.weight
        self.variance_epsilon: float = source.variance_epsilon
        self._before_products = before_products

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [..., D] normalised, in the wider dtype of `x` and the weight, or in autocast's if only matrix
        products read it."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        device = x.device.type
        if self._before_products and torch.is_autocast_enabled(device) and dtype == torch.float32:
            dtype = torch.get_autocast_dtype(device)
        # The products behind keep the output: with it alone the input need not be kept. A weight of 0 hides what was
        # scaled by it; looking for one would make an accelerator wait.
        from_output = self._before_products and device == "cpu" and bool(self.weight.detach().all())
        found: Tensor = _RootMeanSquare.apply(x, self.weight, self.variance_epsilon, dtype, from_output)  # type: ignore[no-untyped-call]
        return found

    def extra_repr(self) -> str:
        """Return the shape of the weight and epsilon."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), whose product is computed again in the backward pass, as are casts of weights."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gate_proj: nn.Module = source.gate_proj
        self.up_proj: nn.Module = source.up_proj
        self.down_proj: nn.Module = source.down_proj
        self.act_fn: nn.Module = source.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [..., D] for the input [..., D]."""
        linears, down = (self.gate_proj, self.up_proj, self.down_proj), self.down_proj
        found: Tensor
        if all(_is_product(module) for module in linears):
            weights: list[Any] = [module.weight for module in linears]
            if (dtype := _product_dtype(x, weights)) is not None:
                found = _GatedMLP.apply(x.to(dtype), *weights)  # type: ignore[no-untyped-call]
                return found
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not _is_product(down) or gate.dtype != up.dtype:
            plain: Tensor = down(self.act_fn(gate) * up)
            return plain
        found = _GatedProduct.apply(gate, up, down.weight)  # type: ignore[no-untyped-call]
        return found


class _RootMeanSquare(torch.autograd.Function):
    """With n = x r the normalised input, r = 1 / sqrt(mean(x^2) + epsilon) of each row, g the gradient in the output:

    d weight = sum over rows of g n,    d x = r (weight g - n mean(weight g n))

    `from_output`: n is output / weight, and the input is not kept; no weight is 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, from_output: bool) -> Tensor:
        wide = x.to(torch.float32)
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rate = norms.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normal = (wide * rate).to(x.dtype)
        out = normal.mul_(weight) if torch.promote_types(x.dtype, weight.dtype) == x.dtype else normal * weight
        found: Tensor = out.to(dtype)
        ctx.save_for_backward(found if from_output else x, weight, rate)
        ctx.from_output, ctx.dtype = from_output, x.dtype
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        kept, weight, rate = ctx.saved_tensors
        size = kept.shape[-1]
        # The sums over rows in float64 where the input is: their order must not show there.
        dtype = torch.promote_types(ctx.dtype, torch.float32)
        rates, scale = rate.to(dtype).reshape(-1, 1), weight.to(dtype)
        upstream, wide = grad.to(dtype).reshape(-1, size), kept.to(dtype).reshape(-1, size)
        normal = wide / scale if ctx.from_output else wide * rates
        joint = upstream * normal
        with torch.autocast(grad.device.type, enabled=False):
            of_weight = joint.sum(0).view_as(weight).to(weight.dtype) if ctx.needs_input_grad[1] else None
            pull = (joint @ scale).unsqueeze(-1).mul_(rates).div_(-size)
        of_x = torch.mul(upstream, scale, out=joint).mul_(rates).addcmul_(normal, pull)
        return of_x.view_as(grad).to(ctx.dtype), of_weight, None, None, None


class _GatedMLP(torch.autograd.Function):
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T in the precision of x [..., D]; gate and up are [F, D], down [D, F].

    A weight of another precision is cast for each product, and the copy is gone with it: kept ones would hold half of
    the weights' own memory until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated, raised = functional.linear(x, gate.to(x.dtype)), functional.linear(x, up.to(x.dtype))
        ctx.save_for_backward(x, gated, raised, gate, up, down)
        return functional.linear(functional.silu(gated).mul_(raised), down.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gated, raised, gate, up, down = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        of_gated, of_raised, of_down = _gated_gradients(
            grad, gated, raised, down, (needs_x or needs_gate, needs_x or needs_up, needs_down)
        )
        of_x, found = None, []
        rows = x.reshape(-1, x.shape[-1])
        for gradient, weight, wanted in ((of_gated, gate, needs_gate), (of_raised, up, needs_up)):
            upstream = None if gradient is None else gradient.reshape(-1, len(weight))
            found.append((upstream.t() @ rows).to(weight.dtype) if wanted and upstream is not None else None)
            if needs_x and upstream is not None:
                narrow = weight.to(x.dtype)
                of_x = upstream @ narrow if of_x is None else of_x.addmm_(upstream, narrow)
        return None if of_x is None else of_x.view_as(x), *found, of_down


class _GatedProduct(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T, in the precision of gate [..., F] and up [..., F]; the weight is [D, F]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return functional.linear(functional.silu(gate).mul_(up), weight.to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        return _gated_gradients(grad, gate, up, weight, ctx.needs_input_grad)


def _gated_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the wanted gradients of (silu(gate) * up) @ weight.T in gate, up and weight."""
    needs_gate, needs_up, needs_weight = wanted
    rows = grad.reshape(-1, grad.shape[-1])
    active = functional.silu(gate)
    of_weight = None
    if needs_weight:
        of_weight = (rows.t() @ (active * up).reshape(-1, weight.shape[1])).to(weight.dtype)
    if not (needs_gate or needs_up):
        return None, None, of_weight
    of_product = (rows @ weight.to(rows.dtype)).view_as(gate)
    of_up = active.mul_(of_product) if needs_up else None
    of_gate = torch.ops.aten.silu_backward(of_product.mul_(up), gate) if needs_gate else None
    return of_gate, of_up, of_weight
