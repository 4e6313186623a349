"""Reward functions of the user's, loaded inside a worker."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError, nearest


def is_path(kind: str) -> bool:
    """Return whether a reward kind names a function: `module:function` or `file.py:function`."""
    return ":" in kind


def check_path(kind: str) -> None:
    """Raise InputError where the reference cannot be right: no function, or a file that is not there."""
    place, _, function = kind.rpartition(":")
    if not place or not function.isidentifier():
        raise InputError(f"reward.kind: {kind!r} is not module:function or file.py:function")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            near = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
            hint = nearest(path.name, near) if near else " There is no Python file in that folder."
            raise InputError(f"reward.kind: there is no file {place!r}.{hint}")
    elif not all(part.isidentifier() for part in place.split(".")):
        raise InputError(f"reward.kind: {place!r} is not a module name; a file needs its .py: {place}.py:{function}")


def function_of(kind: str) -> Callable[..., Any]:
    """Import the function; raise InputError that says what is missing."""
    place, _, name = kind.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise InputError(f"reward.kind: {place!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.append(os.getcwd())  # a module beside the run is found, as with `python -m`, but shadows nothing
        module = importlib.import_module(place)
    if not hasattr(module, name):
        callables = [known for known, value in vars(module).items() if callable(value) and known[0] != "_"]
        hint = nearest(name, callables) if callables else " It defines no function."
        raise InputError(f"reward.kind: {place} has no function {name!r}.{hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise InputError(f"reward.kind: {kind} is a {type(function).__name__}, not a function")
    return function


def load(kind: str) -> Any:
    """Return the worker's scorer for a function of the user's; it gets a list of problems and one of responses."""
    function = function_of(kind)

    def score(payload: dict[str, Any]) -> dict[str, Any]:
        problems, responses = payload["problems"], payload["responses"]
        values = function(problems, responses)
        try:
            values = list(values)
        except TypeError:
            return {"wrong": f"{kind} returned a {type(values).__name__}, expected a list of one score a response"}
        if len(values) != len(responses):
            return {"wrong": f"{kind} returned {len(values)} values for {len(responses)} responses"}
        faults = [(number, value) for number, value in enumerate(values) if not _is_score(value)]
        if faults:
            number, value = faults[0]
            return {"wrong": f"{kind} returned {value!r} for response {number}: expected a number, None or a dict"}
        return {"scores": [_plain(value) for value in values]}

    return score


def _is_score(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(key, str) and _is_number(item) for key, item in value.items())
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if item is None else float(item) for key, item in value.items()}
    return None if value is None else float(value)
