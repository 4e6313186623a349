"""How long the command takes to answer: `python benchmarks/bench_cli.py`. The goal is half a second on two cores."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 11
COMMANDS = (("--help",), ("--version",), ("train", "--help"), ("objectives",))
GOAL_S = 0.5


def seconds(arguments: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tepo", *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    for arguments in COMMANDS:
        seconds(arguments)  # the first one fills the disk cache
        measured = sorted(seconds(arguments) for _ in range(RUNS))
        middle = statistics.median(measured)
        goal = f"  goal {GOAL_S} s: {'met' if middle <= GOAL_S else 'missed'}" if arguments == ("--help",) else ""
        print(f"tepo {' '.join(arguments):<14} median {middle:.3f} s, {measured[0]:.3f} to {measured[-1]:.3f}{goal}")


if __name__ == "__main__":
    main()
