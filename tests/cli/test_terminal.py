"""Text of models and files is shown, never obeyed; JSON is JSON."""

from __future__ import annotations

import io
import json
import math
import shlex
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tepo.cli.display import Display, shortened, step_line
from tepo.cli.outcome import next_commands
from tepo.cli.terminal import plain, print_json, print_table, write_any_text
from tepo.training import RunResult


def test_plain_makes_control_characters_visible() -> None:
    assert plain("a\x1b[31mb\x07\x7f\r\n\tc") == "a␛[31mb␇␡␍\n\tc"
    assert plain("\x9b31m\u202eabc\u2066") == "�31m�abc�"
    assert plain("Σᵢ 日本 👩‍🔬 [bold]") == "Σᵢ 日本 👩‍🔬 [bold]"


@given(st.text())
def test_plain_leaves_no_character_that_a_terminal_obeys(text: str) -> None:
    shown = plain(text)
    assert len(shown) == len(text)
    assert all(character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs") for character in shown)
    shown.encode("utf-8")


def test_tables_do_not_read_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[red]title[/red]", ("[b]a[/b]",), [("[link=x]y[/link] :smile: \x1b[2J",)])
    shown = capsys.readouterr().out
    assert "[red]title[/red]" in shown
    assert "[b]a[/b]" in shown
    assert "[link=x]y[/link] :smile: ␛[2J" in shown


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, 3: [math.inf, 1.5], "s": frozenset({"y", "x"}), "t": (None, "é")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "3": [None, 1.5], "s": ["x", "y"], "t": [None, "é"]}


def test_a_response_is_shown_on_one_line_and_cut_in_the_middle() -> None:
    assert shortened("one\ntwo\x1b") == "one⏎ two␛"
    long = shortened("a" * 1000 + "b" * 1000)
    assert len(long) < 700
    assert long.startswith("aaa")
    assert long.endswith("bbb")


def test_commands_to_copy_are_words_of_a_shell(tmp_path: Path) -> None:
    run = tmp_path / "my runs" / "$(x)"
    (run / "eval").mkdir(parents=True)
    (run / "eval" / "step-000000.jsonl").write_text(json.dumps({"question": "1 + `ls` $HOME ="}) + "\n")
    commands = [command for command, _ in next_commands(RunResult(run, 2, False, {}, {}))]
    assert shlex.split(commands[0]) == ["sample", str(run), "--ask", "1 + `ls` $HOME ="]
    assert commands[0].endswith("'1 + `ls` $HOME ='")
    assert shlex.split(commands[2]) == ["train", "--resume", str(run), "train.steps=4"]


def test_a_step_is_one_line_of_what_was_measured() -> None:
    metrics: dict[str, Any] = {"reward/mean": 0.5, "reward/pass_rate": 0.25, "time/step": 2.0, "kl/old": None}
    assert step_line(3, 40, metrics, 74.0) == "step  3/40  reward 0.500  pass 25%  s 2.0  left 01:14"
    missing = {"reward/mean": math.nan, "reward/pass_rate": 0.0, "reward/unscored": 16}
    assert step_line(3, 40, missing, 0.0) == "step  3/40  no reward 16  pass 0%  left 00:00"
    assert step_line(3, 40, {}, 3600.0).endswith("left 01:00:00")
    assert step_line(3, 40, {}, 30 * 3600.0).endswith("left 30:00:00")
    assert "left" in step_line(1, 10**20, {}, 1e22)


def test_the_display_writes_plain_lines_off_a_terminal() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, markup=False, emoji=False, highlight=False, width=60))
    display.on_message("careful [red]\x1b[2J")
    display.on_progress("sampling", 3, 8)
    display.on_step(0, {"eval/avg": 0.5})
    display.on_step(1, {"reward/mean": 1.0, "time/step": 1.0})
    display.close()
    assert out.getvalue() == "careful [red]␛[2J\n" + "step 1/0  reward 1.000  tok/s 0  s 1.0  left 00:00\n"


@pytest.mark.parametrize("columns", [30, 40, 60, 100])
def test_a_table_loses_nothing_on_a_narrow_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    row = ("a-long-method", "confirmed", "what it does in a few words", "old-entropy")
    print_table("T", ("name", "status", "what", "needs"), [row], whole=3)
    shown = capsys.readouterr().out
    assert all(len(line) <= columns for line in shown.splitlines())
    assert sorted("".join(shown.split())[-sum(len(cell.replace(" ", "")) for cell in row) :]) == sorted(
        "".join(row).replace(" ", "")
    )


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    write_any_text()
    print_json({"π": "🙂"})
    out.write("J = π\n")
    out.flush()
    *lines, text = raw.getvalue().decode("ascii").splitlines()
    assert json.loads("\n".join(lines)) == {"π": "🙂"}
    assert text == "J = \\u03c0"
