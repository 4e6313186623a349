"""Ask for memory before it is read, in functions that numba compiles.

Loads numba: imported where `compiler.why_no_compiler` finds nothing against it, not by `tepo.policy`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a line of the caches of the processors there are, the unit in which memory is read."""

_READ, _NEAREST, _DATA = 0, 3, 1  # arguments of LLVM's llvm.prefetch


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Bring the line with `array[index]`, of one dimension, into the nearest cache, while other work goes on.

    Nothing is read and nothing is checked: an index outside of the array does no harm.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        (stride,) = cgutils.unpack_tuple(builder, found.strides, 1)
        byte = ir.IntType(8).as_pointer()
        place = builder.gep(builder.bitcast(found.data, byte), [builder.mul(arguments[1], stride)])
        number = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(ask, [place, *(number(value) for value in (_READ, _NEAREST, _DATA))])
        return context.get_dummy_value()

    return types.void(array, index), generate
