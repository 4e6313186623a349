"""Which model is trained and how it computes: the `model` part of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LoraConfig(BaseModel):
    """A low-rank adapter trained instead of the whole model (needs the extra `lora`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    rank: int = Field(default=16, gt=0)
    """Rank of the update of every adapted matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update: it is multiplied by alpha / rank (by alpha / sqrt(rank) with `rslora`)."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names (or endings of names) of the modules to adapt; "all-linear" adapts every linear layer but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full beside the adapter; the base is then no longer the start policy with the adapter off."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps the size of the update when the rank grows."""


class PolicyConfig(BaseModel):
    """The model to train: where it comes from, where and in which precision it computes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    path: str = "builtin:smollm2-135m"
    """A folder saved by transformers, a hub id, or a built-in model: builtin:smollm2-135m, builtin:tiny."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: str = "auto"
    """auto takes cuda, then mps, then cpu; or a torch device such as cpu or cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the computation; trained weights are float32 (float64 is for checks, weights included)."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; auto leaves the choice to transformers."""
    fused_layers: bool = True
    """Replace the norms and gated MLPs of Llama, Mistral, Qwen2 and Qwen3 by ones that compute the same formulas and
    keep less for the backward pass; on a processor, let models of any type that use SDPA compute attention in bfloat16
    by matrix products in blocks, in updates and scoring. false keeps transformers' own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    packing: Literal["auto", "always", "never"] = "auto"
    """Whether scoring and updates compute rows one behind the other, without padding; auto does on a processor where
    at least 5 % would be padding. Not with `gradient_checkpointing`, nor with a model that a probe at load shows to
    compute something else that way."""
    share_prompts: Literal["auto", "always", "never"] = "auto"
    """Whether they compute a prompt once for all its responses in a micro-batch, with equal gradients; auto does where
    that leaves at most 80 % of the tokens. Only where `packing` is possible, whatever the device."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the whole model."""
    threads: int | None = Field(default=None, gt=0)
    """Threads of one CPU operation; the default leaves torch's own choice."""
    head: Literal["auto", "chunked", "dense", "triton"] = "auto"
    """Scoring of tokens: chunked never holds all logits; auto falls back to dense where the model's head is unusual;
    triton fuses head and statistics into one CUDA kernel (plain linear heads; not tried on hardware yet)."""
    head_chunk: int = Field(default=1024, gt=0)
    """Tokens whose logits are held at once while scoring."""
    head_keep_mib: int = Field(default=96, ge=0)
    """Logits, in MiB, that a plain linear head keeps from the forward to the backward pass of each micro-batch instead
    of computing them again: up to a quarter less work for that memory (96 MiB hold 1,024 tokens of a vocabulary of
    49,152 in bfloat16). 0 keeps none."""
    max_batch_tokens: int = Field(default=16384, gt=0)
    """Tokens computed in one forward pass, padding included, when scoring without gradient; more rows are scored in
    turns."""
