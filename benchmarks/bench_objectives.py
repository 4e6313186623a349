"""The arithmetic of every method of the catalogue alone: loss and backward on 64 responses of 512 tokens.

    python benchmarks/bench_objectives.py

No model is involved: log-probabilities and statistics are random numbers. The floor is reading each field of the
batch once. No peer: their losses are compared with ours value by value in the tests, and inside their trainers in
bench_step.py. `--pairs` is the number of processes, each of which measures every method. About 3 minutes.
"""

from __future__ import annotations

from typing import Any

import floors
import harness

GROUPS, GROUP, TOKENS, VOCABULARY = 8, 8, 512, 32


def seconds(name: str, told: dict[str, Any]) -> dict[str, float]:
    """Return a method's time and the bytes of its batch."""
    import torch

    import tepo
    from tepo.testing import random_batch

    objective = tepo.objective(name)
    batch = random_batch(
        0,
        fields=objective.needs.batch,
        groups=[told["group"]] * told["groups"],
        width=told["tokens"],
        vocabulary=VOCABULARY,
        dtype=torch.float32,
    )
    moving = {field: value for field, value in batch.present() if field in ("logp", "entropy", "values")}

    def once() -> None:
        leaves = {field: value.detach().requires_grad_(True) for field, value in moving.items()}
        loss = objective(batch.replace(**leaves)).loss
        if loss.requires_grad:
            loss.backward()

    taken = harness.median_seconds(once, told["repeats"], warm_up=2)
    return {"seconds": taken, "bytes": sum(value.numel() * value.element_size() for _, value in batch.present())}


def work(told: dict[str, Any]) -> dict[str, Any]:
    return {"methods": {name: seconds(name, told) for name in told["methods"]}}


def main() -> None:
    import tepo

    chosen = harness.parser(__doc__).parse_args()
    report = harness.Report("objectives", chosen)
    names = [entry.name for entry in tepo.objectives() if report.wants(entry.name)]
    shape = {"groups": GROUPS, "group": GROUP, "tokens": TOKENS, "repeats": 20}
    if chosen.quick:
        names, shape = names[:4], {"groups": 2, "group": 4, "tokens": 16, "repeats": 2}
    bandwidth = floors.measure([], "float32").bandwidth
    side = harness.Side(harness.OURS, {**shape, "methods": names}, harness.ALLOCATOR)
    runs = [harness.run_side(__file__, side) for _ in range(1 if chosen.quick else chosen.pairs)]
    for run in runs:
        if "failed" in run:
            raise SystemExit(f"the objectives could not be measured: {run['failed']}")
    for name in names:
        summary = harness.summary([run["methods"][name] for run in runs])
        report.add(
            {
                "case": name,
                "shape": shape,
                "sides": {harness.OURS: summary},
                "ratios": {},
                "skipped": {},
                "floor": {"seconds": summary["bytes"]["median"] / bandwidth, "bytes": summary["bytes"]["median"]},
            }
        )
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
