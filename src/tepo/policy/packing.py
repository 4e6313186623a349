"""Rows one behind the other in one pass, without padding, and with a prompt that several rows share only once.

Everything but attention treats tokens by themselves, so a pass may hold them in any order as long as each knows its
position. Attention alone needs to know which tokens belong together: tables say that, in pieces of rows of similar
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tepo.policy.sequences import Scored, TokenSequence, recurring

PIECE_TOKENS = 256
"""Tokens from which on a piece ends where lengths fall below half of its longest."""

_TABLE_PARTS = 8  # of the sizes of tables; attention is little of a pass, and each has two or three


@dataclass(frozen=True)
class Prefixes:
    """What a piece's rows have before them: row r the prompt `owners[r]` of the first piece, of `lengths[r]` tokens.

    `width` is the longest of these lengths.
    """

    owners: Tensor
    lengths: Tensor
    width: int


@dataclass(frozen=True)
class Piece:
    """R rows whose attention is computed together: `queries` [R, L] and `keys` [R, W] are places in the pass.

    Row r asks with its own `lengths[r]` tokens, which are places `span` of the pass, row after row; it sees those and,
    before them, its prefix. What fills a row up is its own last place, so that nothing of another row is near: no query
    of its own sees that as a key, and no result is read. The last rows may be repetitions that ask nothing (length 0).
    """

    span: slice
    queries: Tensor
    keys: Tensor
    lengths: Tensor
    prefixes: Prefixes | None = None

    @cached_property
    def asked(self) -> Tensor:
        """Where in the flat [R L] the own tokens are, in their order in the pass."""
        return (_columns(self.queries) < self.lengths[:, None]).flatten().nonzero().squeeze(1)

    @cached_property
    def own_keys(self) -> Tensor:
        """Where in the flat [R W] the own tokens are, in their order in the pass."""
        if self.prefixes is None:
            return self.asked
        place = _columns(self.keys) - self.prefixes.lengths[:, None]
        return ((place >= 0) & (place < self.lengths[:, None])).flatten().nonzero().squeeze(1)

    @cached_property
    def _masks(self) -> dict[int | None, Tensor | None]:
        """The masks that were asked for: all layers keep the same one for their backward pass."""
        return {}

    def mask(self, window: int | None) -> Tensor | None:
        """Return which keys each query sees, [R, 1, L, W]; None where it is all up to its own."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        if self.prefixes is None and window is None:
            return None
        positions = _columns(self.queries).expand(self.queries.shape)
        if self.prefixes is not None:
            positions = positions + self.prefixes.lengths[:, None]
        # What fills a row up may lie beyond the keys: the last one stands in, so that no query is left without a key.
        last = self.keys.shape[1] - 1
        behind = positions.clamp(max=last)[:, None, :, None] - _columns(self.keys)
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)


@dataclass(frozen=True)
class Packed:
    """One pass over N tokens: `ids` [N], their `positions` [N], and the pieces that cover the first `count` places in
    order; what follows repeats the last token, up to a number that recurs.

    `ends` [B] are the places of the last prompt token of each row, `begins` [B] those of the first response token.
    Where prompts are shared they are the first piece.
    """

    ids: Tensor
    positions: Tensor
    pieces: tuple[Piece, ...]
    ends: Tensor
    begins: Tensor

    @property
    def count(self) -> int:
        """How many places the pieces cover."""
        return int(self.pieces[-1].span.stop)

    def predicting(self, scored: Scored) -> Tensor:
        """Return the places [n] of the tokens that predict the scored ones."""
        later = self.begins[scored.rows] + scored.places - 1
        return torch.where(scored.places == 0, self.ends[scored.rows], later)


