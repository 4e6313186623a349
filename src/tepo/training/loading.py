"""Reading a run's configuration from TOML and `section.key=value` overrides, with errors a user can act on."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tepo.core.errors import InputError, nearest
from tepo.training.config import RunConfig

_SHOWN = 200
"""Characters of a wrong value that an error repeats."""
PROVENANCE = "provenance"
"""Table of a run folder's config.toml that describes the run and configures nothing."""


def load_config(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the checked configuration of a TOML file (or of `values`) with overrides applied in order.

    An override is `section.key=value`; the value is read as TOML and, where that fails, as plain text.
    Raises `InputError` naming the file, the key and the nearest known key.
    """
    tree: dict[str, Any] = read_toml(Path(path)) if path is not None else {}
    tree.pop(PROVENANCE, None)
    merge(tree, values or {})
    for text in overrides:
        key, value = parse_override(text)
        assign(tree, key, value)
    source = str(path) if path is not None else "configuration"
    return check_config(tree, source=source, overridden={parse_override(text)[0] for text in overrides})


def check_config(
    tree: Mapping[str, Any], *, source: str = "configuration", overridden: set[str] | None = None
) -> RunConfig:
    """Validate a tree of plain values; keys in `overridden` are reported as given on the command line."""
    try:
        config = RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        raise InputError(_explain(error, source, overridden or set())) from None
    config.objective.build()
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a missing file or a syntax error is an `InputError` that names file and line."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file; `tepo train --help` lists every key") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a TOML file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Split `section.key=value`; the value is a TOML value or, failing that, the text itself."""
    key, sign, value = text.partition("=")
    key = key.strip()
    if not sign or not key or not all(part for part in key.split(".")):
        raise InputError(f"override {text!r}: expected section.key=value, for example optim.lr=2e-6")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, pydantic field) of every leaf of the configuration, in the order of declaration."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and not _is_sequence(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def merge(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write `values` into `tree`, section by section; what is a value there is replaced."""
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` of a tree, making the sections that are not there."""
    *sections, leaf = key.split(".")
    node = tree
    for name in sections:
        if node.get(name) is None:  # absent, or a section that a run's record says is off
            node[name] = {}
        inner = node[name]
        if not isinstance(inner, dict):
            raise InputError(f"override {key}={value}: {name!r} is a value, not a section")
        node = inner
    node[leaf] = value


def _explain(error: ValidationError, source: str, overridden: set[str]) -> str:
    lines = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = ".".join(location)
        overriding = any(name == key or name.startswith(f"{key}.") for name in overridden)
        origin = "command line" if overriding else source
        if item["type"] == "extra_forbidden":
            lines.append(f"{origin}: unknown key {key!r}.{_nearest_key(location)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], Mapping) else f" (given {_short(item['input'])})"
            lines.append(f"{origin}: {key}: {message}{given}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _nearest_key(location: Sequence[str]) -> str:
    model: type[BaseModel] | None = RunConfig
    for name in location[:-1]:
        field = model.model_fields.get(name) if model is not None else None
        if field is not None:
            model = _model_in(field.annotation)
    if model is None:
        return ""
    prefix = "".join(f"{name}." for name in location[:-1])
    siblings = [f"{prefix}{name}" for name in model.model_fields]
    hint = nearest(".".join(location), siblings)
    elsewhere = [key for key, _ in known_keys() if key.split(".")[-1] == location[-1]]
    if "Did you mean" not in hint and elsewhere:
        shallowest = min(elsewhere, key=lambda key: key.count("."))
        return f" Did you mean {shallowest!r}?"
    return hint


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model an annotation holds: M, M | None, tuple[M, ...], list[M]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _is_sequence(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_is_sequence(argument) for argument in typing.get_args(annotation))
    return origin in (tuple, list, dict)
