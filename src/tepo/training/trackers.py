"""Metrics to TensorBoard, Weights & Biases or trackio, where a run asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from tepo.core.errors import MissingExtra
from tepo.training.callbacks import Callback
from tepo.training.config import RunConfig
from tepo.training.rundir import RunFolder, plain_config

_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(config: RunConfig) -> None:
    """Raise `MissingExtra` for a tracker whose package is not installed."""
    for name in config.log.trackers:
        if importlib.util.find_spec(_MODULES[name]) is None:
            raise MissingExtra(_MODULES[name], "track", f"log.trackers = [{name!r}]")


def trackers(config: RunConfig, folder: RunFolder) -> list[Callback]:
    """Return a listener for each tracker of the configuration; it opens when the run starts."""
    return [
        TensorBoard(folder) if name == "tensorboard" else Project(name, config, folder) for name in config.log.trackers
    ]


class TensorBoard(Callback):
    """Writes event files to the run's folder `tensorboard/`."""

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder.path / "tensorboard"))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add every number of the step."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Project(Callback):
    """Sends metrics to wandb or trackio, whose interfaces agree in what is used here: init, log, finish."""

    def __init__(self, package: str, config: RunConfig, folder: RunFolder) -> None:
        self._package: Any = importlib.import_module(package)
        self._run: Any = self._package.init(project="tepo", name=folder.path.name, config=plain_config(config))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log every number of the step."""
        self._package.log(scalars(metrics), step=step)

    def close(self) -> None:
        """Finish the remote run."""
        self._package.finish()


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the metrics."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
