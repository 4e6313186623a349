"""Decoding with a fused model: rows keep their place in a preallocated cache, others take over those that end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.rollout.decoder import prompt_batches
from tepo.rollout.fused_model import FusedModel
from tepo.rollout.tensor_step import Step

SPARE_COLUMNS = 64
"""Columns by which the cache grows."""


@dataclass
class FusedRows:
    """Sequences being decoded; a row's tokens fill the first `lengths[b]` columns of its slot `slots[b]` in the cache.

    `keys` and `values` hold [slots * K, columns, size] for each layer, zero beyond the tokens unless the step goes by
    slots: what is masked must still be a number. `logits` [B, V] predict the next token; `width` is the longest row.
    """

    keys: list[Tensor]
    values: list[Tensor]
    slots: Tensor
    lengths: Tensor
    width: int
    logits: Tensor

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def columns(self) -> int:
        """Columns there is room for."""
        return self.keys[0].shape[1]


class FusedDecoder:
    """Prefill and single-token steps of a fused model; the same contract as `Decoder`."""

    def __init__(self, model: FusedModel, step: Step, *, dtype: torch.dtype, pad_id: int, max_positions: int) -> None:
        self._model = model
        self._step = step
        self._dtype = dtype
        self._pad_id = pad_id
        self._max_positions = max_positions

    @property
    def keeps_in_place(self) -> bool:
        """Whether rows may leave their slots behind."""
        return self._step.by_slot

    def prefill(self, prompts: Sequence[Sequence[int]]) -> FusedRows:
        """Run prompts through the model, neighbours of the list together, and return one row for each."""
        parts = [self._prefill(batch) for batch in prompt_batches(prompts)]
        return self.gather([(part, range(len(part))) for part in parts]) if len(parts) > 1 else parts[0]

    def gather(self, parts: Sequence[tuple[FusedRows, Sequence[int]]]) -> FusedRows:
        """Assemble a batch from rows of others, in the order given; a row may be taken repeatedly."""
        indexed = [(rows, torch.tensor(indices, device=self._model.device)) for rows, indices in parts if indices]
        lengths = torch.cat([rows.lengths[index] for rows, index in indexed])
        width = int(lengths.max())
        result = self._empty(lengths, width, torch.cat([rows.logits[index] for rows, index in indexed]))
        first = 0
        for rows, index in indexed:
            places = torch.arange(first, first + index.numel(), device=index.device)
            self._copy(result, places, rows, index)
            first += index.numel()
        return result

    def fill(
        self, rows: FusedRows, places: Sequence[int], parts: Sequence[tuple[FusedRows, Sequence[int]]]
    ) -> FusedRows:
        """Put rows of `parts` in the given places of `rows`; the others stay as they are. Works in place."""
        device = self._model.device
        taken = 0
        for source, indices in parts:
            if not indices:
                continue
            index = torch.tensor(indices, device=device)
            place = torch.tensor(places[taken : taken + len(indices)], device=device)
            taken += len(indices)
            if source.width > rows.columns:
                self._grow(rows, source.width)
            self._copy(rows, place, source, index)
            rows.lengths[place] = source.lengths[index]
            rows.logits[place] = source.logits[index]
        rows.width = int(rows.lengths.max())
        return rows

    def keep(self, rows: FusedRows, kept: Sequence[int]) -> FusedRows:
        """Return the rows `kept`, in the order given; `rows` is used up. Their slots are moved only when more than half
        of the cache would be idle, or when the step wants them one behind the other."""
        if not self.keeps_in_place or 2 * len(kept) < self._slots(rows):
            return self.gather([(rows, kept)])
        index = torch.tensor(kept, device=self._model.device)
        lengths = rows.lengths[index]
        width = int(lengths.max())
        return FusedRows(rows.keys, rows.values, rows.slots[index], lengths, width, rows.logits[index])

    def advance(self, rows: FusedRows, tokens: Sequence[int]) -> None:
        """Feed one token to each row, in place.

        A row that has used up the model's positions overwrites its last token: the caller has finished with it, and
        it only waits to be replaced or dropped.
        """
        at = rows.lengths.clamp(max=self._max_positions - 1)
        rows.lengths = at + 1
        rows.width = min(rows.width + 1, self._max_positions)
        if rows.width > rows.columns:
            self._grow(rows, rows.width)
        rows.logits = self._step(rows, torch.tensor(tokens, device=at.device), at)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> FusedRows:
        device = self._model.device
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([list(prompt) + [self._pad_id] * (width - len(prompt)) for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        rows = self._empty(lengths, width, torch.empty(0))
        rows.logits = self._step.prompts(rows, ids, lengths)
        return rows

    def _empty(self, lengths: Tensor, width: int, logits: Tensor) -> FusedRows:
        """Return rows with room for `width` columns and the spare ones."""
        model = self._model
        shape = (lengths.shape[0] * model.key_heads, self._room(width), model.size)
        make = torch.empty if self._step.by_slot else torch.zeros
        keys = [make(shape, dtype=self._step.key_dtype, device=model.device) for _ in model.layers]
        values = [make(shape, dtype=self._dtype, device=model.device) for _ in model.layers]
        slots = torch.arange(len(lengths), device=model.device)
        return FusedRows(keys, values, slots, lengths.clone(), width, logits)

    def _copy(self, target: FusedRows, places: Tensor, source: FusedRows, index: Tensor) -> None:
        """Copy the cached columns of rows `index` of `source` to rows `places` of `target`."""
        heads, width = self._model.key_heads, int(source.lengths[index].max())
        to, by = target.slots[places], source.slots[index]
        for into, out_of in zip([*target.keys, *target.values], [*source.keys, *source.values], strict=True):
            _by_slot(into, heads)[to, :, :width] = _by_slot(out_of, heads)[by, :, :width]

    def _slots(self, rows: FusedRows) -> int:
        return rows.keys[0].shape[0] // self._model.key_heads

    def _room(self, width: int) -> int:
        """Return the columns to have for `width` tokens: some to spare, but no more than there are positions."""
        return max(width, min(width + SPARE_COLUMNS, self._max_positions))

    def _grow(self, rows: FusedRows, width: int) -> None:
        """Make room for `width` columns and the spare ones."""
        for caches in (rows.keys, rows.values):
            for index, old in enumerate(caches):
                shape = (old.shape[0], self._room(width), old.shape[2])
                caches[index] = old.new_empty(shape) if self._step.by_slot else old.new_zeros(shape)
                caches[index][:, : old.shape[1]] = old


def _by_slot(cache: Tensor, heads: int) -> Tensor:
    """Return [slots * heads, columns, size] as a view [slots, heads, columns, size]."""
    return cache.view(-1, heads, cache.shape[1], cache.shape[2])
