"""The live panel: bars that follow the values, and nothing drawn that is not known."""

from __future__ import annotations

import io

from rich.console import Console

from tepo.cli.display import Display
from tepo.cli.sparklines import BARS, Course, LivePanel, bucketed, sparkline


def test_bars_go_from_the_smallest_to_the_largest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert sparkline([1.0, -1.0]) == BARS[-1] + BARS[0]
    assert sparkline([2.0, 2.0, 2.0]) == BARS[4] * 3
    assert sparkline([float("nan")]) == ""


def test_long_courses_are_averaged() -> None:
    assert bucketed([1, 3, 5, 7], 2) == [2, 6]
    assert len(sparkline(list(range(1000)), 40)) == 40


def test_a_line_needs_two_values() -> None:
    course = Course()
    course.add({"reward/mean": 0.25, "entropy/rollout": None, "mask/kl": float("inf")})
    assert course.lines() == []
    course.add({"reward/mean": 0.5, "mask/kl": 0.1, "eval/avg": 0.3})
    assert course.lines() == [("reward", BARS[0] + BARS[-1], "0.250 → 0.500")]


def test_the_panel_stands_above_the_bar() -> None:
    panel = LivePanel()
    panel.add_task("sampling", total=2)
    assert len(list(panel.get_renderables())) == 1
    panel.course = Course()
    for reward in (0.1, 0.2, 0.3):
        panel.course.add({"reward/mean": reward, "entropy/rollout": 1 - reward})
    text = io.StringIO()
    Console(file=text, width=100).print(*panel.get_renderables())
    shown = text.getvalue()
    assert "reward   ▁▅█  0.100 → 0.300" in shown
    assert shown.index("entropy") < shown.index("sampling")


def test_off_a_terminal_steps_are_plain_lines_without_bars() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=100, markup=False, highlight=False))
    for step in (1, 2, 3):
        display.on_step(step, {"time/step": 1.0, "reward/mean": step / 10})
    display.close()
    assert text.getvalue().count("step ") == 3
    assert not set(BARS) & set(text.getvalue())
