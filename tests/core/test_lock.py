"""A folder is held by one process, for as long as it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tepo.core import lock
from tepo.core.errors import InputError
from tepo.core.lock import hold

posix = pytest.mark.skipif(lock.fcntl is None, reason="needs fcntl")

HOLDER = """
import sys
from pathlib import Path
from tepo.core.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@posix
def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    with hold(tmp_path):
        for _ in range(2):
            with (
                pytest.raises(InputError, match=f"in use by process {os.getpid()} .*kill {os.getpid()}"),
                hold(tmp_path),
            ):
                pass
    with hold(tmp_path):
        pass


@posix
def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"process {process.pid} "), hold(tmp_path):
            pass
        process.kill()
        process.wait()
        with hold(tmp_path):
            pass


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).mkdir()
    with pytest.raises(InputError, match="cannot be written to: Is a directory"), hold(tmp_path):
        pass


@posix
def test_a_file_system_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    used = False
    with hold(tmp_path):
        used = True
    assert used


def test_without_fcntl_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    with hold(tmp_path), hold(tmp_path):
        assert list(tmp_path.iterdir()) == []
