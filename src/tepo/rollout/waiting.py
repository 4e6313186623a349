"""Responses that are being sampled, and those that wait for a row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tepo.rollout.decoder import DecodedRows, Decoder
from tepo.rollout.response import StopReason


@dataclass
class Growing:
    """A response while it is being sampled; `group` is the index of its prompt in the call."""

    group: int
    prompt_ids: tuple[int, ...]
    limit: int
    draw: int
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    uniforms: Sequence[float] = ()


class Waiting:
    """Responses waiting to start; a prompt is run through the model when the first of its responses starts."""

    def __init__(self, decoder: Decoder, responses: Sequence[Growing]) -> None:
        """Take the responses in the order in which they start, those of a group together."""
        self._decoder = decoder
        self._responses = list(reversed(responses))
        self._held: tuple[int, DecodedRows] | None = None  # a group only some of whose responses have started

    def __len__(self) -> int:
        return len(self._responses)

    def start(self, count: int) -> tuple[list[Growing], list[tuple[DecodedRows, list[int]]]]:
        """Start at most `count` responses; return them, and the rows they continue from in the same order."""
        started = [self._responses.pop() for _ in range(min(count, len(self)))]
        parts: list[tuple[DecodedRows, list[int]]] = []
        fresh = started
        if self._held is not None:
            group, rows = self._held
            fresh = [growing for growing in started if growing.group != group]
            parts.append((rows, [0] * (len(started) - len(fresh))))
        if fresh:
            prompts = {growing.group: growing.prompt_ids for growing in fresh}
            index = {group: position for position, group in enumerate(prompts)}
            prefilled = self._decoder.prefill(list(prompts.values()))
            parts.append((prefilled, [index[growing.group] for growing in fresh]))
            last = fresh[-1].group
            if self._goes_on(last):
                self._held = (last, self._decoder.gather([(prefilled, [index[last]])]))
        if self._held is not None and not self._goes_on(self._held[0]):
            self._held = None
        return started, parts

    def _goes_on(self, group: int) -> bool:
        return bool(self._responses) and self._responses[-1].group == group
