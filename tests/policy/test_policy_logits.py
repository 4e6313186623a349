"""Statistics of given logits against plain log_softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tepo.core.errors import InputError
from tepo.policy import blocks
from tepo.policy.compiler import why_no_compiler
from tepo.policy.logits import token_statistics_from_logits

V = 301


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of two rows, taken by one thread or by three."""
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 2 * V)
    monkeypatch.setattr(blocks, "threads_of", lambda device: request.param)
    return int(request.param)


def _exact(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "of_gradient"),
    [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-5, 1e-2)],
)
def test_values_and_gradients_equal_the_plain_formula(
    temperature: float, dtype: torch.dtype, tolerance: float, of_gradient: float
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, V) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (3, 5))
    exact = logits.detach().double().requires_grad_()
    logp, entropy = token_statistics_from_logits(logits, targets, temperature=temperature)
    wide = torch.promote_types(dtype, torch.float32)
    assert (logp.shape, logp.dtype, entropy.dtype) == ((3, 5), wide, wide)
    expected = _exact(exact, targets, temperature)
    torch.testing.assert_close(logp.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=tolerance, atol=tolerance)
    weights = torch.randn(2, 3, 5)
    (found,) = torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), [logits])
    (wanted,) = torch.autograd.grad((weights[0] * expected[0] + weights[1] * expected[1]).sum(), [exact])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=of_gradient, atol=of_gradient)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_compiled_statistics_are_those_of_tensor_operations(temperature: float) -> None:
    """Rows longer than a stretch, largest first, last or in the middle, masked in part or all but once."""
    assert why_no_compiler() is None
    torch.manual_seed(4)
    logits = torch.randn(9, 3 * 4096 + 77) * 6
    logits[0] = logits[0].sort().values  # every stretch has a larger one
    logits[1] = logits[1].sort(descending=True).values
    logits[2, :9000] = -math.inf
    logits[3, 1:] = -math.inf
    logits[4] += 3000.0
    logits[5] -= 3000.0
    logits[6] = 0.25
    targets = torch.randint(0, logits.shape[1], (9,))
    targets[3] = 0
    expected = _exact(logits.double(), targets, temperature)
    found = token_statistics_from_logits(logits, targets, temperature=temperature)
    plain = token_statistics_from_logits(logits, targets, temperature=temperature, compiled=False)
    for one, tensor, exact in zip(found, plain, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(one, tensor, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[1], plain[1])  # it was compiled


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5000])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_no_distribution_has_no_statistics(value: float, place: int, compiled: bool) -> None:
    logits = torch.zeros(3, 6000)
    logits[1, : place + 1] = -math.inf  # nothing but it may be all that a part of the row holds
    logits[1, place] = value
    logits[2] = -math.inf
    logp, entropy = token_statistics_from_logits(logits, torch.zeros(3, dtype=torch.long), compiled=compiled)
    assert torch.isnan(torch.stack([logp, entropy])).any(0).tolist() == [False, True, True]
    assert torch.isnan(entropy[1:]).all()


@pytest.mark.parametrize("which", [0, 1])
def test_one_statistic_alone_has_its_own_gradient(which: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, V, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (4,))
    (found,) = torch.autograd.grad(token_statistics_from_logits(logits, targets)[which].sum(), [logits])
    (wanted,) = torch.autograd.grad(_exact(logits, targets, 1.0)[which].sum(), [logits])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_entries_at_minus_infinity_have_probability_zero() -> None:
    """Two logits left of four: log 1/2 and entropy log 2, and no gradient where nothing is possible."""
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]], requires_grad=True)
    logp, entropy = token_statistics_from_logits(logits, torch.tensor([2]))
    assert logp.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad((logp + entropy).sum(), [logits])
    assert gradient.tolist() == [[-0.5, 0.0, 0.5, 0.0]]
    assert token_statistics_from_logits(logits, torch.tensor([1]))[0].item() == -math.inf


def test_a_common_shift_of_the_logits_changes_nothing() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, V).round(decimals=1).double()
    targets = torch.randint(0, V, (5,))
    for left, right in zip(
        token_statistics_from_logits(logits, targets),
        token_statistics_from_logits(logits + 4096.0, targets),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


def test_a_row_does_not_depend_on_its_block_or_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    logits, targets = torch.randn(17, V), torch.randint(0, V, (17,))
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 4 * V)
    found = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(blocks, "threads_of", lambda device, threads=threads: threads)
        found.append(torch.stack(token_statistics_from_logits(logits, targets)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        inputs = {id(value) for value in args}
        if isinstance(out, Tensor) and id(out) not in inputs and out._base is None and not func.is_view:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("compiled", "most"), [(True, 32), (False, 2 * V)])
def test_the_forward_pass_makes_nothing_larger_than_a_block(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, most: int
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_CPU", 2 * V)
    monkeypatch.setattr(blocks, "threads_of", lambda device: 1)
    logits, targets = torch.randn(16, V, requires_grad=True), torch.zeros(16, dtype=torch.long)
    with _Largest() as seen:
        token_statistics_from_logits(logits, targets, compiled=compiled)
    assert seen.largest == most


def test_no_rows_give_empty_statistics() -> None:
    logits = torch.empty(0, 3, V, requires_grad=True)
    logp, entropy = token_statistics_from_logits(logits, torch.empty(0, 3, dtype=torch.long))
    assert logp.shape == entropy.shape == (0, 3)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None


@pytest.mark.parametrize(
    ("logits", "targets", "temperature", "says"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), 1.0, r"logits \[2, 3\] .* targets \[3\] do not match"),
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long), 1.0, "expected floating-point logits"),
        (torch.zeros(2, 3), torch.tensor([0, -100]), 1.0, "targets range from -100 to 0; expected 0 to 2"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 0.0, "temperature=0.0 cannot be scored"),
    ],
)
def test_unusable_arguments_are_named(logits: Tensor, targets: Tensor, temperature: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        token_statistics_from_logits(logits, targets, temperature=temperature)
