"""How rows share a forward pass: which of them go together, and whether as a table with padding, one behind the other
without, or with the prompts they have in common computed once.

Everything here follows from token counts alone, so a batch is cut and computed in the same way in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tepo.policy.sequences import TokenSequence

WORTH_SHARING = 0.8
"""Share of the tokens up to which "auto" computes prompts once: attention to them costs a little more."""

WORTH_PACKING = 0.95
"""Share of the tokens up to which padding is left out: moving tokens into rows for attention costs a little."""

PASS_TOKENS = {"cpu": 128}
"""Tokens whose computation takes about as long as one more pass does beside its tokens, by kind of device."""

PASS_TOKENS_ELSEWHERE = 4096
"""The same where the launch of operations counts, so on accelerators."""

Way = Literal["padded", "packed", "shared"]


@dataclass(frozen=True)
class Extent:
    """The size of a batch: its rows, the longest of them, the tokens of all rows, of all distinct prompts, and of all
    responses. The last token of a response predicts nothing, is not computed and does not count."""

    rows: int = 0
    longest: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0

    def grown(self, row: TokenSequence, *, new_prompt: bool) -> Extent:
        """Return the size with one more row."""
        response = max(len(row.response) - 1, 0)
        length = len(row.prompt) + response
        return Extent(
            self.rows + 1,
            max(self.longest, length),
            self.tokens + length,
            self.prompt_tokens + new_prompt * len(row.prompt),
            self.response_tokens + response,
        )

    @property
    def padded(self) -> int:
        """Tokens computed, padding included, as a table of rows."""
        return self.rows * self.longest

    @property
    def shared(self) -> int:
        """Tokens computed without padding when every distinct prompt is computed once."""
        return self.prompt_tokens + self.response_tokens


def extent_of(rows: Sequence[TokenSequence]) -> Extent:
    """Return the size of one batch of all these rows."""
    extent, prompts = Extent(), set[tuple[int, ...]]()
    for row in rows:
        extent = extent.grown(row, new_prompt=row.prompt not in prompts)
        prompts.add(row.prompt)
    return extent


@dataclass(frozen=True)
class Layout:
    """How a model's passes are laid out, and how rows are cut into batches then.

    `packed` says whether padding is left out, `share` whether prompts are computed once; the latter only without
    padding.
    """

    packed: Literal["auto", "always", "never"] = "never"
    share: Literal["auto", "always", "never"] = "never"
    pass_tokens: int = PASS_TOKENS_ELSEWHERE
    """Padding is put up with until it costs as much as this many tokens; then another batch begins."""

    def way(self, extent: Extent) -> Way:
        """Return how a batch of this size is laid out."""
        if self.share == "always" or (self.share == "auto" and extent.shared <= WORTH_SHARING * extent.tokens):
            return "shared"
        if self.packed == "always" or (self.packed == "auto" and extent.tokens <= WORTH_PACKING * extent.padded):
            return "packed"
        return "padded"

    def tokens(self, extent: Extent) -> int:
        """Return how many tokens, padding included, a batch of this size computes."""
        return {"padded": extent.padded, "packed": extent.tokens, "shared": extent.shared}[self.way(extent)]

    def padding(self, extent: Extent) -> int:
        """Return how many of the tokens that a batch of this size computes are padding."""
        return extent.padded - extent.tokens if self.way(extent) == "padded" else 0

    def split(self, sequences: Sequence[TokenSequence], rows: Sequence[int], budget: int) -> list[list[int]]:
        """Cut `rows` into batches of at most `budget` computed tokens (0: no limit), one row at least.

        Rows of similar length share a batch, longest first, or rows with the same prompt do, whatever costs less; and a
        batch ends where its padding would cost more than another pass.
        """
        by_length = sorted(rows, key=lambda row: (-len(sequences[row]), row))
        cuts = [self._cut(sequences, by_length, budget)]
        if self.share != "never":
            groups: dict[tuple[int, ...], list[int]] = {}
            for row in by_length:  # so groups come by their longest row
                groups.setdefault(sequences[row].prompt, []).append(row)
            if len(groups) < len(by_length):
                cuts.insert(0, self._cut(sequences, [row for group in groups.values() for row in group], budget))
        return min(cuts, key=lambda cut: cut[1])[0]

    def _cut(
        self, sequences: Sequence[TokenSequence], order: Sequence[int], budget: int
    ) -> tuple[list[list[int]], int]:
        """Return the batches, filled in this order, and what all of them cost, in tokens."""
        parts: list[list[int]] = []
        extents: list[Extent] = []
        prompts: set[tuple[int, ...]] = set()
        for row in order:
            sequence = sequences[row]
            grown = extents[-1].grown(sequence, new_prompt=sequence.prompt not in prompts) if parts else Extent()
            fits = self.tokens(grown) <= budget and self.padding(grown) <= self.pass_tokens
            if parts and (fits or budget == 0):
                parts[-1].append(row)
                extents[-1] = grown
            else:
                parts.append([row])
                extents.append(Extent().grown(sequence, new_prompt=True))
                prompts.clear()
            prompts.add(sequence.prompt)
        return parts, sum(map(self.tokens, extents)) + len(parts) * self.pass_tokens


PADDED = Layout()
