"""Golden values: what every method of the catalogue makes of two stored batches.

    python tests/objectives/golden.py            # say what differs
    python tests/objectives/golden.py --write    # freeze the present values, on purpose

The inputs are stored beside the values, so neither depends on a random generator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import tepo
from tepo.objectives import TokenBatch
from tepo.testing import evaluate, random_batch

FILE = Path(__file__).with_name("golden.json")
KINDS = ("plain", "first-update")


def to_json(batch: TokenBatch) -> dict[str, Any]:
    """Return the fields of a batch as nested lists."""
    return {name: value.tolist() for name, value in batch.present()}


def from_json(fields: dict[str, Any]) -> TokenBatch:
    """Return the batch that `to_json` wrote; floats are float64."""
    tensors = {name: torch.tensor(value) for name, value in fields.items()}
    return TokenBatch(**{name: _exact(tensors[name], value) for name, value in fields.items()})


def _exact(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64) if tensor.is_floating_point() else tensor


def values(name: str, batch: TokenBatch) -> dict[str, Any]:
    """Return loss, gradients that are not all zero, and metrics of a method at its defaults."""
    outcome = evaluate(tepo.objective(name), batch)
    moving = {field: value.tolist() for field, value in outcome.gradients.items() if bool((value != 0).any())}
    return {"loss": float(outcome.loss), "gradients": moving, "metrics": outcome.metrics}


def present() -> dict[str, Any]:
    """Return the golden file as the present code would write it, on the stored batches where there are some."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"batches": {}}
    batches = {kind: stored["batches"].get(kind) or to_json(random_batch(2604, kind=kind)) for kind in KINDS}
    names = [entry.name for entry in tepo.objectives()]
    found = {name: {kind: values(name, from_json(batches[kind])) for kind in KINDS} for name in names}
    return {"batches": batches, "objectives": found}


def main() -> None:
    """Compare, or write with --write."""
    now = present()
    before = json.loads(FILE.read_text())["objectives"] if FILE.exists() else {}
    changed = [name for name in now["objectives"] if now["objectives"][name] != before.get(name)]
    print("differs in some digit:", ", ".join(changed) or "nothing")
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps(now, separators=(",", ":")).replace('"objectives"', '\n"objectives"') + "\n")
        print(f"wrote {FILE.name}")


if __name__ == "__main__":
    main()
