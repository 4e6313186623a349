"""Real processes: two at once on a run, and what signals do to one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tepo.core import lock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(lock.fcntl is None, reason="needs POSIX signals and locks"),
]

SLOW_REWARD = """
import time


def slowly(problems, responses):
    time.sleep(0.5)
    return [float(len(response) % 2) for response in responses]
"""


def start(*words: str) -> subprocess.Popen[str]:
    """Start `tepo train` in the current folder, with a reward that gives each step a second or so."""
    command = [sys.executable, "-m", "tepo", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(run: Path, process: subprocess.Popen[str], step: int) -> None:
    while step not in steps_of(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_two_at_once_and_every_way_to_stop(workplace: Path) -> None:
    (workplace / "slow.py").write_text(SLOW_REWARD)
    run = workplace / "runs" / "one"
    settings = ("reward.kind=slow.py:slowly", "train.steps=1000", "train.preflight=0", "checkpoint.every=1")

    first = start("run.toml", "name=one", *settings)
    wait_for_step(run, first, 1)
    second = start("--resume", str(run))
    _, said = second.communicate()
    assert second.returncode == 2
    assert f"in use by process {first.pid} " in said

    first.send_signal(signal.SIGTERM)
    out, said = first.communicate()
    assert first.returncode == 1, said
    assert "stopping after this step" in said
    assert "tepo train --resume" in out
    done = steps_of(run)[-1]
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir()

    third = start("--resume", str(run))
    wait_for_step(run, third, done + 1)
    third.kill()
    third.communicate()

    fourth = start("--resume", str(run))
    reached = steps_of(run)[-1]
    wait_for_step(run, fourth, reached + 1)
    time.sleep(0.4)  # in the middle of the next step
    fourth.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    fourth.send_signal(signal.SIGINT)
    _, said = fourth.communicate()
    assert fourth.returncode == 1, said
    assert f"Safe on disk: {run}/checkpoints/step-" in said
    assert "Traceback" not in said
