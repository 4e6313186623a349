"""What a study compares: a base run, variants of it, and seeds."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tepo.core.errors import InputError, nearest
from tepo.training.loading import PROVENANCE, assign, merge, parse_override, read_toml

FIXED = ("name", "runs", "task", "eval", "train.seed", "train.steps", "train.tokens")
"""Keys of a run that a variant may not change: they make the comparison fair."""
_EXAMPLES = {
    "base": 'base = "run.toml", or a [base] table with the sections of a run',
    "variants": 'variants = ["dapo", "tepo"]',
    "grid": "grid = [1e-6, 3e-6, 1e-5]",
}
"""What to write for a key that is missing."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


class Section(BaseModel):
    """Base of this room's sections: frozen, unknown keys refused, docstrings under fields as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Variant(BaseModel):
    """One thing compared: a name, and keys of the run's configuration that differ from the base."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str
    """Name in tables and folders."""

    @property
    def changes(self) -> dict[str, Any]:
        """The sections of the run's configuration that it changes."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Read `"dapo"` as the variant of that objective, and `objective = "dapo"` as its name."""
        if isinstance(value, str):
            return {"name": value, "objective": {"name": value}}
        if isinstance(value, Mapping) and isinstance(value.get("objective"), str):
            value = {**value, "objective": {"name": value["objective"]}}
        if isinstance(value, Mapping) and "name" not in value and isinstance(value.get("objective"), Mapping):
            value = {**value, "name": value["objective"].get("name")}
        return value

    @model_validator(mode="after")
    def _fair(self) -> Variant:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"a variant's name names a folder: letters, digits and . _ + = - only, not {self.name!r}")
        for key in FIXED:
            node: Any = self.changes
            for part in key.split("."):
                node = node.get(part) if isinstance(node, Mapping) else None
            if node is not None:
                raise ValueError(
                    f"variant {self.name!r} changes {key}: prompts, held-out questions, seeds and budget are the "
                    "same for all variants; change it in [base]"
                )
        return self


class Tuning(Section):
    """A grid tried for every variant on seeds of its own, before the seeds that are compared."""

    key: str = "optim.lr"
    """What is tuned."""
    grid: tuple[float, ...] = Field(min_length=1)
    """Values tried."""
    seeds: tuple[int, ...] = (1000,)
    """Seeds of the tuning runs; none of them is compared afterwards."""
    metric: str = "reward/mean"
    """What is best at its largest: the mean of the last quarter of its values. The training reward by default, so
    that the held-out questions do not choose."""
    steps: int | None = Field(default=None, ge=1)
    """Steps of a tuning run; unset: those of the base."""


class StudyConfig(Section):
    """The whole of a study."""

    name: str
    """Name of the study, its folder under `studies`."""
    studies: str = "studies"
    """Folder that holds studies."""
    base: dict[str, Any]
    """The run that every variant starts from: a table, or the path of a run's TOML file."""
    variants: tuple[Variant, ...] = Field(min_length=1)
    """What is compared: names of objectives, or tables of a name and the sections of the run that differ."""
    baseline: str = ""
    """The variant that others are compared with; empty: the first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each variant; a number n stands for 0 to n - 1."""
    at_once: int = Field(default=1, ge=1)
    """Runs at work at the same time, each in a process of its own."""
    cores: int | None = Field(default=None, ge=1)
    """Cores given to the study, shared out evenly between the runs at work; unset: all."""
    steps: int | None = Field(default=None, ge=1)
    """Budget of a run in steps; unset: the base's."""
    tokens: int | None = Field(default=None, ge=1)
    """Budget of a run in response tokens instead: a run ends with the step that reaches it."""
    thresholds: dict[str, float] = {}
    """Metric to value: how long until it is reached is compared. Empty: four fifths of the way that the baseline's
    training reward goes from its first to its last tenth, which is then said to come from the data."""
    keep: Literal["model", "all", "nothing"] = "model"
    """What stays of a finished run beside its records: the model, the checkpoints too, or neither."""
    tuning: Tuning | None = None
    """A learning-rate grid, tuned for each variant on separate seeds."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return tuple(range(value))
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a number of seeds or a list of them, not {value!r}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> StudyConfig:
        names = [variant.name for variant in self.variants]
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} names a folder: letters, digits and . _ + = - only")
        if len(set(names)) != len(names):
            raise ValueError(f"two variants have one name: {', '.join(names)}")
        if self.baseline and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not a variant; they are {', '.join(names)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different, and at least one: {list(self.seeds)}")
        if self.tuning is not None and set(self.tuning.seeds) & set(self.seeds):
            both = sorted(set(self.tuning.seeds) & set(self.seeds))
            raise ValueError(f"seeds {both} are tuned on and compared; what is tuned on favours what was chosen")
        if self.tokens is not None and self.steps is not None:
            raise ValueError("the budget is steps or tokens, not both")
        return self

    @property
    def reference(self) -> str:
        """Name of the baseline."""
        return self.baseline or self.variants[0].name


def load_study(path: Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Return the checked study of a TOML file, `key=value` overrides applied; every fault is an `InputError`.

    `base` may name a run's TOML file, relative to the study's; the base is written out in the result. A relative
    path of a reward or task inside it is kept as it is: relative to where the command is typed, as in `tepo train`.
    """
    tree = read_toml(path)
    base = tree.get("base", {})
    if isinstance(base, str):
        place = path.parent / base
        tree["base"] = read_toml(place if place.exists() else Path(base))
        tree["base"].pop(PROVENANCE, None)
    tree.setdefault("name", path.stem if path.name != "study.toml" else path.resolve().parent.name)
    for text in overrides:
        assign(tree, *parse_override(text))
    try:
        return StudyConfig.model_validate(tree)
    except ValidationError as error:
        raise InputError("\n".join(_fault(fault, path) for fault in error.errors(include_url=False))) from None


def _fault(fault: Any, path: Path) -> str:
    """Return what is wrong with one key, and the nearest key where it is unknown."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        known = StudyConfig.model_fields if len(place) == 1 else Tuning.model_fields
        return f"{path}: unknown key {'.'.join(place)!r}.{nearest(place[-1], known)}"
    if fault["type"] == "missing" and place[-1] in _EXAMPLES:
        return f"{path}: {place[-1]} is missing: {_EXAMPLES[place[-1]]}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{path}: {'.'.join(place) or 'study'}: {message}"


def variant_tree(study: StudyConfig, variant: Variant) -> dict[str, Any]:
    """Return the run's configuration of a variant as plain values, before seed, name and budget.

    A variant that names another objective than the base takes nothing from the base's objective section.
    """
    tree = copy.deepcopy(study.base)
    own = variant.changes.get("objective")
    own = own if isinstance(own, Mapping) else {}
    renamed = "name" in own and own["name"] != tree.get("objective", {}).get("name", "tepo")
    if renamed or "base" in own:
        tree["objective"] = {}
    merge(tree, copy.deepcopy(variant.changes))
    return tree


def refuse_unfair(study: StudyConfig) -> None:
    """Raise `InputError` for keys of the base that the study itself sets."""
    train = study.base.get("train", {})
    for key, instead in (("seed", "seeds"), ("tokens", "tokens")):
        if key in train:
            raise InputError(f"base.train.{key} is set; a study says it once for all runs: {instead} = ...")
