"""Scoring a set of responses without gradient, in micro-batches, as dense arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tepo.policy import Policy, TokenSequence
from tepo.policy.batching import Layout
from tepo.training.micro import Budget, micro_batches, padded_tokens

FIELDS = ("logp", "entropy", "sum_p2", "sum_p2_logp", "kl_full")
"""What a scorer returns, under the names of the token batch's fields."""


def score_rows(
    policy: Policy,
    sequences: Sequence[TokenSequence],
    *,
    rows: Sequence[Sequence[int]],
    width: int,
    temperature: float,
    statistics: frozenset[str],
    budget: Budget,
    reference: Policy | None = None,
) -> dict[str, Tensor]:
    """Return `logp` and the statistics asked for, each `[B, width]`, zero outside the responses, no gradient.

    `rows` are the mini-batches that will be trained on; no micro-batch crosses their borders. So every row is
    computed in the very company it has in its update, and at equal weights the two passes agree to the last bit
    even in bfloat16, where the shape of a batch shows in its values.
    """

    def score(part: Sequence[TokenSequence]) -> dict[str, Tensor]:
        scores = policy.score(part, temperature=temperature, statistics=statistics, reference=reference)
        return {name: value for name in FIELDS if (value := getattr(scores, name)) is not None}

    return score_parts(score, sequences, rows=rows, width=width, budget=budget, layout=policy.layout)


def score_parts(
    score: Callable[[Sequence[TokenSequence]], Mapping[str, Tensor]],
    sequences: Sequence[TokenSequence],
    *,
    rows: Sequence[Sequence[int]],
    width: int,
    budget: Budget,
    layout: Layout,
) -> dict[str, Tensor]:
    """Return what `score` says of the sequences, micro-batch by micro-batch, as arrays `[B, width]`; no gradient.

    `layout` is that of the model whose updates cut their micro-batches alike.
    """
    every = [row for part in rows for row in part]

    def work(tokens: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for part in (part for mini in rows for part in micro_batches(sequences, mini, tokens, layout)):
                for name, value in score([sequences[row] for row in part]).items():
                    if name not in found:
                        found[name] = value.new_zeros(len(sequences), width)
                    found[name][torch.tensor(part, device=value.device), : value.shape[1]] = value
        return found

    return budget.run(work, largest=padded_tokens(sequences, every))
