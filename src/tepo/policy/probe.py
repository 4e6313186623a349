"""What is proved of a model on a probe: its head and what follows it, and that rows may lie one behind the other.

Models differ after the last layer: a soft cap (Gemma 2), a scale (Cohere, Granite), a bias, tied weights, an adapter on
the head. The configuration says which of them to expect. Two forward passes of a few tokens then check it: one compares
the result with the model's logits, the other puts chosen values, small and large, in place of the head's output, and
so shows what the model does to them even where its real logits are too small to tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tepo.policy.attention_interface import tells_its_windows, uses_attention
from tepo.policy.head import Head, Post
from tepo.policy.sequences import TokenSequence, scored_tokens

_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier_scale")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping",)


class UnusualHeadError(Exception):
    """The model's logits are not its head's output; the text says what was found."""


def find_head(model: Any, *, dtype: torch.dtype, context: Callable[[], AbstractContextManager[Any]]) -> Head:
    """Return the head of a transformers causal language model; `context` is the one the model computes in.

    Raises:
        UnusualHeadError: head(hidden) cannot be made to equal the model's own logits.
    """
    module = model.get_output_embeddings()
    if module is None or model.base_model is model:
        raise UnusualHeadError("the model has no separate head")
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(12, device=device) * 7919 % vocabulary).view(2, 6)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    try:
        with torch.no_grad(), context():
            return _probe(model, module, ids, dtype=dtype, tolerance=tolerance)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnusualHeadError(f"the probe failed with {type(error).__name__}: {error}") from error


def _probe(model: Any, module: nn.Module, ids: Tensor, *, dtype: torch.dtype, tolerance: float) -> Head:
    logits, inputs = _logits(model, module, ids)
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    if hidden.shape != inputs.shape or not _equal(hidden, inputs, tolerance):
        raise UnusualHeadError("the hidden states change on their way to the head")
    values = torch.logspace(-2, 3, logits.shape[-1], device=ids.device).to(logits.dtype)
    values[::2].neg_()
    planted = values.expand(logits.shape).contiguous()
    shown, _ = _logits(model, module, ids, planted)
    for post in _candidates(model.config):
        if _equal(post.apply(planted), shown, tolerance):
            head = Head(module, post, dtype)
            break
    else:
        raise UnusualHeadError("the model changes its head's output in a way that is not known here")
    leaves = head.cast(head.parameters(), differentiable=[False] * len(head.parameters()))
    if not _equal(head.post.apply(head.raw(hidden.flatten(0, 1), leaves)), logits.flatten(0, 1), tolerance):
        raise UnusualHeadError("head(hidden) differs from the model's logits")
    return head


def why_not_packed(model: Any, *, dtype: torch.dtype, context: Callable[[], AbstractContextManager[Any]]) -> str | None:
    """Return why rows cannot be computed one behind the other, prompts once; None where that gives the same states."""
    from tepo.policy.passes import packed_pass, padded_pass

    if not uses_attention(model):
        return "its attention does not go through transformers' interface"
    if not tells_its_windows(model):
        return "its masks hide more than its attention is told"
    device = next(model.parameters()).device
    tokens = [int(token) for token in torch.arange(9) * 7919 % model.get_input_embeddings().weight.shape[0]]
    rows = [
        TokenSequence(tuple(tokens[:prompt]), tuple(tokens[start : start + response]))
        for prompt, start, response in ((4, 5, 4), (2, 3, 4), (4, 2, 2), (2, 6, 1))
    ]
    scored = scored_tokens(rows, width=None, device=device)
    try:
        with torch.no_grad(), context():
            expected = padded_pass(model, rows, scored).double()
            found = [packed_pass(model, rows, scored, share=share).double() for share in (False, True)]
            with _not_a_number(model.get_input_embeddings(), tokens[7]):  # the last computed token of row 0 alone
                spoiled = [packed_pass(model, rows, scored, share=share) for share in (False, True)]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"the model cannot: {type(error).__name__}: {error}"
    distance = max(float((states - expected).norm() / expected.norm()) for states in found)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    if not distance <= tolerance:
        return f"one behind the other its states differ by {distance:.2g}"
    # What a convolution or a recurrent layer carries from row to row may be so little, before it is trained, that the
    # tolerance hides it; what is not a number shows.
    reached = [~torch.isfinite(states).all(-1) for states in spoiled]
    if any(bool(each[scored.rows != 0].any()) for each in reached):
        return "one behind the other its rows reach each other"
    return None


@contextlib.contextmanager
def _not_a_number(embedding: nn.Module, token: int) -> Iterator[None]:
    """Let the embedding of a token be NaN."""

    def spoil(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((inputs[0] == token)[..., None], torch.nan)

    handle = embedding.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def _logits(model: Any, module: nn.Module, ids: Tensor, planted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the model's logits [2, 6, V] and the input of its head; `planted` replaces the head's output."""
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return output if planted is None else planted.to(output.dtype)

    handle = module.register_forward_hook(look)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1:
        raise UnusualHeadError(f"the model runs its head {len(seen)} times in one pass")
    return logits, seen[0]


def _candidates(config: Any) -> Iterator[Post]:
    """Yield what may follow the head, by the names that configurations use."""
    text = config.get_text_config()

    def named(names: tuple[str, ...]) -> list[float]:
        found = [getattr(text, name, None) for name in names]
        return [float(value) for value in found if isinstance(value, int | float) and value]

    scales = [1.0, *named(_SCALES), *(1.0 / value for value in named(_DIVISORS))]
    for cap in [None, *named(_CAPS)]:
        yield from (Post(scale=scale, cap=cap) for scale in scales)


def _equal(left: Tensor, right: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree, relative to the size of each entry or, for small entries, of the whole."""
    left, right = left.double(), right.double()
    bound = tolerance * torch.maximum(right.abs(), right.abs().mean())
    return bool(torch.isfinite(left).all()) and bool(((left - right).abs() <= bound).all())
