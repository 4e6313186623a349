"""The fused decoder samples what the model's own forward pass samples, and stands back where it would not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError
from tepo.policy import LoraConfig, Policy, PolicyConfig, load_policy
from tepo.rollout import Response, SamplingConfig, sample, why_plain
from tepo.rollout.choosing import decoder_for
from tepo.rollout.fused_decoder import FusedDecoder, FusedRows
from tepo.rollout.fused_model import fused_model

Make = Callable[..., Policy]

FUSABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "no sharing of keys": ("llama", {"num_key_value_heads": 4}),
    "wide heads": ("llama", {"head_dim": 10}),
    "llama 3 rotations": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}


def responses(policy: Policy, decoder: str, **settings: Any) -> list[Response]:
    """Fifteen responses of many lengths to prompts of many lengths, over four places."""
    prompts = [[5, 6, 7], [9], list(range(30, 50)), [11, 12], [40, 41, 42, 43, 44]]
    found = sample(
        policy,
        prompts,
        samples=3,
        config=SamplingConfig(**{"decoder": decoder, "max_tokens": 100, "rows": 4, **settings}),
        seed=1,
        purpose="test",
        draws=range(5),
        limits=[3, 100, 7, 20, 70],
    )
    return [response for group in found for response in group]


def close(found: list[Response], expected: list[Response], tolerance: float) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=tolerance)
        assert one.entropy == pytest.approx(other.entropy, abs=tolerance)


@pytest.mark.parametrize("name", FUSABLE)
def test_it_samples_what_the_model_samples(random_policy: Make, name: str) -> None:
    kind, changes = FUSABLE[name]
    policy = random_policy(kind, **changes)
    policy.eos_ids = ()
    assert why_plain(policy) is None
    plain = responses(policy, "plain")
    close(responses(policy, "fused"), plain, 2e-4)
    pytest.importorskip("numba")
    close(responses(policy, "compiled"), plain, 2e-4)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.9}, {"rows": 64}])
def test_whatever_the_settings(random_policy: Make, settings: dict[str, Any]) -> None:
    policy = random_policy("llama")
    close(responses(policy, "auto", **settings), responses(policy, "plain", **settings), 2e-4)


def test_packed_matrices_change_nothing(random_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy("llama", attention_bias=True)
    unpacked = responses(policy, "fused")
    monkeypatch.setattr("tepo.rollout.fused_model._PACKED_FROM", 1)
    close(responses(policy, "fused"), unpacked, 2e-4)


def test_low_precision_stays_close(random_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy("qwen3", initializer_range=0.02)
    exact = fused_model(policy.model, dtype=torch.float32, positions=32)
    monkeypatch.setattr("tepo.rollout.fused_model._PACKED_FROM", 1)
    rough = fused_model(policy.model, dtype=torch.bfloat16, positions=32)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        (*exact.project(exact.layers[0], x, exact.turns[:6, None]), exact.logits(x)),
        (*rough.project(rough.layers[0], x, rough.turns[:6, None]), rough.logits(x)),
        strict=True,
    ):
        assert 0 < float((one - other).abs().max()) < 0.02 * float(one.abs().max())


def test_it_uses_the_weights_of_now(random_policy: Make) -> None:
    policy = random_policy("llama")
    before = responses(policy, "fused")
    with torch.no_grad():
        policy.model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)
    after = responses(policy, "fused")
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    close(after, responses(policy, "plain"), 2e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gpt2", {}, "its type is 'gpt2'"),
        ("gemma2", {}, "its type is 'gemma2'"),
        ("mistral-window", {}, "sliding-window"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "sliding-window"),
        ("llama", {"hidden_act": "gelu"}, "its activation is 'gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
            "changes with the length",
        ),
    ],
)
def test_other_models_run_their_own_forward_pass(
    random_policy: Make, kind: str, changes: dict[str, Any], reason: str
) -> None:
    policy = random_policy(kind, **changes)
    assert reason in str(why_plain(policy))
    close(responses(policy, "auto"), responses(policy, "plain"), 2e-6)
    for decoder in ("fused", "compiled"):
        with pytest.raises(InputError, match=rf"sampling\.decoder='{decoder}' does not work for .*; use 'auto'"):
            responses(policy, decoder)


def test_an_adapter_runs_the_models_own_forward_pass() -> None:
    pytest.importorskip("peft")
    policy = load_policy(PolicyConfig(path="builtin:tiny", device="cpu", lora=LoraConfig(rank=2)))
    assert "an adapter" in str(why_plain(policy))
    assert len(responses(policy, "auto")) == 15


def test_a_disagreement_is_found_by_the_probe(random_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy("llama")
    prefill = FusedDecoder.prefill

    def wrong(decoder: FusedDecoder, prompts: Sequence[Sequence[int]]) -> FusedRows:
        rows = prefill(decoder, prompts)
        rows.logits *= 1.01
        return rows

    monkeypatch.setattr(FusedDecoder, "prefill", wrong)
    assert "standard deviations from the model's own" in str(why_plain(policy))
    monkeypatch.undo()
    assert "standard deviations" in str(why_plain(policy)), "a model is probed once"
    close(responses(policy, "auto"), responses(policy, "plain"), 2e-6)


@pytest.mark.parametrize("decoder", ["compiled", "fused"])
def test_rows_that_leave_change_nothing_for_the_others(random_policy: Make, decoder: str) -> None:
    """They leave from anywhere, then enter again, until the cache has to grow; the others never notice."""
    policy = random_policy("llama")
    prompts = [[5, 6, 7], [9], [30, 31, 32, 33], [11, 12], [40, 41]]
    with torch.no_grad(), policy.compute_context():
        made = decoder_for(policy, SamplingConfig(decoder=decoder), 200)
        alone = [made.prefill([prompt]) for prompt in prompts]
        rows, kept = made.prefill(prompts), [0, 1, 2, 3, 4]
        for step, leaving in enumerate([2, None, 0, None, 4, 1, *[None] * 80]):
            if leaving is not None:
                rows = made.keep(rows, [place for place, row in enumerate(kept) if row != leaving])
                kept.remove(leaving)
            if step == 6:
                rows = made.fill(rows, [0], [(made.prefill([prompts[2]]), [0])])
                alone[3], kept = made.prefill([prompts[2]]), [3]
            made.advance(rows, [(3 * row + step) % 50 for row in kept])
            for row in kept:
                made.advance(alone[row], [(3 * row + step) % 50])
            expected = torch.cat([alone[row].logits for row in kept])
            torch.testing.assert_close(rows.logits, expected, rtol=1e-4, atol=1e-5)


def test_rows_leave_without_a_copy_until_half_of_the_cache_is_idle(random_policy: Make) -> None:
    policy = random_policy("llama")
    with torch.no_grad(), policy.compute_context():
        decoder = decoder_for(policy, SamplingConfig(decoder="compiled"), 50)
        assert decoder.keeps_in_place
        rows = decoder.prefill([[5, 6], [7], [8], [9, 10]])
        fewer = decoder.keep(rows, [3, 1])
        assert fewer.keys[0].data_ptr() == rows.keys[0].data_ptr()
        assert (fewer.slots.tolist(), fewer.lengths.tolist()) == ([3, 1], [2, 1])
        last = decoder.keep(fewer, [1])
        assert last.keys[0].shape[0] == rows.keys[0].shape[0] // 4
        assert not decoder_for(policy, SamplingConfig(decoder="fused"), 50).keeps_in_place
        assert not decoder_for(policy, SamplingConfig(decoder="plain"), 50).keeps_in_place
