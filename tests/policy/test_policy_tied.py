"""A weight that is both embedding and head: its gradient comes in one matrix and is the one autograd adds up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import sequences
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tepo.policy import Policy
from tepo.policy import policy as policy_module
from tepo.policy.tied import one_gradient

Load = Callable[..., Policy]
TIED = ("llama-tied", "qwen2", "qwen3")


@contextlib.contextmanager
def _nothing_shared(*_: Any) -> Iterator[None]:
    yield None


def gradients(policy: Policy, passes: int = 1) -> dict[str, Tensor]:
    policy.model.zero_grad()
    for _ in range(passes):
        policy.score(sequences(), temperature=0.8).logp.square().sum().backward()
    found = {name: each.grad.clone() for name, each in policy.model.named_parameters() if each.grad is not None}
    assert all(gradient.layout == torch.strided for gradient in found.values())
    return found


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("fields", [{}, {"share_prompts": "always"}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_gradients_are_those_autograd_adds_up(
    load: Load, name: str, fields: dict[str, Any], dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(name, dtype=dtype, **fields)
    for passes in (1, 3):
        found = gradients(policy, passes)
        with monkeypatch.context() as patched:
            patched.setattr(policy_module, "one_gradient", _nothing_shared)
            expected = gradients(policy, passes)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert float((found[key] - gradient).norm() / gradient.norm()) < tolerance


def test_padding_gets_no_gradient_of_the_embedding(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load("llama-tied")
    policy.model.get_input_embeddings().padding_idx = sequences()[0].prompt[0]
    found = gradients(policy)
    monkeypatch.setattr(policy_module, "one_gradient", _nothing_shared)
    for key, gradient in gradients(policy).items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


def test_hooks_and_autograd_grad_see_one_dense_gradient(load: Load) -> None:
    policy = load("llama-tied")
    expected = gradients(policy)["model.embed_tokens.weight"]
    weight = policy.model.get_input_embeddings().weight
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    logp = policy.score(sequences(), temperature=0.8).logp.square().sum()
    found = [torch.autograd.grad(logp, weight, retain_graph=keep)[0] for keep in (True, False)]
    assert len(seen) == 2
    for gradient in (*found, *seen):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_one_of_the_two_alone_has_a_dense_gradient(load: Load) -> None:
    policy = load("llama-tied")
    assert policy.head is not None
    model, weight = policy.model.base_model, policy.model.get_input_embeddings().weight
    with one_gradient(model, policy.head) as for_head:
        states = model.embed_tokens(torch.tensor([[3, 5, 3]]))
    assert for_head is not None
    of_lookup, of_head = (torch.autograd.grad(each.sum(), weight)[0] for each in (states, for_head))
    assert of_lookup.sum(1).tolist() == [{3: 64.0, 5: 32.0}.get(row, 0.0) for row in range(len(weight))]
    assert torch.equal(of_head, torch.ones_like(weight))


class _Matrices(TorchDispatchMode):
    """Counts the dense float32 matrices of one shape that are made, not written to."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.found = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = isinstance(out, Tensor) and out.layout == torch.strided and out.shape == self.shape
        self.found += made and not any(out is each for each in args) and "detach" not in str(func)
        return out


def test_the_backward_pass_makes_one_matrix(load: Load) -> None:
    policy = load("llama-tied", share_prompts="always")
    loss = policy.score(sequences()).logp.sum()
    with _Matrices(policy.model.get_input_embeddings().weight.shape) as seen:
        loss.backward()
    assert seen.found == 1


@pytest.mark.parametrize("case", ["untied", "frozen", "no gradient", "another embedding"])
def test_nothing_changes_where_there_is_nothing_to_share(load: Load, case: str) -> None:
    policy = load("llama" if case == "untied" else "llama-tied")
    assert policy.head is not None
    embedding = policy.model.get_input_embeddings()
    if case == "frozen":
        embedding.weight.requires_grad_(False)
    if case == "another embedding":
        embedding.max_norm = 1.0
    context = torch.no_grad() if case == "no gradient" else contextlib.nullcontext()
    with context, one_gradient(policy.model.base_model, policy.head) as weight:
        assert weight is None
        assert "forward" not in vars(embedding)


def test_the_embedding_is_itself_again_after_a_pass_and_after_an_error(load: Load) -> None:
    policy = load("llama-tied")
    assert policy.head is not None
    embedding = policy.model.get_input_embeddings()
    gradients(policy)
    assert "forward" not in vars(embedding)
    with pytest.raises(ZeroDivisionError), one_gradient(policy.model.base_model, policy.head):
        raise ZeroDivisionError
    assert "forward" not in vars(embedding)
