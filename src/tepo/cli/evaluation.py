"""An evaluation as `tepo eval` prints it: the table, what it breaks down to, what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo.evaluation import Comparison, Disagreement, Estimate, Evaluation


@dataclass(frozen=True)
class Beside:
    """What was asked for beside the evaluation itself; None where it was not.

    `against` compares with the results in the file `other`.
    """

    greedy: Estimate | None
    against: Comparison | None
    other: str
    disagreements: Sequence[Disagreement] | None


def as_tree(evaluation: Evaluation, ks: Sequence[int] | None, beside: Beside) -> dict[str, Any]:
    """Return everything as plain values, the whole pass@k curve included."""
    found: dict[str, Any] = evaluation.summary(ks=ks or None).to_json()
    found["pass_curve"] = {str(size): value.to_json() for size, value in evaluation.pass_curve().items()}
    found["breakdown"] = {
        label: {value: estimate.to_json() for value, estimate in values.items()}
        for label, values in evaluation.breakdown().items()
    }
    for name, one in (("greedy", beside.greedy), ("against", beside.against)):
        if one is not None:
            found[name] = one.to_json()
    if beside.disagreements is not None:
        found["disagreements"] = [one.to_json() for one in beside.disagreements]
    return found


def show(evaluation: Evaluation, ks: Sequence[int] | None, beside: Beside, *, title: str) -> None:
    """Print an evaluation as tables, with what a reader needs to judge it."""
    _show_summary(evaluation, ks, beside.greedy, title=title)
    _show_breakdown(evaluation)
    if beside.against is not None:
        _show_comparison(beside.against, beside.other)
    if beside.disagreements is not None:
        _show_disagreements(beside.disagreements)


def _show_summary(evaluation: Evaluation, ks: Sequence[int] | None, greedy: Estimate | None, *, title: str) -> None:
    from tepo.cli.terminal import console, plain, print_table

    summary = evaluation.summary(ks=ks or None)
    rows = [(f"avg@{summary.samples}", summary.average)]
    rows += [(f"pass@{k}", estimate) for k, estimate in summary.pass_at.items()]
    rows += [(f"maj@{k}", estimate) for k, estimate in summary.majority_at.items()]
    rows += [("greedy", greedy)] if greedy is not None else []
    cells = [(name, *estimate_text(value)) for name, value in rows]
    out = console()
    out.print(plain(title), style="bold", soft_wrap=True)
    print_table("", ("measure", "value", "95 % interval"), cells, right=1)
    sampling = summary.settings.get("sampling", {})
    if summary.distinct < summary.questions:
        out.print(
            f"{summary.questions} rows repeat {summary.distinct} questions: repeats count as samples, and intervals "
            "are over distinct questions"
        )
    out.print(
        f"{summary.distinct} distinct questions of {summary.questions}, {summary.samples} samples each, "
        f"temperature {sampling.get('temperature', 'unknown')}; intervals are over questions"
    )
    out.print(f"mean length {summary.length:.0f} tokens, {summary.truncated:.0%} cut at the limit")
    troubles = {"failed": summary.errors, "timed out": summary.timeouts, "not scorable": summary.unscorable}
    told = ", ".join(f"{count} {what}" for what, count in troubles.items() if count)
    if told:
        out.print(f"grading: {told}")


def _show_breakdown(evaluation: Evaluation) -> None:
    """Print avg@n by subject, level and the like, where the source says them."""
    from tepo.cli.terminal import plain, print_table

    for label, values in evaluation.breakdown().items():
        cells = [(plain(value or "(none)"), str(one.n), *estimate_text(one)) for value, one in values.items()]
        print_table(f"by {label}", (label, "questions", "value", "95 % interval"), cells, right=1)


def _show_comparison(found: Comparison, other: str) -> None:
    from tepo.cli.terminal import console, plain

    out = console()
    out.print(plain(f"against {other}: {found}"), soft_wrap=True)
    out.print(f"questions flipped: {len(found.gained)} to right, {len(found.lost)} to wrong", soft_wrap=True)
    for name, ids in (("to right", found.gained), ("to wrong", found.lost)):
        if ids:
            out.print(plain(f"  {name}: {', '.join(ids[:20])}" + (" ..." if len(ids) > 20 else "")), soft_wrap=True)
    if found.alone:
        out.print(f"  {found.alone} questions are in one of the two alone and were left out")
    if found.unequal:
        out.print(f"  not a fair comparison: {', '.join(found.unequal)} differ", style="bold")


def _show_disagreements(found: Sequence[Disagreement]) -> None:
    from tepo.cli.terminal import console, plain

    out = console()
    out.print(f"lenient and strict grading disagree on {len(found)} responses")
    for one in found:
        told = "right only when lenient" if one.lenient else "right only when strict"
        text = f"  {one.question} sample {one.sample}: {told}; reference {one.reference!r}, ends {one.end[-80:]!r}"
        out.print(plain(text), soft_wrap=True)


def estimate_text(estimate: Estimate) -> tuple[str, str]:
    """Return a share and its interval in per cent."""
    return f"{100 * estimate.value:.1f} %", f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f}"