def pack(sequences: Sequence[TokenSequence], *, share: bool, device: torch.device) -> Packed:
    """Return one pass over all rows but the last token of each response, which predicts nothing.

    With `share` every distinct prompt is in it once; else each row brings its own.
    """
    prompts = list(dict.fromkeys(row.prompt for row in sequences)) if share else []
    number = {prompt: place for place, prompt in enumerate(prompts)}
    own = [row.response[:-1] if share else (*row.prompt, *row.response[:-1]) for row in sequences]
    before = [len(row.prompt) if share else 0 for row in sequences]
    ids = [token for prompt in prompts for token in prompt]
    positions = [place for prompt in prompts for place in range(len(prompt))]
    places_of_prompts = _begins(prompts, 0)
    pieces = [_piece(0, [len(prompt) for prompt in prompts], device)] if share else []
    starts = [0] * len(sequences)
    for rows in _in_pieces(own, before):
        first = len(ids)
        for row, start in zip(rows, _begins([own[row] for row in rows], first), strict=True):
            starts[row] = start
            ids.extend(own[row])
            positions.extend(range(before[row], before[row] + len(own[row])))
        owners = [number[sequences[row].prompt] for row in rows] if share else []
        prefixes = [(owner, places_of_prompts[owner], len(prompts[owner])) for owner in owners]
        pieces.append(_piece(first, [len(own[row]) for row in rows], device, prefixes))
    prompt_starts = [places_of_prompts[number[row.prompt]] for row in sequences] if share else starts
    ends = [start + len(row.prompt) - 1 for start, row in zip(prompt_starts, sequences, strict=True)]
    begins = starts if share else [end + 1 for end in ends]
    more = recurring(len(ids)) - len(ids)
    ids.extend(ids[-1:] * more)
    positions.extend(positions[-1:] * more)
    tensors = [torch.tensor(each).to(device) for each in (ids, positions, ends, begins)]
    return Packed(tensors[0], tensors[1], tuple(pieces), tensors[2], tensors[3])


def _in_pieces(own: Sequence[tuple[int, ...]], before: Sequence[int]) -> list[list[int]]:
    """Return rows that ask anything, in pieces of similar length, longest first."""
    pieces: list[list[int]] = []
    tokens = longest = width = 0
    asking = [row for row in range(len(own)) if own[row]]
    for row in sorted(asking, key=lambda row: (-len(own[row]) - before[row], row)):
        length, total = len(own[row]), len(own[row]) + before[row]
        shorter = 2 * length < longest or 2 * total < width
        if not pieces or (shorter and tokens >= PIECE_TOKENS):
            pieces.append([])
            tokens = longest = width = 0
        pieces[-1].append(row)
        tokens, longest, width = tokens + length, max(longest, length), max(width, total)
    return pieces


def _piece(
    first: int, lengths: Sequence[int], device: torch.device, prefixes: Sequence[tuple[int, int, int]] = ()
) -> Piece:
    """Return the piece whose rows lie one behind the other from place `first` on; owner, place and length of each
    row's prefix, if there are any."""
    rows = torch.arange(recurring(len(lengths), _TABLE_PARTS)).clamp(max=len(lengths) - 1)
    size = torch.tensor(lengths)
    begin = (size.cumsum(0) - size + first)[rows, None]
    asking = torch.where(torch.arange(len(rows)) < len(lengths), size[rows], 0).to(device)
    size, last = size[rows], size[rows, None] - 1
    queries = begin + torch.arange(recurring(max(lengths), _TABLE_PARTS)).minimum(last)
    span = slice(first, first + sum(lengths))
    if not prefixes:
        queries = queries.to(device)
        return Piece(span, queries, queries, asking)
    owners, places, before = torch.tensor(prefixes)[rows].unbind(1)
    column = torch.arange(recurring(int((before + size).max()), _TABLE_PARTS)) - before[:, None]
    keys = torch.where(column < 0, (places + before)[:, None] + column, begin + column.minimum(last))
    of_prefix = Prefixes(owners.to(device), before.to(device), int(before.max()))
    return Piece(span, queries.to(device), keys.to(device), asking, of_prefix)


def _begins(rows: Sequence[tuple[int, ...]], first: int) -> list[int]:
    """Return the place where each row begins when they lie one behind the other from `first` on."""
    begins = []
    for row in rows:
        begins.append(first)
        first += len(row)
    return begins


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)
