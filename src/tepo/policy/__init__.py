"""A causal language model as a policy: load, score tokens, adapters, save; heavy imports wait for their first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tepo.core.lazy import names_at_first_use

if TYPE_CHECKING:
    from tepo.policy.config import LoraConfig, PolicyConfig
    from tepo.policy.load import load_policy
    from tepo.policy.logits import token_statistics_from_logits
    from tepo.policy.policy import Policy
    from tepo.policy.sequences import Scores, TokenSequence
    from tepo.policy.trained import Trained
    from tepo.policy.value import ValueModel, load_value_model, value_of_policy

__all__ = [
    "LoraConfig",
    "Policy",
    "PolicyConfig",
    "Scores",
    "TokenSequence",
    "Trained",
    "ValueModel",
    "load_policy",
    "load_value_model",
    "token_statistics_from_logits",
    "value_of_policy",
]

_HOMES = {
    "LoraConfig": "config",
    "Policy": "policy",
    "PolicyConfig": "config",
    "Scores": "sequences",
    "TokenSequence": "sequences",
    "Trained": "trained",
    "ValueModel": "value",
    "load_policy": "load",
    "load_value_model": "value",
    "token_statistics_from_logits": "logits",
    "value_of_policy": "value",
}

__getattr__ = names_at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
