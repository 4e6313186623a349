"""Entries of arrays in the compute precision, in functions that numba compiles.

Such an array is float32, or bfloat16 seen as uint16, which numba has no type for.

Loads numba: imported where `compiler.why_no_compiler` finds nothing against it, not by `tepo.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from tepo.policy.compiled_softmax import compiled


@compiled
def store(source: Any, out: Any) -> None:
    """Write a float32 vector in the compute precision."""
    for i in range(out.shape[0]):
        put(out, i, source[i])


def wide(value: Any) -> Any:
    """Return an entry of an array in the compute precision as float32."""
    raise NotImplementedError


def put(out: Any, index: Any, value: Any) -> None:
    """Write a float32 into an array in the compute precision, rounded to the nearest, ties to even."""
    raise NotImplementedError


@overload(wide, inline="always")
def _typed_wide(value: Any) -> Callable[[Any], Any]:
    return _wide_bfloat16 if value == numba.types.uint16 else _wide_float32


@overload(put, inline="always")
def _typed_put(out: Any, index: Any, value: Any) -> Callable[[Any, Any, Any], None]:
    return _put_bfloat16 if out.dtype == numba.types.uint16 else _put_float32


def _wide_bfloat16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _wide_float32(value: Any) -> Any:
    return value


def _put_bfloat16(out: Any, index: Any, value: Any) -> None:
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN must stay one, whatever a carry makes of its last bits.
    out[index] = np.uint16(np.uint32(0x7FC0) if math.isnan(value) else rounded)


def _put_float32(out: Any, index: Any, value: Any) -> None:
    out[index] = value
