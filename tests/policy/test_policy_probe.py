"""What follows a model's head is found, and an unusual head is scored the dense way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, build_model, sequences

from tepo.core.errors import InputError
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.policy.head import Post
from tepo.policy.probe import UnusualHeadError, find_head

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
