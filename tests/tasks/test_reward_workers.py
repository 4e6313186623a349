"""Workers are real processes here; limits are short, and nothing asserts how long anything took."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError, WorkError
from tepo.tasks.workers import WorkerPool

SCORER = """
import os, sys, time
def load(*arguments):
    def score(task):
        kind = task.pop(0)
        if kind == "echo": return task[0]
        if kind == "pid": return os.getpid()
        if kind == "hang":
            while True: pass
        if kind == "hang in C": return len(str(9 ** 9 ** 9))
        if kind == "sleep": time.sleep(600)
        if kind == "child":
            import subprocess
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(task[0], "w").write(str(process.pid))
            time.sleep(600)
        if kind == "raise": raise ValueError(task[0])
        if kind == "exit": os._exit(3)
        if kind == "sys.exit": sys.exit(1)
        if kind == "segfault": os.kill(os.getpid(), 11)
        if kind == "memory": return len(bytearray(task[0] * 2 ** 20))
        if kind == "print": print(task[0] * 100000, flush=True); return "printed"
        if kind == "stdin": return sys.stdin.read()
        if kind == "torch": return "torch" in sys.modules
        if kind == "threads": return os.environ["OMP_NUM_THREADS"]
        if kind == "deep": return score(["deep"])
    return score
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    (tmp_path / "odd_scorer.py").write_text(SCORER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(("odd_scorer",), workers=2, timeout_s=1.5, memory_mb=256) as workers:
        yield workers


def run(pool: WorkerPool, *tasks: list[Any]) -> list[Any]:
    return pool.run(tasks)


def pids(pool: WorkerPool) -> set[int]:
    return {worker.process.pid for worker in pool._idle}


def ended(pid: int) -> bool:
    """Wait until a process is gone or only waits to be collected; False if it stays."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_outcomes_come_in_the_order_of_the_tasks(pool: WorkerPool) -> None:
    outcomes = run(pool, *(["echo", number] for number in range(50)))
    assert [outcome.value for outcome in outcomes] == list(range(50))
    assert not any(outcome.error for outcome in outcomes)


def test_workers_are_started_once_and_reused(pool: WorkerPool) -> None:
    ran = {outcome.value for _ in range(3) for outcome in run(pool, *(["pid"] for _ in range(20)))}
    assert ran <= pids(pool)
    assert len(pids(pool)) == 2
    assert os.getpid() not in ran


def test_a_single_task_starts_a_single_worker(pool: WorkerPool) -> None:
    run(pool, ["pid"])
    assert len(pool._idle) == 1


@pytest.mark.parametrize("kind", ["hang", "hang in C", "sleep"])
def test_an_overrun_is_killed_and_the_others_are_unaffected(pool: WorkerPool, kind: str) -> None:
    outcomes = run(pool, ["echo", 1], [kind], ["echo", 2], ["echo", 3])
    assert [outcome.value for outcome in outcomes] == [1, None, 2, 3]
    assert [outcome.timed_out for outcome in outcomes] == [False, True, False, False]
    assert outcomes[1].error == "ran longer than 1.5 s"
    assert [outcome.value for outcome in run(pool, ["echo", 4])] == [4]


def test_a_killed_worker_takes_its_own_children_along(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, ["child", str(tmp_path / "pid")])
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (["raise", "no number"], "ValueError: no number"),
        (["sys.exit"], "SystemExit: 1"),
        (["exit"], "the worker died (exit code 3)"),
        (["segfault"], "the worker died (signal SIGSEGV)"),
        (["memory", 1024], "out of memory: more than 256 MB"),
        (["deep"], "RecursionError"),
    ],
)
def test_a_failure_is_an_error_of_its_own_task_only(pool: WorkerPool, task: list[Any], error: str) -> None:
    outcomes = run(pool, ["echo", 1], task, ["echo", 2])
    assert [outcomes[0].value, outcomes[2].value] == [1, 2]
    assert str(outcomes[1].error).startswith(error)
    assert not outcomes[1].timed_out
    assert run(pool, ["echo", 5])[0].value == 5


def test_memory_within_the_limit_is_fine(pool: WorkerPool) -> None:
    assert run(pool, ["memory", 100])[0].value == 100 * 2**20


def test_what_a_reward_prints_or_reads_does_not_reach_the_protocol(
    pool: WorkerPool, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = run(pool, ["print", '{"value": 7}\n'], ["stdin"], ["echo", 2])
    assert [outcome.value for outcome in outcomes] == ["printed", "", 2]
    assert '{"value": 7}' in capfd.readouterr().err


def test_a_worker_is_a_light_process_of_its_own_with_one_thread(pool: WorkerPool) -> None:
    import torch  # noqa: F401 - in this process, not in the worker's

    outcomes = run(pool, ["torch"], ["threads"])
    assert [outcome.value for outcome in outcomes] == [False, "1"]


def test_a_worker_that_was_ended_from_outside_is_replaced(pool: WorkerPool) -> None:
    pid = run(pool, ["pid"])[0].value
    os.kill(pid, signal.SIGKILL)
    pool._idle[0].process.wait()
    assert run(pool, ["echo", 1])[0].value == 1


def test_closing_ends_every_worker(pool: WorkerPool) -> None:
    run(pool, ["pid"], ["pid"])
    before = pids(pool)
    pool.close()
    assert len(before) == 2
    assert all(ended(pid) for pid in before)


def test_an_interrupted_run_leaves_no_process(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pool, ["pid"], ["pid"])
    before = pids(pool)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(pool, ["sleep"], ["sleep"])
    assert all(ended(pid) for pid in before)


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "odd_scorer.py").write_text(SCORER)
    code = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        from tepo.tasks.workers import WorkerPool
        pool = WorkerPool(("odd_scorer",), workers=1, timeout_s=5, memory_mb=256)
        print(pool.run([["pid"]])[0].value, flush=True)
        sys.stdin.read()
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert ended(pid)  # its standard input has ended


def test_a_scorer_that_cannot_be_loaded_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_scorer.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "dying_scorer.py").write_text("import os; os._exit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        WorkerPool(("bad_scorer",), workers=1, timeout_s=1, memory_mb=256) as workers,
        pytest.raises(InputError, match="bad_scorer cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
    ):
        workers.start()
    with (
        WorkerPool(("dying_scorer",), workers=1, timeout_s=1, memory_mb=256) as workers,
        pytest.raises(WorkError, match=r"died while starting \(exit code 4\)"),
    ):
        workers.start()
