"""How the passes of a loaded model are laid out: what its configuration asks for, where the model can do it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from tepo.core.errors import InputError
from tepo.policy.batching import PASS_TOKENS, PASS_TOKENS_ELSEWHERE, Layout
from tepo.policy.config import PolicyConfig
from tepo.policy.probe import why_not_packed


def find_layout(
    model: Any,
    config: PolicyConfig,
    *,
    dtype: torch.dtype,
    context: Callable[[], AbstractContextManager[Any]],
    say: Callable[[str], None],
) -> Layout:
    """Return how passes of a transformers model are laid out; `context` is the one it computes in, in `dtype`.

    Raises:
        InputError: what must always be done cannot be done with this model or these settings.
    """
    device = next(model.parameters()).device.type
    padded = Layout(pass_tokens=PASS_TOKENS.get(device, PASS_TOKENS_ELSEWHERE))
    asked = [f"model.{name}='always'" for name in ("packing", "share_prompts") if getattr(config, name) == "always"]
    if config.packing == "never":
        if config.share_prompts == "always":
            raise InputError("model.share_prompts='always' does not go with model.packing='never'")
        return padded
    if config.gradient_checkpointing:
        if asked:
            raise InputError(f"{asked[0]} does not go with model.gradient_checkpointing=true")
        return padded
    if reason := why_not_packed(model, dtype=dtype, context=context):
        if asked:
            raise InputError(f"{asked[0]} does not work for {config.path!r}: {reason}")
        say(f"rows of {config.path} are padded, prompts computed for every response ({reason})")
        return padded
    # Elsewhere attention without a mask is worth more than a little padding, as far as is known here.
    packed = config.packing if config.packing == "always" or device == "cpu" else "never"
    return replace(padded, packed=packed, share=config.share_prompts)
