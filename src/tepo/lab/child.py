"""One run of a study in a process of its own: `python -m tepo.lab.child STUDY_FOLDER KIND NAME`.

It ends when the process that started it does: its standard input is a pipe from there, whose end means that nobody
is left. Nothing is lost by that; the run goes on from its last checkpoint when the study is repeated.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError, TepoError
from tepo.lab.folder import DONE, FAILED, REFUSED, StudyFolder
from tepo.training.callbacks import Callback
from tepo.training.loading import load_config
from tepo.training.rundir import RunFolder, read_config
from tepo.training.trainer import train

ORPHANED = 3


class Log(Callback):
    """Writes what a run says as plain lines."""

    def on_message(self, text: str) -> None:
        """Write it."""
        self._write(text)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the few numbers one would look for."""
        shown = [f"{key} {metrics[key]:.4g}" for key in ("reward/mean", "eval/avg", "time/step") if metrics.get(key)]
        self._write(f"step {step}: " + ", ".join(shown))

    def _write(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Make the run, or go on with it; record how it ended. Return 0 done, 1 failed or stopped."""
    path, kind, name = arguments
    study = StudyFolder(Path(path))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = study.run(name, kind)
    try:
        begun = folder.config.exists()
        if not begun:
            _remove_unborn(folder)
        config = read_config(folder)[0] if begun else load_config(study.config(name))
        result = train(config, callbacks=[Log()], resume=folder.path if begun else False)
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, TepoError) else f"{type(error).__name__}: {error}"
        refused = isinstance(error, InputError) and not folder.config.exists()
        study.write_state(name, REFUSED if refused else FAILED, text.strip() or type(error).__name__)
        return 1
    if result.interrupted:
        return 1
    study.write_state(name, DONE, steps=result.steps, tokens=result.metrics.get("tokens"))
    return 0


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end at once."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


def _remove_unborn(folder: RunFolder) -> None:
    """Remove a run's folder that holds no configuration yet: its process was killed while making it."""
    shutil.rmtree(folder.path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
