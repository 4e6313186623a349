"""The maths: every method of the family as a composition of a few orthogonal parts. Depends on torch alone.

`objective(name, **settings)` returns a method of the catalogue; `Objective(...)` composes a new one from the parts.
"""

import sys
import types

from tepo.objectives.advantages import GroupNormalized, LeaveOneOut
from tepo.objectives.baselines import BestOfGroup, LengthWeightedBaseline, SignalRescaled
from tepo.objectives.batch import TokenBatch
from tepo.objectives.catalogue import Entry, decoding_options, entry, method, objective, objectives
from tepo.objectives.composition import compose
from tepo.objectives.covariance import CovarianceBand, CovarianceKernel, TopCovariance
from tepo.objectives.described import DecodingOption, Described
from tepo.objectives.detached_surrogates import CappedWeight, DivergenceMask, GammaWeight
from tepo.objectives.entropies import EntropyBonusAdvantage, EntropyChangeWeights, ProgressGate, TopEntropy
from tepo.objectives.entropy_rewards import (
    ClassNormalized,
    ConfidenceReward,
    EntropySharedRewards,
    NoAdvantage,
    TokenEntropy,
)
from tepo.objectives.max_entropy import DualAscent, SoftBaseline, Steps, TemperedEntropy
from tepo.objectives.objective import Needs, Objective, Output, Prepared, Statistics, credit
from tepo.objectives.ratios import (
    AnnealedHolderRatio,
    HolderRatio,
    NoRatio,
    PrefixRatio,
    RatioValue,
    SequenceRatio,
    SequenceSumRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from tepo.objectives.reducers import SequenceMean, SequenceSum, TokenMean, Weights
from tepo.objectives.regularizers import (
    KL,
    AdaptiveCoefficient,
    EntropyBonus,
    EveryToken,
    FallingEntropy,
    State,
)
from tepo.objectives.returns import GAE, TokenReturns
from tepo.objectives.row_weights import EvenRows, LengthPreference
from tepo.objectives.selectors import InformativeGroups, NotTruncated, RandomTokens
from tepo.objectives.several_rewards import PerReward
from tepo.objectives.shaping import (
    ClippedReward,
    DistillationReward,
    MissingEOS,
    SequenceKLPenalty,
    SoftOverlong,
    TokenKLPenalty,
    Verified,
)
from tepo.objectives.sums import Parts, Sums
from tepo.objectives.surrogates import (
    OnPolicyRows,
    PolicyGradient,
    PPOClip,
    QuadraticDrift,
    Rejection,
    SoftGate,
    SurrogateValue,
    Unclipped,
)
from tepo.objectives.transforms import Whitened
from tepo.objectives.trie import PrefixAdvantage, UniquePrefixes
from tepo.objectives.value import ValueLoss
from tepo.objectives.weights import Masked, NoWeight, SequenceMasked, Truncated

__all__ = [
    "GAE",
    "KL",
    "AdaptiveCoefficient",
    "AnnealedHolderRatio",
    "BestOfGroup",
    "CappedWeight",
    "ClassNormalized",
    "ClippedReward",
    "ConfidenceReward",
    "CovarianceBand",
    "CovarianceKernel",
    "DecodingOption",
    "Described",
    "DistillationReward",
    "DivergenceMask",
    "DualAscent",
    "EntropyBonus",
    "EntropyBonusAdvantage",
    "EntropyChangeWeights",
    "EntropySharedRewards",
    "Entry",
    "EvenRows",
    "EveryToken",
    "FallingEntropy",
    "GammaWeight",
    "GroupNormalized",
    "HolderRatio",
    "InformativeGroups",
    "LeaveOneOut",
    "LengthPreference",
    "LengthWeightedBaseline",
    "Masked",
    "MissingEOS",
    "Needs",
    "NoAdvantage",
    "NoRatio",
    "NoWeight",
    "NotTruncated",
    "Objective",
    "OnPolicyRows",
    "Output",
    "PPOClip",
    "Parts",
    "PerReward",
    "PolicyGradient",
    "PrefixAdvantage",
    "PrefixRatio",
    "Prepared",
    "ProgressGate",
    "QuadraticDrift",
    "RandomTokens",
    "RatioValue",
    "Rejection",
    "SequenceKLPenalty",
    "SequenceMasked",
    "SequenceMean",
    "SequenceRatio",
    "SequenceSum",
    "SequenceSumRatio",
    "SequenceTokenRatio",
    "SignalRescaled",
    "SoftBaseline",
    "SoftGate",
    "SoftOverlong",
    "State",
    "Statistics",
    "Steps",
    "Sums",
    "SurrogateValue",
    "TemperedEntropy",
    "TokenBatch",
    "TokenEntropy",
    "TokenKLPenalty",
    "TokenMean",
    "TokenRatio",
    "TokenReturns",
    "TopCovariance",
    "TopEntropy",
    "Truncated",
    "Unclipped",
    "UniquePrefixes",
    "ValueLoss",
    "Verified",
    "Weights",
    "Whitened",
    "compose",
    "credit",
    "decoding_options",
    "entry",
    "method",
    "objective",
    "objectives",
]


class _Room(types.ModuleType):
    """This room; called, it returns the catalogue, so that `tepo.objectives()` works however the room was loaded."""

    def __call__(self) -> list[Entry]:
        """Return the catalogue."""
        return objectives()


sys.modules[__name__].__class__ = _Room
