"""The folder of a run: what lies where, and where it came from."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.core.files import append_line, read_lines, write_text
from tepo.core.lock import LOCK
from tepo.core.text import quoted
from tepo.training.config import RunConfig
from tepo.training.loading import PROVENANCE, check_config, read_toml
from tepo.training.toml import dump_toml

_LONGEST_NAME = 255
_STEP_NAME = re.compile(r"step-(\d{6,})(\..+)?")
_VERSIONS = ("tepo", "torch", "transformers", "safetensors", "numpy", "math-verify")


def step_name(step: int) -> str:
    """Return the name a step's files carry: `step-000050`."""
    return f"step-{step:06d}"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run and the operations on its log files."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration and provenance, TOML."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Kept responses with per-token fields, one file a step."""
        return self.path / "rollouts"

    @property
    def eval(self) -> Path:
        """Per-question results, one file an evaluation."""
        return self.path / "eval"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The final policy, loadable by transformers."""
        return self.path / "model"

    @property
    def partner(self) -> Path:
        """The final second policy, where two were trained."""
        return self.path / "partner"

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step's line; a value that is no finite number is written as null."""
        append_line(self.metrics, {"step": step, **{name: _plain(value) for name, value in values.items()}})

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines written so far; none before the first step. A broken line inside is an `InputError`."""
        try:
            return read_lines(self.metrics) if self.metrics.exists() else []
        except ValueError as error:
            raise InputError(f"{self.metrics}: damaged inside, a line is not JSON ({error}); remove it") from None

    def cut_back(self, step: int) -> None:
        """Remove what was written after `step`, so that a continued run writes it once; metrics change atomically."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        if self.metrics.exists():
            write_text(self.metrics, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        # Names that begin with a point are what a killed process was still writing.
        for entry in self.path.glob(".*"):
            if entry.name != LOCK:
                _remove(entry)
        for folder in (self.rollouts, self.eval, self.checkpoints):
            for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
                match = _STEP_NAME.fullmatch(entry.name)
                if entry.name.startswith(".") or (match and int(match[1]) > step):
                    _remove(entry)


def create(path: Path, config: RunConfig, provenance: Mapping[str, Any]) -> None:
    """Fill the folder of a new run, which the caller holds; one that is a run already is an `InputError`."""
    refuse_existing(path)
    folder = RunFolder(path)
    write_config(folder, config, provenance)
    for part in (folder.rollouts, folder.eval, folder.checkpoints):
        part.mkdir()


def refuse_existing(path: Path) -> None:
    """Raise `InputError` where a run's folder is already there and not empty, or cannot be made."""
    place = Path(os.path.abspath(path))
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
    except OSError as error:
        raise InputError(f"run folder {path} cannot be made: {error.strerror}") from None
    # Below a folder that is missing, the system does not look at the length yet.
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise InputError(f"run folder {path} cannot be made: file name too long")
    if not path.exists() and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise InputError(f"run folder {path} cannot be made: {place} is no folder that can be written to")
    if path.exists() and (not path.is_dir() or any(map(_of_a_run, path.iterdir()))):
        raise InputError(
            f"run folder {path} exists: choose another name (name=...), or continue it with "
            f"`tepo train --resume {quoted(path)}`"
        )


def _of_a_run(entry: Path) -> bool:
    """Whether an entry of a folder is more than a process leaves there that was killed before it wrote config.toml."""
    return entry.name != LOCK and not entry.name.startswith(".config.toml.")


def write_config(folder: RunFolder, config: RunConfig, provenance: Mapping[str, Any]) -> None:
    """Write config.toml: every setting, and a `provenance` table."""
    tree = plain_config(config)
    write_text(folder.config, dump_toml({**tree, PROVENANCE: dict(provenance)}))


def read_config(folder: RunFolder) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration and the provenance of an existing run; a damaged config.toml is an `InputError`."""
    if not folder.config.exists():
        raise InputError(f"{folder.path} is not a run: it has no config.toml")
    tree = read_toml(folder.config)
    # It comes last in the file, so that nothing before it is missing either.
    if not isinstance(tree.get(PROVENANCE), dict):
        raise InputError(
            f"{folder.config}: damaged, it is empty or cut short (there is no table [{PROVENANCE}]). Put the run's own "
            "settings back, or start a new run from a checkpoint: tepo train RUN.TOML --fork RUN@STEP"
        )
    provenance = tree.pop(PROVENANCE)
    return check_config(tree, source=str(folder.config)), provenance


def plain_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as a tree of plain values, every setting of the objective included."""
    return {**config.model_dump(mode="json"), "objective": config.objective.resolved()}


def run_name(config: RunConfig) -> str:
    """Return the name of the run, made of objective, task and seed where none is given."""
    if config.name:
        return config.name
    source = Path(str(getattr(config.task, "source", "task"))).stem
    text = f"{config.objective.name}-{source}-seed{config.train.seed}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


def provenance(*, device: str, fork: str | None = None) -> dict[str, Any]:
    """Return where a run was made: versions, code, command, machine, time."""
    import torch

    record: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
    }
    commit = _git("rev-parse", "HEAD")
    if commit:
        record["git"] = {"commit": commit, "changed": bool(_git("status", "--porcelain", "-uno"))}
    if fork:
        record["fork"] = fork
    return record


def _remove(entry: Path) -> None:
    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    """Ask git about the code that runs; nothing where it is not a checkout or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
