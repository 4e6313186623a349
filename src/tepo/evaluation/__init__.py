"""A benchmark sampled and graded: avg@k, unbiased pass@k and maj@k with intervals over questions."""

from __future__ import annotations

from tepo.evaluation.comparison import Comparison as Comparison
from tepo.evaluation.comparison import compare as compare
from tepo.evaluation.evaluate import Sampler as Sampler
from tepo.evaluation.evaluate import evaluate as evaluate
from tepo.evaluation.grading import Disagreement as Disagreement
from tepo.evaluation.grading import disagreements as disagreements
from tepo.evaluation.presets import PRESETS as PRESETS
from tepo.evaluation.presets import Preset as Preset
from tepo.evaluation.results import Evaluation as Evaluation
from tepo.evaluation.results import QuestionResult as QuestionResult
from tepo.evaluation.results import SampleResult as SampleResult
from tepo.evaluation.results import Summary as Summary
from tepo.evaluation.statistics import Estimate as Estimate
from tepo.evaluation.statistics import difference as difference
from tepo.evaluation.statistics import estimates as estimates
from tepo.evaluation.statistics import majority_at_k as majority_at_k
from tepo.evaluation.statistics import pass_at_k as pass_at_k
from tepo.evaluation.store import Store as Store
