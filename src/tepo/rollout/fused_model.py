"""The layers of a Llama-type model for sampling: fused matrices in the compute precision, no gradients.

A decoding step on few rows is bound by overhead and by reading weights, not by arithmetic. So the query, key and value
matrices of a layer are one product and so are gate and up; on a processor the matrices are laid out once for the
matrix kernels instead of at every product; and rotary pairs lie next to each other, which makes the rotation one
complex product. The residual stream, norms, rotations, scores and softmax are float32, as under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tepo.policy.layers import FAMILIES

TYPES = tuple(FAMILIES)
"""`model_type` of configurations whose layers are the ones below."""

_PACKED_FROM = 1 << 14
"""Entries from which a matrix is worth the kernel library's own layout."""

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Norms are (weight, epsilon); `query_norm` and `key_norm` are None where there are none."""

    before_attention: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    before_mlp: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [..., D], normalised, in its own dtype."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True)
class FusedModel:
    """What a decoder needs of a model: its layers, embedding, head and rotations.

    `turns` [positions, size / 2] holds the rotation of every rotary pair at every position, as complex numbers.
    """

    layers: Sequence[Layer]
    embedding: Tensor
    norm: Norm
    head: Linear
    turns: Tensor
    heads: int
    key_heads: int
    size: int
    inner: int
    scale: float

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.embedding.device

    def project(self, layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [..., H, size] and keys [..., K, size], float32, and values [..., K, size].

        Args:
            x: residual stream [..., D].
            turns: rotations [..., 1, size / 2] at the positions of `x`.
        """
        both = self.heads + self.key_heads
        fused = layer.qkv(layer.before_attention(x)).view(*x.shape[:-1], both + self.key_heads, self.size)
        turned = fused[..., :both, :].to(x.dtype)
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat(
                [layer.query_norm(turned[..., : self.heads, :]), layer.key_norm(turned[..., self.heads :, :])], -2
            )
        pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], fused[..., both:, :]

    def close(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention's output [..., H * size] and then the MLP's to the residual stream `x`, in place."""
        x += layer.output(attended)
        gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, -1)
        x += layer.down(functional.silu(gate).mul_(up))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return next-token logits [B, V], float32 or better, from the residual stream [B, D]."""
        found = self.head(self.norm(x))
        return found if found.dtype == torch.float64 else found.float()


class _OnDemand(Sequence[Layer]):
    """Layers that are made when they are asked for and kept by nobody, so that one at a time takes memory."""

    def __init__(self, sources: Sequence[Any], make: Callable[[Any], Layer]) -> None:
        self._sources = sources
        self._make = make

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._sources[index])


def fused_model(model: Any, *, dtype: torch.dtype, positions: int, on_demand: bool = False) -> FusedModel:
    """Return the fused copy of a model to which `why_not_fused` has no objection, as its weights are now.

    Args:
        model: a transformers causal LM.
        dtype: precision of the matrix products.
        positions: positions to prepare rotations for.
        on_demand: make each layer whenever it is used, for a few steps at the memory of one layer.
    """
    config, body = model.config, model.model
    attention = body.layers[0].self_attn
    size: int = attention.head_dim
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    embedding: Tensor = model.get_input_embeddings().weight.detach()
    places = torch.arange(positions, device=embedding.device)
    cosine, sine = (table[0, :, : size // 2] for table in body.rotary_emb(embedding[:1], places.unsqueeze(0)))
    linear = _linear_maker(dtype, embedding.device)

    def layer(source: Any) -> Layer:
        attends, mlp = source.self_attn, source.mlp
        rows = [_paired(attends.q_proj, size), _paired(attends.k_proj, size), _rows(attends.v_proj)]
        return Layer(
            before_attention=_norm(source.input_layernorm),
            qkv=linear(rows),
            query_norm=_paired_norm(attends, "q_norm"),
            key_norm=_paired_norm(attends, "k_norm"),
            output=linear([_rows(attends.o_proj)]),
            before_mlp=_norm(source.post_attention_layernorm),
            gate_up=linear([_rows(mlp.gate_proj), _rows(mlp.up_proj)]),
            down=linear([_rows(mlp.down_proj)]),
        )

    return FusedModel(
        layers=_OnDemand(body.layers, layer) if on_demand else [layer(source) for source in body.layers],
        embedding=embedding,
        norm=_norm(body.norm),
        head=linear([_rows(model.lm_head)]),
        turns=torch.complex(cosine.to(embedding.dtype).contiguous(), sine.to(embedding.dtype).contiguous()),
        heads=heads,
        key_heads=key_heads,
        size=size,
        inner=config.intermediate_size,
        scale=attention.scaling,
    )


def why_not_fused(model: Any) -> str | None:
    """Return why a model's layers are not the ones above, or None where they are."""
    config: Any = model.config
    if config.model_type not in TYPES:
        return f"its type is {config.model_type!r}, not one of {', '.join(TYPES)}"
    linears = [module for name, module in model.named_modules() if name.endswith(("_proj", "_head"))]
    rope = getattr(model.model.rotary_emb, "rope_type", "default") if hasattr(model, "model") else "hidden"
    reasons = {
        "its linear layers are wrapped (an adapter)": any(type(module) is not nn.Linear for module in linears),
        "it has sliding-window layers": _slides(config),
        f"its activation is {config.hidden_act!r}": config.hidden_act != "silu",
        f"its rotary embedding ({rope}) changes with the length": rope not in ("default", "linear", "llama3", "yarn"),
        f"it is on {model.device.type}": model.device.type not in ("cpu", "cuda"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _slides(config: Any) -> bool:
    """Whether some layer attends to a window only; Mistral has no list of layer types and always uses its window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return config.model_type == "mistral" and config.sliding_window is not None
    return set(kinds) != {"full_attention"}


def _linear_maker(
    dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[tuple[Tensor, Tensor | None]]], Linear]:
    """Return what joins the rows of matrices into one linear map, in `dtype`."""

    def make(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Linear:
        matrices = [rows.to(dtype) for rows, _ in parts]
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        biases = [bias for _, bias in parts if bias is not None]
        bias = torch.cat(biases).to(dtype) if biases else None
        if device.type == "cpu" and dtype != torch.float64 and weight.numel() >= _PACKED_FROM and has_packed_products():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            product = torch.ops.mkldnn._linear_pointwise
            return lambda x: product(x.to(dtype), packed, bias, "none", [], "")
        return lambda x: functional.linear(x.to(dtype), weight, bias)

    return make


def has_packed_products() -> bool:
    """Whether this build of torch lays matrices out for the kernel library ahead of the products."""
    present: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return present and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _rows(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _paired(module: nn.Linear, size: int) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias with the two rows of every rotary pair next to each other, head by head.

    Queries and keys are reordered alike, so their products stay what they were.
    """
    weight, bias = _rows(module)
    return _interleaved(weight, size), None if bias is None else _interleaved(bias, size)


def _interleaved(rows: Tensor, size: int) -> Tensor:
    """Move element i + size / 2 of every run of `size` rows behind element i."""
    return rows.view(-1, 2, size // 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def _paired_norm(attention: Any, name: str) -> Norm | None:
    module = getattr(attention, name, None)
    if module is None:
        return None
    return Norm(_interleaved(module.weight.detach(), attention.head_dim), module.variance_epsilon)
