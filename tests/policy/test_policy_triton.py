"""The Triton kernel against the plain torch path, in Triton's interpreter where there is no GPU.

The interpreter is chosen when Triton is imported, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from tepo.core.errors import InputError
from tepo.policy import PolicyConfig, load_policy
from tepo.policy.head import Head, Post
from tepo.policy.scoring import why_no_kernel
from tepo.policy.statistics import Request, token_statistics

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
N, D, V = 37, 24, 203  # none of them a multiple of a tile


def _statistics(kernel: str, module: nn.Linear, hidden: Tensor, post: Post, dtype: torch.dtype) -> list[Tensor]:
    targets = torch.arange(N, device=hidden.device) * 31 % V
    head = Head(module, post, dtype, kernel=kernel)  # type: ignore[arg-type]
    found = token_statistics(hidden, Request(head, targets, temperature=0.8, chunk=20, entropy=True, entropy_grad=True))
    assert found.entropy is not None
    weights = torch.linspace(-1.0, 1.0, 2 * N, device=hidden.device).view(2, N)
    loss = (weights[0] * found.logp + weights[1] * found.entropy).sum()
    return [found.logp.detach(), found.entropy.detach(), *torch.autograd.grad(loss, [hidden, *module.parameters()])]


def compare(device: str) -> None:
    """Hold the kernel to the torch path: float32 tightly, bfloat16 to the exact values of its own operands."""
    for dtype, value, gradient in ((torch.float32, 2e-5, 2e-5), (torch.bfloat16, 1e-4, 0.03)):
        for bias in (False, True):
            for post in (Post(), Post(scale=0.5, cap=3.0)):
                torch.manual_seed(0)
                module = nn.Linear(D, V, bias=bias)
                nn.init.normal_(module.weight, std=0.5)
                with torch.no_grad():  # operands that bfloat16 holds exactly
                    for parameter in module.parameters():
                        parameter.copy_(parameter.bfloat16())
                    if bias:
                        module.bias[7] = -torch.inf
                hidden = torch.randn(N, D).bfloat16().float().to(device).requires_grad_()
                module.to(device)
                found = _statistics("triton", module, hidden, post, dtype)
                expected = _statistics("torch", module, hidden, post, torch.float32)
                for place, (left, right) in enumerate(zip(found, expected, strict=True)):
                    tolerance = value if place < 2 else gradient
                    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@needs_triton
def test_the_kernel_equals_the_torch_path_in_the_interpreter() -> None:
    code = "from tests.policy.test_policy_triton import compare; compare('cpu'); print('equal')"
    settings = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernel_equals_the_torch_path_on_a_gpu() -> None:
    compare("cuda")


def test_statistics_that_the_kernel_does_not_cover_take_the_torch_path() -> None:
    torch.manual_seed(0)
    module, hidden, targets = nn.Linear(D, V), torch.randn(N, D), torch.arange(N)
    found, expected = (
        token_statistics(hidden, Request(Head(module, kernel=kernel), targets, sum_p2=True))  # type: ignore[arg-type]
        for kernel in ("triton", "torch")
    )
    assert found.sum_p2 is not None
    assert expected.sum_p2 is not None
    assert torch.equal(found.sum_p2, expected.sum_p2)


def test_why_the_kernel_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, module = torch.device("cpu"), nn.Linear(2, 3)
    monkeypatch.setattr("tepo.policy.scoring.find_spec", lambda name: None)
    assert "pip install triton" in str(why_no_kernel(cpu))
    monkeypatch.setattr("tepo.policy.scoring.find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "compiles for a CUDA device, not for cpu" in str(why_no_kernel(cpu))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_kernel(cpu, Head(module)) is None
    assert "not in float64" in str(why_no_kernel(cpu, Head(module, dtype=torch.float64)))
    assert "plain linear head" in str(why_no_kernel(cpu, Head(nn.Sequential(module))))


def test_options_choose_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=r"model\.head='triton' does not work for 'builtin:tiny'.*model\.head='auto'"):
        load_policy(PolicyConfig(path="builtin:tiny", device="cpu", head="triton"))
    head = load_policy(PolicyConfig(path="builtin:tiny", device="cpu", head_keep_mib=3)).head
    assert head is not None
    assert (head.keep_bytes, head.kernel) == (3 << 20, "torch")
