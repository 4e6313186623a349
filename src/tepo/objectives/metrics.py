"""What an objective reports beside its loss: sums and counts over the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch
from tepo.objectives.ratios import RatioValue
from tepo.objectives.regularizers import KL, EveryToken, Regularizer, estimate_kl
from tepo.objectives.sums import Pair, Sums, extremes, over
from tepo.objectives.surrogates import SurrogateValue


def policy_metrics(
    batch: TokenBatch,
    ratio: RatioValue,
    surrogate: SurrogateValue,
    carried: Mapping[str, Tensor],
    regularizers: Sequence[Regularizer],
    clamp: float,
) -> Sums:
    """Return ratio, clip, KL, entropy and mask metrics.

    `carried`: the tokens that carry each term, bool `[B, T]`, under "policy" and the regularisers' names.
    `clip/*` and `mask/off_policy` are fractions of the policy term's tokens, `mask/NAME` the share of all tokens
    under the masked regulariser of that name.
    """
    mask = batch.mask
    high, low = extremes(ratio.value, mask)
    means: dict[str, Pair] = {"ratio/mean": over(ratio.value, mask)}
    for name in ("clip_low", "clip_high", "clip_dual"):
        clipped: Tensor | None = getattr(surrogate, name)
        clipped = getattr(ratio, name, None) if clipped is None else clipped
        if clipped is not None:
            means[name.replace("_", "/")] = over(clipped.to(batch.logp.dtype), carried["policy"])
    if surrogate.off_policy is not None:
        means["mask/off_policy"] = over(surrogate.off_policy.to(batch.logp.dtype), carried["policy"])
    for name, target in (("kl/old", batch.old_logp), ("kl/ref", batch.ref_logp)):
        if target is not None:
            means[name] = over(estimate_kl((target - batch.logp.detach()).clamp(-clamp, clamp), "k3"), mask)
    if batch.entropy is not None:
        means["entropy/new"] = over(batch.entropy, mask)
    if batch.old_entropy is not None:
        means["entropy/old"] = over(batch.old_entropy, mask)
        if batch.entropy is not None:
            means["entropy/change"] = over(batch.entropy.detach() - batch.old_entropy, mask)
    means["advantage/mean"] = over(_advantage(batch), mask)
    for part in regularizers:
        if isinstance(part, KL) and not isinstance(part.mask, EveryToken):
            means[f"mask/{part.name}"] = over(carried[part.name].to(batch.logp.dtype), mask)
    return Sums(means=means, maxima={"ratio/max": high}, minima={"ratio/min": low})


def _advantage(batch: TokenBatch) -> Tensor:
    return batch.advantage if batch.advantage is not None else torch.zeros_like(batch.logp)
