"""`tepo.policy.attention` in transformers' models, through their public registry of attention functions.

It takes what it was measured to be faster at, on a processor where a gradient is recorded, and the scoring that is
compared with that; all else, sampling above all, goes on to transformers' own SDPA with the same arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tepo.policy.attention import attention

NAME = "tepo"
"""What transformers knows this attention by, in memory only: configurations are saved without it."""

SERVED = {torch.bfloat16}
"""Precisions that gain; torch's kernel is as fast in float32."""

_scoring: ContextVar[bool] = ContextVar("scoring", default=False)

# What models hand over beside the tensors and the kernel of transformers ignores as well.
_IGNORED = {"cache_position", "output_attentions", "position_ids", "sliding_window", "use_cache"}


def use_attention(model: Any) -> bool:
    """Let a transformers model on a processor compute its attention here where it scores or records a gradient.

    Returns:
        Whether it does: every part of the model uses SDPA through transformers' interface, and its code does not tell
        implementations apart.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not parts or not all(map(_is_exchangeable, parts)):
        return False
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


@contextlib.contextmanager
def the_same_without_gradient() -> Iterator[None]:
    """Serve passes without a gradient too: an old and a new log-probability at equal weights are then equal."""
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


def uses_attention(model: Any) -> bool:
    """Return whether `use_attention` took hold of a model."""
    return getattr(model.config, "_attn_implementation", None) == NAME


def _is_exchangeable(part: Any) -> bool:
    if part.config._attn_implementation != "sdpa":
        return False
    try:
        source = inspect.getsource(sys.modules[type(part).__module__])
    except (KeyError, OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in source and '"sdpa"' not in source


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, L, H, D] as transformers' SDPA does, and by it wherever nothing is scored or recorded, on
    other devices, with dropout and with keywords that are not known here."""
    known = all(name in _IGNORED or given is None for name, given in others.items())
    if dropout != 0 or not known or not _is_served(query, key, value, attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return found
    precision = _precision(query, key, value)
    query, key, value = query.to(precision), key.to(precision), value.to(precision)
    length, width = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is None and causal and length > 1:
        attention_mask = torch.ones(1, 1, length, width, dtype=torch.bool).tril_()
    return attention(query, key, value, attention_mask, scale=scaling).transpose(1, 2), None


def _precision(*tensors: Tensor) -> torch.dtype | None:
    """Return what torch's kernel would compute in, None for tensors that it refuses."""
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.is_autocast_enabled("cpu") and torch.float64 not in dtypes:
        return torch.get_autocast_dtype("cpu")
    return dtypes.pop() if len(dtypes) == 1 else None


def _is_served(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    tensors = (query, key, value)
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not (recorded or _scoring.get()) or query.device.type != "cpu":
        return False
    if _precision(*tensors) not in SERVED or any(each.ndim != 4 for each in tensors):
        return False
    batch, heads, length, _ = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or heads % key.shape[1] or not key.shape[2]:
        return False
    if mask is None:
        return True
    fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    return fits and mask.shape[2:] == (length, key.shape[2]) and not mask.requires_grad
