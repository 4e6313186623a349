"""New objectives from parts: `python examples/composed.py` holds them to every invariance and prints a step.

The first is published but not in the catalogue, the second replaces a part by one of its own. Neither touches the
package; `examples/composed.toml` composes a third in a run's configuration.
"""

from dataclasses import dataclass

import torch

import tepo
from tepo.objectives import GroupNormalized, PPOClip, RatioValue, TokenMean, TokenRatio, compose
from tepo.testing import check_objective, random_batch


def lite_ppo() -> tepo.Objective:
    """Lite PPO (arXiv 2508.08221): the reward less the group's mean, over the batch's deviation; token mean."""
    return tepo.Objective(
        "lite-ppo",
        advantage=GroupNormalized(scale="batch"),
        ratio=TokenRatio(),
        surrogate=PPOClip(0.2, 0.2),
        reducer=TokenMean(),
    )


@dataclass(frozen=True)
class LeastPrefixRatio:
    """r_t * min(1, smallest r before t): a token counts little once the response has become unlikely on the way.

    After the idea of MinPRO (arXiv 2601.22718); this form is ours. The prefix's factor is detached.
    """

    def __call__(self, batch: tepo.TokenBatch, clamp: float) -> RatioValue:
        """Return the ratio of every token, `[B, T]`; the batch is clean: outside the mask all fields are 0."""
        assert batch.old_logp is not None
        own = (batch.logp - batch.old_logp.detach()).clamp(-clamp, clamp)
        before = torch.cat([torch.zeros_like(own[:, :1]), own.detach()[:, :-1]], dim=1)
        log = torch.where(batch.mask, own + before.clamp(max=0).cummin(dim=1).values, 0.0)
        log = log.clamp(-clamp, clamp)
        return RatioValue(log, log.exp())


def least_prefix() -> tepo.Objective:
    """DAPO with that ratio, everything else as it was."""
    return compose("dapo", {"ratio": LeastPrefixRatio(), "clip_high": 0.2}, name="least-prefix")


if __name__ == "__main__":
    for objective in (lite_ppo(), least_prefix()):
        check_objective(objective)
        out = objective(random_batch(0, fields=objective.needs.batch))
        print(f"{objective.name}: every invariance holds; loss {float(out.loss):.4f}")
