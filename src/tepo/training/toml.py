"""Writing a tree of plain values as TOML, which the standard library only reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(tree: Mapping[str, Any]) -> str:
    """Return `tree` as TOML text that `tomllib` reads back equal; None is left out (TOML has no null)."""
    return "\n".join(_table(tree, ())).strip() + "\n"


def _table(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    present = {key: value for key, value in tree.items() if value is not None}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in present.items() if not _is_table(value)]
    if path and (lines or not present):
        lines = ["", f"[{'.'.join(_key(part) for part in path)}]", *lines]
    for key, value in present.items():
        if _is_table(value):
            lines += _table(value, (*path, key))
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no TOML form")


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    # TOML wants digits on both sides of a point and accepts 1e-06 as it is.
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def _text(value: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
