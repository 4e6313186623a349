"""The chunked head against plain autograd over all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tepo.policy.head import Head, Post
from tepo.policy.statistics import Request, token_statistics

N, D, V = 11, 6, 17


def _inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(3)
    module = nn.Linear(D, V, bias=bias, dtype=dtype)
    nn.init.normal_(module.weight)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    return hidden, module, torch.randint(0, V, (N,))


def _dense(hidden: Tensor, module: nn.Module, targets: Tensor, post: Post, temperature: float) -> dict[str, Tensor]:
    raw = module(hidden) * post.scale
    logits = raw if post.cap is None else post.cap * torch.tanh(raw / post.cap)
    log_p = (logits / temperature).log_softmax(-1)
    p = log_p.exp()
    finite = log_p.clamp(min=-1e4)
    return {
        "logp": log_p.gather(-1, targets[:, None]).squeeze(-1),
        "entropy": -(p * finite).sum(-1),
        "sum_p2": (p**2).sum(-1),
        "sum_p2_logp": (p**2 * finite).sum(-1),
        "log_p": finite,
    }


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("post", [Post(), Post(scale=0.3), Post(cap=1.5), Post(scale=2.0, cap=3.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_dense_computation(chunk: int, post: Post, temperature: float) -> None:
    hidden, module, targets = _inputs()
    request = Request(
        head=Head(module, post, torch.float64),
        targets=targets,
        temperature=temperature,
        chunk=chunk,
        entropy=True,
        entropy_grad=True,
        sum_p2=True,
        sum_p2_logp=True,
    )
    found = token_statistics(hidden, request)
    expected = _dense(hidden, module, targets, post, temperature)
    for name in ("logp", "entropy", "sum_p2", "sum_p2_logp"):
        torch.testing.assert_close(getattr(found, name), expected[name], rtol=1e-12, atol=1e-12)
    assert found.entropy is not None
    weights = torch.randn(2, N, dtype=torch.float64)
    inputs = [hidden, *module.parameters()]
    ours = torch.autograd.grad((weights[0] * found.logp + weights[1] * found.entropy).sum(), inputs)
    theirs = torch.autograd.grad((weights[0] * expected["logp"] + weights[1] * expected["entropy"]).sum(), inputs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_full_kl_and_its_gradient(temperature: float) -> None:
    hidden, module, targets = _inputs()
    other = nn.Linear(3, V, dtype=torch.float64)  # a reference may be narrower
    other_hidden = torch.randn(N, 3, dtype=torch.float64)
    request = Request(
        head=Head(module, Post(cap=4.0), torch.float64),
        targets=targets,
        temperature=temperature,
        chunk=4,
        reference=Head(other, Post(scale=0.5), torch.float64),
        reference_hidden=other_hidden,
    )
    kl = token_statistics(hidden, request).kl_full
    assert kl is not None
    log_p = _dense(hidden, module, targets, Post(cap=4.0), temperature)["log_p"]
    log_q = _dense(other_hidden, other, targets, Post(scale=0.5), temperature)["log_p"].detach()
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(N, dtype=torch.float64)
    inputs = [hidden, *module.parameters()]
    for left, right in zip(
        torch.autograd.grad((weights * kl).sum(), inputs),
        torch.autograd.grad((weights * expected).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_kl_of_a_distribution_with_itself_is_zero() -> None:
    hidden, module, targets = _inputs(torch.float32)
    head = Head(module)
    found = token_statistics(hidden, Request(head, targets, reference=head, reference_hidden=hidden.detach()))
    assert found.kl_full is not None
    assert found.kl_full.abs().max() == 0.0


def test_the_entropy_is_a_constant_unless_its_gradient_is_asked_for() -> None:
    hidden, module, targets = _inputs()
    found = token_statistics(
        hidden, Request(Head(module, dtype=torch.float64), targets, entropy=True, sum_p2=True, sum_p2_logp=True)
    )
    assert found.logp.requires_grad
    for value in (found.entropy, found.sum_p2, found.sum_p2_logp):
        assert value is not None
        assert not value.requires_grad


def test_statistics_that_were_not_asked_for_are_none() -> None:
    hidden, module, targets = _inputs()
    found = token_statistics(hidden, Request(Head(module, dtype=torch.float64), targets))
    assert (found.entropy, found.sum_p2, found.sum_p2_logp, found.kl_full) == (None, None, None, None)


def test_temperature_divides_the_logits() -> None:
    """Logits [1, 0] and token 0: log-probability -0.126928 at temperature 0.5, -0.313262 at 1."""
    module = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0], [0.0]]))
    for temperature, expected in ((0.5, -0.126928), (1.0, -0.313262)):
        request = Request(Head(module), torch.tensor([0]), temperature=temperature, entropy=True)
        found = token_statistics(torch.ones(1, 1), request)
        assert found.logp.item() == pytest.approx(expected, abs=1e-6)
        p = math.exp(expected)
        assert found.entropy is not None
        assert found.entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-5)


def test_vocabulary_entries_at_minus_infinity_leave_values_and_gradients_finite() -> None:
    hidden, module, targets = _inputs()
    with torch.no_grad():
        module.bias[:5] = -math.inf
    targets = targets.clamp(min=5)
    other = nn.Linear(D, V, dtype=torch.float64)
    request = Request(
        Head(module, dtype=torch.float64),
        targets,
        entropy=True,
        entropy_grad=True,
        sum_p2_logp=True,
        reference=Head(other, dtype=torch.float64),
        reference_hidden=hidden.detach(),
    )
    found = token_statistics(hidden, request)
    expected = _dense(hidden, module, targets, Post(), 1.0)
    assert found.entropy is not None
    assert found.kl_full is not None
    torch.testing.assert_close(found.entropy, expected["entropy"])
    total = found.logp.sum() + found.entropy.sum() + found.kl_full.sum()
    for gradient in torch.autograd.grad(total, [hidden, module.weight]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("reference", [False, True])
def test_no_more_than_one_chunk_of_logits_exists(reference: bool) -> None:
    hidden, module, targets = _inputs()
    shapes: list[tuple[int, ...]] = []
    module.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape)))
    head = Head(module, dtype=torch.float64)
    extra: dict[str, Any] = {"reference": head, "reference_hidden": hidden.detach()} if reference else {}
    request = Request(head, targets, chunk=4, entropy=True, entropy_grad=True, **extra)
    found = token_statistics(hidden, request)
    assert found.entropy is not None
    (found.logp.sum() + found.entropy.sum() + (found.kl_full.sum() if found.kl_full is not None else 0.0)).backward()
    once = [(4, V), (4, V), (3, V)]
    per_pass = [shape for shape in once for _ in range(1 + reference)]
    assert shapes == per_pass * 2  # forward, and recomputed in the backward pass


def test_memory_of_the_backward_graph_does_not_grow_with_the_vocabulary() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    hidden, module, targets = _inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_statistics(hidden, Request(Head(module, dtype=torch.float64), targets, chunk=4, entropy=True))
    assert max(saved) <= max(N * D, V * D)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    hidden, module, targets = _inputs()
    module.requires_grad_(False)
    found = token_statistics(hidden, Request(Head(module, dtype=torch.float64), targets, chunk=4))
    (gradient,) = torch.autograd.grad(found.logp.sum(), [hidden])
    dense = _dense(hidden, module, targets, Post(), 1.0)["logp"].sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(dense, [hidden])[0])


def test_changed_weights_between_the_passes_are_an_error() -> None:
    hidden, module, targets = _inputs()
    found = token_statistics(hidden, Request(Head(module, dtype=torch.float64), targets))
    with torch.no_grad():
        module.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.logp.sum().backward()


def test_no_tokens_give_empty_statistics_with_a_zero_gradient() -> None:
    hidden, module, _ = _inputs()
    request = Request(Head(module, dtype=torch.float64), torch.empty(0, dtype=torch.long), entropy=True)
    found = token_statistics(hidden[:0], request)
    assert found.logp.shape == (0,)
    found.logp.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().max() == 0.0


def test_bfloat16_products_give_float32_statistics_near_the_exact_ones() -> None:
    hidden, module, targets = _inputs(torch.float32)
    found = token_statistics(hidden, Request(Head(module, dtype=torch.bfloat16), targets, entropy=True, chunk=3))
    assert found.logp.dtype == torch.float32
    exact = _dense(hidden, module, targets, Post(), 1.0)
    torch.testing.assert_close(found.logp, exact["logp"], rtol=0.0, atol=0.05)
    found.logp.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
