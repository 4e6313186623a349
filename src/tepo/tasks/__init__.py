"""Problems and rewards: what the policy is asked, and what a response is worth.

Names are loaded when they are used: reward workers import this package and start faster without pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tepo.core.lazy import names_at_first_use

if TYPE_CHECKING:
    from tepo.tasks.config import ColumnsConfig as ColumnsConfig
    from tepo.tasks.config import Example as Example
    from tepo.tasks.config import MixturePart as MixturePart
    from tepo.tasks.config import PromptConfig as PromptConfig
    from tepo.tasks.config import RewardConfig as RewardConfig
    from tepo.tasks.config import RewardPart as RewardPart
    from tepo.tasks.config import TaskConfig as TaskConfig
    from tepo.tasks.grader import Grade as Grade
    from tepo.tasks.grader import Grader as Grader
    from tepo.tasks.problem import Problem as Problem
    from tepo.tasks.stream import ProblemStream as ProblemStream
    from tepo.tasks.task import Task as Task
    from tepo.tasks.task import load_problems as load_problems
    from tepo.tasks.task import load_task as load_task

_HOME = {
    "ColumnsConfig": "config",
    "Example": "config",
    "MixturePart": "config",
    "PromptConfig": "config",
    "RewardConfig": "config",
    "RewardPart": "config",
    "TaskConfig": "config",
    "Grade": "grader",
    "Grader": "grader",
    "Problem": "problem",
    "ProblemStream": "stream",
    "Task": "task",
    "load_problems": "task",
    "load_task": "task",
}

__all__ = [
    "ColumnsConfig",
    "Example",
    "Grade",
    "Grader",
    "MixturePart",
    "Problem",
    "ProblemStream",
    "PromptConfig",
    "RewardConfig",
    "RewardPart",
    "Task",
    "TaskConfig",
    "load_problems",
    "load_task",
]

__getattr__ = names_at_first_use(__name__, _HOME)
