"""The command line, called in the process of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ended import Ended, Tepo

from tepo.cli import main
from tepo.core import allocator

TINY = """
runs = "runs"
[model]
path = "builtin:tiny"
device = "cpu"
threads = 1
[task]
source = "arithmetic"
held_out = 8
prompt = { few_shot = 0 }
[reward]
kind = "reward.py:digits"
[sampling]
max_tokens = 3
[train]
steps = 1
prompts = 2
group_size = 2
preflight = 1
[eval]
questions = 4
"""

REWARDS = """
def digits(problems, responses):
    return [sum(c.isdigit() for c in text) / 3 for text in responses]


def one_short(problems, responses):
    return [0.0] * (len(responses) - 1)
"""


@pytest.fixture
def tepo_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tepo:
    """Return the command: tepo_("explain", "grpo") runs it and returns how it ended."""
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: True)
    monkeypatch.delenv("TEPO_DEBUG", raising=False)
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1" if name.startswith("HF") else "false")

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code or 0
        shown = capsys.readouterr()
        return Ended(int(code), shown.out, shown.err)

    return run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder with a tiny run's configuration in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "reward.py").write_text(REWARDS)
    return tmp_path
