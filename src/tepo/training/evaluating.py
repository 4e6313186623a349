"""The held-out evaluation of a run, as metrics of a step."""

from __future__ import annotations

from tepo.evaluation import Evaluation


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
