"""From the next-token logits of a batch to one token a row, its log-prob and the entropy of the distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tepo.rollout.config import SamplingConfig
from tepo.rollout.draws import choose, truncate
from tepo.rollout.em_inf import minimise_entropy


class Choice(NamedTuple):
    """One token of each row; log-prob and entropy (nats) are those of the policy's own distribution at the run's
    temperature, before anything is cut off."""

    tokens: list[int]
    logp: list[float]
    entropy: list[float]


ChooseTokens: TypeAlias = Callable[[Tensor, Sequence[float]], Choice]
"""Takes logits [B, V] and one uniform in [0, 1) a row. A log-prob is NaN where the logits are no distribution."""


def choose_tokens(config: SamplingConfig, logits: Tensor, uniforms: Sequence[float]) -> Choice:
    """Choose by tensor operations, on any device and with every option."""
    logits = logits if config.temperature in (0.0, 1.0) else logits / config.temperature
    weights, centred, total = _exponentials(logits)
    smallest = torch.finfo(centred.dtype).min  # a logit of minus infinity adds nothing to the entropy
    log_total = total.log()
    entropy = log_total - torch.linalg.vecdot(weights, centred.clamp_(min=smallest)) / total
    if config.em_inf is not None:
        logits = minimise_entropy(logits, config.em_inf)
        weights, _, total = _exponentials(logits)
    if config.greedy:
        chosen = logits.argmax(-1)
    else:
        if config.top_k > 0 or config.top_p < 1.0:
            weights = truncate(weights / total.unsqueeze(-1), top_k=config.top_k, top_p=config.top_p)
        drawn = torch.tensor(uniforms, dtype=torch.float64)
        chosen = choose(weights, drawn.to(weights.device) if weights.device.type != "mps" else drawn.float().to("mps"))
    logp = centred.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - log_total
    tokens: list[int] = chosen.tolist()
    return Choice(tokens, *torch.stack([logp, entropy]).tolist())


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(z - max z) [B, V], z - max z [B, V] and the sum of the first over the vocabulary [B]."""
    centred = logits - logits.amax(-1, keepdim=True)
    weights = centred.exp()
    return weights, centred, weights.sum(-1)
