"""The model's forward pass as the sampler needs it: prompts in, next-token logits out, rows coming and going."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PREFILL_TOKENS = 8192
"""Most tokens, padding included, in one forward pass over prompts; a single longer prompt goes alone."""


class DecodedRows(Protocol):
    """Sequences being decoded, whatever holds their keys and values; `logits` [B, V] predict the next tokens."""

    logits: Tensor

    def __len__(self) -> int: ...


class Decoder(Protocol):
    """What the sampling loop asks of a model. The rows a decoder is given are those it made."""

    @property
    def keeps_in_place(self) -> bool:
        """Whether `keep` seldom copies what rows hold, so that rows may leave one by one."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Run prompts through the model, neighbours of the list together, and return one row for each."""

    def gather(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> Any:
        """Assemble a batch from rows of others, in the order given; a row may be taken repeatedly."""

    def fill(self, rows: Any, places: Sequence[int], parts: Sequence[tuple[Any, Sequence[int]]]) -> Any:
        """Return `rows` with those of `parts` in the given places, as many as there are; `rows` is used up."""

    def keep(self, rows: Any, kept: Sequence[int]) -> Any:
        """Return the rows `kept`, in the order given; `rows` is used up."""

    def advance(self, rows: Any, tokens: Sequence[int]) -> None:
        """Feed one token to each row, in place.

        A row that has used up the model's positions forgets a token instead of taking a position that does not
        exist: the caller has finished with it, and it only waits to be replaced or dropped.
        """


@dataclass
class Rows:
    """Sequences being decoded: a left-padded batch in which every row's last token is in the last column.

    `lengths` [B] counts the tokens of each row that are in the cache, `logits` [B, V] (float32 or better) predict the
    next one. A row that entered late is simply padded more.
    """

    cache: Any
    lengths: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return self.lengths.shape[0]


class ModelDecoder:
    """Decoding by the model's own forward pass, for every model with a standard cache; call it without gradients."""

    keeps_in_place = False

    def __init__(self, model: nn.Module, *, device: torch.device, pad_id: int, max_positions: int) -> None:
        """Look at the model's signature once; `pad_id` fills columns that are masked.

        Raises:
            InputError: the model's cache holds more than keys and values.
        """
        from tepo.rollout import cache

        base: Any = model
        while hasattr(base, "get_base_model"):  # adapters pass everything on and hide the signature
            base = base.get_base_model()
        cache.check_supported(base.config)
        accepted = inspect.signature(base.forward).parameters
        self._cache = cache
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._model = model
        self._device = device
        self._pad_id = pad_id
        self._max_positions = max_positions

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Rows:
        """Run prompts through the model, neighbours of the list together, and return one row for each."""
        parts = [self._prefill(batch) for batch in prompt_batches(prompts)]
        return self.gather([(part, list(range(len(part)))) for part in parts]) if len(parts) > 1 else parts[0]

    def gather(self, parts: Sequence[tuple[Rows, Sequence[int]]]) -> Rows:
        """Assemble a batch from rows of others, in the order given; a row may be taken repeatedly."""
        indexed = [(rows, torch.tensor(indices, device=self._device)) for rows, indices in parts if indices]
        lengths = torch.cat([rows.lengths[index] for rows, index in indexed])
        return Rows(
            cache=self._cache.gather([(rows.cache, index) for rows, index in indexed], int(lengths.max())),
            lengths=lengths,
            logits=torch.cat([rows.logits[index] for rows, index in indexed]),
        )

    def fill(self, rows: Rows, places: Sequence[int], parts: Sequence[tuple[Rows, Sequence[int]]]) -> Rows:
        """Return `rows` with those of `parts` in the given places, as many as there are."""
        incoming = iter([(source, index) for source, indices in parts for index in indices])
        replaced = dict(zip(places, incoming, strict=False))
        chosen = [replaced.get(place, (rows, place)) for place in range(len(rows))]
        runs = [list(run) for _, run in itertools.groupby(chosen, key=lambda one: id(one[0]))]
        return self.gather([(run[0][0], [index for _, index in run]) for run in runs])

    def keep(self, rows: Rows, kept: Sequence[int]) -> Rows:
        """Return the rows `kept`, in the order given."""
        return self.gather([(rows, kept)])

    def advance(self, rows: Rows, tokens: Sequence[int]) -> None:
        """Feed one token to each row, in place; a row without a position left forgets its first token."""
        ids = torch.tensor(tokens, device=self._device).unsqueeze(-1)
        rows.lengths = (rows.lengths + 1).clamp(max=self._max_positions)
        width = rows.cache.get_seq_length() + 1
        rows.logits = self._forward(ids, rows.lengths.unsqueeze(-1) - 1, rows.lengths, width, rows.cache)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Rows:
        width = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        positions = torch.arange(width, device=self._device) - (width - lengths.unsqueeze(-1))
        cache = self._cache.empty_cache()
        tokens = torch.tensor(ids, device=self._device)
        logits = self._forward(tokens, positions.clamp(min=0), lengths, width, cache)
        return Rows(cache, lengths, logits)

    def _forward(self, ids: Tensor, positions: Tensor, lengths: Tensor, width: int, cache: Any) -> Tensor:
        """Return the logits [B, V] after the last of `ids` [B, n]; `width` columns are in the cache afterwards."""
        columns = torch.arange(width, device=self._device)
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": (columns >= width - lengths.unsqueeze(-1)).long(),
            self._cache_argument: cache,
            "use_cache": True,
            **self._keep_last,
        }
        if self._takes_positions:
            arguments["position_ids"] = positions
        logits: Tensor = self._model(**arguments).logits[:, -1]
        return logits if logits.dtype == torch.float64 else logits.float()


def prompt_batches(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Cut the list into runs of at most PREFILL_TOKENS padded tokens."""
    first, width = 0, 0
    for index, prompt in enumerate(prompts):
        width = max(width, len(prompt))
        if index > first and width * (index + 1 - first) > PREFILL_TOKENS:
            yield prompts[first:index]
            first, width = index, len(prompt)
    yield prompts[first:]
