"""Comparing programs fairly: a process for every measurement, sides that take turns, ratios with their spread.

A benchmark is one file. As a parent it describes *cases*, each with *sides* (ours, the peers); `compare` runs every
side once a round, in an order that turns from round to round, and divides within a round, so that what the machine
does meanwhile falls on both. As a child (`--child`) the same file does one side's work and writes what it measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# What tepo asks of glibc for itself (tepo.core.allocator), as variables of the environment, for any program.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
OURS = "tepo"
TIMEOUT_S = 3600.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One contestant: what its process is told, and the environment it runs in."""

    name: str
    work: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages without which the side is left out, and the result says so."""
    python: str = sys.executable


@dataclass(frozen=True)
class Case:
    """One row of the table: `shape` describes the work; the first side is the one others are divided by."""

    name: str
    shape: Mapping[str, Any]
    sides: Sequence[Side]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the options that every benchmark has; the caller adds its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pairs", type=int, default=5, help="rounds in which every side runs once (default 5)")
    made.add_argument("--json", type=Path, help="where the result is written (default benchmarks/results/NAME.json)")
    made.add_argument("--quick", action="store_true", help="tiny shapes, one round: only to see that it runs")
    made.add_argument("--only", default="", help="run only the cases whose name contains this text")
    return made


def command(arguments: Sequence[str]) -> str:
    """Return what to type for the same measurement, without where its result was written."""
    script, *rest = arguments
    if "--json" in rest:
        place = rest.index("--json")
        rest = rest[:place] + rest[place + 2 :]
    return " ".join(["python", f"benchmarks/{Path(script).name}", *rest])


class Report:
    """Collects cases; after every one the JSON is written anew, so that a broken-off run keeps what it has."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.path: Path = options.json or RESULTS / f"{name}.json"
        self.content: dict[str, Any] = {
            "benchmark": name,
            "command": command(sys.argv),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": bool(options.quick),
            "machine": machine(),
            "notes": [],
            "cases": [],
        }

    def note(self, text: str) -> None:
        """Keep a remark that belongs to the numbers."""
        self.content["notes"].append(text)

    def wants(self, name: str) -> bool:
        """Return whether `--only` leaves the case in."""
        return self.options.only in name

    def run(self, script: str, case: Case, extra: Callable[[Result], None] | None = None) -> Result | None:
        """Run a case, let `extra` add to it (a floor), write everything and return the case."""
        if not self.wants(case.name):
            return None
        found = compare(script, case, 1 if self.options.quick else self.options.pairs)
        if extra is not None:
            extra(found)
        self.add(found)
        return found

    def add(self, found: Result) -> None:
        """Add a finished case and write the file."""
        self.content["cases"].append(found)
        self.content["machine"]["load_at_end"] = os.getloadavg()[0]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".partial")
        aside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        aside.replace(self.path)

    def show(self) -> None:
        """Print the table and where the JSON is."""
        from tables import console

        console(self.content)
        print(f"written to {self.path}")


def compare(script: str, case: Case, rounds: int) -> Result:
    """Run every side `rounds` times, taking turns, and return medians and ratios with their spread."""
    runs: dict[str, list[Result]] = {}
    skipped: dict[str, str] = {}
    for index in range(rounds):
        turn = index % len(case.sides)
        for side in [*case.sides[turn:], *case.sides[:turn]]:
            if side.name in skipped:
                continue
            print(f"{case.name}: round {index + 1} of {rounds}, {side.name}", file=sys.stderr, flush=True)
            result = run_side(script, side)
            if "failed" in result:
                skipped[side.name] = result["failed"]
                runs.pop(side.name, None)
            else:
                runs.setdefault(side.name, []).append(result)
    first = case.sides[0].name
    return {
        "case": case.name,
        "shape": dict(case.shape),
        "sides": {name: summary(results) for name, results in runs.items()},
        "ratios": {
            name: ratios(runs[first], results) for name, results in runs.items() if first in runs and name != first
        },
        "skipped": skipped,
    }


