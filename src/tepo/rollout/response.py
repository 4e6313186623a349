"""One sampled response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Response:
    """A response with what the sampler knew of each of its tokens.

    `logp` and `entropy` (nats) have one entry a token and describe the full distribution the token was drawn from:
    after temperature, before top-k and top-p. Under greedy decoding they describe the distribution at temperature 1.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Sampled tokens; the end-of-sequence token and the token that completed a stop text are included."""
    text: str
    """Decoded response without end-of-sequence token, cut before the stop text."""
    logp: tuple[float, ...]
    entropy: tuple[float, ...]
    stop_reason: StopReason
    """`eos` (an end-of-sequence token), `stop` (a stop text), `length` (cut: the response is not finished)."""
    draw: int
    """Index of the prompt in the run: with `sample`, the address of the response's random draws."""
    sample: int
    """Index of the response among those of its prompt."""
