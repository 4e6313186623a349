"""What an evaluation found: every sample of every question, and the summary computed from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.core.files import write_json, write_text
from tepo.evaluation.statistics import Estimate, estimates, majority_at_k, pass_at_k
from tepo.tasks.problem import normalised


@dataclass(frozen=True)
class SampleResult:
    """One sampled response and its grade; `length` in tokens, the end-of-sequence token included."""

    text: str
    score: float | None
    passed: bool
    answer: str | None
    length: int
    stop_reason: str
    parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class QuestionResult:
    """One question with its samples."""

    id: str
    question: str
    answer: str | None
    samples: tuple[SampleResult, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the source says of it that results are broken down by: subject, level, ..."""

    @property
    def share(self) -> float:
        """Share of samples that passed."""
        return self.passed / len(self.samples)

    @property
    def mostly_right(self) -> bool:
        """Whether more than half of the samples passed."""
        return 2 * self.passed > len(self.samples)

    @property
    def passed(self) -> int:
        """Number of samples that passed."""
        return sum(sample.passed for sample in self.samples)

    def pass_at(self, k: int) -> float:
        """Return the unbiased pass@k of this question."""
        return pass_at_k(len(self.samples), self.passed, k)

    def majority_at(self, k: int) -> float:
        """Return the expected maj@k: all samples that passed are one answer, the others vote by canonical answer."""
        wrong = Counter(sample.answer for sample in self.samples if not sample.passed and sample.answer is not None)
        return majority_at_k(len(self.samples), self.passed, tuple(wrong.values()), k)


@dataclass(frozen=True)
class Summary:
    """Means over questions with 95 % intervals, and what a reader needs to judge them.

    `average` is avg@n, the mean share of samples that passed; `score` the mean score over samples that could be
    scored (None without any), partial scores and weights included. Lengths are in tokens.
    """

    questions: int
    distinct: int
    samples: int
    average: Estimate
    pass_at: Mapping[int, Estimate]
    majority_at: Mapping[int, Estimate]
    score: float | None
    length: float
    truncated: float
    errors: int
    timeouts: int
    unscorable: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the k of pass@k and maj@k are its keys as text."""
        return asdict(self) | {
            "pass_at": {str(k): estimate.to_json() for k, estimate in self.pass_at.items()},
            "majority_at": {str(k): estimate.to_json() for k, estimate in self.majority_at.items()},
        }


@dataclass(frozen=True)
class Evaluation:
    """Per-question results and the settings under which they were sampled (temperature, seed, samples, ...)."""

    questions: tuple[QuestionResult, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples a question, the fewest where they differ."""
        return min((len(question.samples) for question in self.questions), default=0)

    def merged(self) -> Evaluation:
        """Return the evaluation with repeats of a question (same text, same answer) as more samples of the first."""
        samples: dict[tuple[str, str | None], tuple[SampleResult, ...]] = {}
        first: dict[tuple[str, str | None], QuestionResult] = {}
        for question in self.questions:
            key = normalised(question.question), question.answer
            first.setdefault(key, question)
            samples[key] = samples.get(key, ()) + question.samples
        if len(first) == len(self.questions):
            return self
        return replace(self, questions=tuple(replace(one, samples=samples[key]) for key, one in first.items()))

    def pass_curve(self, *, seed: int = 0) -> dict[int, Estimate]:
        """Return pass@k with its interval for every k up to the samples of a question."""
        merged = self.merged()
        ks = range(1, merged.samples + 1)
        rows = [[question.pass_at(k) for question in merged.questions] for k in ks]
        return dict(zip(ks, estimates(rows, seed=seed), strict=True))

    def breakdown(self, *, seed: int = 0) -> dict[str, dict[str, Estimate]]:
        """Return avg@n by label (subject, level, ...) and its value, in the order of the values' names.

        A label that is missing from a question counts as `""`; labels with one value say nothing and are left out.
        """
        merged = self.merged()
        names = sorted({name for question in merged.questions for name in question.labels})
        result = {}
        for name in names:
            groups: dict[str, list[float]] = {}
            for question in merged.questions:
                groups.setdefault(question.labels.get(name, ""), []).append(question.share)
            if len(groups) > 1:
                result[name] = {value: estimates([shares], seed=seed)[0] for value, shares in sorted(groups.items())}
        return result

    def summary(self, ks: Sequence[int] | None = None, *, seed: int = 0) -> Summary:
        """Return the summary; `ks` are the k of pass@k and maj@k, by default 1, 2, 4, ... and the samples taken.

        Rows that repeat a question are one question with more samples, in means and intervals alike.
        `seed` is the bootstrap's. Raise InputError for a k above the samples of a question.
        """
        if not self.questions or self.samples == 0:
            raise InputError("an evaluation needs at least one question with at least one sample")
        wanted = tuple(ks) if ks is not None else default_ks(self.merged().samples)
        questions = self.merged().questions
        rows = [[question.share for question in questions]]
        rows += [[question.pass_at(k) for question in questions] for k in wanted]
        rows += [[question.majority_at(k) for question in questions] for k in wanted]
        average, *others = estimates(rows, seed=seed)
        every = [sample for question in self.questions for sample in question.samples]
        scores = [sample.score for sample in every if sample.score is not None]
        return Summary(
            questions=len(self.questions),
            distinct=len(questions),
            samples=self.merged().samples,
            average=average,
            pass_at=dict(zip(wanted, others[: len(wanted)], strict=True)),
            majority_at=dict(zip(wanted, others[len(wanted) :], strict=True)),
            score=sum(scores) / len(scores) if scores else None,
            length=sum(sample.length for sample in every) / len(every),
            truncated=sum(sample.stop_reason == "length" for sample in every) / len(every),
            errors=sum(sample.error is not None for sample in every),
            timeouts=sum(sample.timed_out for sample in every),
            unscorable=len(every) - len(scores),
            settings=dict(self.settings),
        )

    def write(self, path: Path) -> None:
        """Write one JSON line a question to `path`, and the summary beside it as NAME.summary.json, each atomically."""
        lines = [json.dumps(asdict(question), ensure_ascii=True) for question in self.questions]
        write_text(path, "\n".join(lines) + "\n")
        write_json(summary_path(path), self.summary().to_json())

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """Read what `write` wrote."""
        settings = json.loads(summary_path(path).read_text(encoding="utf-8"))["settings"]
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return cls(
            tuple(question_from(record) for record in records),
            settings,
        )


def question_from(record: Mapping[str, Any]) -> QuestionResult:
    """Return a question's result from the plain values that were written of it."""
    samples = tuple(SampleResult(**sample) for sample in record["samples"])
    return QuestionResult(**{**record, "samples": samples})


def summary_path(path: Path) -> Path:
    """Return where the summary of a result file lies."""
    return path.with_suffix(".summary.json")


def default_ks(samples: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `samples`, and `samples` itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return tuple(sorted({*powers, samples}))
