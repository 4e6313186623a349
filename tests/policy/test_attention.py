"""Attention in blocks: the values and gradients of the formula and of torch's own, in models of several types too."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import build_model, save_model, sequences
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tepo.policy import LoraConfig, Policy, attention_interface
from tepo.policy.attention import attention
from tepo.policy.attention_interface import attends_in_blocks, attention_forward, use_attention, uses_attention

Load = Callable[..., Policy]
Attend = Callable[..., Tensor]
ROWS, HEADS, GROUPS, QUERIES, KEYS, SIZE = 3, 6, 2, 7, 11, 8
TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt-neox", "cohere", "granite", "phi", "opt")
BLOCKS = (1, 700, 3000, 1 << 20)  # a query, some queries of a group, some groups or rows, everything


def drawn(dtype: torch.dtype = torch.float64, seed: int = 0, heads: int = HEADS) -> list[Tensor]:
    """Return query, key, value and the gradient in the output, laid out as models lay them out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int) -> Tensor:
        numbers = torch.randn(ROWS, length, heads, SIZE, generator=generator, dtype=torch.float64)
        return numbers.to(dtype).transpose(1, 2)

    return [draw(heads, QUERIES), draw(GROUPS, KEYS), draw(GROUPS, KEYS), draw(heads, QUERIES)]


def causal(window: int = KEYS) -> Tensor:
    distance = torch.arange(QUERIES)[:, None] + KEYS - QUERIES - torch.arange(KEYS)
    return ((distance >= 0) & (distance < window)).expand(ROWS, 1, QUERIES, KEYS)


def padded(left: bool) -> Tensor:
    places = torch.arange(KEYS) if left else torch.arange(KEYS).flip(0)
    return causal() & (places >= torch.tensor([0, 2, 3])[:, None])[:, None, None]


