"""The catalogue: every method by name, with its paper, formula, settings and needs."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from tepo.core.errors import InputError, nearest
from tepo.objectives.checks import fits
from tepo.objectives.described import DecodingOption, Described
from tepo.objectives.method import Method, Setting
from tepo.objectives.objective import Needs, Objective
from tepo.objectives.papers.cispo import CISPO
from tepo.objectives.papers.clip_cov import ClipCov, KLCov
from tepo.objectives.papers.codistill import CoDistillGRPO
from tepo.objectives.papers.cw_grpo import CWGRPO
from tepo.objectives.papers.dapo import DAPO, DAPOOverlong
from tepo.objectives.papers.dppo import DPPO
from tepo.objectives.papers.dr_grpo import DrGRPO
from tepo.objectives.papers.dro import DRO
from tepo.objectives.papers.entropy_advantage import EntropyAdvantage
from tepo.objectives.papers.entropy_minimization import EM_INF, EMFT, EMRLSequence, EMRLToken
from tepo.objectives.papers.erpo import ERPO
from tepo.objectives.papers.gdpo import GDPO
from tepo.objectives.papers.gmpo import GMPO
from tepo.objectives.papers.gpg import GPG
from tepo.objectives.papers.grpo import GRPO
from tepo.objectives.papers.grpo_passk import GRPOPassK
from tepo.objectives.papers.gspo import GSPO, GSPOToken
from tepo.objectives.papers.gtpo import GRPOS, GTPO
from tepo.objectives.papers.high_entropy import HighEntropy
from tepo.objectives.papers.holder import Holder
from tepo.objectives.papers.instructgpt import InstructGPT
from tepo.objectives.papers.lambda_grpo import LambdaGRPO
from tepo.objectives.papers.luspo import LUSPO
from tepo.objectives.papers.maximum_entropy import MaxEntropy
from tepo.objectives.papers.opo import OPO
from tepo.objectives.papers.pnpo import PNPO
from tepo.objectives.papers.ppo import PPO
from tepo.objectives.papers.ppo_clip import PPOClipped
from tepo.objectives.papers.reinforce import RLOO, Reinforce
from tepo.objectives.papers.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from tepo.objectives.papers.sapo import SAPO
from tepo.objectives.papers.steer import STEER
from tepo.objectives.papers.tepo import TEPO, TEPOMarkov
from tepo.objectives.papers.token_efficient import SGRPO, TSPMO
from tepo.objectives.papers.tulu3 import Tulu3RLVR
from tepo.objectives.papers.vespo import VESPO

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        TEPO,
        TEPOMarkov,
        GRPO,
        DAPO,
        DrGRPO,
        GSPO,
        GSPOToken,
        Reinforce,
        RLOO,
        PPOClipped,
        ReinforcePP,
        ReinforcePPBaseline,
        GPG,
        OPO,
        GRPOPassK,
        GDPO,
        CISPO,
        SAPO,
        GMPO,
        LUSPO,
        VESPO,
        Holder,
        PNPO,
        DPPO,
        DRO,
        DAPOOverlong,
        ClipCov,
        KLCov,
        STEER,
        HighEntropy,
        EntropyAdvantage,
        CWGRPO,
        GTPO,
        GRPOS,
        ERPO,
        LambdaGRPO,
        SGRPO,
        TSPMO,
        MaxEntropy,
        EMRLSequence,
        EMRLToken,
        EMFT,
        PPO,
        InstructGPT,
        Tulu3RLVR,
        CoDistillGRPO,
    )
}
DECODING: dict[str, DecodingOption] = {EM_INF.name: EM_INF}
"""What the family does without a loss; kept apart, so that whatever is in `METHODS` can train."""


@dataclass(frozen=True)
class Entry(Described):
    """One method of the catalogue, with what it needs and the objective that its defaults make."""

    needs: Needs
    objective: Objective


def objective(name: str, **overrides: Any) -> Objective:
    """Return a method of the catalogue as an objective, any of its settings overridden.

    Raises `InputError` with the nearest match for an unknown name or setting, or a value that does not fit.
    """
    return method(name, **overrides).compose()


def method(name: str, **overrides: Any) -> Method:
    """Return the settings of a method, some of them overridden; "none" is None where a setting may be unset."""
    if name in DECODING:
        raise InputError(
            f"{name!r} has no loss to train with: it is an option of decoding. Switch it on with "
            f"{DECODING[name].switch}, in `tepo eval` too. See: tepo explain {name}"
        )
    if name not in METHODS:
        raise InputError(
            f"objective {name!r} is not in the catalogue.{nearest(name, [*METHODS, *DECODING])} See: tepo objectives"
        )
    chosen = METHODS[name]
    known = {item.name for item in dataclasses.fields(chosen)}
    for key in overrides:
        if key not in known:
            raise InputError(
                f"objective {name!r} has no setting {key!r}.{nearest(key, known)} See: tepo explain {name}"
            )
    hints = typing.get_type_hints(chosen)
    unset: dict[str, Any] = {
        key: None for key, value in overrides.items() if value == "none" and fits(None, hints[key])
    }
    return chosen(**(overrides | unset))


def objectives() -> list[Entry]:
    """Return the catalogue, in the order of `METHODS`."""
    return [entry(name) for name in METHODS]


def decoding_options() -> list[DecodingOption]:
    """Return what the catalogue knows beside the objectives: options of the sampler, which have no loss."""
    return list(DECODING.values())


def entry(name: str) -> Entry:
    """Return one method's entry, with its default composition."""
    chosen = method(name)
    kind = type(chosen)
    hints = typing.get_type_hints(kind)
    settings = tuple(
        Setting(
            item.name,
            words(hints[item.name]),
            item.default,
            **{key: item.metadata[key] for key in ("help", "source", "status")},
        )
        for item in dataclasses.fields(kind)
    )
    composed = chosen.compose()
    summary = (kind.__doc__ or "").splitlines()[0]
    return Entry(name, kind.paper, kind.formula, kind.status, kind.notes, summary, settings, composed.needs, composed)


def words(hint: Any) -> str:
    """Write an annotation as a user types its values: 'float', 'float or none', 'old | reference'."""
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"list of {words(parts[0])}"
    if parts:
        return " or ".join(words(part) for part in parts)
    return "none" if hint is type(None) else str(getattr(hint, "__name__", hint))
