"""`tepo eval`: a benchmark file or a task, sampled and graded, with intervals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo.cli.models import MODEL_HELP, NamedModel
from tepo.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tepo.evaluation import Estimate, Evaluation, Summary
    from tepo.policy import Policy
    from tepo.tasks import Problem
    from tepo.training.config import RunConfig

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=.*", re.DOTALL)
_SECTIONS = ("model", "task", "reward", "sampling")


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help=MODEL_HELP)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE|SECTION.KEY=VALUE",
            help="A file, a task or a hub id; without it, the run's held-out problems. "
            "Keys of the sections model, task, reward and sampling change how it is asked and graded.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses to each question.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: the run's, or 1.0; 0 takes the most probable token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response. Default: the run's, or 512.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first K questions.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", min=1, help="k of pass@k and maj@k; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write every question's results to this file, as JSON lines.")
    ] = None,
) -> None:
    """Evaluate a model or a run: avg@k, pass@k and maj@k with 95 % intervals over questions."""
    from tepo.cli.process import prepare

    prepare()
    from tepo.cli.models import load, resolve
    from tepo.cli.terminal import print_json, speaker

    source, overrides = split_words(words or [])
    if k and max(k) > samples:
        raise InputError(f"--k {max(k)} needs at least {max(k)} samples a question: --samples {max(k)}")
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder; expected a file to write")
    say = speaker()
    named = resolve(model, say)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    config = _config(named, source, overrides, {key: value for key, value in sampling.items() if value is not None})
    problems, chat = _problems(config, named, source, limit=limit, say=say)
    policy = load(named, config.model.model_dump(exclude={"path"}), say)
    evaluation = _run(policy, problems, config, samples=samples, seed=seed, chat=chat)
    summary = evaluation.summary(ks=k or None)
    if out is not None:
        evaluation.write(out)
        say(f"every question's results: {out}")
    if as_json:
        print_json({"model": model, "source": source or "held out", **summary.to_json()})
    else:
        show(summary, title=f"{model} on {source or 'its held-out questions'}")


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell the source from the overrides; more than one source, or a key that does not apply, is an `InputError`."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    sources = [word for word in words if word not in overrides]
    if len(sources) > 1:
        raise InputError(f"expected one source, got {len(sources)}: {', '.join(sources)}")
    for word in overrides:
        key = word.partition("=")[0]
        if key.split(".")[0] not in _SECTIONS or key in ("model.path", "task.source"):
            raise InputError(f"{key} does not apply to an evaluation; sections that do: {', '.join(_SECTIONS)}")
    return (sources[0] if sources else None), overrides


def _config(named: NamedModel, source: str | None, overrides: list[str], sampling: dict[str, Any]) -> RunConfig:
    """Return what the evaluation is made of: the run's own settings, or defaults for another source."""
    from tepo.training.loading import load_config
    from tepo.training.rundir import plain_config

    if source is None and named.run is None:
        raise InputError("SOURCE is missing: a file, a task or a hub id; only a run has held-out questions of its own")
    if source is None and named.run is not None:
        values = plain_config(named.run)
        own = {"temperature": named.run.eval.temperature, "max_tokens": named.run.eval.max_tokens}
        values["sampling"] |= {key: value for key, value in own.items() if value is not None} | sampling
    else:
        model = {} if named.run is None else plain_config(named.run)["model"]
        values = {"model": model, "task": {"source": source}, "sampling": {"max_tokens": 512, **sampling}}
    if named.checkpoint is None:
        values["model"].pop("lora", None)  # a saved model is merged
    values["model"]["path"] = named.path
    return load_config(None, overrides, values=values)


def _problems(
    config: RunConfig, named: NamedModel, source: str | None, *, limit: int | None, say: Callable[[str], None]
) -> tuple[list[Problem], bool | str]:
    """Return the questions and whether they are chats: all of a file's, or what a task holds out."""
    from tepo.tasks import load_problems, load_task

    if source is not None and source != "arithmetic" and not source.startswith("gym:"):
        return load_problems(config.task, limit=limit, say=say), config.task.chat
    task = load_task(config.task, seed=config.train.seed, say=say)
    first = limit or (config.eval.questions if named.run is not None and source is None else 0)
    problems = list(task.held_out[: first or None])
    if not problems:
        raise InputError("the task holds no questions out; name a SOURCE")
    return problems, task.chat


def _run(
    policy: Policy, problems: list[Problem], config: RunConfig, *, samples: int, seed: int, chat: bool | str
) -> Evaluation:
    """Sample and grade, with a progress bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tepo.cli.terminal import console
    from tepo.evaluation import evaluate as evaluate_policy
    from tepo.tasks import Grader

    columns = (TextColumn("responses"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    out = console(stderr=True)
    with (
        Grader(config.reward) as grader,
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar,
    ):
        line = bar.add_task("", total=len(problems) * samples)
        return evaluate_policy(
            policy,
            problems,
            grader,
            samples=samples,
            sampling=config.sampling,
            seed=seed,
            chat=policy.has_chat_template if chat == "auto" else bool(chat),
            progress=lambda done, total: bar.update(line, completed=done, total=total),
        )


def show(summary: Summary, *, title: str) -> None:
    """Print a summary as a table, with what a reader needs to judge it."""
    from tepo.cli.terminal import console, plain, print_table

    rows = [(f"avg@{summary.samples}", summary.average)]
    rows += [(f"pass@{k}", estimate) for k, estimate in summary.pass_at.items()]
    rows += [(f"maj@{k}", estimate) for k, estimate in summary.majority_at.items()]
    cells = [(name, *estimate_text(value)) for name, value in rows]
    print_table(plain(title), ("measure", "value", "95 % interval"), cells, right=1)
    out = console()
    sampling = summary.settings.get("sampling", {})
    out.print(
        f"{summary.distinct} distinct questions of {summary.questions}, {summary.samples} samples each, "
        f"temperature {sampling.get('temperature', 'unknown')}; intervals are over questions"
    )
    out.print(f"mean length {summary.length:.0f} tokens, {summary.truncated:.0%} cut at the limit")
    troubles = {"failed": summary.errors, "timed out": summary.timeouts, "not scorable": summary.unscorable}
    told = ", ".join(f"{count} {what}" for what, count in troubles.items() if count)
    if told:
        out.print(f"grading: {told}")


def estimate_text(estimate: Estimate) -> tuple[str, str]:
    """Return a share and its interval in per cent."""
    return f"{100 * estimate.value:.1f} %", f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f}"
