"""A whole study on the tiny model, from one TOML, killed at random and repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tepo.lab.folder import DONE, HALF, StudyFolder

STUDY = """
variants = ["dapo", "tepo"]
seeds = 3
at_once = 2
cores = 2
[base.model]
path = "builtin:tiny"
device = "cpu"
[base.task]
source = "arithmetic"
options = { digits = [1, 1], operators = ["+"] }
held_out = 20
prompt = { few_shot = 0 }
[base.reward]
kind = "reward.py:sevens"
[base.sampling]
max_tokens = 4
[base.optim]
lr = 1e-3
[base.train]
steps = 8
prompts = 4
group_size = 4
mini_batches = 2
[base.eval]
questions = 20
samples = 2
[base.checkpoint]
every = 2
"""
REWARD = "def sevens(problems, responses): return [float('7' in text) for text in responses]\n"
KILLS = 3


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start `tepo compare` in a folder; what it says is appended to said.txt."""
    command = [sys.executable, "-m", "tepo", "compare", "tiny.toml", "--json", *options]
    with (folder / "said.txt").open("ab") as said, (folder / "results.json").open("wb") as results:
        environment = {**os.environ, "TEPO_DEBUG": "0"}
        return subprocess.Popen(command, cwd=folder, stdout=results, stderr=said, env=environment)


def lines(study: StudyFolder) -> int:
    """Return how many steps all runs have written."""
    return sum(path.read_bytes().count(b"\n") for path in study.path.glob("runs/*/metrics.jsonl"))


def finished(study: StudyFolder) -> dict[str, tuple[int, bytes]]:
    """Return, for every finished run, when its metrics were last written, and what they are."""
    names = [path.stem for path in study.path.glob("states/*.json") if study.read_state(path.stem)["status"] == DONE]
    files = {name: study.run(name).metrics for name in names}
    return {name: (path.stat().st_mtime_ns, path.read_bytes()) for name, path in files.items()}


@pytest.mark.slow
def test_a_study_killed_at_random_is_finished_by_repeating_the_command(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(STUDY)
    (tmp_path / "reward.py").write_text(REWARD)
    study = StudyFolder(tmp_path / "studies" / "tiny")
    moments = random.Random(0)
    for _ in range(KILLS):
        before, process = lines(study), start(tmp_path)
        wanted = before + moments.randint(2, 14)
        while process.poll() is None and lines(study) < wanted:
            time.sleep(0.02)
        kept = finished(study)
        process.send_signal(signal.SIGKILL)
        process.wait()
        still = lines(study)
        time.sleep(0.5)  # the runs end with the process that started them
        assert lines(study) <= still + 2
        assert {name: found for name, found in finished(study).items() if name in kept} == kept
    kept = finished(study)
    process = start(tmp_path)
    assert process.wait() == 0, (tmp_path / "said.txt").read_text()
    assert {name: finished(study)[name] for name in kept} == kept
    check(study, json.loads((tmp_path / "results.json").read_text()))
    whole = finished(study)
    process = start(tmp_path, "--report-only")
    assert process.wait() == 0, (tmp_path / "said.txt").read_text()
    assert finished(study) == whole
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(study.results.read_text())


@pytest.mark.slow
def test_ctrl_c_stops_a_study_cleanly_and_repeating_the_command_finishes_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(STUDY.replace("seeds = 3", "seeds = 1").replace("every = 2", "every = 1000"))
    (tmp_path / "reward.py").write_text(REWARD)
    study = StudyFolder(tmp_path / "studies" / "tiny")
    process = start(tmp_path)
    while process.poll() is None and lines(study) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 1
    said = (tmp_path / "said.txt").read_text()
    assert "stopping: every run at work finishes its step and saves" in said
    assert said.endswith(f"Continue with: tepo compare {study.path.relative_to(tmp_path)}\n")
    assert "Traceback" not in said
    stopped = lines(study)
    half = [name for name in ("dapo-seed0", "tepo-seed0") if study.read_state(name)["status"] == HALF]
    assert half
    # What was asked to stop has saved its last step: nothing of it is made again.
    for name in half:
        run = study.run(name)
        last = run.read_metrics()[-1]["step"]
        kept = [f"step-{last:06d}"] if last > 0 else []  # before its first step a run has nothing to keep
        assert [path.name for path in run.checkpoints.iterdir()] == kept
    time.sleep(0.5)
    assert lines(study) == stopped
    process = start(tmp_path)
    assert process.wait() == 0, (tmp_path / "said.txt").read_text()
    assert all(f"{name}: continued" in (tmp_path / "said.txt").read_text() for name in half)
    for name in ("dapo-seed0", "tepo-seed0"):
        assert study.read_state(name)["status"] == DONE
        assert [record["step"] for record in study.run(name).read_metrics()] == list(range(9))
        assert not study.run(name).checkpoints.exists()


def check(study: StudyFolder, results: dict[str, Any]) -> None:
    """Check that every run is whole and that the results speak of all of them."""
    assert len(results["runs"]) == 6
    assert {run["status"] for run in results["runs"]} == {DONE}
    for run in results["runs"]:
        records = study.run(run["name"]).read_metrics()
        assert [record["step"] for record in records] == list(range(9))
        assert (study.run(run["name"]).model / "config.json").is_file()
        assert not study.run(run["name"]).checkpoints.exists()
    # The same seed meets the same prompts and the same questions under both objectives.
    asked = {
        name: [json.loads(line)["question"] for line in path.read_text().split("\n") if line]
        for name in ("dapo-seed1", "tepo-seed1", "dapo-seed2")
        for path in [study.run(name).rollouts / "step-000003.jsonl"]
    }
    assert asked["dapo-seed1"] == asked["tepo-seed1"] != asked["dapo-seed2"]
    (comparison,) = results["comparisons"]
    assert comparison["seeds"] == [0, 1, 2]
    assert comparison["accuracy"]["questions"] == 20
    assert results["verdicts"][0].startswith("tepo minus dapo: ")
    assert "3 seeds, paired over 20 questions" in results["verdicts"][0]
    assert any("barely estimated" in note for note in results["notes"])
