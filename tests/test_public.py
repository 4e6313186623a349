"""The names and options that users depend on, frozen: a change here is a change of the public face.

After a deliberate change run `python tests/test_public.py` and say it in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import tepo

GOLDEN = Path(__file__).parent / "public.json"
ROOMS = ("core", "objectives", "tasks", "policy", "rollout", "evaluation", "training", "lab", "cli")


def names_of(module: types.ModuleType) -> list[str]:
    """Return what a module says is public, or else what it has that is no module and no underscore name."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in ("annotations", "Any")
    )


def command_line() -> dict[str, dict[str, str]]:
    """Return verb -> parameter -> how it is typed."""
    from typer.main import get_command

    from tepo.cli.app import app

    root: Any = get_command(app)
    verbs: dict[str, Any] = {"": root, **root.commands}
    return {
        verb: {
            str(parameter.name): " ".join(sorted(parameter.opts))
            if parameter.param_type_name == "option"
            else str(parameter.metavar)
            for parameter in command.params
        }
        for verb, command in verbs.items()
    }


def public_face() -> dict[str, Any]:
    return {
        "tepo": names_of(tepo),
        **{f"tepo.{room}": names_of(importlib.import_module(f"tepo.{room}")) for room in ROOMS},
        "command line": command_line(),
    }


def test_public_names_and_options_are_the_frozen_ones() -> None:
    assert public_face() == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", tepo.__all__)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(tepo, name)
    assert value.__doc__


def test_the_catalogue_is_called_by_the_name_of_its_room() -> None:
    from tepo.objectives import TokenBatch  # loading the room first must not hide the catalogue

    assert tepo.TokenBatch is TokenBatch
    assert "tepo" in [entry.name for entry in tepo.objectives()]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tepo.nothing


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert tepo.__version__ == version("tepo")


def loaded_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after some code."""
    script = f"{code}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_tepo_loads_nothing_heavy() -> None:
    assert not loaded_after("import tepo") & {"torch", "transformers", "pydantic", "numpy", "typer", "rich"}


def test_objectives_need_torch_alone() -> None:
    loaded = loaded_after("import tepo; tepo.objective('tepo'); tepo.TokenBatch; tepo.credit")
    assert "torch" in loaded
    assert not loaded & {"transformers", "pydantic", "typer", "rich", "safetensors"}


def test_the_command_line_starts_without_torch() -> None:
    loaded = loaded_after("from tepo.cli.app import app; from typer.main import get_command; get_command(app)")
    assert not loaded & {"torch", "transformers", "pydantic", "numpy"}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(public_face(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
