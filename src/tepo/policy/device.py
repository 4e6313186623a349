"""Where the policy computes and in which precision, chosen by what the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tepo.core.errors import InputError

# Below this size bfloat16 saves a quarter of a step at most, and float32 keeps sampler and scorer equal.
_SMALL_MODEL = 20_000_000


def choose_device(name: str) -> torch.device:
    """Return the device for "auto" (cuda, then mps, then cpu) or for a torch device name.

    Raises:
        InputError: the name is no device, or this machine has no such device.
    """
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device={name!r} is no torch device; expected auto, cpu, cuda, cuda:N or mps") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device={name!r}, but torch sees {count} CUDA device(s) here; use device=auto or cpu")
    if device.type == "mps" and not has_mps:
        raise InputError("device='mps', but torch has no MPS device here; use device=auto or cpu")
    return device


def choose_dtype(name: str, device: torch.device, parameters: int) -> torch.dtype:
    """Return the compute precision: for "auto", bfloat16 where the hardware multiplies it natively.

    A model of fewer than 20 million parameters computes in float32: bfloat16 would gain little, and in float32 sampler
    and scorer agree.
    """
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]
    return torch.bfloat16 if parameters >= _SMALL_MODEL and has_native_bfloat16(device) else torch.float32


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the device has instructions for bfloat16 products, not only an emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities:
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())


def store_frozen_linears(model: Any, dtype: torch.dtype) -> None:
    """Keep the matrices of frozen linear layers in the compute precision: half the memory, and no cast at every pass.

    The products stay the same, since the matrices would be cast before each of them. A head tied to the embedding
    keeps its precision, because the embedding's values are not cast.
    """
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding and not module.weight.requires_grad:
            module.to(dtype)
