"""A run killed at ten random moments and resumed each time equals the uninterrupted run bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tepo.training.rundir import RunFolder

from .test_trainer import assert_same_run


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ten_kills_leave_no_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killing.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 10
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    assert_same_run(whole, killed)
    lines = RunFolder(whole).read_metrics()
    assert [line["step"] for line in lines] == list(range(15))
    assert not any("reward/timed_out" in line for line in lines)
    for part in ("rollouts", "eval"):
        files = sorted(file.name for file in (whole / part).iterdir())
        assert files == sorted(file.name for file in (killed / part).iterdir())
        for name in files:
            assert (whole / part / name).read_bytes() == (killed / part / name).read_bytes()
