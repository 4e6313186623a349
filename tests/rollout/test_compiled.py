"""The compiled functions compute what the formulas say, in both precisions, and stand back where they cannot."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.policy import Policy
from tepo.rollout import SamplingConfig, sample
from tepo.rollout.choice import choose_tokens
from tepo.rollout.choosing import choice_for, decoder_for
from tepo.rollout.compiled_step import CompiledStep, why_not_compiled
from tepo.rollout.fused_decoder import FusedDecoder
from tepo.rollout.tensor_step import TensorStep

pytest.importorskip("numba")
assert why_not_compiled(torch.device("cpu"), torch.float32, torch.float32) is None

from tepo.rollout import compiled, compiled_attention  # noqa: E402
from tepo.rollout.compiled_choice import choose_compiled  # noqa: E402

Make = Callable[..., Policy]
NONE = np.empty(0, np.float32)
PRECISIONS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def array(tensor: Tensor) -> Any:
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_residual_and_norm(dtype: torch.dtype) -> None:
    x, delta, weight = normal(5, 36), normal(5, 36, seed=1).to(dtype), normal(36, seed=2)
    expected = x + delta.float()
    normed = expected.double() * (expected.double().pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    out = torch.empty(5, 36, dtype=dtype)
    compiled.add_and_norm(x.numpy(), array(delta), weight.numpy(), np.float32(1e-3), array(out))
    assert torch.equal(x, expected), "the residual stream is float32 and exact"
    torch.testing.assert_close(out.double(), normed, rtol=PRECISIONS[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_gate(dtype: torch.dtype) -> None:
    both = torch.cat([normal(3, 40) * 30, normal(3, 40, seed=1)], -1).to(dtype)
    gate, up = both.double().chunk(2, -1)
    out = torch.empty(3, 40, dtype=dtype)
    compiled.gate(array(both), array(out))
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=PRECISIONS[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("normed", [False, True])
def test_attention_sees_its_own_tokens_and_nothing_else(dtype: torch.dtype, normed: bool) -> None:
    rows, heads, key_heads, size, columns = 3, 4, 2, 6, 9
    fused = normal(rows, (heads + 2 * key_heads) * size).to(dtype)
    at = torch.tensor([0, 3, 8])
    slots = torch.arange(rows, 0, -1)  # backwards, and slot 0 is nobody's
    cache = [normal(rows + 1, key_heads, columns, size, seed=seed).to(dtype) for seed in (1, 2)]
    for each in cache:
        each[0] = torch.nan
        for row in range(rows):
            each[slots[row], :, at[row] :] = torch.nan  # what was never written
    turns = torch.polar(torch.ones(columns, size // 2), normal(columns, size // 2, seed=3))
    norms = [normal(size, seed=seed) if normed else torch.empty(0) for seed in (4, 5)]

    split = fused.view(rows, -1, size).double()
    queries, new_keys, new_values = split.split([heads, key_heads, key_heads], 1)
    if normed:
        queries, new_keys = (
            head * (head.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt() * norm.double()
            for head, norm in zip((queries, new_keys), norms, strict=True)
        )
    turned = [
        torch.view_as_real(
            torch.view_as_complex(head.reshape(rows, -1, size // 2, 2).contiguous())
            * turns[at].to(torch.complex128)[:, None]
        ).flatten(-2)
        for head in (queries, new_keys)
    ]
    keys, values, out = (*(each.flatten(0, 1) for each in cache), torch.empty(rows, heads * size, dtype=dtype))
    compiled_attention.attend(
        array(fused),
        torch.view_as_real(turns).flatten(-2).numpy(),
        at.numpy(),
        slots.numpy(),
        array(keys),
        array(values),
        array(out),
        np.float32(0.3),
        norms[0].numpy(),
        norms[1].numpy(),
        np.float32(1e-2),
    )
    for row in range(rows):
        seen = int(at[row]) + 1
        torch.testing.assert_close(
            cache[0][slots[row], :, seen - 1].double(), turned[1][row], rtol=PRECISIONS[dtype], atol=PRECISIONS[dtype]
        )
        assert torch.equal(cache[1][slots[row], :, seen - 1].double(), new_values[row])
        for head in range(heads):
            key, value = (each[slots[row], head // (heads // key_heads), :seen].double() for each in cache)
            expected = (0.3 * key @ turned[0][row, head]).softmax(-1) @ value
            found = out[row, head * size : (head + 1) * size].double()
            torch.testing.assert_close(found, expected, rtol=PRECISIONS[dtype], atol=PRECISIONS[dtype])


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = torch.cat(
        [normal(500) * 10.0 ** normal(500, seed=1), torch.tensor([1.00390625, 1.01171875, 3.4e38, torch.nan])]
    )
    out = torch.empty(1, len(x), dtype=torch.bfloat16)
    compiled.gate(np.stack([np.full(len(x), 100.0), x.numpy()]).astype(np.float32).reshape(1, -1), array(out))
    torch.testing.assert_close(out[0], (x * 100).bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [3, 100, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_choice_is_that_of_the_formula(size: int, temperature: float) -> None:
    config = SamplingConfig(temperature=temperature)
    logits = 3 * normal(40, size)
    logits[:, ::3] = -torch.inf
    logits[:, 1] += 4
    uniforms = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    exact, found = choose_tokens(config, logits.double(), uniforms), choose_compiled(config, logits, uniforms)
    assert found.tokens == exact.tokens
    assert found.logp == pytest.approx(exact.logp, abs=2e-6)
    assert found.entropy == pytest.approx(exact.entropy, abs=2e-6)


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, [3, 700]] = 0.0
    last = math.nextafter(1.0, 0.0)
    found = choose_compiled(SamplingConfig(), logits, [0.0, 0.49, 0.51, last])
    assert found.tokens == [3, 3, 700, 700]
    assert found.entropy == pytest.approx([math.log(2)] * 4)
    logits[:, 300] = -200.0  # e^-200 is nothing beside 1 in float32
    assert choose_compiled(SamplingConfig(), logits, [0.0, 0.4999999, 0.5, last]).tokens == [3, 3, 700, 700]
    assert choose_compiled(SamplingConfig(temperature=0.0), torch.tensor([[1.0, 5.0, 5.0]]), [0.0]).tokens == [1]


@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_distribution_has_no_log_prob(wrong: float) -> None:
    logits = normal(3, 600)
    logits[1, slice(None) if wrong == -math.inf else 400] = wrong
    found = choose_compiled(SamplingConfig(), logits, [0.5] * 3)
    assert [math.isnan(logp) for logp in found.logp] == [False, True, False]


def test_draws_follow_the_probabilities() -> None:
    logits = normal(1, 700)
    points = 20_000
    grid = ((np.arange(points) + 0.5) / points).tolist()
    found = choose_compiled(SamplingConfig(), logits.expand(points, -1), grid)
    counts = torch.bincount(torch.tensor(found.tokens), minlength=700)
    assert (counts / points - logits[0].double().softmax(-1)).abs().max() < 1.01 / points


def test_who_samples_how(random_policy: Make) -> None:
    policy = random_policy("llama")

    def step(decoder: str) -> Any:
        with torch.no_grad():
            made = decoder_for(policy, SamplingConfig(decoder=decoder), 32)
        assert isinstance(made, FusedDecoder)
        return made._step

    assert isinstance(step("auto"), CompiledStep)
    assert isinstance(step("fused"), TensorStep)
    chosen = {
        "compiled": SamplingConfig(),
        "tensors": SamplingConfig(decoder="fused"),
        "cut off": SamplingConfig(top_k=3),
    }
    assert {name: choice_for(policy, config).func.__name__ for name, config in chosen.items()} == {  # type: ignore[attr-defined]
        "compiled": "choose_compiled",
        "tensors": "choose_tokens",
        "cut off": "choose_tokens",
    }


def test_float64_and_other_devices_are_not_compiled() -> None:
    assert "float64" in str(why_not_compiled(torch.device("cpu"), torch.float64, torch.float64))
    assert "cuda" in str(why_not_compiled(torch.device("cuda"), torch.float32, torch.float32))


def test_without_the_compiler_everything_else_works(random_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy("llama")
    monkeypatch.setattr("tepo.rollout.compiled_step.why_no_compiler", lambda: "the package numba is not installed")
    asked = {"samples": 2, "seed": 0, "purpose": "test", "draws": [0]}
    found = sample(policy, [[5, 6]], config=SamplingConfig(max_tokens=5), **asked)  # type: ignore[arg-type]
    assert len(found[0]) == 2
    with pytest.raises(InputError, match="numba is not installed"):
        sample(policy, [[5, 6]], config=SamplingConfig(decoder="compiled"), **asked)  # type: ignore[arg-type]


def test_bfloat16_stays_close_to_float32(random_policy: Make) -> None:
    """Both decoders of bfloat16 differ from float32 by rounding alone, and about as much."""
    policy = random_policy("qwen3", initializer_range=0.02)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(0.3)
    logits = {}
    for dtype in PRECISIONS:
        policy.compute_dtype = dtype
        for decoder in ("fused", "compiled"):
            with torch.no_grad():
                made: Any = decoder_for(policy, SamplingConfig(decoder=decoder), 32)
                rows = made.prefill([[5, 6, 7], [8]])
                for token in (9, 10, 11):
                    made.advance(rows, [token, token])
            logits[dtype, decoder] = rows.logits
    exact = logits[torch.float32, "fused"]
    torch.testing.assert_close(logits[torch.float32, "compiled"], exact, rtol=1e-4, atol=1e-4)
    errors = [
        float((logits[torch.bfloat16, decoder] - exact).norm() / exact.norm()) for decoder in ("fused", "compiled")
    ]
    assert 0 < max(errors) < 0.03


@pytest.mark.slow
def test_starting_the_compiler_leaves_torch_its_threads() -> None:
    code = (
        "import torch; from tepo.rollout.compiled_step import why_not_compiled as why; torch.set_num_threads(1);"
        "assert why(torch.device('cpu'), torch.float32, torch.float32) is None; print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


def test_it_runs_in_as_many_threads_as_torch(random_policy: Make) -> None:
    import numba

    threads = torch.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        torch.set_num_threads(1)
        sample(
            random_policy("llama"),
            [[5]],
            samples=1,
            config=SamplingConfig(max_tokens=2),
            seed=0,
            purpose="t",
            draws=[0],
        )
        assert numba.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
