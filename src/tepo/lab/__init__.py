"""Is the difference real, and where did the credit go: studies, their statistics, the report and the token viewer.

Names are loaded when they are used: the statistics need neither torch nor the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tepo.core.lazy import names_at_first_use

if TYPE_CHECKING:
    from tepo.lab.config import StudyConfig, load_study
    from tepo.lab.folder import StudyFolder
    from tepo.lab.intervals import Effect, paired_accuracy, probability_of_improvement
    from tepo.lab.report import write_report, write_run_report
    from tepo.lab.results import analyse
    from tepo.lab.study import run_study, write_results
    from tepo.lab.survival import kaplan_meier, restricted_mean
    from tepo.lab.tokens import Inspection, inspect, token_batch
    from tepo.lab.view import write_view

__all__ = [
    "Effect",
    "Inspection",
    "StudyConfig",
    "StudyFolder",
    "analyse",
    "inspect",
    "kaplan_meier",
    "load_study",
    "paired_accuracy",
    "probability_of_improvement",
    "restricted_mean",
    "run_study",
    "token_batch",
    "write_report",
    "write_results",
    "write_run_report",
    "write_view",
]

_HOMES = {
    "Effect": "intervals",
    "Inspection": "tokens",
    "StudyConfig": "config",
    "StudyFolder": "folder",
    "analyse": "results",
    "inspect": "tokens",
    "kaplan_meier": "survival",
    "load_study": "config",
    "paired_accuracy": "intervals",
    "probability_of_improvement": "intervals",
    "restricted_mean": "survival",
    "run_study": "study",
    "token_batch": "tokens",
    "write_report": "report",
    "write_results": "study",
    "write_run_report": "report",
    "write_view": "view",
}

__getattr__ = names_at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
