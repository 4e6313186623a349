"""Small random models of several architectures, token sequences for them, and the dense computation to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.policy import Policy, TokenSequence

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _without(*names: str, **extra: Any) -> dict[str, Any]:
    return {name: value for name, value in SMALL.items() if name not in names} | extra


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _without(tie_word_embeddings=False, attention_dropout=0.5)),
    "llama-tied": ("Llama", _without(tie_word_embeddings=True)),
    "mistral": ("Mistral", _without(tie_word_embeddings=False, sliding_window=None)),
    "mistral-window": ("Mistral", _without(tie_word_embeddings=False, sliding_window=3)),
    "qwen2": ("Qwen2", _without(tie_word_embeddings=True)),
    "qwen2-window": (  # of its second layer alone
        "Qwen2",
        _without(tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", _without(tie_word_embeddings=True, head_dim=8)),
    "gpt-neox": ("GPTNeoX", _without("num_key_value_heads", hidden_dropout=0.5, attention_dropout=0.5)),
    "gemma2": ("Gemma2", _without(head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=5.0)),
    "gemma2-window": ("Gemma2", _without(head_dim=8, sliding_window=4)),
    "cohere": ("Cohere", _without(logit_scale=0.25)),
    "granite": ("Granite", _without(logits_scaling=4.0)),
    "phi": ("Phi", _without(partial_rotary_factor=0.5)),  # its head has a bias
    "opt": (
        "OPT",
        _without("intermediate_size", "num_key_value_heads", "initializer_range", init_std=0.2)
        | {"ffn_dim": 48, "dropout": 0.5, "attention_dropout": 0.5},
    ),
}


def build_model(name: str, **extra: Any) -> Any:
    """Return a random float32 model; biases are drawn too, so that a forgotten one shows."""
    import transformers

    family, settings = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**(settings | extra))
    torch.manual_seed(11)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def save_model(model: Any, folder: Path) -> Path:
    """Save a model with the character tokenizer."""
    from tepo.policy.tiny import tiny_tokenizer

    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Let models compute in float64 where they name float32 themselves: norms, rotary angles, softmax."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def sequences(count: int = 4, seed: int = 0) -> list[TokenSequence]:
    """Return sequences of random tokens with prompts of 1-7 and responses of 1-9 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    return [TokenSequence(draw(3, 99, 1 + (3 * row) % 7), draw(3, 99, 1 + (5 * row + 3) % 9)) for row in range(count)]


def dense_statistics(
    policy: Policy, sequence: TokenSequence, temperature: float = 1.0, reference: Policy | None = None
) -> dict[str, torch.Tensor]:
    """Return the statistics [R] of one response from all logits of the unpadded sequence, with plain autograd."""

    def log_softmax(model: Any) -> torch.Tensor:
        ids = torch.tensor([[*sequence.prompt, *sequence.response]])
        logits = model(input_ids=ids).logits[0, len(sequence.prompt) - 1 : -1].double()
        return (logits / temperature).log_softmax(-1)

    log_p = log_softmax(policy.model)
    p = log_p.exp()
    found = {
        "logp": log_p.gather(-1, torch.tensor(sequence.response)[:, None]).squeeze(-1),
        "entropy": -(p * log_p).sum(-1),
        "sum_p2": (p**2).sum(-1),
        "sum_p2_logp": (p**2 * log_p).sum(-1),
    }
    if reference is not None:
        with torch.no_grad():
            log_q = log_softmax(reference.model)
        found["kl_full"] = (p * (log_p - log_q)).sum(-1)
    return found
