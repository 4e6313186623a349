"""Low-rank adapters: what is trained, the reference with the adapter off, merged saving."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import sequences

from tepo.core.errors import InputError, MissingExtra
from tepo.policy import LoraConfig, Policy, PolicyConfig, load_policy

Load = Callable[..., Policy]
LORA = LoraConfig(rank=4, alpha=8)


def _train_a_little(policy: Policy) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture(autouse=True)
def _needs_peft() -> None:
    pytest.importorskip("peft")


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(load: Load) -> None:
    plain, policy = load("llama"), load("llama", lora=LORA)
    assert torch.equal(policy.score(sequences()).logp, plain.score(sequences()).logp)
    names = list(policy.state_tensors())
    assert names
    assert all("lora_" in name for name in names)
    policy.score(sequences()).logp.sum().backward()
    assert all(p.grad is None for name, p in policy.model.named_parameters() if "lora_" not in name)


def test_the_seed_draws_the_adapter(load: Load) -> None:
    config = PolicyConfig(path="builtin:tiny", device="cpu", lora=LORA)
    first, again, other = (load_policy(config, seed=seed).state_tensors() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_the_reference_is_the_base_and_survives_training(load: Load, targets: str | tuple[str, ...]) -> None:
    """Also with an adapter on the head itself."""
    plain = load("llama").score(sequences()).logp
    policy = load("llama", lora=LORA.model_copy(update={"target_modules": targets}), head_chunk=4)
    reference = policy.frozen_copy()
    _train_a_little(policy)
    with torch.no_grad():
        torch.testing.assert_close(reference.score(sequences()).logp, plain, rtol=1e-6, atol=1e-6)
    scores = policy.score(sequences(), statistics=frozenset({"kl_full"}), reference=reference)
    assert scores.kl_full is not None
    scores.kl_full.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.trainable_parameters())
    assert all(p.requires_grad for p in policy.trainable_parameters())
    with torch.no_grad():
        (logq, logp) = (reference.score(sequences()).logp, policy.score(sequences()).logp)
    assert (logp - logq).abs().max() > 1e-3
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        log_p = policy.model(ids).logits[0, 1].log_softmax(-1)
        log_q = load("llama").model(ids).logits[0, 1].log_softmax(-1)
    from tepo.policy import TokenSequence

    one = policy.score([TokenSequence((3, 4), (5,))], statistics=frozenset({"kl_full"}), reference=reference)
    assert one.kl_full is not None
    torch.testing.assert_close(one.kl_full[0, 0], (log_p.exp() * (log_p - log_q)).sum(), rtol=1e-4, atol=1e-5)


def test_recomputed_activations_with_an_adapter(load: Load) -> None:
    policy = load("llama", lora=LORA, gradient_checkpointing=True)
    reference = policy.frozen_copy()
    _train_a_little(policy)
    other = load("llama", lora=LORA)
    _train_a_little(other)
    for one, against in ((policy, reference), (other, other.frozen_copy())):
        scores = one.score(sequences(), statistics=frozenset({"kl_full"}), reference=against)
        assert scores.kl_full is not None
        (scores.logp.sum() + scores.kl_full.sum()).backward()
    for left, right in zip(policy.trainable_parameters(), other.trainable_parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_saved_model_is_merged_and_the_adapter_is_beside_it(load: Load, tmp_path: Path, name: str) -> None:
    policy = load(name, lora=LORA)
    _train_a_little(policy)
    policy.save(tmp_path / "model")
    merged = load_policy(PolicyConfig(path=str(tmp_path / "model"), device="cpu"))
    torch.testing.assert_close(merged.score(sequences()).logp, policy.score(sequences()).logp, rtol=1e-4, atol=1e-4)
    assert not any("lora" in key or "base_layer" in key for key in merged.model.state_dict())
    adapted = load_policy(PolicyConfig(path=str(tmp_path / "model" / "adapter"), device="cpu"))
    assert torch.equal(adapted.score(sequences()).logp, policy.score(sequences()).logp)
    with pytest.raises(InputError, match="trained before"):
        adapted.frozen_copy()


def test_modules_trained_in_full_are_saved_and_forbid_the_reference(load: Load, tmp_path: Path) -> None:
    policy = load("llama", lora=LORA.model_copy(update={"modules_to_save": ("lm_head",)}))
    _train_a_little(policy)
    with pytest.raises(InputError, match="modules_to_save"):
        policy.frozen_copy()
    policy.save(tmp_path / "model")
    merged = load_policy(PolicyConfig(path=str(tmp_path / "model"), device="cpu"))
    torch.testing.assert_close(merged.score(sequences()).logp, policy.score(sequences()).logp, rtol=1e-4, atol=1e-4)


def test_state_tensors_of_an_adapter_restore_it(load: Load) -> None:
    policy, other = load("llama", lora=LORA), load("llama", lora=LORA)
    _train_a_little(policy)
    other.load_state_tensors(policy.state_tensors())
    assert torch.equal(other.score(sequences()).logp, policy.score(sequences()).logp)
    with pytest.raises(InputError, match="another model or adapter"):
        other.load_state_tensors(load("llama").state_tensors())


def test_frozen_matrices_are_kept_in_the_compute_precision(load: Load) -> None:
    policy = load("llama-tied", lora=LORA, dtype="bfloat16")
    kinds = {name: p.dtype for name, p in policy.model.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.base_layer.weight"] == torch.bfloat16
    assert kinds["model.embed_tokens.weight"] == torch.float32
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    plain = load("llama-tied", dtype="bfloat16")
    torch.testing.assert_close(policy.score(sequences()).logp, plain.score(sequences()).logp, rtol=0.0, atol=1e-6)


def test_wrong_adapter_settings_are_named(load: Load, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no module is called 'qproj'.*q_proj"):
        load("llama", lora=LoraConfig(target_modules=("qproj",)))
    with pytest.raises(InputError, match="ties its embedding and its head"):
        load("llama-tied", lora=LoraConfig(target_modules=("lm_head",)))
    policy = load("builtin:tiny", lora=LORA)
    policy.save(tmp_path / "model")
    with pytest.raises(InputError, match="is an adapter already"):
        load_policy(PolicyConfig(path=str(tmp_path / "model" / "adapter"), lora=LORA, device="cpu"))


def test_without_peft_the_extra_is_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    with pytest.raises(MissingExtra, match=r"tepo\[lora\]"):
        load("llama", lora=LORA)
