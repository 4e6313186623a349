"""`tepo compare`: a study of variants and seeds, with the verdicts that its runs support."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tepo.core.errors import InputError
from tepo.core.files import exists

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*=.*", re.DOTALL)


def compare(
    words: Annotated[
        list[str],
        typer.Argument(metavar="STUDY.TOML|KEY=VALUE", help="A study or its folder, and keys that change it."),
    ],
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; analyse what is there and rebuild the report.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Make failed runs again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compare variants over seeds: tepo compare study.toml. Repeat the command to continue a study that stopped."""
    from tepo.cli.process import prepare
    from tepo.cli.terminal import print_json, speaker

    prepare()
    from tepo.lab import StudyFolder, load_study, run_study, write_results

    path, overrides = split_words(words)
    study = load_study(path, overrides)
    say = speaker()
    folder = StudyFolder(Path(study.studies) / study.name)
    results = write_results(study, folder, say=say) if report_only else run_study(study, say=say, retry=retry)
    if as_json:
        print_json(results)
    else:
        show(results)
    if not any(run["status"] == "done" for run in results["runs"]):
        raise typer.Exit(1)


def split_words(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Tell the study from the overrides; a folder stands for the study.toml in it."""
    overrides = [word for word in words if _OVERRIDE.fullmatch(word) and not exists(word)]
    places = [Path(word) for word in words if word not in overrides]
    if len(places) != 1:
        raise InputError(f"expected one study, such as study.toml, got {len(places)}")
    place = places[0]
    if place.is_dir():
        place = place / "study.toml"
    return place, overrides


def show(results: Mapping[str, Any]) -> None:
    """Print a table of the variants, the verdicts, what failed and what must be known to judge them."""
    from tepo.cli.terminal import console, plain, print_table

    columns = ("variant", "runs", "accuracy, %", "final reward", "entropy kept, %", "unstable")
    rows = [
        (
            one["name"] + (" (baseline)" if one["name"] == results["baseline"] else ""),
            f"{one['finished']}/{len(results['seeds'])}",
            effect_text(one.get("accuracy"), scale=100, form=".1f"),
            effect_text(one["final_reward"], form=".3f"),
            effect_text(one["entropy_kept"], scale=100, form=".0f"),
            _unstable(one),
        )
        for one in results["variants"]
    ]
    print_table(plain(f"{results['name']}: mean [95 % interval] over seeds"), columns, rows, right=1)
    out = console()
    for sentence in results["verdicts"]:
        out.print(plain(sentence), soft_wrap=True)
    for one in results["comparisons"]:
        if one.get("improvement") is not None:
            chance = effect_text(one["improvement"], form=".2f")
            out.print(
                plain(f"chance that a run of {one['variant']} beats one of {one['baseline']}: {chance}"), soft_wrap=True
            )
    for run in results["runs"]:
        if run["status"] == "failed":
            out.print(plain(f"{run['name']} failed: {run['error']}"), style="bold", soft_wrap=True)
    for note in results["notes"]:
        out.print(plain(f"note: {note}"), style="dim", soft_wrap=True)


def _unstable(one: Mapping[str, Any]) -> str:
    """Return what went wrong in a variant's runs, in a few words."""
    counts = {"collapsed": one["collapsed"], "spikes": one["spikes"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no"


def effect_text(effect: Mapping[str, Any] | None, *, form: str, scale: float = 1.0) -> str:
    """Return `value [low, high]`, the value alone without an interval, or a dash without a value."""
    if effect is None:
        return "-"
    value = f"{scale * effect['value']:{form}}"
    if effect["low"] is None:
        return value
    return f"{value} [{scale * effect['low']:{form}}, {scale * effect['high']:{form}}]"
