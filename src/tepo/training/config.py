"""The configuration of a run: one checked model composed of every room's own part.

Each section is a frozen pydantic model; unknown keys are errors. Reading files and overrides is `loading`'s work.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tepo.core.errors import InputError
from tepo.objectives import Objective, compose, method, objective
from tepo.objectives.composition import SLOTS, as_tree, split
from tepo.policy.config import PolicyConfig
from tepo.rollout.config import SamplingConfig
from tepo.tasks.config import RewardConfig, TaskConfig

_LONGEST_NAME = 200
"""Bytes of a run's name; file systems allow 255, and files beside it add to theirs."""


class Section(BaseModel):
    """Base of the sections of this room: frozen, unknown keys refused, docstrings under fields as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ObjectiveConfig(BaseModel):
    """Which objective, and any of its settings: `name = "tepo"`, `kl_coef = 0.5`; or a new one on a `base`.

    With `base`, parts may be replaced too: `ratio = { part = "SequenceRatio" }`, or a list of them for shaping,
    transforms, selectors and regularizers. Parts and their fields: docs/objectives.md.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "tepo"
    """Name in the catalogue (`tepo objectives` lists them); with `base`, any name. Further keys are the
    method's settings."""
    base: str | None = None
    """Method of the catalogue that a new objective starts from."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_base(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("base"), str) and "name" not in given:
            return {**given, "name": f"{given['base']}-composed"}
        return given

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings and parts given beside name and base."""
        return dict(self.__pydantic_extra__ or {})

    def resolved(self) -> dict[str, Any]:
        """Return everything that makes the objective, defaults included; "none" where a setting differs by it."""
        settings, parts = (self.overrides, {}) if self.base is None else split(self.base, self.overrides)
        chosen = method(self.base or self.name, **settings)
        default = {field.name: field.default for field in dataclasses.fields(chosen)}
        plain = {
            name: "none" if value is None and default[name] is not None else value
            for name, value in dataclasses.asdict(chosen).items()
        }
        built = self.build()
        named = {"name": self.name} if self.base is None else {"name": self.name, "base": self.base}
        return {**named, **plain, **{place: as_tree(getattr(built, place)) for place in parts}}

    def build(self) -> Objective:
        """Return the objective; an unknown name, setting, part or field is an `InputError` with the nearest match."""
        if self.base is not None:
            return compose(self.base, self.overrides, name=self.name)
        if any(key in SLOTS and not isinstance(value, str | int | float) for key, value in self.overrides.items()):
            raise InputError(
                f'[objective] name = "{self.name}" takes settings alone; parts go with base = "{self.name}"'
            )
        return objective(self.name, **self.overrides)