def run_side(script: str, side: Side) -> Result:
    """Do one side's work in a fresh process; `{"failed": why}` where it cannot be done."""
    with tempfile.TemporaryDirectory(prefix="tepo-bench-") as folder:
        to = Path(folder) / "result.json"
        told = {**side.work, "needs": list(side.needs), "folder": folder}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **side.environment}
        order = [side.python, script, "--child", json.dumps(told), str(to)]
        try:
            done = subprocess.run(
                order, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"did not finish within {TIMEOUT_S:.0f} s"}
        except OSError as error:
            return {"failed": str(error)}
        if to.exists():
            result: Result = json.loads(to.read_text(encoding="utf-8"))
            return result
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        return {"failed": f"exit {done.returncode}: {last[0][:300]}"}


def child(work: Callable[[dict[str, Any]], Result]) -> None:
    """Do a child's work where this process is one, and end it; return otherwise."""
    if len(sys.argv) != 4 or sys.argv[1] != "--child":
        return
    told: dict[str, Any] = json.loads(sys.argv[2])
    missing = [name for name in told["needs"] if not installed(name)]
    result = {"failed": f"not installed here: {', '.join(missing)}"} if missing else work(told)
    Path(sys.argv[3]).write_text(json.dumps(result), encoding="utf-8")
    raise SystemExit(0)


def installed(package: str) -> bool:
    """Return whether a distribution is in this environment."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, least and greatest, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def summary(results: Sequence[Result]) -> Result:
    """Return the spread of every number the runs of one side have in common; other entries are the first run's."""
    kept: Result = {}
    for name, value in results[0].items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        kept[name] = spread([float(one[name]) for one in results]) if number else value
    if "seconds" in kept and "tokens" in kept:
        kept["tokens_per_s"] = spread([one["tokens"] / one["seconds"] for one in results])
    return kept


def ratios(ours: Sequence[Result], theirs: Sequence[Result]) -> Result:
    """Return theirs over ours, round by round: seconds, seconds a token where tokens differ, and memory."""
    both = list(zip(ours, theirs, strict=False))
    found: Result = {"seconds": spread([b["seconds"] / a["seconds"] for a, b in both])}
    if all("tokens" in one for pair in both for one in pair):
        found["seconds_per_token"] = spread(
            [(b["seconds"] / b["tokens"]) / (a["seconds"] / a["tokens"]) for a, b in both]
        )
    for name in ("peak_mb", "extra_mb"):
        if all(one.get(name, 0) > 0 for pair in both for one in pair):
            found[name] = spread([b[name] / a[name] for a, b in both])
    return found


# --- what a child measures itself with --------------------------------------------------------------------
def memory_mb(field_name: str = "VmHWM", process: str = "self") -> float:
    """Return a process's resident memory in MiB: `VmHWM` its peak, `VmRSS` now; 0 where Linux does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field_name + ":")), 0.0)


def family_peak_mb() -> float:
    """Return the peak of this process and of its living children together, so that worker processes count."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    children = path.read_text(encoding="utf-8").split() if path.exists() else []
    return memory_mb() + sum(memory_mb(process=one) for one in children)


def reset_peak() -> float:
    """Set this process's peak back to what it holds now and return that, in MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return memory_mb("VmRSS")


def extra_mb(work: Callable[[], Any]) -> float:
    """Return the memory that a second call of `work` adds to what is held, in MiB.

    The first call imports, compiles and fills caches. What it leaves free is given back to the kernel before the
    second, for free memory inside the process would hide as much of what is measured.
    """
    work()
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    work()
    return memory_mb() - before


def median_seconds(work: Callable[[], Any], repeats: int, warm_up: int = 1) -> float:
    """Return the median time of `work`."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def machine() -> dict[str, Any]:
    """Describe the machine and what runs on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    flags = set(about.get("flags", "").split())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("tepo", "torch", "transformers", "trl", "liger-kernel", "numpy", "numba")
    return {
        "processor": about.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(total, 1),
        "instructions": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}),
        "system": f"{platform.system()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages if installed(name)},
        "threads": os.environ.get("OMP_NUM_THREADS", "torch's own choice"),
        "load_at_start": os.getloadavg()[0],
    }
