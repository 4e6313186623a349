"""What a run came to: accuracy before and after with intervals, where it is, and what to type next."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo.core.text import quoted

if TYPE_CHECKING:
    from tepo.training import RunResult


def record(result: RunResult) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "run": str(result.folder),
        "model": str(result.model) if result.model.is_dir() else None,
        "steps": result.steps,
        "interrupted": result.interrupted,
        "evaluations": {step: dict(values) for step, values in sorted(result.evaluations.items())},
        "metrics": dict(result.metrics),
        "preflight": result.preflight.to_json() if result.preflight is not None else None,
    }


def show(result: RunResult) -> None:
    """Print the result in a panel, and the commands to try next below it, where they can be copied."""
    from rich.box import ROUNDED
    from rich.panel import Panel
    from rich.text import Text

    from tepo.cli.terminal import console, plain

    out = console()
    title = "interrupted" if result.interrupted else "done"
    body = Text(plain("\n".join([*accuracy_lines(result), "", f"run    {result.folder}", *_places(result)]).strip()))
    out.print(Panel(body, title=Text(f"{title}: {result.steps} steps"), title_align="left", box=ROUNDED, expand=False))
    tepo = command_name()
    commands = [(plain(f"{tepo} {command}"), purpose) for command, purpose in next_commands(result)]
    width = max(len(command) for command, _ in commands)
    out.print("Try next:")
    for command, purpose in commands:
        out.print(f"  {command:<{width}}  # {purpose}", soft_wrap=True)


def accuracy_lines(result: RunResult) -> list[str]:
    """Return accuracy before and after on the held-out questions; nothing where none was measured."""
    measured = sorted(result.evaluations.items())
    if not measured:
        return []
    (start, before), (end, after) = measured[0], measured[-1]
    questions = int(after["eval/distinct"])
    lines = [f"accuracy on {questions} distinct held-out questions (95 % interval over questions)"]
    if start == end:
        return [*lines, f"  step {start:<6} {share(after)}"]
    lines += [f"  before       {share(before)}", f"  after        {share(after)}"]
    if before["eval/avg_high"] < after["eval/avg_low"]:
        lines.append("  better: the intervals do not overlap")
    elif after["eval/avg_high"] < before["eval/avg_low"]:
        lines.append("  worse: the intervals do not overlap")
    else:
        lines.append("  the intervals overlap: no difference is shown")
    return lines


def share(values: Mapping[str, float]) -> str:
    """Return an accuracy with its interval, in per cent."""
    return f"{values['eval/avg']:6.1%}  ({values['eval/avg_low']:.1%} to {values['eval/avg_high']:.1%})"


def next_commands(result: RunResult) -> list[tuple[str, str]]:
    """Return what to type after `tepo`, and why."""
    run = quoted(result.folder)
    if result.interrupted:
        return [(f"train --resume {run}", "continue where it stopped")]
    return [
        (f"sample {run} --ask {_question(result)}", "ask the trained model"),
        (f"eval {run} --samples 8", "avg@k, pass@k, maj@k on its held-out questions"),
        (f"train --resume {run} train.steps={2 * result.steps}", "train it further"),
        ("explain tepo --versus dapo", "what was optimised, part by part"),
        ("train --help", "every setting: your model, your problems, your reward"),
    ]


def command_name() -> str:
    """Return how this command is typed here: `tepo`, or its path where it is not on the search path."""
    typed = Path(sys.argv[0])
    return "tepo" if typed.name != "tepo" or shutil.which("tepo") else str(typed)


def _question(result: RunResult) -> str:
    """Return a short held-out question as one word of a shell, or words in its place."""
    for path in sorted((result.folder / "eval").glob("step-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            question = str(json.loads(lines.readline())["question"])
        if len(question) <= 20 and "'" not in question and question.isprintable():
            return quoted(question)
    return quoted("a question")


def _places(result: RunResult) -> list[str]:
    """Return where the final model is, where there is one."""
    return [] if result.interrupted else [f"model  {result.model}"]
