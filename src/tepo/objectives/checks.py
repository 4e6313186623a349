"""Checks of what a method's settings and an objective's parts may be, before anything is computed with them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal

from tepo.core.errors import InputError, nearest


def check_value(where: str, name: str, value: Any, hint: Any) -> None:
    """Raise `InputError` unless `value` fits the annotation (numbers, bools, literals, tuples and unions of them)."""
    if fits(value, hint):
        return
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        expected = f"one of {', '.join(map(repr, choices))}." + nearest(str(value), map(str, choices))
    else:
        expected = getattr(hint, "__name__", str(hint))
    raise InputError(f"{where}: {name}={value!r}, expected {expected}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a simple annotation; an int is a float, a bool is neither."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if origin is tuple:  # tuple[float, ...]; TOML gives a list
        return isinstance(value, tuple | list) and all(fits(item, typing.get_args(hint)[0]) for item in value)
    if hint in (float, int):
        number = isinstance(value, int if hint is int else int | float)
        return number and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)


def check_number(where: str, name: str, value: Any, lowest: float) -> None:
    """Raise `InputError` for a number, or one of a list, that is not finite or smaller than `lowest`."""
    for number in value if isinstance(value, tuple | list) else (value,):
        if _is_number(number) and not (math.isfinite(number) and number >= lowest):
            least = f" >= {lowest:g}" if math.isfinite(lowest) else ""
            raise InputError(f"{where}: {name}={value!r}, expected a finite number{least}")


def check_parts(part: Any, where: str) -> None:
    """Raise `InputError` for a number of a part, or of a part inside it, that no formula means.

    That is NaN anywhere, a coefficient below 0 (it would turn what holds the policy back into what drives it), and
    a negative eps beside a deviation.
    """
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(inner):
                check_parts(inner, f"{where}: {type(inner).__name__}")
            elif _is_number(inner) and math.isnan(inner):
                raise InputError(f"{where}: {item.name}={value}, expected a number")
            elif _is_number(inner) and item.name.endswith(("coef", "eps")) and inner < 0:
                raise InputError(f"{where}: {item.name}={value}, expected a number >= 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
