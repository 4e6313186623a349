"""Random token batches for tests: consistent distributions, padding on both sides, holes, unsorted groups."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tepo.core.errors import InputError, nearest
from tepo.core.seeds import address, stream
from tepo.objectives import TokenBatch

Kind = Literal[
    "plain",
    "first-update",
    "token-advantages",
    "reward-components",
    "zero-variance",
    "group-of-one",
    "length-one",
    "empty-row",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Given to every objective; the rest only to one that declares it, so that an undeclared need is found.
ALWAYS = frozenset({"logp", "mask", "old_logp", "rewards", "group"})
OPTIONAL = frozenset(
    {
        "ref_logp",
        "rollout_logp",
        "entropy",
        "old_entropy",
        "token_ids",
        "token_rewards",
        "values",
        "old_values",
        "other_logp",
        "sum_p2",
        "sum_p2_logp",
        "kl_full",
        "row_id",
        "truncated",
        "correct",
    }
)


def random_batch(
    seed: int,
    *,
    fields: Collection[str] = OPTIONAL,
    kind: Kind = "plain",
    groups: Sequence[int] = (4, 3),
    width: int = 6,
    vocabulary: int = 9,
    rounded: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
) -> TokenBatch:
    """Return a batch of `sum(groups)` rows and `width` columns, the same for the same arguments.

    Log-probs, entropies and second moments of a position belong to one distribution over `vocabulary` tokens; the
    current policy has drifted from the old one by up to about a factor of 2 a token, in both directions. Rows come
    in random order, group ids are arbitrary integers, padding is left and right, and masks have holes.

    `fields`: the optional fields to set beside `ALWAYS`, e.g. `objective.needs.batch`. `kind`:
    "plain" · "first-update" (no old values, the current policy is the old one) · "token-advantages" (`[B, T]`
    advantages beside the rewards) · "reward-components" (`[B, 2]`, some NaN, one row all NaN) · "zero-variance"
    (the first group's rewards are equal, and no binary fraction) · "group-of-one" (two more groups of one row) ·
    "length-one" (one token a row) · "empty-row" (one row without tokens).
    `rounded`: round every float to this type first, so that narrower arithmetic gets exactly the same inputs.
    """
    unknown = set(fields) - ALWAYS - OPTIONAL - {"advantage"}
    if unknown:
        raise InputError(f"no generator for the field {sorted(unknown)[0]!r}.{nearest(sorted(unknown)[0], OPTIONAL)}")
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} of a random batch.{nearest(kind, KINDS)}")
    sizes = [*groups, 1, 1] if kind == "group-of-one" else list(groups)
    draw = stream(seed, "testing/layout", *sizes, width)
    rows = [group for group, size in enumerate(sizes) for _ in range(size)]
    draw.shuffle(rows)
    names = draw.sample(range(-99, 100), len(sizes))
    made: dict[str, Tensor] = {
        "mask": _mask(draw, len(rows), width, kind),
        "group": torch.tensor([names[group] for group in rows]),
        "row_id": torch.tensor(draw.sample(range(10**6), len(rows))),
        "truncated": torch.tensor([draw.random() < 0.3 for _ in rows]),
        "rewards": _rewards(draw, rows, kind),
    }
    made["correct"] = made["rewards"].reshape(len(rows), -1)[:, 0] > 0
    generator = torch.Generator().manual_seed(address(seed, "testing/values", len(rows), width) % 2**63)
    made |= _token_values(generator, len(rows), width, vocabulary, first_update=kind == "first-update")
    wanted = (ALWAYS | set(fields)) & set(made)
    if kind == "token-advantages":
        wanted = wanted | {"advantage"}
    chosen = {name: _cast(made[name], rounded, dtype) for name in wanted}
    return TokenBatch(**chosen)


def _cast(value: Tensor, rounded: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    if not value.is_floating_point():
        return value
    return (value if rounded is None else value.to(rounded)).to(dtype)


def _mask(draw: random.Random, rows: int, width: int, kind: Kind) -> Tensor:
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        if kind == "length-one":
            mask[row, draw.randrange(width)] = True
            continue
        start = draw.randrange(max(1, width // 2))
        end = draw.randrange(start + 1, width + 1)
        mask[row, start:end] = True
        for column in range(start + 1, end):
            mask[row, column] = draw.random() > 0.2
    if kind == "empty-row":
        mask[draw.randrange(rows)] = False
    return mask


def _rewards(draw: random.Random, rows: Sequence[int], kind: Kind) -> Tensor:
    members = {group: [row for row, other in enumerate(rows) if other == group] for group in rows}
    binary = draw.random() < 0.5
    values = [float(draw.random() < 0.5) if binary else draw.uniform(-1, 1) for _ in rows]
    for inside in members.values():
        if len(inside) > 1:
            values[inside[0]], values[inside[1]] = (1.0, 0.0) if binary else (0.9, -0.8)
    if kind == "zero-variance":
        equal = draw.choice((0.1, 1 / 3, -0.7))
        for row in members[0]:
            values[row] = equal
    rewards = torch.tensor(values, dtype=torch.float64)
    if kind != "reward-components":
        return rewards
    second = torch.tensor([draw.uniform(-1, 1) for _ in rows], dtype=torch.float64)
    both = torch.stack([rewards, second], dim=1)
    gaps = draw.sample(range(len(rows)), 2)
    both[gaps[0]] = float("nan")
    both[gaps[1], 1] = float("nan")
    return both


@dataclass(frozen=True, eq=False)
class _Policy:
    """Log-probs of every token of the vocabulary, `[B, T, V]`."""

    log_probs: Tensor

    def of(self, tokens: Tensor) -> Tensor:
        return self.log_probs.gather(2, tokens[..., None])[..., 0]

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(dim=2)


def _token_values(
    generator: torch.Generator, rows: int, width: int, vocabulary: int, first_update: bool
) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def policy(logits: Tensor) -> _Policy:
        return _Policy(logits.log_softmax(dim=2))

    shape = (rows, width, vocabulary)
    logits = 1.5 * normal(*shape)
    old = policy(logits)
    tokens = torch.multinomial(old.log_probs.exp().flatten(0, 1), 1, generator=generator).view(rows, width)
    taken = torch.nn.functional.one_hot(tokens, vocabulary).to(torch.float64)
    drift = 0.5 * normal(rows, 1, 1) + 0.4 * normal(rows, width, 1)
    new = policy(logits + drift * taken + 0.1 * normal(*shape))
    sampler, reference, other = (policy(logits + scale * normal(*shape)) for scale in (0.4, 0.5, 1.0))
    if first_update:
        new = old
    squares = (2 * new.log_probs).exp()
    values = {
        "logp": new.of(tokens),
        "old_logp": old.of(tokens),
        "ref_logp": reference.of(tokens),
        "rollout_logp": sampler.of(tokens),
        "other_logp": other.of(tokens),
        "entropy": new.entropy(),
        "old_entropy": old.entropy(),
        "sum_p2": squares.sum(dim=2),
        "sum_p2_logp": (squares * new.log_probs).sum(dim=2),
        "kl_full": (new.log_probs.exp() * (new.log_probs - reference.log_probs)).sum(dim=2),
        "token_ids": tokens,
        "token_rewards": 0.3 * normal(rows, width),
        "values": normal(rows, width),
        "old_values": normal(rows, width),
        "advantage": normal(rows, width),
    }
    if first_update:
        del values["old_logp"], values["old_entropy"]
    return values
