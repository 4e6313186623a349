"""The partner: a second policy that learns from the responses of the first."""

from __future__ import annotations

from collections.abc import Callable

from tepo.core.errors import InputError
from tepo.objectives import Objective
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.training.config import RunConfig
from tepo.training.learner import Learner


def load_partner(config: RunConfig, policy: Policy, objective: Objective, say: Callable[[str], None]) -> Learner:
    """Return the second policy, which learns by `objective`.

    Raises:
        InputError: it cannot be loaded, or does not share the policy's tokens.
    """
    path = config.model.path if config.partner.path == "start" else config.partner.path
    named = PolicyConfig.model_validate({**config.model.model_dump(), "path": path, "lora": None})
    partner = load_policy(named, seed=config.train.seed, say=say)
    if partner.vocabulary != policy.vocabulary:
        raise InputError(
            f"partner.path {path} has {partner.vocabulary} token ids, the policy {policy.vocabulary}: "
            "they must share a tokenizer"
        )
    optim = config.optim if config.partner.lr is None else config.optim.model_copy(update={"lr": config.partner.lr})
    return Learner(
        partner, objective, optim, updates_per_step=config.train.updates, steps=config.train.steps, name="partner"
    )
