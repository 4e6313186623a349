"""The rooms of the house import only downwards, also lazily inside functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tepo

SOURCE = Path(tepo.__file__).parent

# What a room may import, beside itself and core.
NEIGHBOURS: dict[str, set[str]] = {
    "core": set(),
    "objectives": set(),
    "tasks": set(),
    "policy": set(),
    "rollout": {"policy"},
    "evaluation": {"rollout", "policy", "tasks"},
    "training": {"evaluation", "rollout", "policy", "tasks", "objectives"},
    "lab": {"training", "evaluation", "objectives"},
    "engines": {"training", "policy", "tasks", "objectives"},
    "testing": {"objectives"},
    "cli": {"core", "objectives", "tasks", "policy", "rollout", "evaluation", "training", "lab", "engines", "testing"},
}

# Third-party packages a room may import; a room that is not listed may import anything.
PACKAGES: dict[str, set[str]] = {"core": set(), "objectives": {"torch"}}


def allowed(room: str) -> set[str]:
    """Return every room that `room` may import: itself, core, and those it names."""
    return {room, "core"} | NEIGHBOURS[room]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import of a file, wherever in the file it stands."""
    package = ("tepo", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module in ("tepo", ""):
                for alias in node.names:
                    yield node.lineno, f"tepo.{alias.name}"
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and _is_dynamic_import(node) and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def _is_dynamic_import(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args)


def files_of(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


def rooms() -> list[str]:
    return sorted(folder.name for folder in SOURCE.iterdir() if folder.is_dir() and list(folder.rglob("*.py")))


def test_every_room_has_a_rule() -> None:
    assert set(rooms()) <= set(NEIGHBOURS)


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in files_of(room)
        for line, name in imports(path)
        if name.split(".")[0] == "tepo"
        and [*name.split("."), ""][1] not in allowed(room)
        # The version is the face's own, and the command line may show it.
        and not (room == "cli" and name == "tepo.__version__")
    ]
    assert wrong == []


@pytest.mark.parametrize("room", sorted(set(PACKAGES) & set(rooms())))
def test_the_lowest_rooms_depend_on_almost_nothing(room: str) -> None:
    known = PACKAGES[room] | set(sys.stdlib_module_names) | {"tepo"}
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in files_of(room)
        for line, name in imports(path)
        if name.split(".")[0] not in known
    ]
    assert wrong == []


def test_lazy_and_relative_imports_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (
        "def f():\n    from tepo.training import train\n"
        "from ..policy import Policy\nfrom . import batch\nfrom .. import lab\n"
        "import importlib\nimportlib.import_module('tepo.cli')\n"
    )
    file = tmp_path / "objectives" / "bad.py"
    file.parent.mkdir()
    file.write_text(source)
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    found = {name for _, name in imports(file)}
    assert {"tepo.training", "tepo.policy", "tepo.objectives", "tepo.lab", "tepo.cli", "importlib"} <= found
