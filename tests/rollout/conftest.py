"""Policies small enough to sample from in a moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.policy import Policy, PolicyConfig, load_policy

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def tiny() -> Policy:
    """The built-in tiny policy in float32."""
    return load_policy(PolicyConfig(path="builtin:tiny", device="cpu", dtype="float32"))


@pytest.fixture
def random_policy(tiny: Policy, tmp_path: Path) -> Callable[..., Policy]:
    """Make a policy with random weights, spread enough that its tokens differ, of the named architecture."""

    def make(kind: str, **changes: Any) -> Policy:
        import transformers

        config_class, settings = {
            "llama": (transformers.LlamaConfig, GROUPED),
            "qwen2": (transformers.Qwen2Config, GROUPED),
            "qwen3": (transformers.Qwen3Config, {**GROUPED, "head_dim": 12}),
            "mistral": (transformers.MistralConfig, {**GROUPED, "sliding_window": None}),
            "gemma2": (transformers.Gemma2Config, {**GROUPED, "head_dim": 8, "final_logit_softcapping": 2.0}),
            "mistral-window": (transformers.MistralConfig, {**GROUPED, "sliding_window": 5}),
            "gpt-neox": (transformers.GPTNeoXConfig, SIZES),
            "gpt2": (transformers.GPT2Config, SIZES),
            "bloom": (transformers.BloomConfig, {**SIZES, "n_layer": 2, "n_head": 4}),
        }[kind]
        config = config_class(vocab_size=len(tiny.tokenizer), **{**settings, **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.normal_(std=0.3)
                    else:  # biases and norms
                        weight.add_(torch.randn_like(weight), alpha=0.3)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        tiny.tokenizer.save_pretrained(folder)
        return load_policy(PolicyConfig(path=str(folder), device="cpu", dtype="float32"))

    return make
