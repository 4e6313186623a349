"""Is the difference real: studies of objectives and seeds, their statistics and the sentences that follow."""

from __future__ import annotations

from tepo.lab.config import StudyConfig as StudyConfig
from tepo.lab.config import load_study as load_study
from tepo.lab.folder import StudyFolder as StudyFolder
from tepo.lab.intervals import Effect as Effect
from tepo.lab.intervals import paired_accuracy as paired_accuracy
from tepo.lab.intervals import probability_of_improvement as probability_of_improvement
from tepo.lab.results import analyse as analyse
from tepo.lab.study import run_study as run_study
from tepo.lab.study import write_results as write_results
from tepo.lab.survival import kaplan_meier as kaplan_meier
from tepo.lab.survival import restricted_mean as restricted_mean
