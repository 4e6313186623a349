"""A run in one child process, killed again and again: `python killing.py FOLDER` prints how many kills struck.

The parent imports everything once and forks, so that a child starts at once; it computes nothing itself, so that
forking is safe.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import tiny_tree
from transformers.models.llama import modeling_llama  # noqa: F401  (imported before the forks, not in each of them)

from tepo.training.loading import check_config
from tepo.training.trainer import train

STEPS, KILLS = 14, 10


def config(folder: Path, name: str) -> object:
    """Return a run with several updates a step, dynamic sampling and a checkpoint every step."""
    tree = tiny_tree(folder)
    tree["name"] = name
    tree["train"] |= {"steps": STEPS, "dynamic_sampling": True, "epochs": 2}
    tree["eval"] = {"questions": 4, "every": 3}
    tree["checkpoint"] = {"every": 1, "best": "eval/avg"}
    return check_config(tree)


def start(folder: Path, name: str) -> int:
    """Fork a child that starts the run, or goes on with it where it exists."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            settings = config(folder, name)
            train(settings, resume=(folder / "runs" / name / "config.toml").exists())  # type: ignore[arg-type]
            code = 0
        finally:
            os._exit(code)
    return child


def finish(child: int) -> None:
    """Wait for a child and insist that it succeeded."""
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"the run failed with {status}")


def lines(folder: Path) -> int:
    """Return how many lines the metrics of the killed run have."""
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_step(folder: Path, child: int, step: int) -> None:
    """Return when the child has written the line of `step`."""
    while lines(folder) <= step:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            sys.exit("the run ended before it was killed")
        time.sleep(0.005)


def main(folder: Path) -> None:
    """Make one run in peace and one under fire: each kill strikes a random while after another step."""
    torch.set_num_threads(1)
    began = time.monotonic()
    finish(start(folder, "whole"))
    length = (time.monotonic() - began) / STEPS
    moments = random.Random(0)
    struck = 0
    for kill in range(KILLS):
        child = start(folder, "killed")
        if kill not in (3, 7):  # these two strike while the run is loading
            wait_for_step(folder, child, kill + 1)
        time.sleep(moments.uniform(0, 1.5 * length))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        struck += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    finish(start(folder, "killed"))
    print(struck)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
