"""The one-machine trainer: configuration, experience, updates, checkpoints, exact resume. Loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo.training.callbacks import Callback, RunInfo
    from tepo.training.config import ObjectiveConfig, RunConfig
    from tepo.training.loading import load_config
    from tepo.training.preflight import Preflight
    from tepo.training.trainer import RunResult, train

__all__ = [
    "Callback",
    "ObjectiveConfig",
    "Preflight",
    "RunConfig",
    "RunInfo",
    "RunResult",
    "load_config",
    "train",
]

_HOMES = {
    "Callback": "callbacks",
    "ObjectiveConfig": "config",
    "Preflight": "preflight",
    "RunConfig": "config",
    "RunInfo": "callbacks",
    "RunResult": "trainer",
    "load_config": "loading",
    "train": "trainer",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
