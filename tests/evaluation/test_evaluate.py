from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError
from tepo.evaluation import Evaluation, QuestionResult, SampleResult, evaluate
from tepo.evaluation.results import default_ks
from tepo.rollout import Response, SamplingConfig
from tepo.tasks import Grader, Problem, RewardConfig, TaskConfig, load_problems


@dataclass(frozen=True)
class Speaker:
    """A policy only in name: its prompts are characters, its sampler below says what it is told."""

    name: str = "speaker"

    def encode(self, messages: Sequence[Mapping[str, str]], *, chat: bool) -> list[int]:
        return [int(chat), *map(ord, messages[-1]["content"])]


class Telling:
    """A sampler that answers question i with its own list of texts, and remembers how it was asked."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        self.texts = texts
        self.asked: dict[str, Any] = {}

    def __call__(
        self,
        policy: Any,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        config: Any,
        seed: int,
        purpose: str,
        draws: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Response]]:
        self.asked = {"prompts": prompts, "seed": seed, "purpose": purpose, "draws": list(draws)}
        return [
            [self.response(prompt, text, draw, number) for number, text in enumerate(self.texts[draw][:samples])]
            for draw, prompt in zip(draws, prompts, strict=True)
        ]

    def response(self, prompt: Sequence[int], text: str, draw: int, sample: int) -> Response:
        ids = tuple(range(len(text)))
        reason = "length" if text.endswith("...") else "eos"
        return Response(tuple(prompt), ids, text, (0.0,) * len(ids), (0.0,) * len(ids), reason, draw, sample)  # type: ignore[arg-type]


def problems(*answers: str) -> list[Problem]:
    return [
        Problem(f"p{number}", ({"role": "user", "content": f"q{number}"},), f"q{number}", answer)
        for number, answer in enumerate(answers)
    ]


@pytest.fixture
def evaluation() -> Evaluation:
    texts = [["4", "4", "5", "6"], ["5", "5", "no", "7..."], ["9", "9", "9", "9"]]
    with Grader(RewardConfig(kind="numeric")) as grader:
        return evaluate(
            Speaker(),  # type: ignore[arg-type]
            problems("4", "7", "9"),
            grader,
            samples=4,
            sampling=SamplingConfig(temperature=0.7, max_tokens=5),
            seed=11,
            chat=False,
            sampler=Telling(texts),
        )


def test_every_question_is_sampled_graded_and_summed_up(evaluation: Evaluation) -> None:
    assert [question.passed for question in evaluation.questions] == [2, 1, 4]
    summary = evaluation.summary()
    assert (summary.questions, summary.distinct, summary.samples) == (3, 3, 4)
    assert summary.average.value == pytest.approx(7 / 12)
    assert {k: estimate.value for k, estimate in summary.pass_at.items()} == pytest.approx(
        {1: 7 / 12, 2: (5 / 6 + 1 / 2 + 1) / 3, 4: 1.0}
    )
    # Question 0: 4 4 5 6. Question 1: 5 5 and no answer, 7 cut off but right. Question 2: all right.
    assert summary.majority_at[4].value == pytest.approx((1 + 0 + 1) / 3)
    assert summary.majority_at[1].value == pytest.approx((2 / 4 + 1 / 4 + 1) / 3)
    assert (summary.truncated, summary.errors, summary.timeouts, summary.unscorable) == (1 / 12, 0, 0, 0)
    assert summary.length == pytest.approx((4 + 1 + 1 + 2 + 4 + 4) / 12)
    assert summary.score == pytest.approx(7 / 12)
    assert summary.average.low < summary.average.value < summary.average.high


def test_the_settings_that_make_a_comparison_fair_are_recorded(evaluation: Evaluation) -> None:
    assert evaluation.settings["sampling"]["temperature"] == 0.7
    assert {name: evaluation.settings[name] for name in ("policy", "seed", "samples", "chat")} == {
        "policy": "speaker",
        "seed": 11,
        "samples": 4,
        "chat": False,
    }
    assert evaluation.summary().settings == evaluation.settings


def test_prompts_and_draws_are_addressed_by_question() -> None:
    sampler = Telling([["4"], ["7"]])
    with Grader(RewardConfig(kind="numeric")) as grader:
        evaluate(
            Speaker(),  # type: ignore[arg-type]
            problems("4", "7"),
            grader,
            samples=1,
            sampling=SamplingConfig(),
            seed=3,
            chat=True,
            sampler=sampler,
        )
    assert sampler.asked == {
        "prompts": [[1, ord("q"), ord("0")], [1, ord("q"), ord("1")]],
        "seed": 3,
        "purpose": "evaluation",
        "draws": [0, 1],
    }


def test_results_survive_writing_and_reading(evaluation: Evaluation, tmp_path: Path) -> None:
    path = tmp_path / "eval" / "step-000010.jsonl"
    evaluation.write(path)
    assert Evaluation.read(path) == evaluation
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[0])["samples"][0]["text"] == "4"
    summary = json.loads((tmp_path / "eval" / "step-000010.summary.json").read_text())
    assert summary["pass_at"]["4"]["value"] == 1.0
    assert summary["average"]["n"] == 3


def test_text_with_odd_separators_survives(tmp_path: Path) -> None:
    sample = SampleResult("a\u2028b\x85\n\ud800", None, False, None, 3, "eos", {"x": None}, "failed", True)
    evaluation = Evaluation((QuestionResult("p", "q", None, (sample,)),), {})
    evaluation.write(tmp_path / "odd.jsonl")
    assert Evaluation.read(tmp_path / "odd.jsonl") == evaluation
    summary = evaluation.summary()
    assert (summary.score, summary.unscorable, summary.errors, summary.timeouts) == (None, 1, 1, 1)
    assert summary.average.value == 0.0


def test_partial_scores_never_pass(tmp_path: Path) -> None:
    reward = tmp_path / "half.py"
    reward.write_text("def half(problems, responses): return [0.99 for _ in responses]\n")
    with Grader(RewardConfig(kind=f"{reward}:half")) as grader:
        result = evaluate(
            Speaker(),  # type: ignore[arg-type]
            problems("4"),
            grader,
            samples=2,
            sampling=SamplingConfig(),
            seed=0,
            chat=False,
            sampler=Telling([["4", "4"]]),
        )
    summary = result.summary()
    assert summary.average.value == 0.0
    assert summary.score == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (33, (1, 2, 4, 8, 16, 32, 33))]
)
def test_by_default_k_doubles_up_to_the_samples(samples: int, ks: tuple[int, ...]) -> None:
    assert default_ks(samples) == ks


def test_a_k_beyond_the_samples_is_an_error(evaluation: Evaluation) -> None:
    with pytest.raises(InputError, match="pass@8 needs at least 8 samples a question, and k at least 1; there are 4"):
        evaluation.summary(ks=[8])
    assert list(evaluation.summary(ks=[3]).pass_at) == [3]


def test_nothing_to_evaluate_is_an_error() -> None:
    with Grader(RewardConfig(kind="numeric")) as grader:
        for asked, samples, message in (([], 1, "no problem to evaluate"), (problems("4"), 0, r"eval\.samples")):
            with pytest.raises(InputError, match=message):
                evaluate(
                    Speaker(),  # type: ignore[arg-type]
                    asked,
                    grader,
                    samples=samples,
                    sampling=SamplingConfig(),
                    seed=0,
                    chat=False,
                )
    with pytest.raises(InputError, match="at least one question"):
        Evaluation(()).summary()


def test_a_real_policy_is_evaluated_the_same_way_twice() -> None:
    from tepo.policy import PolicyConfig, load_policy

    policy = load_policy(PolicyConfig(path="builtin:tiny", device="cpu"), seed=0)
    asked = load_problems(TaskConfig(source="arithmetic", held_out=6))
    results = []
    with Grader(RewardConfig()) as grader:
        for _ in range(2):
            sampling = SamplingConfig(max_tokens=4)
            results.append(evaluate(policy, asked, grader, samples=3, sampling=sampling, seed=1, chat=False))
    assert results[0] == results[1]
    assert results[0].samples == 3
    assert all(1 <= sample.length <= 4 for question in results[0].questions for sample in question.samples)
