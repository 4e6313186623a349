"""What follows a model's head is found, an unusual head is scored the dense way, and models whose rows cannot lie one
behind the other are found too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from small_models import ARCHITECTURES, SMALL, build_model, sequences

from tepo.core.errors import InputError
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.policy.attention_interface import use_attention
from tepo.policy.head import Post
from tepo.policy.probe import UnusualHeadError, find_head, why_not_packed

Load = Callable[..., Policy]
EXPECTED = {
    "gemma2": Post(cap=2.0),
    "gemma2-window": Post(cap=30.0),
    "cohere": Post(scale=0.25),
    "granite": Post(scale=0.25),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_of_every_architecture_is_found(load: Load, name: str, dtype: str) -> None:
    policy = load(name, dtype=dtype)
    assert policy.head is not None
    assert policy.head.post == EXPECTED.get(name, Post())


def _spoil_logits(model: Any) -> None:
    """Add to the logits after the head, in a way no configuration names."""
    forward = model.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits + 0.25 * output.logits.sin()
        return output

    model.forward = spoiled


def test_a_change_after_the_head_that_no_configuration_names_is_noticed() -> None:
    model = build_model("llama").eval()
    _spoil_logits(model)
    with pytest.raises(UnusualHeadError, match="in a way that is not known"):
        find_head(model, dtype=torch.float32, context=nullcontext)


def test_a_small_soft_cap_effect_is_noticed_although_the_logits_are_tiny() -> None:
    model = build_model("gemma2", initializer_range=1e-4, final_logit_softcapping=30.0).eval()
    assert find_head(model, dtype=torch.float32, context=nullcontext).post == Post(cap=30.0)


def test_a_model_without_a_separate_head_is_unusual() -> None:
    model = build_model("llama").eval()
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnusualHeadError, match="no separate head"):
        find_head(model, dtype=torch.float32, context=nullcontext)


def test_auto_falls_back_to_the_dense_path_and_says_so(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise UnusualHeadError("it is odd")

    monkeypatch.setattr("tepo.policy.load.find_head", fail)
    said: list[str] = []
    policy = load("llama", say=said.append)
    assert policy.head is None
    assert any("unusual (it is odd)" in line for line in said)
    rows = sequences()
    monkeypatch.undo()
    torch.testing.assert_close(policy.score(rows).logp, load("llama").score(rows).logp, rtol=1e-5, atol=1e-5)


def test_chunked_is_refused_where_the_head_is_unusual(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise UnusualHeadError("it is odd")

    monkeypatch.setattr("tepo.policy.load.find_head", fail)
    with pytest.raises(InputError, match="it is odd"):
        load_policy(PolicyConfig(path="builtin:tiny", head="chunked", device="cpu"))


def tiny_of(family: str, config: str | None = None, **fields: Any) -> Any:
    """Return a small random model of a family of transformers whose attention is ours."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{config or family}Config")(**(SMALL | {"initializer_range": 0.02} | fields))
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    assert use_attention(model)
    return model


def refused(model: Any, dtype: torch.dtype = torch.float32) -> str | None:
    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()

    return why_not_packed(model.base_model, dtype=dtype, context=context)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "model",
    [
        ("Llama4", "Llama4Text", {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}),
        ("Qwen2Moe", None, EXPERTS | {"shared_expert_intermediate_size": 16, "sliding_window": 4}),
        ("Olmoe", None, EXPERTS | {"sliding_window": 4}),
    ],
    ids=["chunks", "a window that is not told", "a window that is told but not there"],
)
def test_masks_that_attention_is_not_told_of_are_refused(model: tuple[str, str | None, dict[str, Any]]) -> None:
    """They show in rows longer than any probe."""
    family, config, fields = model
    assert refused(tiny_of(family, config, **fields)) == "its masks hide more than its attention is told"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Mistral", {"sliding_window": 4}),
        ("Phi3", {"sliding_window": 4}),
        ("Olmoe", EXPERTS),
        ("Qwen3Moe", EXPERTS),
    ],
)
def test_windows_that_are_told_and_experts_pass(family: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    """In bfloat16 experts round otherwise where other tokens come to them; that is not taken for a difference."""
    assert refused(tiny_of(family, **fields), dtype) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_from_row_to_row_is_noticed_although_it_changes_little(dtype: torch.dtype) -> None:
    model = tiny_of("Lfm2", layer_types=["conv", "full_attention"])
    reason = refused(model, dtype)
    assert reason is not None
    assert reason.startswith("one behind the other its")
    assert ("reach each other" in reason) == (dtype == torch.bfloat16)
    assert not model.get_input_embeddings()._forward_hooks
