"""EM-INF: entropy minimised on the logits at decoding time (Agarwal et al., arXiv 2505.15134, section 4).

The next-token logits are parameters for a few Adam steps on

    f(z) = H(softmax z) + w KL(p || softmax z),   p = softmax of the logits as they were

and the token is drawn from what comes out. A row stops as soon as its entropy is below the threshold, so tokens that
are nearly decided stay as they are. Nothing of the model changes. Confirmed: the objective, the threshold and the
defaults of the authors' evaluation script (3 steps of 0.1, threshold 0.3, w 0.05); the paper tells of 5 to 15 steps and
thresholds of 0.1 to 0.5. Inferred: that temperature divides the logits first. Derivatives, with q = softmax z:

    dH/dz_k = -q_k (log q_k + H),   dKL/dz_k = q_k - p_k
"""

from __future__ import annotations

import torch
from torch import Tensor

from tepo.rollout.config import EMInfConfig

_BETAS = (0.9, 0.999)
_EPS = 1e-8


def minimise_entropy(logits: Tensor, config: EMInfConfig) -> Tensor:
    """Return the logits [B, V] after the steps, each row on its own; float32 or better in and out."""
    start = logits.softmax(-1)
    moved, mean, square = logits.clone(), torch.zeros_like(logits), torch.zeros_like(logits)
    running = torch.ones_like(logits[:, :1], dtype=torch.bool)
    for step in range(1, config.steps + 1):
        logp = moved.log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)  # a token of probability 0 adds nothing
        current = logp.exp()
        entropy = -(current * logp).sum(-1, keepdim=True)
        running = running & (entropy >= config.threshold)
        if not bool(running.any()):
            break
        slope = config.kl_coef * (current - start) - current * (logp + entropy)
        mean = _BETAS[0] * mean + (1 - _BETAS[0]) * slope
        square = _BETAS[1] * square + (1 - _BETAS[1]) * slope**2
        size = (square / (1 - _BETAS[1] ** step)).sqrt() + _EPS
        moved = torch.where(running, moved - config.lr * mean / (1 - _BETAS[0] ** step) / size, moved)
    return moved
