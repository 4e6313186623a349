"""How time and memory of a training step grow, one quantity at a time; no peer, so ratios are to the first point.

    python benchmarks/bench_scaling.py
    python benchmarks/bench_scaling.py --only responses

responses    64 to 512 a step, the same rows decoded and tokens learnt at once: memory should not grow
length       32 to 256 tokens a response
vocabulary   1,000 to 151,936 tokens, a random model of width 64
model        random models from 0.2 to 20 million parameters
threads      1 and 2 of one process. The trainer is one process; rewards alone run in others.

For responses and length a straight line through (tokens, time) is fitted; its R^2 says how linear time is. Memory of
stored rollouts (tokens, log-probabilities, entropies) is part of what is shown. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import harness
import models
import step_sides

BASE: dict[str, Any] = {
    "model": "tiny",
    "name": "tiny-endless",
    "prompts": 8,
    "group": 8,
    "length": 32,
    "updates": 1,
    "warm_up": 1,
    "steps": 3,
    "ends": "full",
}
BOUND = {"micro_tokens": 2304}  # what 64 responses take; by default 8192 tokens are learnt at once
CURVES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "responses": [(str(8 * prompts), {"prompts": prompts, "train": BOUND}) for prompts in (8, 16, 32, 64)],
    "length": [(str(length), {"length": length}) for length in (32, 64, 128, 256)],
    "vocabulary": [(f"{size:,}", {"name": f"random-h64-l2-v{size}"}) for size in (1_000, 8_192, 49_152, 151_936)],
    "model": [
        (f"width {hidden}, {layers} layers", {"name": f"random-h{hidden}-l{layers}-v1000"})
        for hidden, layers in ((64, 2), (192, 4), (320, 8), (448, 8))
    ],
    "threads": [(str(threads), {"threads": threads}) for threads in (1, 2)],
}
LINEAR = ("responses", "length")


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Train for a few steps with tepo."""
    found = step_sides.ours(told)
    return {**found, "update_seconds": found["split_s"].get("time/update", 0.0)}


def fit(points: list[tuple[float, float]]) -> dict[str, float]:
    """Return the straight line of least squares through (x, y), and R^2."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    return {"slope": slope, "intercept": intercept, "r2": statistics.correlation(xs, ys) ** 2}


def curve(report: harness.Report, name: str, points: list[tuple[str, dict[str, Any]]], quick: bool) -> None:
    """Measure one curve: its points are sides that take turns, so that all see the same machine."""
    sides = []
    for label, changed in points:
        shape = {**BASE, **changed}
        if quick:
            shape |= {"group": 4, "steps": 1, "prompts": shape["prompts"] // 4, "length": shape["length"] // 8}
        path = str(models.ensure(shape["name"]))
        threads = {"OMP_NUM_THREADS": str(shape["threads"])} if "threads" in shape else {}
        sides.append(harness.Side(f"{name} {label}", {**shape, "path": path}, threads))

    def add_fit(found: dict[str, Any]) -> None:
        if name not in LINEAR or len(found["sides"]) < 2:
            return
        for kind in ("seconds", "update_seconds"):
            measured = [(s["tokens"]["median"], s[kind]["median"]) for s in found["sides"].values()]
            found[f"fit_{kind}"] = line = fit(measured)
            what = "a step takes" if kind == "seconds" else "the updates of a step take"
            report.note(
                f"{name}: {what} {1e6 * line['slope']:.3g} us a token and {1e3 * line['intercept']:.3g} ms,"
                f" R^2 = {line['r2']:.4f}"
            )

    report.run(__file__, harness.Case(name, {**BASE, "quick": quick}, sides), add_fit)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--curve", choices=list(CURVES), help="one curve only")
    chosen: argparse.Namespace = parser.parse_args()
    report = harness.Report("scaling", chosen)
    for name, points in CURVES.items():
        if chosen.curve in (None, name) and report.wants(name):
            curve(report, name, points[:2] if chosen.quick else points, chosen.quick)
    report.note("ratios are to the first point of each curve; peak: resident memory, worker processes included")
    report.note("processes: the trainer is one process with any number of threads; it has no ranks to measure")
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
