"""The configuration of the sampler."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class SamplingConfig(BaseModel):
    """How responses are sampled from the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Logits are divided by this before the softmax; 0 is greedy (the most probable token, the first of equals)."""

    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw only from the smallest set of most probable tokens whose mass reaches this, after `top_k`; 1 is off."""

    top_k: int = Field(default=0, ge=0)
    """Draw only from this many most probable tokens; 0 is off."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens, the end-of-sequence token included; the model's own positions may end it earlier."""

    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = ()
    """Texts that end a response; the text is cut before the first of them, the token that completed it is kept."""

    rows: int = Field(default=64, ge=1)
    """Responses decoded at once: more is quicker and takes more memory; it never changes what is drawn."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens that the policy gives some probability are never drawn.

        A policy gradient assumes responses drawn from the full distribution after temperature, which is also what
        the recorded log-probs describe; under truncation the two differ.
        """
        return self.greedy or self.top_k > 0 or self.top_p < 1.0
