"""What lies where in the folder of a study.

```
studies/NAME/
  study.toml       the study as it was asked for, its base run written out
  runs/            one run a folder, VARIANT-seedN: an ordinary run (config.toml, metrics.jsonl, eval/, rollouts/, ...)
  tuning/          runs of the learning-rate grid, on seeds of their own
  configs/         the configuration each run was started with
  logs/            what each run said
  states/          RUN.json: whether a run is done, failed or refused before it began, and with what error
  results.json     the statistics and verdicts (see `results`)
  report.html      the page to read
```
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.core.files import write_json
from tepo.training.rundir import RunFolder

DONE, FAILED, REFUSED, HALF, WAITING = "done", "failed", "refused", "half", "waiting"


@dataclass(frozen=True)
class StudyFolder:
    """Paths of one study."""

    path: Path

    @property
    def study(self) -> Path:
        """The study as it was asked for, TOML."""
        return self.path / "study.toml"

    @property
    def results(self) -> Path:
        """Statistics and verdicts, JSON."""
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        """The page to read."""
        return self.path / "report.html"

    def run(self, name: str, kind: str = "runs") -> RunFolder:
        """Return the folder of a run; `kind` is `runs` or `tuning`."""
        return RunFolder(self.path / kind / name)

    def config(self, name: str) -> Path:
        """Return where the configuration lies that a run is started with."""
        return self.path / "configs" / f"{name}.toml"

    def log(self, name: str) -> Path:
        """Return where what a run says is kept."""
        return self.path / "logs" / f"{name}.log"

    def state(self, name: str) -> Path:
        """Return where it is kept how a run ended."""
        return self.path / "states" / f"{name}.json"

    def read_state(self, name: str, kind: str = "runs") -> dict[str, Any]:
        """Return how a run stands.

        `status` is done, failed, refused (its input is at fault, nothing was made), half (to be continued) or waiting
        (not begun).
        """
        path = self.state(name)
        if path.exists():
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return state
        begun = self.run(name, kind).config.exists()
        return {"status": HALF if begun else WAITING, "error": None}

    def write_state(self, name: str, status: str, error: str | None = None, **more: Any) -> None:
        """Record, atomically, how a run ended."""
        write_json(self.state(name), {"status": status, "error": error, **more})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from working on the study; a lock ends with its process, however that ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # a system without such locks goes without
                pass
            except OSError:
                raise InputError(f"{self.path}: another `tepo compare` is at work on this study") from None
            yield
