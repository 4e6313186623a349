"""Load a policy: built-in models, folders and hub ids, on the device and in the precision of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from tepo.core.errors import InputError
from tepo.policy.activations import disable_dropout, enable_recomputation
from tepo.policy.attention_interface import use_attention
from tepo.policy.config import PolicyConfig
from tepo.policy.device import choose_device, choose_dtype, store_frozen_linears
from tepo.policy.head import Head
from tepo.policy.layers import fuse_layers
from tepo.policy.layouts import find_layout
from tepo.policy.lora import Adapter, add_adapter, load_adapter
from tepo.policy.policy import Policy
from tepo.policy.probe import UnusualHeadError, find_head
from tepo.policy.scoring import why_no_kernel
from tepo.policy.smollm2 import ensure_smollm2
from tepo.policy.source import Source, find_source, similar_folders
from tepo.policy.tiny import tiny_model, tiny_tokenizer

Say = Callable[[str], None]
_UNLIMITED = 1 << 30


def quiet(text: str) -> None:
    """Say nothing."""


def load_policy(config: PolicyConfig, *, seed: int = 0, say: Say = quiet) -> Policy:
    """Return the policy that `config` names, ready to score and train; `say` gets a line for every choice made.

    `seed` draws the weights of builtin:tiny and of a new adapter. Nothing is written but the cache of built-in models.

    Raises:
        InputError: the model does not exist, has no weights, or cannot be used as configured.
        MissingExtra: a package that this model or adapter needs is not installed.
    """
    device = choose_device(config.device)
    source = find_source(config.path)
    if source.kind == "adapter" and config.lora is not None:
        raise InputError(
            f"model.path={config.path!r} is an adapter already: remove model.lora to train it further, or start"
            " from a merged model"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with no_progress_bars():
        model, tokenizer = _load_source(source, config, seed, say)
    if config.fused_layers:
        fuse_layers(model)
    use_attention(model, blocks=config.fused_layers)
    size = sum(parameter.numel() for parameter in model.parameters())
    dtype = choose_dtype(config.dtype, device, size)
    model.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    adapter = _adapt(model, source, config, seed)
    if adapter is not None:
        model = adapter.model
        store_frozen_linears(model, dtype)
    disable_dropout(model.eval())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(
        f"model {config.path}: {size / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained,"
        f" {str(dtype).removeprefix('torch.')} compute on {device}"
    )
    eos_ids = end_ids(model, tokenizer)
    policy = Policy(
        model,
        tokenizer,
        adapter=adapter,
        recomputed=_recomputed(model, config),
        name=config.path,
        device=device,
        compute_dtype=dtype,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0],
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNLIMITED,
        head_chunk=config.head_chunk,
        max_batch_tokens=config.max_batch_tokens,
    )
    policy.head = _find_head(policy, config, say)
    backbone = model if policy.head is None else model.base_model
    policy.layout = find_layout(backbone, config, dtype=dtype, context=policy.compute_context, say=say)
    return policy


def _load_source(source: Source, config: PolicyConfig, seed: int, say: Say) -> tuple[Any, Any]:
    if source.base is not None:
        base = find_source(source.base)
        if base.kind == "adapter":
            raise InputError(f"the adapter in {source.path!r} adapts another adapter; merge that one first")
        return _load_source(base, config, seed, say)
    if source.path == "builtin:tiny":
        return tiny_model(seed), tiny_tokenizer()
    if source.kind == "builtin":
        return _load_pretrained(Source("folder", str(ensure_smollm2(say))), config)
    return _load_pretrained(source, config)


def _load_pretrained(source: Source, config: PolicyConfig) -> tuple[Any, Any]:
    """Return model and tokenizer of a folder or hub id, in float32.

    Raises:
        InputError: it cannot be loaded, lacks weights, or is quantised.
    """
    import transformers
    from safetensors import SafetensorError

    where: dict[str, Any] = {"local_files_only": True} if source.kind == "folder" else {"revision": config.revision}
    options: dict[str, Any] = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    try:
        settings = transformers.AutoConfig.from_pretrained(source.path, **where)
        if getattr(settings, "quantization_config", None) is not None:
            raise InputError(f"model.path={source.path!r} is quantised; training needs the unquantised weights")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.path, **where)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source.path, dtype=torch.float32, output_loading_info=True, **where, **options
        )
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise InputError(_why_not_loaded(source, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"model.path={source.path!r} lacks {len(missing)} weights that its config.json asks for, first"
            f" {missing[0]!r}: it would start with random numbers there"
        )
    return model, tokenizer


def _why_not_loaded(source: Source, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if source.kind == "hub":
        from pathlib import Path

        return (
            f"model.path={source.path!r}: there is no such folder here.{similar_folders(Path(source.path))}"
            f" As a hub id it could not be loaded: {first}"
        )
    return f"model.path={source.path!r} could not be loaded ({type(error).__name__}): {first}"


def _adapt(model: Any, source: Source, config: PolicyConfig, seed: int) -> Adapter | None:
    if source.kind == "adapter":
        return load_adapter(model, source.path)
    if config.lora is not None:
        return add_adapter(model, config.lora, name=config.path, seed=seed)
    model.requires_grad_(True)
    return None


def _recomputed(model: Any, config: PolicyConfig) -> list[torch.nn.Module]:
    if not config.gradient_checkpointing:
        return []
    try:
        return enable_recomputation(model)
    except ValueError as error:
        raise InputError(f"model.gradient_checkpointing=true: {config.path!r} does not support it: {error}") from error


def _find_head(policy: Policy, config: PolicyConfig, say: Say) -> Head | None:
    """Return the head to score with in chunks, or None for the dense path."""
    if config.head == "dense":
        return None
    try:
        head = find_head(policy.model, dtype=policy.compute_dtype, context=policy.compute_context)
        if config.head == "triton" and (reason := why_no_kernel(policy.device, head)):
            raise InputError(f"model.head='triton' does not work for {config.path!r}: {reason}; set model.head='auto'")
        kernel: Literal["torch", "triton"] = "triton" if config.head == "triton" else "torch"
        return replace(head, keep_bytes=config.head_keep_mib << 20, kernel=kernel)
    except UnusualHeadError as error:
        if config.head in ("chunked", "triton"):
            raise InputError(f"model.head={config.head!r} does not work for {config.path!r}: {error}") from error
        say(
            f"the head of {config.path} is unusual ({error}); all logits of a batch are held at once, so memory"
            " grows with tokens x vocabulary"
        )
        return None


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every id that ends a response: of the generation configuration, the configuration and the tokenizer.

    Raises:
        InputError: none of them names one.
    """
    named: list[object] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    found: set[int] = set()
    for value in named:
        values = value if isinstance(value, Iterable) else [value]
        found.update(one for one in values if isinstance(one, int) and one >= 0)
    if not found:
        raise InputError("neither the model nor its tokenizer names an EOS token, so no response would ever end")
    return tuple(sorted(found))


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the screen while a model loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
