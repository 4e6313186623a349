"""The written-out products of a plain linear head against autograd, and the logits that wait between the passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.policy.test_policy_logits import _Largest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tepo.policy import products as products_module
from tepo.policy.head import Head, Identity, Post
from tepo.policy.products import AutogradProducts, LinearProducts, products
from tepo.policy.statistics import Request, token_statistics

N, D, V = 13, 6, 37


def _inputs(dtype: torch.dtype, bias: bool) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(4)
    module = nn.Linear(D, V, bias=bias, dtype=dtype)
    nn.init.normal_(module.weight)
    return torch.randn(N, D, dtype=dtype, requires_grad=True), module, torch.randint(0, V, (N,))


def _gradients(hidden: Tensor, request: Request) -> list[Tensor]:
    found = token_statistics(hidden, request)
    assert found.entropy is not None
    weights = torch.linspace(-1.0, 1.0, 2 * N, dtype=found.logp.dtype).view(2, N)
    loss = (weights[0] * found.logp + weights[1] * found.entropy).sum()
    wanted = [hidden, *(p for p in request.head.module.parameters() if p.requires_grad)]
    return [found.logp.detach(), found.entropy.detach(), *torch.autograd.grad(loss, wanted)]


class _Unchanged(nn.Module):
    """Hides that a head is a plain linear layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden)
        return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize(
    ("compute", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("keep_rows", [0, 5, N, 100])
def test_written_out_products_equal_autograd(
    bias: bool,
    frozen: tuple[str, ...],
    compute: torch.dtype,
    tolerance: float,
    keep_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products_module, "_SLICE", 10)  # several slices, the last one shorter
    hidden, module, targets = _inputs(torch.float64 if compute == torch.float64 else torch.float32, bias)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    keep_bytes = keep_rows * V * compute.itemsize
    plain = Head(module, Post(scale=0.7, cap=5.0), compute, keep_bytes=keep_bytes)
    request = Request(plain, targets, temperature=0.9, chunk=4, entropy=True, entropy_grad=True)
    through_autograd = replace(request, head=replace(plain, module=_Unchanged(module)))
    assert plain.is_plain
    assert not through_autograd.head.is_plain
    for found, expected in zip(_gradients(hidden, request), _gradients(hidden, through_autograd), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keep_rows", [0, 3, N])
def test_kept_logits_are_not_computed_again_and_no_more_than_a_chunk_exists(
    keep_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, module, targets = _inputs(torch.float32, False)
    rows: list[int] = []
    raw = LinearProducts.raw

    def count(self: LinearProducts, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return raw(self, hidden)

    monkeypatch.setattr(LinearProducts, "raw", count)
    head = Head(module, keep_bytes=keep_rows * V * 4)
    with _Largest() as seen:
        token_statistics(hidden, Request(head, targets, chunk=5)).logp.sum().backward()
    assert sum(rows) == 2 * N - keep_rows
    assert max(rows) == max(5, keep_rows)
    assert seen.largest == max(5, keep_rows, D) * V


class _Copies(TorchDispatchMode):
    """Counts tensors as large as the weight in the compute precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.bfloat16 and out.numel() == V * D:
            self.found += "_to_copy" in str(func)
        return out


@pytest.mark.parametrize(("keep_rows", "copies"), [(0, 1), (3, 1), (N, 0)])
def test_the_backward_pass_copies_the_weight_only_to_compute_logits_again(
    keep_rows: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_module, "_SLICE", 10)
    hidden, module, targets = _inputs(torch.float32, False)
    head = Head(module, dtype=torch.bfloat16, keep_bytes=keep_rows * V * 2)
    logp = token_statistics(hidden, Request(head, targets, chunk=5)).logp.sum()
    with _Copies() as seen:
        logp.backward()
    assert seen.found == copies


def test_nothing_is_kept_without_a_backward_pass() -> None:
    hidden, module, targets = _inputs(torch.float32, False)
    with torch.no_grad(), _Largest() as seen:
        token_statistics(hidden, Request(Head(module), targets, chunk=2))
    assert seen.largest == 2 * V


def test_a_second_backward_pass_computes_the_kept_logits_again() -> None:
    hidden, module, targets = _inputs(torch.float64, True)
    logp = token_statistics(hidden, Request(Head(module, dtype=torch.float64), targets)).logp
    inputs = [hidden, *module.parameters()]
    first = torch.autograd.grad(logp.sum(), inputs, retain_graph=True)
    for left, right in zip(first, torch.autograd.grad(logp.sum(), inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_autocast_around_the_call_changes_nothing() -> None:
    hidden, module, targets = _inputs(torch.float32, True)
    request = Request(Head(module), targets, entropy=True, entropy_grad=True)
    expected = _gradients(hidden, request)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _gradients(hidden, request)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


def test_which_heads_are_plain() -> None:
    linear = nn.Linear(D, V)
    assert Head(linear).is_plain
    assert not Head(Identity()).is_plain
    assert not Head(linear, active=torch.no_grad).is_plain
    assert isinstance(products(Head(linear), list(linear.parameters())), LinearProducts)
    handle = linear.register_forward_hook(lambda *_: None)
    assert isinstance(products(Head(linear), list(linear.parameters())), AutogradProducts)
    handle.remove()
    assert Head(linear).is_plain
