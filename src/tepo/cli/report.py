"""`tepo report RUN`: one page on a run or a study, at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|STUDY", help="Folder of a run (finished, running or crashed), or of a study.")
    ],
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write report.html: verdict, curves, benchmark, objectives on the same tokens, health, provenance."""
    from tepo.cli.terminal import plain, print_json
    from tepo.lab.report import write_report, write_run_report

    path = write_report(run) if (run / "study.toml").is_file() else write_run_report(run)
    if as_json:
        print_json({"report": str(path)})
        return
    typer.echo(plain(str(path)))
    if opened:
        typer.launch(path.resolve().as_uri())
