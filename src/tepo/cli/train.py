"""`tepo train`: train a policy as a TOML file says, continue a run, or fork one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tepo.core.errors import InputError, TepoError, WorkError
from tepo.core.files import exists
from tepo.core.text import quoted

if TYPE_CHECKING:
    from tepo.training import RunResult

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*=.*", re.DOTALL)


class TrainCommand(TyperCommand):
    """The verb whose help also lists every key of the configuration."""

    def get_help(self, ctx: Any) -> str:
        """Return usage and options, then the configuration's fields."""
        from tepo.cli.fields import fields_text

        return f"{super().get_help(ctx)}\n\n{fields_text()}"


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.TOML|SECTION.KEY=VALUE",
            help="A configuration, and keys that change it; with --resume, the run's folder.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run: the folder given, or the one the configuration names.")
    ] = False,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="RUN@STEP", help="Start a new run from a checkpoint of another.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run: its folder under runs/.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the pre-flight; nothing is written.")] = False,
    fields: Annotated[bool, typer.Option("--fields", help="List every key of the configuration.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result (or the fields) as JSON.")] = False,
) -> None:
    """Train a policy: tepo train examples/quickstart.toml optim.lr=2e-6; tepo train --resume runs/NAME."""
    from tepo.cli.terminal import print_json

    if fields:
        _print_fields(as_json)
        return
    asked = request(words or [], resume=resume, fork=fork, name=name)
    from tepo.cli.process import prepare

    prepare()
    from tepo.cli.outcome import record, show

    result = _run(asked, dry_run=dry_run)
    if as_json:
        print_json(record(result))
    elif not dry_run:
        show(result)
    if result.interrupted and not dry_run:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Request:
    """What a command line asks for: settings from `path` with `overrides`, and where to start from."""

    path: Path | None
    overrides: tuple[str, ...]
    resume: Path | bool
    fork: str | None


def request(words: Sequence[str], *, resume: bool, fork: str | None, name: str | None) -> Request:
    """Sort the words of the command line into file, run folder and overrides; what does not fit is an `InputError`.

    A run that is continued or forked brings its own settings where no file is given.
    """
    overrides = [word for word in words if _OVERRIDE.fullmatch(word) and not exists(word)]
    places = [Path(word) for word in words if word not in overrides]
    files = [place for place in places if place.is_file() or place.suffix == ".toml"]
    folders = [place for place in places if place not in files]
    if len(files) > 1 or len(folders) > 1:
        raise InputError(f"expected one configuration file, got: {', '.join(map(str, files or folders))}")
    if folders and not resume:
        raise InputError(_not_a_file(folders[0]))
    if resume and fork is not None:
        raise InputError("--resume continues a run and --fork starts a new one: give one of them")
    if name is not None:
        if not name:
            raise InputError("--name is empty; leave it out for a name made of objective, task and seed")
        overrides.append(f"name={json.dumps(name)}")
    path = files[0] if files else None
    if path is None and folders:
        path = _settings_of(folders[0])
    elif path is None and fork is not None:
        folder, step = _fork_place(fork)
        path = _settings_of(folder)
        if not any(word.partition("=")[0].strip() == "name" for word in overrides):
            overrides.append(f"name={json.dumps(f'{folder.resolve().name}-fork{step}')}")
    if path is None and not overrides:
        raise InputError("nothing to train: give a configuration, such as examples/quickstart.toml, or --resume RUN")
    return Request(path, tuple(overrides), folders[0] if folders else resume, fork)


def _not_a_file(place: Path) -> str:
    """Return what is wrong with a word that is neither a file nor an override."""
    if (place / "config.toml").is_file():
        return f"{place} is a run; to continue it: tepo train --resume {quoted(place)}"
    if place.is_dir():
        return f"{place} is a folder; expected a TOML file"
    return f"{place}: no such file; expected a TOML file or section.key=value"


def _settings_of(folder: Path) -> Path:
    """Return the configuration of a run folder."""
    path = folder / "config.toml"
    if not path.is_file():
        raise InputError(f"{folder} is not a run: it has no config.toml")
    return path


def _fork_place(fork: str) -> tuple[Path, int]:
    """Return the run folder and the step of RUN@STEP."""
    from tepo.training.resume import parse_fork

    folder, step = parse_fork(fork)
    return folder.path, step


def _run(asked: Request, *, dry_run: bool) -> RunResult:
    """Train, shown on stderr; any failure after the run's folder was made says what is safe on disk."""
    from tepo.cli.display import Display
    from tepo.training import load_config
    from tepo.training import train as train_policy

    config = load_config(asked.path, asked.overrides)
    display = Display()
    try:
        return train_policy(config, callbacks=[display], resume=asked.resume, fork=asked.fork, dry_run=dry_run)
    except TepoError:
        raise
    except KeyboardInterrupt:
        if display.folder is None:
            raise
        # What is safe has been said, as for any other end of the work before its time.
        raise typer.Exit(1) from None
    except Exception as error:
        if display.folder is None:
            raise
        from tepo.training.checkpoint import what_is_safe
        from tepo.training.rundir import RunFolder

        safe = what_is_safe(RunFolder(display.folder))
        raise WorkError(f"unexpected {type(error).__name__}: {error}\n{safe}") from error
    finally:
        display.close()


def _print_fields(as_json: bool) -> None:
    """Print every key of the configuration."""
    from tepo.cli.fields import describe_fields, fields_text
    from tepo.cli.terminal import print_json

    if as_json:
        print_json(describe_fields())
    else:
        typer.echo(fields_text())
