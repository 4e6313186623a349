"""Sampling groups of responses from a policy: shared prefill, addressed draws, recorded log-probs and entropies.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tepo.core.lazy import names_at_first_use

if TYPE_CHECKING:
    from tepo.rollout.choosing import why_plain
    from tepo.rollout.config import EMInfConfig, SamplingConfig
    from tepo.rollout.response import Response, StopReason
    from tepo.rollout.sampler import sample

__all__ = ["EMInfConfig", "Response", "SamplingConfig", "StopReason", "sample", "why_plain"]

_HOMES = {
    "EMInfConfig": "config",
    "Response": "response",
    "SamplingConfig": "config",
    "StopReason": "response",
    "sample": "sampler",
    "why_plain": "choosing",
}

__getattr__ = names_at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