def of_heads() -> Tensor:
    mask = torch.rand(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[..., 0] = True
    return mask


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "causal": causal(),
    "window": causal(3),
    "left": padded(left=True),
    "right": padded(left=False),
    "heads": of_heads(),
    "added": torch.randn(ROWS, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(4)),
    "infinite": torch.zeros(ROWS, 1, QUERIES, KEYS).masked_fill(~causal(), -torch.inf),
}


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float = SIZE**-0.5) -> Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = scale * query @ key.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def run(attend: Attend, mask: Tensor | None, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output and the gradients in query, key and value."""
    *inputs, grad = tensors
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = attend(*leaves, mask, **options)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_values_and_gradients_are_those_of_the_formula(mask: str, block_bytes: int) -> None:
    tensors = drawn()
    expected = run(formula, MASKS[mask], tensors)
    assert error(run(attention, MASKS[mask], tensors, block_bytes=block_bytes), expected) < 1e-13
    narrow = [each.float() for each in tensors]
    assert error(run(attention, MASKS[mask], narrow, block_bytes=block_bytes), expected) < 1e-6
    assert error(run(torchs, MASKS[mask], narrow), expected) < 1e-6


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_in_bfloat16_it_is_about_as_near_to_the_formula_as_torchs_own(mask: str, scale: float) -> None:
    query, *others = drawn(torch.bfloat16)
    tensors = [query * scale, *others]
    expected = run(formula, MASKS[mask], [each.double() for each in tensors])
    allowed = 1.5 * error(run(torchs, MASKS[mask], tensors), expected)
    for block_bytes in BLOCKS:
        assert error(run(attention, MASKS[mask], tensors, block_bytes=block_bytes), expected) < allowed


@pytest.mark.parametrize("heads", [GROUPS, 3 * GROUPS])
@pytest.mark.parametrize("block_bytes", [80, 1 << 20])
def test_derivatives_agree_with_differences(heads: int, block_bytes: int) -> None:
    query, key, value, _ = drawn(heads=heads)
    inputs = [each[1:, :, -3:, :3].clone().requires_grad_() for each in (query, key, value)]
    mask = torch.tensor([[True, False, False], [True, True, False], [False, True, True]]).view(1, 1, 3, 3)

    def attend(*tensors: Tensor) -> Tensor:
        return attention(*tensors, mask, scale=0.3, block_bytes=block_bytes)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_a_query_that_sees_nothing_gets_zeros_and_says_nothing(block_bytes: int, as_numbers: bool) -> None:
    tensors = drawn()
    mask = causal().clone()
    mask[1, :, :4] = False
    mask[2] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if as_numbers else mask
    found = run(attention, given, tensors, block_bytes=block_bytes)
    assert not found[0][1, :, :4].any()
    assert not any(each[2].any() for each in found)
    assert not found[1][1, :, :4].any()
    kept = run(attention, causal(), [*tensors[:3], tensors[3] * mask.any(-1, keepdim=True)])
    assert error([each[:2] for each in found[1:]], [each[:2] for each in [*kept[1:]]]) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_what_is_hidden_reaches_nothing(dtype: torch.dtype, block_bytes: int) -> None:
    query, key, value, grad = drawn(dtype)
    mask = padded(left=True).clone()
    mask[0, :, 2] = False
    clean = run(attention, mask, [query, key, value, grad], block_bytes=block_bytes)
    query, key, value = query.clone(), key.clone(), value.clone()
    query[0, :, 2] = 1e30  # sees nothing
    for row, columns in ((1, 2), (2, 3)):
        key[row, :, :columns] = 1e30
        value[row, :, :columns] = -1e30
    assert all(map(torch.equal, run(attention, mask, [query, key, value, grad], block_bytes=block_bytes), clean))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_are_those_that_are_needed(needed: tuple[bool, ...]) -> None:
    *inputs, grad = drawn()
    expected = run(formula, causal(), [*inputs, grad])[1:]
    leaves = [each.requires_grad_(wanted) for each, wanted in zip(inputs, needed, strict=True)]
    attention(*leaves, causal()).backward(grad)
    for leaf, wanted, gradient in zip(leaves, needed, expected, strict=True):
        assert (leaf.grad is not None) == wanted
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient)


def test_nothing_of_the_size_of_the_scores_is_kept() -> None:
    kept: list[Tensor] = []
    inputs = [each.requires_grad_() for each in drawn(torch.bfloat16)[:3]]
    mask = causal()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
        attention(*inputs, mask)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in [*inputs, mask]}


class Layer(torch.nn.Module):
    """What transformers' kernels read of an attention layer."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True


def forwarded(forward: Any, tensors: list[Tensor], mask: Tensor | None, **options: Any) -> list[Tensor]:
    return run(lambda q, k, v, m: forward(Layer(), q, k, v, m, **options)[0].transpose(1, 2), mask, tensors)


@pytest.fixture
def every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve also the precisions in which results can be compared closely."""
    monkeypatch.setattr(attention_interface, "SERVED", {torch.bfloat16, torch.float32, torch.float64})


@pytest.mark.usefixtures("every_precision")
@pytest.mark.parametrize("mask", [None, causal(), padded(left=True)])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.2}, {"is_causal": False}, {"sliding_window": 4}])
@pytest.mark.parametrize("shape", ["fewer", "one", "as many"])
def test_in_transformers_place_it_sees_what_transformers_sees(
    mask: Tensor | None, options: dict[str, Any], shape: str
) -> None:
    """Also without a mask, where queries are fewer than keys: the first ones are meant."""
    query, key, value, grad = drawn()
    count = {"fewer": QUERIES, "one": 1, "as many": QUERIES}[shape]
    width = QUERIES if shape == "as many" else KEYS
    tensors = [query[:, :, :count], key[:, :, :width], value[:, :, :width], grad[:, :, :count]]
    mask = None if mask is None else mask[:, :, :count, :width].clone()
    if mask is not None:
        mask[..., -1] = True
    expected = forwarded(sdpa_attention_forward, tensors, mask, **options)
    assert error(forwarded(attention_forward, tensors, mask, **options), expected) < 1e-13


def test_all_else_goes_to_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Tensor:
        used.append(1)
        return attention(*arguments, **options)

    monkeypatch.setattr(attention_interface, "attention", counted)
    query, key, value, _ = drawn(torch.bfloat16)
    learned = torch.zeros(ROWS, 1, QUERIES, KEYS, dtype=torch.bfloat16, requires_grad=True)

    def attend(query: Tensor = query, key: Tensor = key, mask: Tensor | None = None, **options: Any) -> Tensor:
        return attention_forward(Layer(), query, key, value, mask, **options)[0]

    attend()
    query.requires_grad_()
    with torch.no_grad():
        attend()
    attend(dropout=0.1)
    attend(position_bias=None, unknown=1)
    attend(mask=learned)
    attention_forward(Layer(), query.float(), key.float(), value.float(), None)
    assert not used
    assert attend(softcap=None, use_cache=False).is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query.float(), key.float()).dtype == torch.bfloat16
    assert len(used) == 2


def gradients(model: Any, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    weights = torch.arange(logits.numel()).view_as(logits).cos()
    (logits * weights * (1 if mask is None else mask[..., None])).sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def model_pair(name: str, **extra: Any) -> tuple[Any, Any]:
    plain = build_model(name, **extra).eval()
    ours = copy.deepcopy(plain)
    assert use_attention(ours)
    assert uses_attention(ours)
    assert not uses_attention(plain)
    return plain, ours


def batch(masked: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(7))
    return ids, (torch.arange(12) >= torch.tensor([0, 2, 5])[:, None]).long() if masked else None


@pytest.mark.usefixtures("every_precision")
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_models_of_any_type_keep_their_gradients(name: str, masked: bool) -> None:
    plain, ours = model_pair(name, **({"sliding_window": 4} if name == "mistral" else {}))
    expected, found = (gradients(model, *batch(masked)) for model in (plain, ours))
    size = float(torch.stack([each.norm() for each in expected.values()]).norm())
    for key, gradient in expected.items():  # some are zero but for rounding: those of biases of keys
        assert float((found[key] - gradient).norm()) < 1e-5 * float(gradient.norm()) + 1e-6 * size, key


def test_under_autocast_a_model_is_as_near_to_float32_and_without_gradient_the_same() -> None:
    plain, ours = model_pair("llama")
    ids, mask = batch(masked=True)
    exact = list(gradients(plain, ids, mask).values())
    with torch.autocast("cpu", torch.bfloat16):
        narrow, found = (list(gradients(model, ids, mask).values()) for model in (plain, ours))
        with torch.no_grad():
            assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert not all(map(torch.equal, narrow, found))
    assert error(found, exact) < 1.5 * error(narrow, exact)


def test_eager_attention_stays_the_models_own() -> None:
    eager, plain = (build_model("gemma2") for _ in range(2))
    assert plain.config._attn_implementation == "eager"  # it caps its scores
    assert use_attention(eager)
    assert uses_attention(eager)
    assert not attends_in_blocks(eager)
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected, found = (model(input_ids=ids, attention_mask=mask, output_attentions=True) for model in (plain, eager))
    assert torch.equal(found.logits, expected.logits)
    assert all(map(torch.equal, found.attentions, expected.attentions))


def test_models_whose_code_asks_for_an_implementation_by_name_stay_as_they_are() -> None:
    config = transformers.FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert not use_attention(transformers.FalconForCausalLM(config))
    assert not use_attention(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("every_precision")
@pytest.mark.parametrize(
    "fields", [{}, {"gradient_checkpointing": True}, {"packing": "always"}, {"share_prompts": "always"}]
)
@pytest.mark.parametrize("adapted", [False, True])
def test_policies_with_and_without_it_agree(load: Load, fields: dict[str, Any], adapted: bool) -> None:
    found = []
    if adapted:
        pytest.importorskip("peft")
        fields = fields | {"lora": LoraConfig(rank=4)}
    for fused in (True, False):
        policy = load("qwen3", fused_layers=fused, **fields)
        assert uses_attention(policy.model)
        assert attends_in_blocks(policy.model) == fused
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.trainable_parameters() if adapted else ():
            parameter.data.normal_(std=0.1, generator=generator)
        scores = policy.score(sequences())
        scores.logp.square().sum().backward()
        grads = [each.grad for each in policy.model.parameters() if each.requires_grad]
        found.append([scores.logp.detach(), *grads])
    assert error(*found) < 1e-5


def test_scores_are_the_same_with_and_without_gradient(load: Load) -> None:
    policy = load("llama", dtype="bfloat16")
    with torch.no_grad():
        old = policy.score(sequences()).logp
    assert torch.equal(policy.score(sequences()).logp, old)


@pytest.mark.parametrize("packing", ["never", "always"])
def test_blocks_go_with_fused_layers_and_tables_without_padding_do_not(
    load: Load, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each model keeps to its own setting, and so do its copies, whatever was loaded after it."""
    served: list[Tensor] = []
    monkeypatch.setattr(attention_interface, "attention", lambda *a, **o: served.append(a[0]) or attention(*a, **o))
    fused, plain = (
        load("llama", dtype="bfloat16", fused_layers=on, packing=packing, share_prompts="never") for on in (True, False)
    )
    assert fused.layout == plain.layout
    assert plain.layout.packed == packing
    for policy, blocks in ((plain, False), (fused, True), (plain.frozen_copy(), False), (fused.frozen_copy(), True)):
        served.clear()
        policy.score(sequences())
        assert bool(served) == blocks


def test_a_saved_model_does_not_name_it(load: Load, tmp_path: Path) -> None:
    policy = load("llama")
    assert uses_attention(policy.model)
    policy.save(tmp_path)
    assert "tepo" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    save_model(policy.model, tmp_path / "again")
    assert "tepo" not in (tmp_path / "again" / "config.json").read_text()
