"""One call that holds an objective to the whole invariance matrix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from tepo.core.errors import InputError, nearest
from tepo.objectives import Objective
from tepo.objectives import objective as named
from tepo.testing.batches import KINDS, Kind
from tepo.testing.draws import steady_batch
from tepo.testing.invariances import INVARIANCES, OF_PLAIN
from tepo.testing.outcomes import evaluate

# bfloat16 inputs hold few values, so their batches are drawn apart, and only where rounding has something to turn.
ROUNDED_KINDS: tuple[Kind, ...] = ("plain", "first-update", "zero-variance")


def check_objective(
    objective: Objective | str,
    *,
    kinds: Sequence[Kind] = KINDS,
    only: Collection[str] | None = None,
    seeds: Sequence[int] = (0,),
    **settings: Any,
) -> None:
    """Hold an objective (or a name of the catalogue, with settings) to the invariance matrix.

    On random batches of every kind (see `random_batch`), and for every invariance of `INVARIANCES` (or those in
    `only`): loss, gradients (of log-probs, entropies, other scorer statistics and learnable scalars) and metrics.
    Draws within 1e-3 of a clip or threshold are rejected.
    Raises `AssertionError` that names the objective, the invariance, the kind of batch, the field and the size of
    the difference.
    """
    if isinstance(objective, str):
        objective = named(objective, **settings)
    elif settings:
        raise InputError(f"settings {sorted(settings)} go with a name of the catalogue, not with an Objective")
    for name in only or ():
        if name not in INVARIANCES:
            raise InputError(f"invariance {name!r} is not in the matrix.{nearest(name, INVARIANCES)}")
    wanted = [name for name in INVARIANCES if only is None or name in only]
    for seed in seeds:
        for kind in kinds:
            found = _failures(objective, wanted, kind, seed)
            if found:
                raise AssertionError(f"objective {objective.name!r} is not invariant:\n" + "\n".join(found))


def _failures(objective: Objective, wanted: Sequence[str], kind: Kind, seed: int) -> list[str]:
    """Return one line a difference, for one kind of batch."""
    wanted = [name for name in wanted if kind == "plain" or name not in OF_PLAIN]
    groups = {torch.float32: [name for name in wanted if name != "bfloat16"]}
    if kind in ROUNDED_KINDS:
        groups[torch.bfloat16] = [name for name in wanted if name == "bfloat16"]
    lines = []
    for rounded, names in groups.items():
        if not names:
            continue
        batch = steady_batch(objective, seed, kind=kind, rounded=rounded)
        expected = evaluate(objective, batch)
        for name in names:
            for difference in INVARIANCES[name](objective, batch, expected):
                lines.append(f"  {name}, {kind} batch, seed {seed}: {difference}")
    return lines
