"""Sampling groups of responses from a policy: shared prefill, addressed draws, recorded log-probs and entropies.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo.rollout.config import SamplingConfig
    from tepo.rollout.response import Response, StopReason
    from tepo.rollout.sampler import sample

__all__ = ["Response", "SamplingConfig", "StopReason", "sample"]

_HOMES = {"Response": "response", "SamplingConfig": "config", "StopReason": "response", "sample": "sampler"}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
