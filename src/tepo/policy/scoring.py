"""Whether the Triton kernel can score on this machine."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from tepo.policy.head import Head

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def why_no_kernel(device: torch.device, head: Head | None = None) -> str | None:
    """Return why the Triton kernel cannot score on this device (with this head); None where it can."""
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles for a CUDA device, not for {device.type}"
    if head is not None and not head.is_plain:
        return "the kernel covers a plain linear head, without an adapter on it"
    if head is not None and head.dtype not in _KERNEL_DTYPES:
        return f"the kernel computes in float32 or bfloat16, not in {str(head.dtype).removeprefix('torch.')}"
    return None
