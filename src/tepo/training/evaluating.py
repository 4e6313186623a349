"""The held-out evaluation of a run, and what of it becomes metrics of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tepo.evaluation import Evaluation, evaluate
from tepo.tasks import Grader
from tepo.training.micro import Budget
from tepo.training.setup import Setup


@dataclass(frozen=True)
class HeldOut:
    """The held-out questions of a run, sampled and graded; the same draws at every step, so steps are comparable."""

    setup: Setup
    grader: Grader
    rows: Budget
    progress: Callable[[str, int, int], None]

    def evaluate(self) -> Evaluation | None:
        """Return the evaluation of the policy as it is now; None where no questions are held out."""
        config, task = self.setup.config, self.setup.task
        problems = task.held_out[: config.eval.questions or None]
        if not problems:
            return None
        given = {"temperature": config.eval.temperature, "max_tokens": config.eval.max_tokens}
        sampling = config.sampling.model_copy(
            update={name: value for name, value in given.items() if value is not None}
        )
        return self.rows.run(
            lambda rows: evaluate(
                self.setup.policy,
                problems,
                self.grader,
                samples=config.eval.samples,
                sampling=sampling.model_copy(update={"rows": rows}),
                seed=config.train.seed,
                chat=self.setup.chat,
                progress=lambda done, total: self.progress("evaluating", done, total),
            ),
            largest=len(problems) * config.eval.samples,
        )


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return `eval/avg` (mean share of samples that passed) with its 95 % interval, pass@k and maj@k where several
    samples were taken, lengths and what went wrong."""
    summary = evaluation.summary()
    metrics = {
        "eval/avg": summary.average.value,
        "eval/avg_low": summary.average.low,
        "eval/avg_high": summary.average.high,
        "eval/questions": float(summary.questions),
        "eval/distinct": float(summary.distinct),
        "eval/length": summary.length,
        "eval/truncated": summary.truncated,
        "eval/timeouts": float(summary.timeouts),
    }
    if summary.score is not None:
        metrics["eval/score"] = summary.score
    for name, estimates in (("pass", summary.pass_at), ("maj", summary.majority_at)):
        metrics |= {f"eval/{name}@{k}": estimate.value for k, estimate in estimates.items() if k > 1}
    return metrics
