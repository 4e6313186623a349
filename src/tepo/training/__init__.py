"""The one-machine trainer: configuration, experience, updates, checkpoints, exact resume. Loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tepo.core.lazy import names_at_first_use

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

__getattr__ = names_at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
