"""A whole training step against TRL's GRPOTrainer: sampling, rewards, old values, updates.

    python benchmarks/bench_step.py                                  every shape, length and number of updates
    python benchmarks/bench_step.py --model tiny --lengths full --updates 1

TRL appears twice: with the settings its configuration has by itself (recomputation, 8 rows at once), and with its
quickest full-precision-weights settings (no recomputation, all rows at once; bfloat16 autocast for SmolLM2, float32 for
the tiny model) under our allocator setting. Each side has the precision it is quickest in, weights are float32: ours
computes in bfloat16; for the tiny model a second row shows it in float32, which is what `model.dtype=auto` takes there.
`--bf16` adds TRL with bfloat16 weights, where small updates are rounded away.

Lengths: `full` responses all reach the limit (what ends one cannot be sampled; the same folder for every side);
`varied` they end by themselves, SmolLM2 as it does, the tiny model taught to stop after 4 to 32 tokens.
About 10 minutes a row for SmolLM2, 3 for the tiny model, on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import floors
import harness
import models
import step_sides

MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "prompts": 2,
        "group": 8,
        "length": 64,
        "warm_up": 1,
        "steps": 3,
        "full": "smollm2-endless",
        "varied": "smollm2",
        "best": {"gradient_checkpointing": False},
        "dtype": "bfloat16",
    },
    "tiny": {
        "prompts": 8,
        "group": 8,
        "length": 32,
        "warm_up": 3,
        "steps": 10,
        "full": "tiny-endless",
        "varied": "tiny-4-32",
        "best": {"gradient_checkpointing": False, "bf16": False},
        "dtype": "bfloat16",
        "also": "float32",
    },
}


def options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--lengths", choices=["full", "varied", "all"], default="all")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 8], help="updates a rollout batch (default 1 8)")
    parser.add_argument("--steps", type=int, help="measured steps in each process")
    parser.add_argument("--bf16", action="store_true", help="also TRL with bfloat16 weights")
    parser.add_argument("--tepo", action="store_true", help="also our side with the objective tepo")
    return parser.parse_args()


def sides(name: str, work: dict[str, Any], chosen: argparse.Namespace) -> list[harness.Side]:
    """Return ours first, then TRL's settings."""
    best = MODELS[name]["best"]
    found = [harness.Side(harness.OURS, {**work, "side": "ours", "dtype": MODELS[name]["dtype"]})]
    if dtype := MODELS[name].get("also"):
        found.append(harness.Side(f"tepo, {dtype}", {**work, "side": "ours", "dtype": dtype}))
    if chosen.tepo:
        found.append(harness.Side("tepo, objective tepo", {**work, "side": "ours", "objective": "tepo"}))
    peers: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "trl as documented": ({}, {}),
        "trl at its best, our allocator": (best, harness.ALLOCATOR),
    }
    if chosen.bf16:
        weights = {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}
        peers["trl bfloat16 weights, our allocator"] = (weights, harness.ALLOCATOR)
    for peer, (settings, environment) in peers.items():
        found.append(harness.Side(peer, {**work, "side": "trl", "settings": settings}, environment, ("trl",)))
    return found


def case(name: str, ends: str, updates: int, chosen: argparse.Namespace) -> harness.Case:
    shape = {key: MODELS[name][key] for key in ("prompts", "group", "length", "warm_up", "steps")}
    shape["steps"] = chosen.steps or shape["steps"]
    if chosen.quick:
        shape |= {"prompts": 2, "group": 4, "length": 8 if ends == "full" else 16, "warm_up": 1, "steps": 2}
    work = {**shape, "model": name, "ends": ends, "updates": updates, "path": str(models.ensure(MODELS[name][ends]))}
    plural = "update" if updates == 1 else "updates"
    rows = f"{shape['prompts']}x{shape['group']} x {shape['length']}"
    return harness.Case(f"{name} {rows}, {ends}, {updates} {plural}", work, sides(name, work, chosen))


def add_floor(found: dict[str, Any]) -> None:
    """Add the floor of what our side did, by its own counts of tokens."""
    shape, side = found["shape"], found["sides"].get(harness.OURS)
    if side is None:
        return
    rows = shape["prompts"] * shape["group"]
    found["floor"] = floors.step(
        floors.Sizes.of(models.ensure(MODELS[shape["model"]][shape["ends"]])),
        groups=shape["prompts"],
        prompt=side["prompt_tokens"]["median"] / rows,
        rows=rows,
        tokens=side["tokens"]["median"],
        longest=shape["length"],
        updates=shape["updates"],
        dtype=MODELS[shape["model"]]["dtype"],
    )


def work(told: dict[str, Any]) -> dict[str, Any]:
    return step_sides.ours(told) if told["side"] == "ours" else step_sides.trl(told)


def main() -> None:
    chosen = options()
    report = harness.Report("step", chosen)
    names = list(MODELS) if chosen.model == "all" else [chosen.model]
    if chosen.quick and chosen.model == "all":
        names = ["tiny"]
    for name in names:
        for ends in ("full", "varied") if chosen.lengths == "all" else (chosen.lengths,):
            for updates in chosen.updates:
                made = case(name, ends, updates, chosen)
                report.run(__file__, made, add_floor)
    report.note("time: one rollout batch with all its updates; peak: resident memory, worker processes included")
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
