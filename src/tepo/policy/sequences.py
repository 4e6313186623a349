"""Token sequences to score, and their layout as one right-padded batch."""

from __future__ import annotations

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
class Layout:
    """A right-padded batch and where its scored tokens are.

    ids [B, L]: the tokens; predictors [N]: flat positions in [B * L] whose hidden state predicts a scored token;
    targets [N]: those tokens; slots [N]: flat positions of the results in [B * T]; mask [B, T].
    """

    ids: Tensor
    predictors: Tensor
    targets: Tensor
    slots: Tensor
    mask: Tensor


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


def lay_out(sequences: Sequence[TokenSequence], *, width: int | None, device: torch.device) -> Layout:
    """Pad to the right and list the scored tokens; T is `width` or the longest response.

    A causal model never looks to the right, so padding needs no attention mask; each row is padded with its own
    last token, an id that certainly exists.
    """
    longest = max(len(sequence.response) for sequence in sequences)
    columns = longest if width is None else width
    if columns < longest:
        raise InputError(f"width={columns} is less than the longest response ({longest} tokens)")
    length = max(len(sequence) for sequence in sequences)
    ids: list[list[int]] = []
    predictors: list[int] = []
    targets: list[int] = []
    slots: list[int] = []
    mask = torch.zeros(len(sequences), columns, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens = [*sequence.prompt, *sequence.response]
        ids.append(tokens + tokens[-1:] * (length - len(tokens)))
        start = row * length + len(sequence.prompt) - 1
        for place, token in enumerate(sequence.response):
            if sequence.loss_mask is None or sequence.loss_mask[place]:
                predictors.append(start + place)
                targets.append(token)
                slots.append(row * columns + place)
    index = torch.tensor(slots, dtype=torch.long)
    mask.view(-1)[index] = True
    return Layout(
        ids=torch.tensor(ids, dtype=torch.long).to(device),
        predictors=torch.tensor(predictors, dtype=torch.long).to(device),
        targets=torch.tensor(targets, dtype=torch.long).to(device),
        slots=index.to(device),
        mask=mask.to(device),
    )


def split_rows(sequences: Sequence[TokenSequence], max_tokens: int) -> list[list[int]]:
    """Split row indices, longest rows first, into parts of at most `max_tokens` padded tokens (one row at least)."""
    order = sorted(range(len(sequences)), key=lambda row: (-len(sequences[row]), row))
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * len(sequences[parts[-1][0]]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def spread(found: TokenStatistics, layout: Layout) -> Scores:
    """Put the statistics [N] of the scored tokens into their places [B, T]; zero elsewhere."""

    def place(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        flat = values.new_zeros(layout.mask.numel()).index_copy(0, layout.slots, values)
        return flat.view(layout.mask.shape)

    logp = place(found.logp)
    assert logp is not None
    return Scores(
        logp=logp,
        mask=layout.mask,
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
