"""The command `tepo`: its verbs, and how every failure leaves it.

Exit codes: 0 done; 2 wrong usage or input, found before work starts, nothing written; 1 failed during the work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tepo.cli.compare import compare
from tepo.cli.doctor import doctor
from tepo.cli.eval import evaluate
from tepo.cli.explain import explain
from tepo.cli.objectives import objectives
from tepo.cli.report import report
from tepo.cli.sample import sample
from tepo.cli.train import TrainCommand, train
from tepo.cli.view import view
from tepo.core.errors import InputError, TepoError

DONE, FAILED, WRONG_INPUT = 0, 1, 2

app = typer.Typer(
    name="tepo",
    help="Token-level policy optimisation of language models: train, evaluate, look inside.",
    epilog="Start with: tepo train examples/quickstart.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        from tepo import __version__

        typer.echo(f"tepo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (anywhere on the line; also TEPO_DEBUG=1).")
    ] = False,
) -> None:
    """Token-level policy optimisation of language models: train, evaluate, look inside."""


app.command("train", cls=TrainCommand, short_help="Train a policy, continue a run or fork one.")(train)
app.command("eval", short_help="Evaluate a model or a run: avg@k, pass@k, maj@k.")(evaluate)
app.command("sample", short_help="Talk to a model or a checkpoint.")(sample)
app.command("compare", short_help="Compare variants over seeds: a study, with verdicts.")(compare)
app.command("report", short_help="Write a page on a run or a study, at any time.")(report)
app.command("view", short_help="Look at a run's responses token by token.")(view)
app.command("objectives", short_help="List the methods of the catalogue.")(objectives)
app.command("explain", short_help="Explain a method, or two side by side.")(explain)
app.command("doctor", short_help="Say what this machine can do and what is missing.")(doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; a traceback is shown only with `--debug` or TEPO_DEBUG."""
    from tepo.cli.terminal import write_any_text

    write_any_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("TEPO_DEBUG", "") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    try:
        app(args=words, prog_name="tepo")
    except Exception as error:
        if debug:
            raise
        _explain_failure(error)
        sys.exit(WRONG_INPUT if isinstance(error, InputError) else FAILED)


def _explain_failure(error: Exception) -> None:
    """Write what went wrong to stderr, without a traceback."""
    from tepo.cli.terminal import complain

    if isinstance(error, TepoError):
        complain(str(error))
        return
    text = str(error).strip() or "no message"
    complain(f"unexpected {type(error).__name__}: {text}\nRun the same command with --debug for the traceback.")
