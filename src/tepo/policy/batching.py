"""How rows share a forward pass: which of them go together, and whether the prompts they have in common are computed
once.

Everything here follows from token counts alone, so a batch is cut and computed in the same way in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tepo.policy.sequences import TokenSequence

WORTH_SHARING = 0.8
"""Share of the tokens up to which "auto" computes prompts once: two smaller passes cost a little more a token."""

PASS_TOKENS = {"cpu": 128}
"""Tokens whose computation takes about as long as one more pass does beside its tokens, by kind of device."""

PASS_TOKENS_ELSEWHERE = 4096
"""The same where the launch of operations counts, so on accelerators."""


@dataclass(frozen=True)
class Extent:
    """The size of a batch of rows: how many, of how many distinct prompts, the longest of each kind in tokens, and the
    tokens of all rows and of all distinct prompts."""

    rows: int = 0
    prompts: int = 0
    longest: int = 0
    longest_prompt: int = 0
    longest_response: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    predicting_tokens: int = 0

    def grown(self, row: TokenSequence, *, new_prompt: bool) -> Extent:
        """Return the size with one more row."""
        return Extent(
            self.rows + 1,
            self.prompts + new_prompt,
            max(self.longest, len(row)),
            max(self.longest_prompt, len(row.prompt)),
            max(self.longest_response, len(row.response)),
            self.tokens + len(row),
            self.prompt_tokens + new_prompt * len(row.prompt),
            self.predicting_tokens + max(len(row.response) - 1, 0),
        )

    @property
    def separate(self) -> int:
        """Tokens computed, padding included, when every row brings its own prompt."""
        return self.rows * self.longest

    @property
    def shared(self) -> int:
        """Tokens computed, padding included, when every prompt is computed once; no response's last token is."""
        return self.prompts * self.longest_prompt + self.rows * max(self.longest_response - 1, 0)


def extent_of(rows: Sequence[TokenSequence]) -> Extent:
    """Return the size of one batch of all these rows."""
    extent, prompts = Extent(), set[tuple[int, ...]]()
    for row in rows:
        extent = extent.grown(row, new_prompt=row.prompt not in prompts)
        prompts.add(row.prompt)
    return extent


@dataclass(frozen=True)
class Sharing:
    """Whether a model computes the prompts that rows have in common once, and how rows are cut into batches then."""

    mode: Literal["auto", "always", "never"]
    pass_tokens: int = PASS_TOKENS_ELSEWHERE
    """Padding is put up with until it costs as much as this many tokens; then another batch begins."""

    def wanted(self, extent: Extent) -> bool:
        """Return whether a batch of this size shares its prompts."""
        if self.mode == "auto":
            return extent.shared <= WORTH_SHARING * extent.separate
        return self.mode == "always"

    def tokens(self, extent: Extent) -> int:
        """Return how many tokens, padding included, a batch of this size computes."""
        return extent.shared if self.wanted(extent) else extent.separate

    def padding(self, extent: Extent) -> int:
        """Return how many of the tokens that a batch of this size computes are padding."""
        real = extent.prompt_tokens + extent.predicting_tokens if self.wanted(extent) else extent.tokens
        return self.tokens(extent) - real

    def split(self, sequences: Sequence[TokenSequence], rows: Sequence[int], budget: int) -> list[list[int]]:
        """Cut `rows` into batches of at most `budget` computed tokens (0: no limit), one row at least.

        Rows of similar length share a batch, longest first, or rows with the same prompt do, whatever costs less; and a
        batch ends where its padding would cost more than another pass.
        """
        by_length = sorted(rows, key=lambda row: (-len(sequences[row]), row))
        cuts = [self._cut(sequences, by_length, budget)]
        if self.mode != "never":
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


NEVER = Sharing("never")
