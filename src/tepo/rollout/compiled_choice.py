"""The choice of tokens in one compiled pass over the logits; loads numba."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tepo.policy.compiler import use_threads_of_torch
from tepo.rollout import compiled
from tepo.rollout.choice import Choice
from tepo.rollout.config import SamplingConfig


def choose_compiled(config: SamplingConfig, logits: Tensor, uniforms: Sequence[float]) -> Choice:
    """Choose from logits [B, V] on the processor, without `top_k`, `top_p` or `em_inf`; as `choose_tokens` does."""
    use_threads_of_torch()
    rows = len(logits)
    tokens, logp, entropy = np.empty(rows, np.int64), np.empty(rows), np.empty(rows)
    scale = np.float32(1.0 if config.greedy else 1.0 / config.temperature)
    compiled.draw(logits.float().contiguous().numpy(), scale, np.array(uniforms), config.greedy, tokens, logp, entropy)
    return Choice(tokens.tolist(), logp.tolist(), entropy.tolist())
