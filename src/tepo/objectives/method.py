"""Methods: the flat, named settings of a paper, and how they become a composition of parts."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from tepo.objectives.advantages import GroupNormalized
from tepo.objectives.checks import check_number, check_value
from tepo.objectives.objective import Objective
from tepo.objectives.regularizers import EntropyBonus, Regularizer
from tepo.objectives.selectors import InformativeGroups, NotTruncated, Selector
from tepo.objectives.surrogates import OnPolicyRows, Surrogate
from tepo.objectives.weights import ImportanceWeight, Masked, NoWeight, SequenceMasked, Truncated

T = TypeVar("T")
Status = Literal["confirmed", "inferred", "experimental"]


def setting(default: T, text: str, source: str, status: Status = "confirmed", *, lowest: float = 0.0) -> T:
    """Declare a field of a method: its default, what it does, where the default comes from, its smallest number."""
    return field(default=default, metadata={"help": text, "source": source, "status": status, "lowest": lowest})


@dataclass(frozen=True)
class Setting:
    """One field of a method: name, type, default, what it does, where the default comes from, how sure that is."""

    name: str
    type: str
    default: Any
    help: str
    source: str
    status: Status = "confirmed"


@dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    title: str
    year: int
    arxiv: str
    venue: str = ""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Settings every method shares. A subclass is one paper: its own settings, and `compose`."""

    name: ClassVar[str]
    paper: ClassVar[Paper]
    formula: ClassVar[str]
    status: ClassVar[Status]
    notes: ClassVar[str] = ""

    truncated: Literal["keep", "drop"] = setting(
        "keep", "drop: responses cut at the length limit leave the loss, not the group's statistics", "ours"
    )
    zero_variance: Literal["keep", "drop"] = setting(
        "keep", "drop: tokens of groups with equal rewards leave the denominator", "ours"
    )
    entropy_coef: float = setting(0.0, "coefficient of an entropy bonus in the loss", "verl and TRL: 0")
    importance_weight: Literal["none", "truncate", "mask", "sequence-mask"] = setting(
        "none",
        "correct for a sampler that differs from the scorer; needs rollout_logp",
        "ours: the samplers agree",
    )
    importance_cap: float = setting(2.0, "cap of the importance weight", "open-instruct: 2", lowest=1)
    off_policy_mask: float | None = setting(
        None,
        "leave out responses with A < 0 that lost more than this many nats a token since they were sampled",
        "DeepSeek-V3.2 (arXiv 2512.02556) by TRL: none",
    )
    log_ratio_clamp: float = setting(20.0, "log-ratios are clamped to +-this, gradient 0 beyond", "verl: 20")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            where, value = f"objective {self.name!r}", getattr(self, item.name)
            check_value(where, item.name, value, hints[item.name])
            check_number(where, item.name, value, item.metadata["lowest"])

    def compose(self) -> Objective:
        """Return the objective these settings stand for."""
        raise NotImplementedError

    def composition(self, *, surrogate: Surrogate, **parts: Any) -> Objective:
        """Return an objective of these parts, the shared settings filled in (`compose` calls it)."""
        if self.off_policy_mask is not None:
            surrogate = OnPolicyRows(surrogate, self.off_policy_mask)
        shared: dict[str, Any] = {
            "name": self.name,
            "selectors": self.selectors(),
            "weight": self.weight(),
            "regularizers": self.regularizers(),
            "log_ratio_clamp": self.log_ratio_clamp,
        }
        return Objective(surrogate=surrogate, **(shared | parts))

    def selectors(self) -> tuple[Selector, ...]:
        """Return the row filters of the shared settings."""
        chosen: list[Selector] = []
        if self.truncated == "drop":
            chosen.append(NotTruncated())
        if self.zero_variance == "drop":
            chosen.append(InformativeGroups())
        return tuple(chosen)

    def weight(self) -> ImportanceWeight:
        """Return the importance weight of the shared settings."""
        match self.importance_weight:
            case "truncate":
                return Truncated(self.importance_cap)
            case "mask":
                return Masked(self.importance_cap)
            case "sequence-mask":
                return SequenceMasked(self.importance_cap)
            case _:
                return NoWeight()

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the entropy bonus of the shared settings, if any."""
        return (EntropyBonus(self.entropy_coef),) if self.entropy_coef else ()


@dataclass(frozen=True, kw_only=True)
class GroupMethod(Method):
    """A method whose advantage is (R - mean of the group) / std of the group."""

    advantage_eps: float = setting(1e-6, "added to the standard deviation", "verl: 1e-6 (TRL: 1e-4)")

    def normalized(self) -> GroupNormalized:
        """Return the group-normalised advantage."""
        return GroupNormalized(eps=self.advantage_eps)
