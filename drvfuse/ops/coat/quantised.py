# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of FP8 ops: a tensor with group scales, the size of groups, weights of columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import dtypes
from ...dtypes import DType
from ...errors import ArgumentError, shown
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ..call import operands
from ..call.operands import Operand
from ..call.results import Wanted

Outputs = Sequence[ArrayLike] | None
"""The arrays that a call writes, in the order in which its docstring names them; None allocates them."""
WEIGHTS = ("bfloat16", "float32")
GROUPS = (16, 32, 64, 128)
COAT_WARPS = 8  # ops return it as `num_warps`, as COAT's functions do; it has no effect


def group_size(QB: Any) -> int:
    """`QB` as an int. Raises ArgumentError unless it is 16, 32, 64 or 128."""
    if isinstance(QB, bool) or not isinstance(QB, (int, float, np.integer)) or QB not in GROUPS:
        raise ArgumentError("QB", shown(QB), "one of " + ", ".join(map(str, GROUPS)))
    return int(QB)


def matrix_shape(operand: Operand) -> tuple[int, ...]:
    """The operand's shape, which must be [M, N] or [B, S, N]. Raises ArgumentError."""
    shape = operand.shape
    if len(shape) not in (2, 3) or not shape[-1]:
        raise ArgumentError(operand.name, f"of shape {shape}", "of shape [M, N] or [B, S, N] with N of at least 1")
    return shape


def quantised_rows(driver: Driver, x: Any, s_x: Any, QB: Any) -> tuple[Operand, Operand, tuple[int, ...]]:
    """x in FP8, its group scales, which are checked to fit x, and x's shape."""
    group_size(QB)
    xs = operands.rows("x", x, driver, dtypes.FP8)
    shape = matrix_shape(xs)
    scales = operands.rows("s_x", s_x, driver, ["bfloat16"])
    wanted = (*shape[:-1], -(-shape[-1] // QB))
    if scales.shape != wanted:
        raise ArgumentError("s_x", f"of shape {scales.shape}", f"of shape {wanted}, ceil(N / QB) scales per row")
    return xs, scales, shape


def column_weights(driver: Driver, columns: int, given: Mapping[str, Any]) -> dict[str, Operand]:
    """The operands of those of w and b that the caller has given, by the kernel parameter that gets the address. Both
    must have the same dtype and an element for each column."""
    fields = {"w": "weight", "b": "bias"}
    found = {fields[name]: operands.whole(name, value, driver, WEIGHTS) for name, value in given.items()}
    for operand in found.values():
        operands.require_shape(operand, (columns,), "one for each column of x")
        if operand.dtype is not found["weight"].dtype:
            raise ArgumentError("b.dtype", str(operand.dtype), f"{found['weight'].dtype}, as that of w")
    return found


def weight_type(read: Mapping[str, Operand]) -> DType:
    """The dtype of the weights, for which a kernel is compiled: bfloat16 if there are no weights."""
    return read["weight"].dtype if "weight" in read else dtypes.get("bfloat16")


def transposed_shape(shape: tuple[int, ...], transpose_output_2d: Any) -> tuple[tuple[int, ...], int]:
    """The shape of qy_t for an x of shape `shape`, and the number of rows of a batch. Each batch is transposed as a
    matrix."""
    if not isinstance(transpose_output_2d, bool):
        raise ArgumentError("transpose_output_2d", shown(transpose_output_2d), "True or False")
    count, columns = math.prod(shape[:-1]), shape[-1]
    if len(shape) == 3 and not transpose_output_2d:
        return (shape[0], columns, shape[1]), shape[1]
    return (columns, count), count


def quantised_outputs(shape: tuple[int, ...], fp8: DType, turned: tuple[int, ...]) -> dict[str, Wanted]:
    """Descriptions of qy, its scale and its transpose, by the kernel parameter that gets the address of the array. The
    transpose has the shape `turned`."""
    return {"qy": ("qy", shape, fp8), "scale": ("s_y", (), dtypes.get("bfloat16")), "qy_t": ("qy_t", turned, fp8)}


def row_outputs(shape: tuple[int, ...], *names: str) -> dict[str, Wanted]:
    """Descriptions of results with a float32 number for each row of x. The keys and names are `names`."""
    rows = (math.prod(shape[:-1]),)
    return {name: (name, rows, dtypes.get("float32")) for name in names}


def require_columns(x: Operand, most: int) -> None:
    """Raise ArgumentError if `x` has more than `most` columns."""
    if x.shape[-1] > most:
        raise ArgumentError(x.name, f"of {x.shape[-1]} columns", f"of at most {most} columns")
