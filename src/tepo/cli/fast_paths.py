"""The fast paths of a machine or of a model: which are active, why not, and the option that switches each off."""

from __future__ import annotations

from typing import Any


def fast_paths(model: str | None) -> list[dict[str, Any]]:
    """Return every fast path: `name`, `active` (None: decided for each model), `detail` and `option`.

    Args:
        model: a model as `model.path` names it, which is loaded to say what it can do; None says what the machine can.

    Raises:
        InputError: the model cannot be loaded.
    """
    return [*_of_the_machine(), *(_of_any_model() if model is None else _of_model(model))]


def _path(name: str, active: bool | None, detail: str, option: str) -> dict[str, Any]:
    return {"name": name, "active": active, "detail": detail, "option": option}


def _of_the_machine() -> list[dict[str, Any]]:
    import torch

    from tepo.core import allocator
    from tepo.policy.device import choose_device, has_native_bfloat16
    from tepo.policy.scoring import why_no_kernel
    from tepo.rollout.compiled_step import why_not_compiled
    from tepo.rollout.fused_model import has_packed_products

    device = choose_device("auto")
    native = has_native_bfloat16(device)
    packed = device.type == "cpu" and has_packed_products()
    no_kernel = why_no_kernel(device)
    kept = allocator.is_on()
    not_compiled = why_not_compiled(device, torch.float32, torch.float32)
    return [
        _path("freed memory kept", kept, "glibc's allocator" if kept else "not glibc", f"{allocator.SWITCH}=0"),
        _path("bfloat16 products", native, "from 20 M parameters on", "model.dtype=float32"),
        _path("matrices packed for sampling", packed, "for the kernel library", "sampling.decoder=plain"),
        _path(
            "compiled steps of sampling",
            not_compiled is None,
            not_compiled or "between the matrix products, and the draws",
            "sampling.decoder=fused",
        ),
        _path(
            "compiled statistics of given logits",
            not_compiled is None,
            not_compiled or "tepo.policy.token_statistics_from_logits",
            "compiled=False there",
        ),
        _path(
            "fused head kernel",
            None if no_kernel is None else False,
            no_kernel or "with model.head=triton; not tried on hardware yet",
            "model.head=chunked",
        ),
        _path("fused optimizer step", device.type in ("cpu", "cuda"), "AdamW in one pass", "optim.fused=false"),
        _path("rows without signal left out", True, "where nothing acts on them", "train.skip_zero_rows=false"),
    ]


def _of_any_model() -> list[dict[str, Any]]:
    from tepo.policy.layers import FAMILIES
    from tepo.rollout.fused_model import TYPES

    return [
        _path(
            "fused layers in updates",
            None,
            f"norms and gated MLPs of types {', '.join(FAMILIES)}",
            "model.fused_layers=false",
        ),
        _path("attention in blocks in updates", None, "on a processor, in bfloat16", "model.fused_layers=false"),
        _path("fused layers in sampling", None, f"types {', '.join(TYPES)}", "sampling.decoder=plain"),
        _path("logits in chunks", None, "most heads; a probe decides", "model.head=dense"),
        _path("logits kept for the backward pass", None, "plain linear heads, 96 MiB", "model.head_keep_mib=0"),
        _path("rows without padding", None, "on a processor; a probe decides", "model.packing=never"),
        _path("prompts computed once", None, "where it saves tokens; a probe decides", "model.share_prompts=never"),
    ]


def _of_model(path: str) -> list[dict[str, Any]]:
    from tepo.policy import PolicyConfig, load_policy
    from tepo.policy.attention_interface import SERVED, attends_in_blocks
    from tepo.policy.layers import FAMILIES, count_fused
    from tepo.rollout import why_plain

    config = PolicyConfig(path=path)
    said: list[str] = []
    policy = load_policy(config, say=said.append)
    plain = why_plain(policy)
    unusual = next((line for line in said if line.startswith("the head of")), "all logits at once")
    padded = next((line for line in said if line.startswith("rows of")), None)
    head = policy.head
    keeps = head is not None and head.is_plain and head.keep_bytes > 0
    packs, shares = policy.layout.packed != "never", policy.layout.share != "never"
    fused = count_fused(policy.model)
    attends = attends_in_blocks(policy.model) and policy.device.type == "cpu"
    narrow = policy.compute_dtype in SERVED
    return [
        _path(
            "fused layers in updates",
            fused > 0,
            f"{fused} norms and MLPs" if fused else f"its layers are not those of {', '.join(FAMILIES)}",
            "model.fused_layers=false",
        ),
        _path(
            "attention in blocks in updates",
            attends and narrow,
            "with its gradient"
            if attends and narrow
            else "it gains in bfloat16"
            if attends
            else "not SDPA on a processor",
            "model.fused_layers=false",
        ),
        _path("fused layers in sampling", plain is None, plain or "agrees with the model", "sampling.decoder=plain"),
        _path(
            "logits in chunks",
            head is not None,
            unusual if head is None else f"{config.head_chunk} tokens at once",
            "model.head=dense",
        ),
        _path(
            "logits kept for the backward pass",
            keeps,
            f"up to {config.head_keep_mib} MiB" if keeps else "the head is not a plain matrix",
            "model.head_keep_mib=0",
        ),
        _path(
            "rows without padding",
            packs,
            "where it saves tokens" if packs else padded or "it gains on a processor",
            "model.packing=never",
        ),
        _path(
            "prompts computed once",
            shares,
            "where it saves tokens" if shares else padded or "switched off",
            "model.share_prompts=never",
        ),
    ]
