"""Load a policy: built-in models, folders and hub ids, on the device and in the precision of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tepo.core.errors import InputError, nearest
from tepo.policy.config import PolicyConfig
from tepo.policy.device import choose_device, choose_dtype
from tepo.policy.head import Head
from tepo.policy.policy import Policy
from tepo.policy.tiny import tiny_model, tiny_tokenizer

BUILTIN = ("builtin:tiny", "builtin:smollm2-135m")
_UNLIMITED = 1 << 30


def _quiet(text: str) -> None:
    """Say nothing."""


def load_policy(config: PolicyConfig, *, seed: int = 0, say: Callable[[str], None] = _quiet) -> Policy:
    """Return the policy that `config` names, ready to score and train; `say` gets one line for every choice made.

    `seed` draws the weights of builtin:tiny and of a new adapter. Nothing is written but the cache of built-in models.

    Raises:
        InputError: the model does not exist, has no weights, or cannot be used as configured.
    """
    device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, tokenizer = _load_parts(config, seed)
    model.to(device=device, dtype=torch.float32).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = choose_dtype(config.dtype, device, parameters)
    say(f"model {config.path}: {parameters / 1e6:.1f} M parameters, {_name(dtype)} compute on {device}")
    eos_ids = end_ids(model, tokenizer)
    return Policy(
        model,
        tokenizer,
        head=Head(model.get_output_embeddings(), dtype=dtype),
        name=config.path,
        device=device,
        compute_dtype=dtype,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0],
        max_positions=getattr(model.config, "max_position_embeddings", None) or _UNLIMITED,
        head_chunk=config.head_chunk,
        max_batch_tokens=config.max_batch_tokens,
    )


def _load_parts(config: PolicyConfig, seed: int) -> tuple[Any, Any]:
    if config.path == "builtin:tiny":
        return tiny_model(seed), tiny_tokenizer()
    raise InputError(f"unknown built-in model {config.path!r}.{nearest(config.path, BUILTIN)}")


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every id that ends a response: of the generation configuration, the configuration and the tokenizer."""
    named: list[object] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    found: set[int] = set()
    for value in named:
        values = value if isinstance(value, Iterable) else [value]
        found.update(int(one) for one in values if isinstance(one, int))
    if not found:
        raise InputError(
            "neither the model nor its tokenizer names an EOS token, so no response would ever end"
        )
    return tuple(sorted(found))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
