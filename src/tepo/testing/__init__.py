"""Checks for objectives, public: `check_objective` holds any of them to the invariance matrix.

from tepo.testing import check_objective

check_objective("tepo", kl_estimator="abs")   # a method of the catalogue, any setting overridden
check_objective(tepo.Objective(name="mine", ...))
"""

from tepo.testing.batches import KINDS, Kind, random_batch
from tepo.testing.check import check_objective
from tepo.testing.draws import steady_batch
from tepo.testing.invariances import INVARIANCES
from tepo.testing.outcomes import Difference, Outcome, evaluate

__all__ = [
    "INVARIANCES",
    "KINDS",
    "Difference",
    "Kind",
    "Outcome",
    "check_objective",
    "evaluate",
    "random_batch",
    "steady_batch",
]
