from __future__ import annotations

import json
from pathlib import Path

import pytest

from tepo.core.files import append_line, read_lines


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [{"text": "a\u2028b\x85c\x0bd\n"}, {"text": ""}, {"step": 2}]
    for record in records:
        append_line(tmp_path / "lines.jsonl", record)
    assert read_lines(tmp_path / "lines.jsonl") == records


def test_a_last_line_cut_by_a_crash_is_dropped_but_a_broken_one_before_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes('{"step": 1}\n{"text": "é'.encode()[:-1])
    assert read_lines(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        read_lines(path)


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("")
    assert read_lines(tmp_path / "lines.jsonl") == []
