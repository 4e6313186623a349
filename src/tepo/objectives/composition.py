"""Composing: a method with some of its parts replaced, said in plain values, as Python and TOML can both write them.

    compose("dapo", {"ratio": {"part": "SequenceRatio"}, "clip_high": 0.3}, name="mine")

A part is its class's name and fields; `PARTS` says which classes fit where. Parts inside parts are written alike.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from tepo.core.errors import InputError, nearest
from tepo.objectives.advantages import Advantage, GroupNormalized, LeaveOneOut
from tepo.objectives.baselines import BestOfGroup, LengthWeightedBaseline, SignalRescaled
from tepo.objectives.catalogue import METHODS, method
from tepo.objectives.checks import check_value
from tepo.objectives.covariance import CovarianceBand, CovarianceKernel, TopCovariance
from tepo.objectives.detached_surrogates import CappedWeight, DivergenceMask, GammaWeight
from tepo.objectives.entropies import EntropyBonusAdvantage, EntropyChangeWeights, ProgressGate, TopEntropy
from tepo.objectives.entropy_rewards import (
    ClassNormalized,
    ConfidenceReward,
    EntropySharedRewards,
    NoAdvantage,
    TokenEntropy,
)
from tepo.objectives.max_entropy import DualAscent, SoftBaseline, Steps, TemperedEntropy, Tuner
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import (
    AnnealedHolderRatio,
    HolderRatio,
    NoRatio,
    PrefixRatio,
    Ratio,
    SequenceRatio,
    SequenceSumRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from tepo.objectives.reducers import Reducer, SequenceMean, SequenceSum, TokenMean
from tepo.objectives.regularizers import KL, EntropyBonus, EveryToken, FallingEntropy, Regularizer, TokenMask
from tepo.objectives.returns import GAE, TokenReturns
from tepo.objectives.row_weights import EvenRows, LengthPreference, RowWeight
from tepo.objectives.selectors import InformativeGroups, NotTruncated, RandomTokens, Selector
from tepo.objectives.several_rewards import PerReward
from tepo.objectives.shaping import (
    ClippedReward,
    DistillationReward,
    MissingEOS,
    SequenceKLPenalty,
    Shaping,
    SoftOverlong,
    TokenKLPenalty,
    Verified,
)
from tepo.objectives.surrogates import (
    OnPolicyRows,
    PolicyGradient,
    PPOClip,
    QuadraticDrift,
    Rejection,
    SoftGate,
    Surrogate,
    Unclipped,
)
from tepo.objectives.transforms import Transform, Whitened
from tepo.objectives.trie import PrefixAdvantage, UniquePrefixes
from tepo.objectives.value import ValueLoss
from tepo.objectives.weights import ImportanceWeight, Masked, NoWeight, SequenceMasked, Truncated

PARTS: dict[Any, tuple[type, ...]] = {
    Shaping: (
        SequenceKLPenalty,
        TokenKLPenalty,
        DistillationReward,
        Verified,
        MissingEOS,
        ClippedReward,
        SoftOverlong,
        ConfidenceReward,
        EntropySharedRewards,
    ),
    Advantage: (
        GroupNormalized,
        LeaveOneOut,
        LengthWeightedBaseline,
        BestOfGroup,
        SignalRescaled,
        PerReward,
        SoftBaseline,
        ClassNormalized,
        TokenReturns,
        GAE,
        PrefixAdvantage,
        NoAdvantage,
    ),
    Transform: (Whitened, EntropyBonusAdvantage, EntropyChangeWeights, ProgressGate, CovarianceKernel),
    Ratio: (
        NoRatio,
        TokenRatio,
        SequenceRatio,
        SequenceTokenRatio,
        SequenceSumRatio,
        PrefixRatio,
        HolderRatio,
        AnnealedHolderRatio,
    ),
    Surrogate: (
        PPOClip,
        PolicyGradient,
        Unclipped,
        Rejection,
        SoftGate,
        QuadraticDrift,
        CappedWeight,
        GammaWeight,
        DivergenceMask,
        TokenEntropy,
        OnPolicyRows,
    ),
    Selector: (NotTruncated, InformativeGroups, RandomTokens, TopEntropy, CovarianceBand, UniquePrefixes),
    ImportanceWeight: (NoWeight, Truncated, Masked, SequenceMasked),
    RowWeight: (EvenRows, LengthPreference),
    Regularizer: (KL, EntropyBonus, TemperedEntropy, ValueLoss),
    Reducer: (TokenMean, SequenceMean, SequenceSum),
    TokenMask: (EveryToken, FallingEntropy, TopCovariance),
    Tuner: (DualAscent, Steps),
}
"""What a place of a composition is for -> the classes that fit there."""

_NO_PLACES = ("name", "partner")  # a second policy's objective is a whole one: it comes with the base

SLOTS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(Objective).items() if name not in _NO_PLACES
}
"""The places of an objective that `compose` can fill, by name, with their annotations."""


def compose(base: Objective | str, changes: Mapping[str, Any], *, name: str | None = None) -> Objective:
    """Return an objective, or a method of the catalogue, with some parts replaced.

    `changes`: place -> part (`{"part": "KL", "coef": 0.1}`, just "SequenceRatio", or an object; a list of them for
    shaping, transforms, selectors and regularizers, which replaces the whole list). With a method's name as `base`,
    its settings too: they apply first. `name`: of the result; unset: "BASE-composed".
    Raises `InputError` with the nearest match for an unknown place, part or field, for a value that does not fit,
    and for a setting that the replaced parts leave without effect.
    """
    if isinstance(base, Objective):
        return _replaced(base, changes, name)
    settings, parts = split(base, changes)
    composed = _replaced(method(base, **settings).compose(), parts, name)
    for setting in settings:
        others = {key: value for key, value in settings.items() if key != setting}
        without = method(base, **others).compose()
        if without != method(base, **settings).compose() and _replaced(without, parts, name) == composed:
            raise InputError(
                f"{setting}={settings[setting]!r} of {base!r} has no effect: {', '.join(parts)} replaces what it sets"
            )
    return composed


def split(base: str, changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (settings of the method, parts); a name that is both is a part where a part is given."""
    if base not in METHODS:
        method(base)  # raises, with the nearest name
    known = {field.name for field in dataclasses.fields(METHODS[base])}
    for key in changes:
        if key not in known and key not in SLOTS:
            raise InputError(
                f"{base!r} has no setting {key!r}, and an objective no such part."
                f"{nearest(key, known | SLOTS.keys())} See: tepo explain {base}"
            )
    parts = {key: value for key, value in changes.items() if key in SLOTS and (key not in known or _is_part(value))}
    return {key: value for key, value in changes.items() if key not in parts}, parts


