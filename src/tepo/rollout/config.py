"""The configuration of the sampler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class EMInfConfig(BaseModel):
    """EM-INF: entropy minimised on the logits of every token before it is chosen (arXiv 2505.15134)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps: int = Field(default=3, ge=1)
    """Most Adam steps a token."""

    lr: float = Field(default=0.1, gt=0.0, allow_inf_nan=False)
    """Size of a step, in units of a logit."""

    threshold: float = Field(default=0.3, ge=0.0, allow_inf_nan=False)
    """Entropy (nats) below which a token's logits are left as they are."""

    kl_coef: float = Field(default=0.05, ge=0.0, allow_inf_nan=False)
    """Coefficient of the KL from the distribution as it was, which holds the logits back."""


class SamplingConfig(BaseModel):
    """How responses are sampled from the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, ge=0.0)
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

    decoder: Literal["auto", "compiled", "fused", "plain"] = "auto"
    """How tokens are computed: `plain` runs the model's own forward pass; `fused` runs the layers of a Llama-type model
    (Llama, Mistral, Qwen2, Qwen3) with fused matrices and a cache in place, several times faster on a processor;
    `compiled` is `fused` with the steps between the matrices compiled for the processor by numba (`tepo[cpu]`), once on
    each machine; `auto` takes the last of these that works for the model here and agrees with `plain` on a probe."""

    em_inf: EMInfConfig | None = None
    """Sharpen every token's distribution by minimising its entropy before it is chosen, after `temperature` and before
    `top_k` and `top_p`; what is recorded stays the policy's own distribution. For evaluation: `sampling.em_inf.steps=3`
    switches it on."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's: some never, or sharpened ones.

        A policy gradient assumes responses drawn from the full distribution after temperature, which is also what
        the recorded log-probs describe; under truncation or sharpening the two differ.
        """
        return self.greedy or self.top_k > 0 or self.top_p < 1.0 or self.em_inf is not None
