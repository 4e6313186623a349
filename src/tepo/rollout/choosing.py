"""How a policy is sampled here: by the model's own forward pass or a quicker one that agrees with it, and by which
choice of tokens."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tepo.core.errors import InputError
from tepo.rollout.choice import ChooseTokens, choose_tokens
from tepo.rollout.compiled_step import CompiledStep, why_not_compiled
from tepo.rollout.config import SamplingConfig
from tepo.rollout.decoder import Decoder, ModelDecoder
from tepo.rollout.fused_decoder import FusedDecoder
from tepo.rollout.fused_model import FusedModel, fused_model, why_not_fused
from tepo.rollout.tensor_step import TensorStep

if TYPE_CHECKING:
    from tepo.policy import Policy

_PROBE = (5, 3)
"""Tokens of the probe's prompt, and single-token steps after it."""

_TOLERANCE = 1e-3
"""Largest difference of the probe's logits, relative to their standard deviation; both compute in the weights' dtype,
float32, where only the order of sums differs."""

_found: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def decoder_for(policy: Policy, config: SamplingConfig, positions: int) -> Decoder:
    """Return a decoder for the policy as its weights are now, for sequences of at most `positions` tokens.

    Call it without gradients and in the policy's compute context.

    Raises:
        InputError: `config.decoder` names one that does not work for the model or on this machine; or the model's cache
            holds more than keys and values.
    """
    if config.decoder == "plain":
        return _plain(policy)
    reason = why_plain(policy)
    if reason is None and config.decoder == "compiled":
        reason = why_not_compiled(policy.device, policy.model.dtype, policy.compute_dtype)
    if reason is None:
        model = fused_model(policy.model, dtype=policy.compute_dtype, positions=positions)
        return _fused(policy, model, policy.compute_dtype, compiled=config.decoder != "fused")
    if config.decoder != "auto":
        raise InputError(f"sampling.decoder={config.decoder!r} does not work for {policy.name!r}: {reason}; use 'auto'")
    return _plain(policy)


def choice_for(policy: Policy, config: SamplingConfig) -> ChooseTokens:
    """Return what chooses the next tokens from logits: one compiled pass over them where this machine can."""
    wanted = config.decoder in ("auto", "compiled") and config.top_k == 0 and config.top_p == 1.0
    if wanted and config.em_inf is None and why_not_compiled(policy.device, torch.float32, torch.float32) is None:
        from tepo.rollout.compiled_choice import choose_compiled

        return functools.partial(choose_compiled, config)
    return functools.partial(choose_tokens, config)


def why_plain(policy: Policy) -> str | None:
    """Return why the policy is not sampled with the fused decoder, or None where it is.

    Once for each model, the fused decoder is held to the model's own forward pass on a probe.
    """
    if policy.model not in _found:
        _found[policy.model] = why_not_fused(policy.model) or _disagreement(policy)
    return _found[policy.model]


def _plain(policy: Policy) -> ModelDecoder:
    return ModelDecoder(policy.model, device=policy.device, pad_id=policy.pad_id, max_positions=policy.max_positions)


def _fused(policy: Policy, model: FusedModel, dtype: torch.dtype, *, compiled: bool) -> FusedDecoder:
    """Return the decoder of a fused model, with compiled steps where they are wanted and this machine can."""
    compiled = compiled and why_not_compiled(model.device, model.embedding.dtype, dtype) is None
    step = CompiledStep(model, dtype) if compiled else TensorStep(model, dtype)
    return FusedDecoder(model, step, dtype=dtype, pad_id=policy.pad_id, max_positions=len(model.turns))


def _disagreement(policy: Policy) -> str | None:
    """Return what the two decoders disagree on, or None."""
    length, steps = _PROBE
    if policy.max_positions < length + steps:
        return f"it has {policy.max_positions} positions only"
    ids = [(7 * place + 3) % policy.vocabulary for place in range(length + steps)]
    with torch.no_grad(), torch.autocast(policy.device.type, enabled=False):
        dtype = policy.model.dtype
        model = fused_model(policy.model, dtype=dtype, positions=length + steps, on_demand=True)
        decoders: tuple[Decoder, Decoder] = (_plain(policy), _fused(policy, model, dtype, compiled=True))
        rows = [decoder.prefill([ids[:length], ids[: length - 2]]) for decoder in decoders]
        for step in range(steps + 1):
            expected, found = (one.logits for one in rows)
            error = float((found - expected).abs().max() / expected.std())
            if not error <= _TOLERANCE:
                return f"its logits differ by {error:.2g} standard deviations from the model's own"
            if step < steps:
                for decoder, row in zip(decoders, rows, strict=True):
                    decoder.advance(row, [ids[length + step]] * 2)
    return None