def as_tree(value: Any) -> Any:
    """Return a part (or a tuple of parts) as plain values that `compose` reads back equal; None is "none"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"part": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [as_tree(item) for item in value]
    return "none" if value is None else value


def _replaced(base: Objective, parts: Mapping[str, Any], name: str | None) -> Objective:
    """Return the objective with the given parts."""
    for place in parts:
        if place not in SLOTS:
            raise InputError(f"an objective has no part {place!r}.{nearest(place, SLOTS)}")
    made = {place: _read(SLOTS[place], given, place) for place, given in parts.items()}
    return dataclasses.replace(base, name=name or f"{base.name}-composed", **made)


def _is_part(value: Any) -> bool:
    """Whether a value says a part, or a list of them, rather than a setting."""
    if isinstance(value, list | tuple):
        return all(_is_part(item) for item in value)
    return value is not None and not isinstance(value, bool | int | float | str)


def _read(hint: Any, given: Any, where: str) -> Any:
    """Return the value of a place or a field from plain values (or from objects, which are taken as they are)."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(given, list | tuple):
            raise InputError(f"{where}: expected a list, given {given!r}")
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, item, f"{where}[{place}]") for place, item in enumerate(given))
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if types.NoneType in options and given in (None, "none"):
        return None
    of_tuple = [option for option in options if typing.get_origin(option) is tuple]
    if of_tuple and isinstance(given, list | tuple):
        return _read(of_tuple[0], given, where)
    fitting = [kind for option in options for kind in _classes(option)]
    if not fitting:
        place, _, field = where.rpartition(".")
        check_value(place or "objective", field or where, given, hint)
        return given
    if isinstance(given, str):
        given = {"part": given}
    if isinstance(given, Mapping):
        return _made(fitting, given, where)
    if given is None or isinstance(given, bool | int | float | list | tuple):
        raise InputError(f'{where}: expected a part such as {{part = "{fitting[0].__name__}"}}, given {given!r}')
    return given


def _classes(hint: Any) -> tuple[type, ...]:
    """Return the part classes that an annotation asks for; none for a plain value."""
    if hint in PARTS:
        return PARTS[hint]
    return (hint,) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else ()


def _made(fitting: list[type], given: Mapping[str, Any], where: str) -> Any:
    """Return the part that a table names, its fields filled in."""
    names = {kind.__name__: kind for kind in fitting}
    fields = dict(given)
    name = fields.pop("part", None)
    if name is None:
        raise InputError(f'{where}: expected part = "NAME", one of: {", ".join(names)}')
    if name not in names:
        elsewhere = any(kind.__name__ == name for kinds in PARTS.values() for kind in kinds)
        hint = f" It does not belong here. Known: {', '.join(names)}." if elsewhere else nearest(str(name), names)
        raise InputError(f"{where}: no part {name!r}.{hint}")
    kind: Any = names[name]
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for field in fields:
        if field not in known:
            told = nearest(field, known) if known else " It has none."
            raise InputError(f"{where}: part {name!r} has no field {field!r}.{told}")
    for field, declared in known.items():
        if field not in fields and declared.default is dataclasses.MISSING:
            raise InputError(f"{where}: part {name!r} needs {field}")
    return kind(**{field: _read(hints[field], value, f"{where}.{field}") for field, value in fields.items()})
