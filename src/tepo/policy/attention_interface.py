"""Attention of transformers' models, through their public registry of attention functions: in a pass without padding
each row to itself, over SDPA or the model's own eager attention, and before SDPA, on a processor, by
`tepo.policy.attention`.

The latter takes what it was measured to be faster at, where a gradient is recorded, and the scoring that is compared
with that; all else, sampling above all, goes on to transformers' own SDPA with the same arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tepo.policy.attention import attention
from tepo.policy.packed_attention import packed_attention
from tepo.policy.packing import Packed

Kind = Literal["sdpa", "blocks", "eager"]

NAMES: dict[Kind, str] = {"sdpa": "tepo", "blocks": "tepo_blocks", "eager": "tepo_eager"}
"""What transformers knows this attention by: over its SDPA, with blocks in front of that, or over a model's own eager
attention. In memory only, configurations are saved without it."""

SERVED = {torch.bfloat16}
"""Precisions that gain; torch's kernel is as fast in float32."""

_scoring: ContextVar[bool] = ContextVar("scoring", default=False)
_packed: ContextVar[Packed | None] = ContextVar("packed", default=None)

# What models hand over beside the tensors and the kernel of transformers ignores as well.
_IGNORED = {"cache_position", "output_attentions", "position_ids", "sliding_window", "use_cache"}


def use_attention(model: Any, *, blocks: bool = True) -> bool:
    """Let a transformers model compute its attention here; `blocks` says whether `tepo.policy.attention` serves it.

    Returns:
        Whether it does: every part of the model uses SDPA, or every part its own eager attention, through transformers'
        interface, and its code does not tell implementations apart.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import eager_mask, sdpa_mask

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if parts and all(_is_exchangeable(part, "sdpa") for part in parts):
        kind: Kind = "blocks" if blocks else "sdpa"
        attend: Callable[..., Any] = partial(attention_forward, blocks=blocks)
    elif parts and all(_is_exchangeable(part, "eager") for part in parts):
        kind, attend = "eager", eager_forward
    else:
        return False
    AttentionInterface.register(NAMES[kind], attend)
    AttentionMaskInterface.register(NAMES[kind], partial(_mask, eager_mask if kind == "eager" else sdpa_mask))
    model.set_attn_implementation(NAMES[kind])
    return True


@contextlib.contextmanager
def the_same_without_gradient() -> Iterator[None]:
    """Serve passes without a gradient too: an old and a new log-probability at equal weights are then equal."""
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


@contextlib.contextmanager
def attending_within(packed: Packed) -> Iterator[None]:
    """In the passes of this block, which are over `packed`, let tokens attend within their row and its prefix."""
    token = _packed.set(packed)
    try:
        yield
    finally:
        _packed.reset(token)


def uses_attention(model: Any) -> bool:
    """Return whether `use_attention` took hold of a model."""
    return getattr(model.config, "_attn_implementation", None) in NAMES.values()


def attends_in_blocks(model: Any) -> bool:
    """Return whether `use_attention` took hold of a model with blocks."""
    return getattr(model.config, "_attn_implementation", None) == NAMES["blocks"]


def tells_its_windows(model: Any) -> bool:
    """Return whether what a model's masks hide beside the future is exactly the window that its attention is told of:
    in a pass without padding there are no masks of the model's."""
    from transformers import PreTrainedModel

    return all(_tells_its_window(module) for module in model.modules() if isinstance(module, PreTrainedModel))


def _tells_its_window(part: Any) -> bool:
    source = _source_of(part)
    hides = "create_sliding_window" in source
    # Some classes name a window to every kernel, although only those that make masks themselves would heed it.
    tells = "sliding_window=" in source and (hides or getattr(part.config, "sliding_window", None) is not None)
    return hides == tells and "create_chunked" not in source


def _source_of(part: Any) -> str:
    """Return the code of a part's module, nothing where it cannot be found."""
    try:
        return inspect.getsource(sys.modules[type(part).__module__])
    except (KeyError, OSError, TypeError):
        return ""


def _is_exchangeable(part: Any, implementation: str) -> bool:
    if part.config._attn_implementation != implementation:
        return False
    source = _source_of(part)
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in source and f'"{implementation}"' not in source


def _mask(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask of a table of rows; none in a pass without padding, whose tokens are not told apart by places."""
    return None if _packed.get() else make(*args, **kwargs)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    blocks: bool = True,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, L, H, D] as transformers' SDPA does, and by it without `blocks`, wherever nothing is scored
    or recorded, on other devices, with dropout and with keywords that are not known here. In a pass without padding B
    is 1."""
    options = {"dropout": dropout, "scaling": scaling, "blocks": blocks, **others}
    packed = _packed.get()
    if packed is None:
        return _of_rows(module, query, key, value, attention_mask, is_causal=is_causal, **options), None
    if dtype := _precision(query, key, value):  # less to move, and what attention would cast to
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    def attend(asking: Tensor, seen: Tensor, told: Tensor, mask: Tensor | None) -> Tensor:
        return _of_rows(module, asking, seen, told, mask, is_causal=mask is None, **options)

    window = others.get("sliding_window")
    return packed_attention(packed, query, key, value, window=window, attend=attend), None


def eager_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return attention [B, L, H, D] and its probabilities as the model's own eager attention does; the latter are None
    in a pass without padding, where B is 1."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    packed = _packed.get()
    if packed is None:
        found: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **options)
        return found

    def attend(asking: Tensor, seen: Tensor, told: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(asking.shape[2], seen.shape[2], dtype=torch.bool, device=asking.device).tril_()
        hidden = torch.finfo(asking.dtype).min
        bias = torch.zeros(mask.shape, dtype=asking.dtype, device=asking.device).masked_fill_(~mask, hidden)
        attended: Tensor = eager(module, asking, seen, told, bias, **options)[0]
        return attended

    window = options.get("sliding_window")
    return packed_attention(packed, query, key, value, window=window, attend=attend), None


def _of_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    blocks: bool,
    **others: Any,
) -> Tensor:
    known = all(name in _IGNORED or given is None for name, given in others.items())
    if not blocks or dropout != 0 or not known or not _is_served(query, key, value, mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: Tensor
        found, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal, **others)
        return found
    precision = _precision(query, key, value)
    query, key, value = query.to(precision), key.to(precision), value.to(precision)
    length, width = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if mask is None and causal and length > 1:
        mask = torch.ones(1, 1, length, width, dtype=torch.bool).tril_()
    return attention(query, key, value, mask, scale=scaling).transpose(1, 2)


def _precision(*tensors: Tensor) -> torch.dtype | None:
    """Return what torch's kernel would compute in, None for tensors that it refuses."""
    dtypes = {tensor.dtype for tensor in tensors}
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
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
