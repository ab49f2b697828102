# SPDX-License-Identifier: Apache-2.0
"""Per-tensor FP8 quantisation, with the transposed copy or without, under COAT's signatures."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ... import dtypes
from ...dtypes import DType
from ...errors import ArgumentError, Unsupported
from ...plans.coat_rows import Division, column_run
from ...plans.scratch import GRID_BYTES
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands, results, scratch
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache, Planned, resident
from ..call.prepared import Prepared, on_device, op
from ..call.scratch import ScratchParams, Workspace
from ..call.specialisation import FP8_CAPABILITY, Specialisation
from ..call.streams import StreamArgument, resolve_stream
from ..call.turns import DeviceTurns, WorkspaceTurns
from .quantised import Outputs, matrix_shape

_INPUTS = ("bfloat16", "float32")
_SCALES = ("bfloat16", "float32", "float16")


class DivisionParams(ctypes.Structure):
    """`struct DivisionParams` of cu/coat/fp8_division.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scale", "y", "y_t")),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride")),
        ("columns", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
    )


@op
def fp8_division_transpose(
    x: ArrayLike,
    QB: int,
    fp8type: str | DType,
    s_y: ArrayLike | None = None,
    stochastic: bool = False,
    only_transposed: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, ...]]:
    """`(y, s_y, y_t)`, or with `only_transposed` `(y_t, s_y)`: x / s_y in FP8, and its transpose.

    x [M, N] or [B, S, N], bfloat16 or float32; its rows may lie apart. `fp8type` is "E4M3", "E5M2" or a dtype. s_y is
    an array of one element (bfloat16, float16 or float32); without it s_y = (max|x| + 1e-10) / fp8_max with each step
    rounded to x's dtype, 0-d; a NaN in x then makes everything NaN. y has x's shape; y_t is (N, M). The quotient is
    fp32, rounded once to FP8, saturating. QB has no effect on values. stochastic=True is refused: COAT's is biased.

    `outputs` is (y, y_t), or (y_t,), and with them s_y in front of y_t if it is not given: (y, s_y, y_t), (y_t, s_y).
    The rest as in `fp8_rmsnorm_forward`.
    """
    return _divide(x, QB, fp8type, s_y, stochastic, not only_transposed, True, outputs, workspace, stream, pdl_level)


@op
def fp8_division(
    x: ArrayLike,
    QB: int,
    fp8type: str | DType,
    s_y: ArrayLike | None = None,
    stochastic: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, ...]]:
    """`(y, s_y)`: as `fp8_division_transpose`, without the transpose. `outputs` is (y,) or (y, s_y)."""
    return _divide(x, QB, fp8type, s_y, stochastic, True, False, outputs, workspace, stream, pdl_level)


def _divide(
    x: Any,
    QB: Any,
    fp8type: Any,
    s_y: Any,
    stochastic: Any,
    straight: bool,
    turned: bool,
    outputs: Any,
    workspace: Any,
    stream: Any,
    pdl_level: Any,
) -> Prepared[tuple[Array, ...]]:
    level = checked_level(pdl_level)
    if stochastic:
        raise Unsupported("stochastic=True: COAT's stochastic rounding is biased by half a step; pass False")
    if isinstance(QB, bool) or not isinstance(QB, int) or QB < 1:
        raise ArgumentError("QB", repr(QB), "a positive integer")
    target = dtypes.fp8(fp8type, "fp8type")
    driver = operands.driver_of(x=x, s_y=s_y)
    xs = operands.rows("x", x, driver, _INPUTS)
    shape = matrix_shape(xs)
    columns, count = shape[-1], math.prod(shape[:-1])
    read: list[Operand] = [xs]
    if s_y is not None:
        given = operands.whole("s_y", s_y, driver, _SCALES)
        if given.array.size != 1:
            raise ArgumentError("s_y", f"of shape {given.shape}", "an array of one element")
        read.append(given)
    device = operands.one_device(read)
    queue = resolve_stream(device, stream, xs)
    made_scale = [("s_y", (), xs.dtype)] if s_y is None else []
    rows_out = [("y", shape, target)] if straight else []
    columns_out = [("y_t", (columns, count), target)] if turned else []
    order = [*rows_out, *made_scale, *columns_out] if straight else [*columns_out, *made_scale]
    written, values = results.outputs(device, queue, order, outputs)
    own = scratch.checked(workspace, driver, device, GRID_BYTES)
    operands.no_overlap(read, [*written, *own])
    by_name = {name: operand for (name, _, _), operand in zip(order, written, strict=True)}
    scale, y, y_t = by_name["s_y"] if s_y is None else read[1], by_name.get("y"), by_name.get("y_t")
    aligned = columns % 16 == 0 and xs.rows_aligned and (y is None or y.rows_aligned)
    run = 1 if y_t is None else column_run(16, count, y_t.ptr)

    def plan() -> Planned:
        defines = (
            ("DRVFUSE_DTYPE", xs.dtype.cxx),
            ("DRVFUSE_OUT_DTYPE", target.cxx),
            ("DRVFUSE_SCALE_DTYPE", scale.dtype.cxx),
            ("DRVFUSE_WARPS", Division.warps),
            ("DRVFUSE_RUN", run),
            ("DRVFUSE_ALIGNED", int(aligned)),
            ("DRVFUSE_FIND_SCALE", int(s_y is None)),
            ("DRVFUSE_ROWS_OUT", int(straight)),
            ("DRVFUSE_COLUMNS_OUT", int(turned)),
        )
        early = int(level is PDLLevel.OVERLAP_AT_BEGINNING)
        return Planned(
            device,
            Specialisation("coat", "fp8_division", defines, capability=FP8_CAPABILITY),
            lambda kernel: Division.grid(count, columns, resident(kernel, device, Division.threads)),
            Division.threads,
            DivisionParams(rows=count, batch_rows=count, columns=columns, early_trigger=early),
            waits=s_y is None,
            pdl=level,
        )

    types = xs.dtype, target, scale.dtype, s_y is None, straight, turned
    ready = device.part(PlanCache).get(("division", count, columns, types, run, aligned, level, planted()), plan).take()
    parameters = ready.parameters
    parameters.x, parameters.x_stride, parameters.scale = xs.ptr, xs.stride, scale.ptr
    parameters.y, parameters.y_t = y.ptr if y is not None else 0, y_t.ptr if y_t is not None else 0

    def bind(space: Workspace) -> None:
        parameters.scratch = space.params

    turns = DeviceTurns(device)
    if s_y is None:
        turns = WorkspaceTurns(device, queue, own[0].array if own else None, GRID_BYTES, bind)
    found = dict(zip((name for name, _, _ in order), values, strict=True))
    found.setdefault("s_y", s_y)
    names = ("y_t", "s_y") if not straight else ("y", "s_y", "y_t") if turned else ("y", "s_y")
    name = "fp8_division_transpose" if turned else "fp8_division"
    return on_device(name, turns, queue, tuple(found[name] for name in names), read, written, ready)
