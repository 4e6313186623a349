"""`tepo view` and `tepo report` on a run of the trainer itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from ended import Tepo
from rich.console import Console

from tepo.cli.view import QUANTITIES, coloured, viridis


@pytest.fixture
def run(tepo_: Tepo, workplace: Path) -> Path:
    assert tepo_("train", "run.toml", "--name", "seen").code == 0
    return workplace / "runs" / "seen"


def test_a_run_of_the_trainer_is_viewed_and_reported(tepo_: Tepo, run: Path) -> None:
    shown = tepo_("view", run, "--no-open")
    assert shown.code == 0
    assert "4 responses of 1 steps" in shown.out
    assert (run / "view.html").is_file()
    assert tepo_("view", run, "--json").json == {"view": str(run / "view.html"), "holds": "4 responses of 1 steps"}
    assert tepo_("report", run, "--json").json == {"report": str(run / "report.html")}
    assert "after minus before" in (run / "report.html").read_text()
    for quantity in QUANTITIES:
        ended = tepo_("view", run, "--terminal", "--quantity", quantity)
        assert ended.code == 0
        assert f"coloured by {quantity}" in ended.out
    assert "under gspo" in tepo_("view", run, "--terminal", "--objective", "gspo").out


def test_what_is_not_there_is_said_and_nothing_is_written(tepo_: Tepo, workplace: Path) -> None:
    for words in (("view", workplace), ("report", workplace)):
        ended = tepo_(*words, "--no-open")
        assert ended.code == 2
        assert "is not a run" in ended.err
    ended = tepo_("view", workplace, "--quantity", "entropi")
    assert ended.code == 2
    assert "entropy" in ended.err
    assert not list(workplace.glob("**/*.html"))


def test_tokens_of_the_terminal_carry_sign_and_mark_and_obey_nothing() -> None:
    assert coloured(["W" * 5000], None, [0], 1.0, signed=False).plain == "W" * 120 + "… (4880 more)"
    line = coloured(["up", "down", "\x1b[2J", "same\n"], [1.0, -1.0, 0.0, 0.0], [1, 16, 0, 2], 1.0, signed=True)
    assert line.plain == "+up▾-down◉␛[2Jsame⏎▴\n"
    out = Console(width=80, color_system=None)
    with out.capture() as captured:
        out.print(line)
    assert "\x1b" not in captured.get()


def test_the_scale_runs_from_dark_to_bright_and_stays_within_its_ends() -> None:
    assert viridis(-1) == viridis(0) == (68, 1, 84)
    assert viridis(2) == viridis(1) == (253, 231, 37)
    brightness = [sum(viridis(step / 10)) for step in range(11)]
    assert brightness == sorted(brightness)
