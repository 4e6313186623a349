"""Norms and gated MLPs that keep less: the values and gradients of transformers' own modules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import build_model, float64_throughout, sequences
from torch import Tensor, nn

from tepo.policy import LoraConfig, Policy
from tepo.policy.layers import GatedMLP, Norm, fuse_layers

Load = Callable[..., Policy]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
REPLACED = {"llama": 7, "mistral": 7, "qwen2": 7, "qwen3": 11}  # two layers; qwen3 norms queries and keys too


def pair(name: str, **extra: Any) -> tuple[Any, Any]:
    """Return transformers' model with norms that are not all ones, and a fused copy."""
    plain = build_model(name, **extra).eval()
    generator = torch.Generator().manual_seed(5)
    for key, parameter in plain.named_parameters():
        if "norm" in key:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused) == REPLACED[name]
    return plain, fused


def logits_and_gradients(model: Any, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (3, length), generator=torch.Generator().manual_seed(7))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.arange(logits.numel()).view_as(logits).cos()).sum().backward()
    return {"logits": logits.detach()} | {name: each.grad for name, each in model.named_parameters()}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_values_and_gradients_equal_transformers_own(name: str, dtype: str, tolerance: float) -> None:
    plain, fused = (model.to(getattr(torch, dtype)) for model in pair(name))
    with float64_throughout() if dtype == "float64" else contextlib.nullcontext():
        assert largest_error(logits_and_gradients(fused), logits_and_gradients(plain)) < tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_under_autocast_both_are_as_near_to_float32_and_gradients_are_float32(name: str) -> None:
    plain, fused = pair(name)
    exact = logits_and_gradients(plain)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, ours = logits_and_gradients(plain), logits_and_gradients(fused)
    assert all(gradient.dtype == torch.float32 for key, gradient in ours.items() if key != "logits")
    assert largest_error(ours, exact) < 1.5 * largest_error(narrow, exact)


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj", "norm", "embed"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    plain, fused = pair("llama")
    for model in (plain, fused):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in key)
    found, expected = (
        {key: each for key, each in logits_and_gradients(model).items() if each is not None} for model in (fused, plain)
    )
    assert largest_error(found, expected) < 1e-5


def saved_tensors(model: Any) -> list[Tensor]:
    """Return one tensor for each distinct memory, parameters apart, that autograd keeps for the backward pass."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor
        return tensor

    ids = torch.randint(3, 99, (4, 64), generator=torch.Generator().manual_seed(7))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.base_model(input_ids=ids, use_cache=False)[0]  # held, and with it everything kept
    assert states.requires_grad
    return list(kept.values())


def saved_bytes(model: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors(model))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("autocast", "share"), [(True, 0.5), (False, 0.6)])
def test_little_is_kept_for_the_backward_pass(name: str, autocast: bool, share: float) -> None:
    plain, fused = pair(name, hidden_size=64, intermediate_size=192)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert saved_bytes(fused) < share * saved_bytes(plain)


def test_no_copy_of_an_mlp_weight_and_no_input_of_a_norm_before_products_is_kept() -> None:
    _, fused = pair("llama", hidden_size=48, intermediate_size=176)
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_tensors(fused)
    assert not any(set(tensor.shape) == {48, 176} for tensor in kept)
    wide = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.shape == (4, 64, 48)]
    assert len(wide) == 1  # of the last norm, behind which there is no product


@pytest.mark.parametrize("autocast", [True, False])
def test_norms_with_weights_of_zero_get_the_same_gradients(autocast: bool) -> None:
    plain, fused = pair("llama")
    for model in (plain, fused):
        model.model.layers[1].input_layernorm.weight.data[3:9] = 0.0
    exact = logits_and_gradients(plain)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        narrow, ours = logits_and_gradients(plain), logits_and_gradients(fused)
    assert largest_error(ours, exact) < max(1e-5, 1.5 * largest_error(narrow, exact))


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "phi", "opt", "gpt-neox"])
def test_other_types_are_left_as_they_are(name: str) -> None:
    assert fuse_layers(build_model(name)) == 0


def test_other_activations_and_hooked_modules_are_left_as_they_are() -> None:
    assert fuse_layers(build_model("llama", hidden_act="gelu")) == 5
    hooked = build_model("llama")
    hooked.model.norm.register_forward_hook(lambda *_: None)
    assert fuse_layers(hooked) == 6


def test_an_mlp_with_biases_computes_the_same() -> None:
    plain, fused = pair("llama", mlp_bias=True)
    assert largest_error(logits_and_gradients(fused), logits_and_gradients(plain)) < 1e-5


def test_a_hook_set_later_on_the_down_projection_is_called() -> None:
    _, fused = pair("llama")
    called: list[nn.Module] = []
    down = fused.model.layers[0].mlp.down_proj
    down.register_forward_hook(lambda module, *_: called.append(module))
    logits_and_gradients(fused)
    assert called == [down]


def test_names_are_kept_and_the_option_switches_it_off(load: Load, tmp_path: Path) -> None:
    fused, plain = load("llama"), load("llama", fused_layers=False)
    assert isinstance(fused.model.model.norm, Norm)
    assert isinstance(fused.model.model.layers[0].mlp, GatedMLP)
    assert not any(isinstance(module, Norm | GatedMLP) for module in plain.model.modules())
    assert list(fused.state_tensors()) == list(plain.state_tensors())
    assert list(fused.model.state_dict()) == list(plain.model.state_dict())
    torch.testing.assert_close(fused.score(sequences()).logp, plain.score(sequences()).logp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ("gate_proj",), ("down_proj",)])
def test_adapters_wrap_the_layers_inside(load: Load, targets: str | tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    lora = LoraConfig(rank=4, target_modules=targets)
    found = []
    for fused in (True, False):
        policy = load("llama", lora=lora, fused_layers=fused)
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.trainable_parameters():
            parameter.data.normal_(std=0.1, generator=generator)
        scores = policy.score(sequences())
        scores.logp.square().sum().backward()
        gradients = {name: each.grad for name, each in policy.model.named_parameters() if each.requires_grad}
        found.append({"logp": scores.logp.detach()} | gradients)
    assert largest_error(*found) < 1e-5


def test_recomputed_activations_give_the_same_gradients(load: Load) -> None:
    found = []
    for checkpointing in (False, True):
        policy = load("qwen3", gradient_checkpointing=checkpointing)
        policy.score(sequences()).logp.sum().backward()
        found.append({name: each.grad for name, each in policy.model.named_parameters()})
    assert largest_error(*found) < 1e-6


def test_in_float64_rows_add_up_exactly_however_they_are_split() -> None:
    """Also where the values themselves are normalised in float32."""
    _, model = pair("llama")
    norm, rows = model.model.norm.double(), torch.randn(7, 32, dtype=torch.float64)
    whole = torch.autograd.grad(norm(rows).pow(3).sum(), norm.weight)[0]
    parts = [torch.autograd.grad(norm(row).pow(3).sum(), norm.weight)[0] for row in rows.split(1)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-12, atol=1e-12)
