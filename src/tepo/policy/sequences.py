"""Token sequences to score, where their scored tokens are, and the results as a table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.policy.statistics import TokenStatistics


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and the response to it, as token ids.

    `loss_mask` says which response tokens are scored (default: all); tool output inside a response is masked out.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Scores:
    """What the policy says of the response tokens; every tensor is [B, T] and zero outside `mask`.

    `logp` is log pi(token | prefix) after temperature over the full vocabulary, `entropy` the entropy of that
    distribution (nats), `sum_p2` the sum of p^2 and `sum_p2_logp` the sum of p^2 log p over the vocabulary,
    `kl_full` KL(pi || reference) summed over the vocabulary. All float32; a statistic not asked for is None.
    """

    logp: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    sum_p2: Tensor | None = None
    sum_p2_logp: Tensor | None = None
    kl_full: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The scored tokens of a batch, row after row.

    rows [N] and places [N]: the row of each and its place in the response; tokens [N]; mask [B, T]. The first `count`
    are the scored ones; what follows repeats the last, up to a number that recurs.
    """

    rows: Tensor
    places: Tensor
    tokens: Tensor
    mask: Tensor
    count: int


def recurring(count: int, parts: int = 32) -> int:
    """Return `count` or a little more, at most 1 / `parts` of it, one of `parts` numbers between two powers of two.

    The kernel libraries of processors compile code for every shape that they meet and keep it: in bfloat16 half a
    millisecond and half a megabyte a product, up to a gigabyte in all. Sizes that recur find theirs made.
    """
    step = 1 << max(0, (count // parts).bit_length() - 1)
    return -(-count // step) * step


def check_sequences(sequences: Sequence[TokenSequence], *, vocabulary: int, max_positions: int) -> None:
    """Raise InputError for a batch that cannot be scored, naming the row and what is wrong with it."""
    if not sequences:
        raise InputError("score() needs at least one sequence, got none")
    for row, sequence in enumerate(sequences):
        if not sequence.prompt:
            raise InputError(
                f"sequence {row}: the prompt is empty, so nothing predicts the first response token;"
                " put the tokenizer's BOS (or EOS) token there"
            )
        if sequence.loss_mask is not None and len(sequence.loss_mask) != len(sequence.response):
            raise InputError(
                f"sequence {row}: loss_mask has {len(sequence.loss_mask)} entries for"
                f" {len(sequence.response)} response tokens"
            )
        if len(sequence) > max_positions:
            raise InputError(f"sequence {row}: {len(sequence)} tokens, but the model has {max_positions} positions")
        tokens = (*sequence.prompt, *sequence.response)
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise InputError(f"sequence {row}: token id {wrong} is outside the vocabulary of {vocabulary}")


def scored_tokens(sequences: Sequence[TokenSequence], *, width: int | None, device: torch.device) -> Scored:
    """List the tokens to score; T is `width` or the longest response."""
    longest = max(len(sequence.response) for sequence in sequences)
    columns = longest if width is None else width
    if columns < longest:
        raise InputError(f"width={columns} is less than the longest response ({longest} tokens)")
    masks = [
        [True] * len(sequence.response) if sequence.loss_mask is None else list(sequence.loss_mask)
        for sequence in sequences
    ]
    mask = torch.tensor([[*row, *[False] * (columns - len(row))] for row in masks], dtype=torch.bool)
    mask = mask.view(len(sequences), columns)
    rows, places = mask.nonzero(as_tuple=True)
    count = len(rows)
    again = torch.arange(recurring(count)).clamp(max=count - 1)
    tokens = [
        token
        for sequence, chosen in zip(sequences, masks, strict=True)
        for token in itertools.compress(sequence.response, chosen)
    ]
    rows, places, ids = (each[again].to(device) for each in (rows, places, torch.tensor(tokens, dtype=torch.long)))
    return Scored(rows, places, ids, mask.to(device), count)


def padded(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return token ids [B, L], padded to the right: a causal model never looks there, so that needs no mask.

    A row is padded with its own last token, an id that certainly exists; an empty one with id 0.
    """
    length = max(len(row) for row in rows)
    ids = [[*row, *(row[-1:] or (0,)) * (length - len(row))] for row in rows]
    return torch.tensor(ids, dtype=torch.long).to(device)


def spread(values: Tensor, scored: Scored) -> Tensor:
    """Put values [N] of the scored tokens into their places [B, T]; zero elsewhere."""
    rows, columns = scored.mask.shape
    places = (scored.rows * columns + scored.places)[: scored.count]
    flat = values.new_zeros(rows * columns).index_copy(0, places, values[: scored.count])
    return flat.view(rows, columns)


def scores_of(found: TokenStatistics, scored: Scored) -> Scores:
    """Return the statistics [N] of the scored tokens as a table [B, T]."""

    def place(values: Tensor | None) -> Tensor | None:
        return None if values is None else spread(values, scored)

    return Scores(
        logp=spread(found.logp, scored),
        mask=scored.mask,
        entropy=place(found.entropy),
        sum_p2=place(found.sum_p2),
        sum_p2_logp=place(found.sum_p2_logp),
        kl_full=place(found.kl_full),
    )


def in_order(scored: Sequence[Scores], rows: Sequence[int]) -> Scores:
    """Join parts of a batch and put the rows back in their order."""
    back = torch.argsort(torch.tensor(rows))

    def join(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in scored]
        return None if values[0] is None else torch.cat(values)[back.to(values[0].device)]

    logp, mask = join("logp"), join("mask")
    assert logp is not None
    assert mask is not None
    rest = {name: join(name) for name in ("entropy", "sum_p2", "sum_p2_logp", "kl_full")}
    return Scores(logp=logp, mask=mask, **rest)
