"""Random batches on which an objective makes no close decisions, so that rounding cannot turn one over.

A clip, a mask or a threshold makes the gradient jump. Whether a value is within `MARGIN` of one is found from
outside, for parts known and unknown alike: the inputs are moved by the margin, up, down and at random, and no
decision may change and no gradient may jump. Exact ties are a matter of definition and are tested apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tepo.core.seeds import address
from tepo.objectives import Objective, TokenBatch
from tepo.testing.batches import Kind, random_batch
from tepo.testing.outcomes import CURRENT, detached, evaluate

# Distance (nats) from every clip and threshold; where clips are finer than 1e-2, a distance they leave room for.
MARGIN = 1e-3
FINE_MARGIN = 5e-5
# A gradient that moves by more than this many margins, relative to the largest one, has jumped.
JUMP = 30
ATTEMPTS = 300


def steady_batch(
    objective: Objective, seed: int, *, kind: Kind = "plain", rounded: torch.dtype | None = torch.float32
) -> TokenBatch:
    """Return the first random batch of this seed on which the objective makes no close decision.

    Every float is representable in `rounded`, held in float64. Raises `AssertionError` when `ATTEMPTS` draws in a
    row are unsteady: the objective then jumps nearly everywhere.
    """
    for attempt in range(ATTEMPTS):
        place = address(seed, "testing/steady", attempt)
        batch = random_batch(place, fields=objective.needs.batch, kind=kind, rounded=rounded)
        if is_steady(objective, batch):
            return batch
    raise AssertionError(f"objective {objective.name!r}: no steady {kind!r} batch in {ATTEMPTS} draws (seed {seed})")


def is_steady(objective: Objective, batch: TokenBatch) -> bool:
    """Whether no input of the batch is within the margin of a decision of the objective."""
    margin = FINE_MARGIN if objective.needs.fine_clip else MARGIN
    decisions, gradients = _fingerprint(objective, batch)
    for probe in _probes(batch, margin):
        other_decisions, other_gradients = _fingerprint(objective, probe)
        if decisions != other_decisions:
            return False
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            if float((other_gradients[name] - gradient).abs().max()) > JUMP * margin * scale:
                return False
    return True


def _probes(batch: TokenBatch, margin: float) -> Iterator[TokenBatch]:
    for name in ("logp", "entropy", "rollout_logp", "values"):
        value: Tensor | None = getattr(batch, name)
        if value is not None:
            yield batch.replace(**{name: value + margin})
            yield batch.replace(**{name: value - margin})
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        moved = {}
        for name in CURRENT:
            value = getattr(batch, name)
            if value is not None:
                signs = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype) * 2 - 1
                moved[name] = value + margin * signs
        yield batch.replace(**moved)


def _fingerprint(objective: Objective, batch: TokenBatch) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return what was decided (exactly comparable), and the gradients (comparable up to the margin)."""
    with torch.random.fork_rng(devices=[]):  # one that reads the global generator fails "repeatable", not here
        torch.manual_seed(0)
        outcome = evaluate(objective, batch)
        statistics = objective.statistics(objective.prepare(detached(batch)).batch)
    decisions: dict[str, object] = {
        name: value for name, value in outcome.metrics.items() if name.startswith(("clip/", "mask/"))
    }
    decisions |= {f"weights {name}": (value != 0).tolist() for name, value in statistics.weights.items()}
    return decisions, outcome.gradients
