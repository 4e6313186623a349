"""`tepo eval`: a benchmark file or a task, sampled and graded, with intervals."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo.cli.models import MODEL_HELP, NamedModel
from tepo.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tepo.evaluation import Evaluation, Preset
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
        Path | None,
        typer.Option(
            help="Also write every question's results to this file, as JSON lines; the same command again continues "
            "an evaluation that was stopped."
        ),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Also answer each question once, with the most probable tokens.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RESULTS", help="Results that --out wrote, to compare with question by question."),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option(help="Treat SOURCE as a known benchmark: aime24, math500, ...; told by its name else.")
    ] = None,
    grader_report: Annotated[
        bool, typer.Option("--grader-report", help="List responses that lenient and strict grading judge differently.")
    ] = False,
) -> None:
    """Evaluate a model or a run: avg@k, pass@k and maj@k with 95 % intervals over questions."""
    from tepo.cli.process import prepare

    prepare()
    from tepo.cli.evaluation import Beside, as_tree, show
    from tepo.cli.models import load, resolve
    from tepo.cli.terminal import print_json, speaker
    from tepo.evaluation import compare, disagreements
    from tepo.evaluation.comparison import refuse_unrelated

    source, overrides = split_words(words or [])
    _refuse_impossible(samples, k or (), out)
    other = _read_results(against) if against is not None else None
    say = speaker()
    named = resolve(model, say)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    given = {key: value for key, value in sampling.items() if value is not None}
    config = _config(named, source, overrides, given, known=_benchmark(benchmark, source, say))
    problems, chat = _problems(config, named, source, limit=limit, say=say)
    if other is not None:
        refuse_unrelated(other, problems, name=str(against))
    policy = load(named, config.model.model_dump(exclude={"path"}), say)
    ask = partial(_run, policy, problems, seed=seed, chat=chat)
    evaluation = ask(config, samples=samples, out=out)
    beside = Beside(
        greedy=ask(_greedy(config), samples=1, out=_greedy_place(out)).summary(ks=(1,)).average if greedy else None,
        against=compare(other, evaluation) if other is not None else None,
        other=str(against),
        disagreements=disagreements(problems, evaluation, config.reward) if grader_report else None,
    )
    if out is not None:
        say(f"every question's results: {out}")
    if as_json:
        print_json({"model": model, "source": source or "held out", **as_tree(evaluation, k, beside)})
    else:
        show(evaluation, k, beside, title=f"{model} on {source or 'its held-out questions'}")


def _refuse_impossible(samples: int, ks: Sequence[int], out: Path | None) -> None:
    """Raise `InputError` for options that cannot be served, before any work."""
    if ks and max(ks) > samples:
        raise InputError(f"--k {max(ks)} needs at least {max(ks)} samples a question: --samples {max(ks)}")
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder; expected a file to write")


def _greedy(config: RunConfig) -> RunConfig:
    """Return the configuration with the most probable token taken always."""
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 0.0})})


def _greedy_place(out: Path | None) -> Path | None:
    """Return where the greedy answers go that belong to the results in `out`."""
    return out.with_name(f"{out.stem}.greedy{out.suffix}") if out is not None else None


def _read_results(path: Path) -> Evaluation:
    """Read results that `--out` wrote; a file that is none is an `InputError`."""
    from tepo.evaluation import Evaluation

    if not path.is_file():
        raise InputError(f"--against {path}: there is no such file; expected results that `tepo eval --out` wrote")
    try:
        return Evaluation.read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--against {path}: not results that `tepo eval --out` wrote ({error})") from None


def _benchmark(name: str | None, source: str | None, say: Callable[[str], None]) -> Preset | None:
    """Return the known benchmark that a source is, saying what a model may have seen of it."""
    from tepo.evaluation.presets import preset, recognised
    from tepo.tasks.sources import read_rows

    found = preset(name) if name is not None else recognised(source) if source is not None else None
    if found is None or (name is None and not (Path(str(source)).is_file() and found.fits(read_rows(str(source))[0]))):
        return None
    say(f"{found.title}: {found.note}; usually {found.samples} sample{'s' * (found.samples > 1)} a question")
    return found


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


def _config(
    named: NamedModel,
    source: str | None,
    overrides: list[str],
    sampling: dict[str, Any],
    *,
    known: Preset | None = None,
) -> RunConfig:
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
        if known is not None:
            values["task"] |= known.task()
            values["reward"] = dict(known.reward)
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
    policy: Policy,
    problems: list[Problem],
    config: RunConfig,
    *,
    samples: int,
    seed: int,
    chat: bool | str,
    out: Path | None,
) -> Evaluation:
    """Sample and grade, with a progress bar on stderr; with `out`, go on with what is there, and write it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tepo.cli.terminal import console
    from tepo.evaluation import Store
    from tepo.evaluation import evaluate as evaluate_policy
    from tepo.tasks import Grader

    store = Store(out.with_name(f"{out.name}.partial")) if out is not None else None

    columns = (TextColumn("responses"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console(stderr=True)
    with (
        Grader(config.reward, device=str(policy.device)) as grader,
        Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar,
    ):
        line = bar.add_task("", total=len(problems) * samples)
        evaluation = evaluate_policy(
            policy,
            problems,
            grader,
            samples=samples,
            sampling=config.sampling,
            seed=seed,
            chat=policy.has_chat_template if chat == "auto" else bool(chat),
            progress=lambda done, total: bar.update(line, completed=done, total=total),
            store=store,
        )
    if store is not None and out is not None:
        evaluation.write(out)
        store.remove()
    return evaluation