class OptimConfig(Section):
    """AdamW, its schedule and gradient clipping."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate; 1e-6 suits 7B models, 1e-5 the built-in 135M, 1e-3 the tiny one."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; biases and norms are never decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, over the optimizer updates of the whole run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps (rollout batches) over which the learning rate rises linearly to `lr`."""
    final_lr: float = Field(default=0.0, ge=0, le=1)
    """Fraction of `lr` that `linear` and `cosine` end at."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 leaves gradients as they are."""
    fused: bool = True
    """Step all parameters in one kernel where the device has it (cpu, cuda); false takes torch's ordinary loop."""
    state_lr: float = Field(default=1e-3, gt=0)
    """Learning rate of what an objective learns itself (its learnable scalars), where it has any."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}; both must lie in [0, 1)")
        return self


class CriticConfig(Section):
    """The value model of objectives that learn one beside the policy (PPO and its kin)."""

    path: str = "start"
    """What it starts from: `start` (a copy of the policy's backbone, its values 0 at first), or the folder of a
    sequence-classification model, such as a reward model, or of a causal language model with the policy's tokens."""
    lr: float | None = Field(default=None, gt=0)
    """Its peak learning rate; unset: that of `optim`, whose other settings it shares."""


class PartnerConfig(Section):
    """The second policy of objectives that train two, the run's model sampling for both."""

    path: str = "start"
    """A folder or hub id with the policy's tokens, such as a larger model of its family; `start`: the run's own model
    once more. All of it is trained."""
    lr: float | None = Field(default=None, gt=0)
    """Its peak learning rate; unset: that of `optim`, whose other settings it shares."""


class PretrainingConfig(Section):
    """Text mixed into the updates, where the objective has a term for it (`instructgpt` with `ptx_coef`)."""

    path: str | None = None
    """A UTF-8 text file."""
    windows: int = Field(default=8, ge=1)
    """Windows of the text that each update reads."""
    length: int = Field(default=256, ge=1)
    """Tokens scored in a window."""


class TrainConfig(Section):
    """Size and course of a run."""

    steps: int = Field(default=100, ge=1)
    """Steps of the run; a step samples one rollout batch and makes `epochs x mini_batches` optimizer updates."""
    tokens: int = Field(default=0, ge=0)
    """Response tokens after which the run ends, with the step that reaches them, even before `steps`; 0: no such
    budget."""
    prompts: int = Field(default=8, ge=1)
    """Prompts in a rollout batch."""
    group_size: int = Field(default=8, ge=1)
    """Responses sampled for each prompt (the group)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a rollout batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Mini-batches a pass is cut into, whole groups kept together where there are enough; one update each."""
    micro_tokens: int = Field(default=8192, ge=0)
    """Tokens (prompt and response, padding counted) computed at once; 0 forwards a mini-batch whole. Never changes
    the result, only memory and speed."""
    skip_zero_rows: bool = True
    """Leave out of the updates what can change nothing: responses whose advantages are all 0 where no other term of the
    objective acts on them. They count in denominators, and in metrics with the values of the old policy."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and draw further prompts in their place (DAPO)."""
    max_draws: float = Field(default=4.0, ge=1)
    """With dynamic sampling, draw at most this many times `prompts` in a step; then train on what there is."""
    old_logp: Literal["auto", "scorer", "sampler"] = "auto"
    """Where old log-probabilities come from when a rollout batch serves several updates: `scorer` is the training
    path's own pass, `sampler` the values recorded while sampling; `auto` takes the scorer where it matters."""
    reference: str = "start"
    """Reference policy of objectives that need one: `start` (what `model` names, before training) or another model."""
    preflight: int = Field(default=16, ge=0)
    """Questions sampled before the run to estimate pass rate, signal, memory and time; 0 skips it."""
    seed: int = 0
    """Seed of everything random in the run."""

    @property
    def updates(self) -> int:
        """Optimizer updates a rollout batch serves."""
        return self.epochs * self.mini_batches


class EvalConfig(Section):
    """Evaluation on the held-out questions."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 leaves only start and end."""
    at_start: bool = True
    """Evaluate the start policy (step 0)."""
    at_end: bool = True
    """Evaluate the final policy."""
    questions: int = Field(default=200, ge=0)
    """Held-out questions used, the first ones in order; 0 uses all."""
    samples: int = Field(default=1, ge=1)
    """Responses sampled for each question."""
    temperature: float | None = Field(default=None, ge=0)
    """Temperature of evaluation, the same at start and end; unset: that of training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response in evaluation; unset: that of training."""


class CheckpointConfig(Section):
    """What is saved to continue from."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 saves only at the end and on interruption."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    best: str | None = None
    """Metric whose best checkpoint is kept too, for example `eval/avg`."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value of `best` is better."""
    at_end: bool = True
    """Save a checkpoint after the last step, so that the run can be continued with more steps."""


class LogConfig(Section):
    """What a run writes beside metrics."""

    rollouts: int = Field(default=8, ge=0)
    """Responses kept per step with their per-token fields (whole groups first)."""
    rollouts_every: int = Field(default=1, ge=1)
    """Steps between kept rollouts."""
    sample_every: int = Field(default=10, ge=0)
    """Steps between sample responses shown while training; 0 shows none."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Further places metrics are sent to; each needs its package."""


class RunConfig(Section):
    """The whole configuration of a run."""

    name: str = ""
    """Name of the run, its folder under `runs`: one file name of at most 200 bytes, not hidden and no option; empty
    makes one of objective, task and seed."""
    runs: str = "runs"
    """Folder that holds the runs."""
    model: PolicyConfig = PolicyConfig()
    """The policy that is trained."""
    task: TaskConfig = TaskConfig()
    """The problems."""
    reward: RewardConfig = RewardConfig()
    """How responses are graded."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are sampled in training."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is optimised."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    critic: CriticConfig = CriticConfig()
    """The value model, where the objective has one."""
    partner: PartnerConfig = PartnerConfig()
    """The second policy, where the objective has one."""
    pretraining: PretrainingConfig = PretrainingConfig()
    """Text mixed into the updates, where the objective has a term for it."""
    train: TrainConfig = TrainConfig()
    """Size and course of the run."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out questions."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved to continue from."""
    log: LogConfig = LogConfig()
    """What is written beside metrics."""

    @field_validator("name")
    @classmethod
    def _name_is_one_folder(cls, name: str) -> str:
        if fault := _fault_of_name(name):
            raise ValueError(f"{fault}; expected the name of one folder, such as first-run")
        return name


def _fault_of_name(name: str) -> str | None:
    """Return why a run's folder cannot, or should not, carry this name; None where it may."""
    if "/" in name or "\\" in name:
        return "a name holds no path (the folder it lies in is `runs`)"
    if not name.isprintable():
        return "a name holds no newline or other control character"
    if name != name.strip():
        return "a name neither begins nor ends with a space"
    if name.startswith(("-", ".")):
        return f"a name does not begin with {name[0]!r}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        return f"a name is at most {_LONGEST_NAME} bytes long"
    return None
