"""Configuration of tasks and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tepo.core.errors import InputError, nearest

Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def changed(model: BaseModel, names: Iterable[str]) -> list[str]:
    """Return which fields differ from their defaults; a default written out, as in a run's record, is no change."""
    defaults = {name: type(model).model_fields[name].get_default(call_default_factory=True) for name in names}
    return sorted(name for name, default in defaults.items() if getattr(model, name) != default)


class ColumnsConfig(_Strict):
    """Names of the columns that hold a problem; what is not named is guessed, and the guess is said.

    A dotted name reaches into a nested record: `reward_model.ground_truth`.
    """

    question: str | None = None
    """The question: a text, or a list of chat messages."""
    answer: str | None = None
    """The reference answer."""
    id: str | None = None
    """What names the problem; row numbers where there is none."""


class Example(_Strict):
    """One worked example shown before the question."""

    question: str
    answer: str


class PromptConfig(_Strict):
    """How a question becomes a prompt."""

    system: str | None = None
    """System message; without a chat template it is the first paragraph."""
    template: str | None = None
    """Text with `{question}`; by default one that suits the source."""
    few_shot: int | tuple[Example, ...] | None = None
    """Worked examples before the question: how many to take from the training side (they are then neither
    trained on nor held out), or the examples themselves. By default 4 for bare arithmetic, 0 elsewhere."""
    example_template: str = "{question} {answer}"
    """One worked example as text; `{question}` is the question after `template`."""
    separator: str = "\n"
    """What stands between worked examples and before the question."""

    @model_validator(mode="after")
    def _placeholders(self) -> PromptConfig:
        if self.template is not None and "{question}" not in self.template:
            raise ValueError("template must contain {question}")
        missing = [name for name in ("{question}", "{answer}") if name not in self.example_template]
        if missing:
            raise ValueError(f"example_template must contain {' and '.join(missing)}")
        return self


class TaskConfig(_Strict):
    """What the policy is asked."""

    source: str = Field(default="arithmetic", pattern=r"\S")
    """`arithmetic`, `gym:FAMILY`, a .jsonl, .json, .parquet or .csv file, a folder of such files or of a saved
    dataset, or a hub id such as `openai/gsm8k`."""
    split: str | None = None
    """Split of a folder or hub dataset (`train` where there are several)."""
    subset: str | None = None
    """Configuration name of a hub dataset, such as `main`."""
    columns: ColumnsConfig = ColumnsConfig()
    """Which columns hold the problem."""
    answer_format: Literal["auto", "plain", "gsm8k", "boxed"] = "auto"
    """Where the reference stands in its column: all of it, after `####`, or in the last \\boxed{}."""
    prompt: PromptConfig = PromptConfig()
    """How a question becomes a prompt."""
    chat: Literal["auto"] | bool = "auto"
    """Whether prompts go through the chat template; auto: where the tokenizer has one (bare arithmetic: no)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the family: `terms`, `digits`, `operators` for arithmetic, the family's own for `gym:`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows of a file."""
    held_out: Literal["auto"] | int = Field(default="auto")
    """Problems kept away from training for evaluation; auto: 200, at most a tenth."""
    held_out_source: str | None = None
    """A file or dataset to hold out instead; its questions are removed from training."""
    split_seed: int = 0
    """Decides which problems are held out and which are worked examples; not the run's seed, so that runs with
    different seeds are measured on the same questions."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are dropped before the run, counted and said."""
    mixture: tuple[MixturePart, ...] = ()
    """Several tasks drawn by weight, instead of one source; `chat`, `split_seed` and `held_out` hold for each part
    that does not say otherwise."""

    @model_validator(mode="after")
    def _numbers(self) -> TaskConfig:
        if isinstance(self.held_out, int) and self.held_out < 0:
            raise ValueError(f"held_out must be 0 or more, not {self.held_out}")
        described = ("source", "options", "columns", "held_out_source", "limit")
        if self.mixture and changed(self, described):
            raise ValueError("a mixture is described by its parts: give source, options, columns, limit there")
        return self


class MixturePart(TaskConfig):
    """One task of a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the draws, relative to the other parts."""

    @model_validator(mode="after")
    def _flat(self) -> MixturePart:
        if self.mixture:
            raise ValueError("a part of a mixture cannot be a mixture; list all parts side by side")
        if self.max_prompt_tokens is not None:
            raise ValueError("max_prompt_tokens holds for the whole mixture; set it on the task")
        return self


class ScorerConfig(_Strict):
    """How one reward scores a response."""

    kind: str = "auto"
    """`auto` (the scorer that suits each problem), `math`, `exact`, `numeric`, `format`, `gym`, `model` (a reward
    model), or a function of yours: `module:function` or `path/file.py:function`. While training it is called with the
    responses of one group, as soon as the last of them has ended."""
    path: str | None = None
    """model: the folder of a sequence-classification model with one label; it runs on the policy's device."""
    answer_after: str | None = None
    """Judge only what follows the last occurrence of this text, such as `</think>`; without it, nothing."""
    mode: Literal["lenient", "strict"] = "lenient"
    """math: strict takes a \\boxed{} only, lenient the last expression where there is none."""
    number: Literal["auto", "first-line", "first", "last"] = "auto"
    """numeric: the first number of the first line, the first or the last of all; auto: as the problem asks,
    else the last."""
    tolerance: float = Field(default=0.0, ge=0)
    """numeric: accepted relative difference."""
    pattern: str | None = None
    """format: the regular expression that the whole response must match (`.` matches newlines).
    exact: one whose first group, in its last occurrence, is the answer."""
    ignore_case: bool = False
    """exact: whether case does not count."""


class RewardPart(ScorerConfig):
    """One term of a weighted sum."""

    name: str | None = None
    """Name in metrics; the kind by default."""
    weight: float = 1.0
    """Factor of the score."""


class RewardConfig(ScorerConfig):
    """How responses are rewarded."""

    parts: tuple[RewardPart, ...] = ()
    """A weighted sum of rewards instead of one; a pass is a full score of the first."""
    full_score: float = 1.0
    """Score of the first reward from which a response counts as passed."""
    on_error: Literal["zero", "raise"] = "zero"
    """What a reward that fails or overruns is worth: nothing, or the end of the run."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall-clock limit of one call in a worker process. A function of yours is called with a whole batch; when
    that call fails or overruns, each response gets a call of its own, with the same limit."""
    memory_mb: int = Field(default=2048, ge=64)
    """Memory that a call may take beyond the loaded worker."""
    workers: int | None = Field(default=None, ge=1)
    """Worker processes of each reward; by default one a core, at most 4. A function of yours has one."""

    @model_validator(mode="after")
    def _one_or_many(self) -> RewardConfig:
        given = changed(self, ScorerConfig.model_fields)
        if self.parts and given:
            raise ValueError(f"a sum of parts is described by its parts: move {', '.join(given)} there")
        return self


def checked(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Build `model` from `values`; every fault becomes one InputError that names the field and what fits."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InputError("\n".join(_fault(fault, model, where) for fault in error.errors())) from None


def _fault(fault: Any, model: type[BaseModel], where: str) -> str:
    place = ".".join([where, *(str(part) for part in fault["loc"])])
    if fault["type"] == "extra_forbidden":
        known: Iterable[str] = model.model_fields if len(fault["loc"]) == 1 else ()
        return f"{place}: no such option.{nearest(str(fault['loc'][-1]), known) if known else ''}"
    return f"{place}: {fault['msg']}, not {fault['input']!r}"


TaskConfig.model_rebuild()
