"""The held-out evaluation of a run, as metrics of a step."""

from __future__ import annotations

from tepo.evaluation import Evaluation


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return `eval/avg` with its 95 % interval, pass@k and maj@k where there are several samples, and lengths."""
    summary = evaluation.summary()
    metrics = {
        "eval/avg": summary.avg.value,
        "eval/avg_low": summary.avg.low,
        "eval/avg_high": summary.avg.high,
        "eval/questions": float(summary.avg.n),
        "eval/length": summary.mean_length,
        "eval/truncated": summary.truncated,
    }
    for name, estimates in (("pass", summary.pass_at), ("maj", summary.maj_at)):
        metrics |= {f"eval/{name}@{k}": estimate.value for k, estimate in estimates.items() if k > 1}
    return metrics
