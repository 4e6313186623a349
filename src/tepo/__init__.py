"""Token-level policy optimisation of language models.

The public face: every name below is loaded from its room when it is first used, so `import tepo` is immediate and
loads neither torch nor transformers nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tepo.core.errors import InputError, TepoError, WorkError

if TYPE_CHECKING:
    from tepo.evaluation import Evaluation, evaluate
    from tepo.objectives import Objective, Output, TokenBatch, credit, objective, objectives
    from tepo.policy import LoraConfig, Policy, PolicyConfig, Scores, TokenSequence, load_policy
    from tepo.rollout import Response, SamplingConfig, sample
    from tepo.tasks import Grade, Grader, Problem, RewardConfig, TaskConfig, load_problems, load_task
    from tepo.training import Callback, RunConfig, RunResult, load_config, train

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Evaluation",
    "Grade",
    "Grader",
    "InputError",
    "LoraConfig",
    "Objective",
    "Output",
    "Policy",
    "PolicyConfig",
    "Problem",
    "Response",
    "RewardConfig",
    "RunConfig",
    "RunResult",
    "SamplingConfig",
    "Scores",
    "TaskConfig",
    "TepoError",
    "TokenBatch",
    "TokenSequence",
    "WorkError",
    "credit",
    "evaluate",
    "load_config",
    "load_policy",
    "load_problems",
    "load_task",
    "objective",
    "objectives",
    "sample",
    "train",
]

# Which room each lazily loaded name lives in. Rooms themselves are here too: `tepo.policy` needs no extra import.
_HOMES = {
    "tepo.objectives": ("Objective", "Output", "TokenBatch", "credit", "objective"),
    "tepo.policy": ("LoraConfig", "Policy", "PolicyConfig", "Scores", "TokenSequence", "load_policy"),
    "tepo.rollout": ("Response", "SamplingConfig", "sample"),
    "tepo.tasks": ("Grade", "Grader", "Problem", "RewardConfig", "TaskConfig", "load_problems", "load_task"),
    "tepo.evaluation": ("Evaluation", "evaluate"),
    "tepo.training": ("Callback", "RunConfig", "RunResult", "load_config", "train"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = frozenset({"core", "objectives", "policy", "rollout", "tasks", "evaluation", "training", "testing", "lab"})


def __getattr__(name: str) -> Any:
    """Load a public name from its room at first use.

    `tepo.objectives` is a room and, called, the catalogue: the room's module is callable.
    """
    if name in _ROOMS:
        return importlib.import_module(f"tepo.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tepo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, "__version__"})
