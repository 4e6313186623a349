"""The language-model head apart from the model: from hidden states to logits, one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Post:
    """What a model does to its head's output x: cap * tanh(scale * x / cap), or scale * x without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32-or-better logits from the head's output, in `out` or in a new tensor."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True) if out is None else out.copy_(raw)
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


class Identity(nn.Module):
    """The head of the dense path, where the model's own logits take the place of hidden states.

    It copies, because a chunk's logits are overwritten with their gradient.
    """

    def forward(self, logits: Tensor) -> Tensor:
        """Return a copy of the logits."""
        return logits.clone()


@dataclass(frozen=True)
class Head:
    """A head: the module from hidden states to raw logits, and what follows it.

    `dtype` is the precision of its matrix products: parameters and hidden states are cast to it, the parameters once
    a pass. `active` opens the context it computes in (a reference that shares the policy's model switches the
    adapter off there). `keep_bytes` bounds the raw logits that a plain linear head keeps from the forward to the
    backward pass instead of computing them again; 0 keeps none. `kernel` "triton" scores by one fused kernel where it
    covers the head, "torch" always by matrix products in chunks.
    """

    module: nn.Module
    post: Post = Post()
    dtype: torch.dtype = torch.float32
    active: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    keep_bytes: int = 96 << 20
    kernel: Literal["torch", "triton"] = "torch"

    @property
    def is_plain(self) -> bool:
        """Whether the head is one linear layer and nothing more, so that its products can be written out."""
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        return type(module) is nn.Linear and self.active is nullcontext and not any(hooks)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the module, in a fixed order."""
        return [parameter for _, parameter in self.module.named_parameters()]

    def cast(self, parameters: Sequence[Tensor], *, differentiable: Sequence[bool]) -> dict[str, Tensor]:
        """Return the parameters in the compute precision as fresh leaves, by name; no copy where it is theirs."""
        names = [name for name, _ in self.module.named_parameters()]
        leaves = {}
        for name, parameter, wanted in zip(names, parameters, differentiable, strict=True):
            value = parameter.detach()
            leaves[name] = (value.to(self.dtype) if value.is_floating_point() else value).requires_grad_(wanted)
        return leaves

    def raw(self, hidden: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        """Return the head's output [n, V] for hidden states [n, D], before `post`."""
        with self.active(), torch.autocast(hidden.device.type, enabled=False):
            output: Tensor = torch.func.functional_call(self.module, leaves, (hidden.to(self.dtype),))
        return output
