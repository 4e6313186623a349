"""The allocator settings, set in a process of their own since they last as long as it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tepo.core import allocator


def _run(code: str, **environment: str) -> str:
    base = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=base | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_stays_in_the_process() -> None:
    code = """
import resource
from tepo.core.allocator import is_on, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, off, told = faults(), is_on(), keep_freed_memory()
faults()
print(off, told, is_on(), faults() < first / 10 if told else True)
"""
    told = allocator.platform.libc_ver()[0] == "glibc"
    assert _run(code) == f"False {told} {told} True"


def test_the_environment_counts_as_on() -> None:
    code = "from tepo.core.allocator import is_on; print(is_on())"
    assert _run(code, MALLOC_MMAP_MAX_="0") == "True"
    assert _run(code) == "False"


def test_the_environment_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allocator.SWITCH, "0")
    assert allocator.keep_freed_memory() is False


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert allocator.keep_freed_memory() is False
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    assert allocator.keep_freed_memory() is False
