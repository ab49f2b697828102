# SPDX-License-Identifier: Apache-2.0
"""Per-tensor FP8 quantisation, with the transposed copy or without, under COAT's signatures."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ... import dtypes
from ...errors import ArgumentError, Unsupported
from ...plans.coat_forward import column_run
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.options import pdl_level as checked_level
from ..call.scratch import HEADER_BYTES, ScratchParams, acquire

_INPUTS = ("bfloat16", "float32")
_SCALES = ("bfloat16", "float32", "float16")
_WARPS = 8


class DivisionParams(ctypes.Structure):
    """`struct DivisionParams` of cu/coat/fp8_division.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scale", "y", "y_t")),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride")),
        ("columns", ctypes.c_int32),
        ("early_trigger", ctypes.c_int32),
    )


def fp8_division_transpose(
    x: Any,
    QB: int,
    fp8type: Any,
    s_y: Any = None,
    stochastic: bool = False,
    only_transposed: bool = False,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, ...]:
    """`(y, s_y, y_t)`, or with `only_transposed` `(y_t, s_y)`: x / s_y in FP8, and its transpose.

    x [M, N] or [B, S, N], bfloat16 or float32; its rows may lie apart. `fp8type` is "E4M3", "E5M2" or a dtype. s_y is
    an array of one element (bfloat16, float16 or float32); without it s_y = (max|x| + 1e-10) / fp8_max with each step
    rounded to x's dtype, 0-d; a NaN in x then makes everything NaN. y has x's shape; y_t is (N, M). The quotient is
    fp32, rounded once to FP8, saturating. QB has no effect on values. stochastic=True is refused: COAT's is biased.

    `outputs` is (y, y_t), or (y_t,), and with them s_y in front of y_t if it is not given: (y, s_y, y_t), (y_t, s_y).
    The rest as in `fp8_rmsnorm_forward`.
    """
    return _divide(x, QB, fp8type, s_y, stochastic, not only_transposed, True, outputs, workspace, stream, pdl_level)


def fp8_division(
    x: Any,
    QB: int,
    fp8type: Any,
    s_y: Any = None,
    stochastic: bool = False,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, ...]:
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
) -> tuple[Any, ...]:
    level = checked_level(pdl_level)
    if stochastic:
        raise Unsupported("stochastic=True: COAT's stochastic rounding is biased by half a step; pass False")
    if isinstance(QB, bool) or not isinstance(QB, int) or QB < 1:
        raise ArgumentError("QB", repr(QB), "a positive integer")
    target = dtypes.fp8(fp8type, "fp8type")
    driver = operands.driver_of(x, s_y)
    xs = operands.rows("x", x, driver, _INPUTS)
    shape = xs.shape
    if len(shape) not in (2, 3) or not shape[-1]:
        raise ArgumentError("x", f"of shape {shape}", "of shape [M, N] or [B, S, N] with N of at least 1")
    columns, count = shape[-1], math.prod(shape[:-1])
    read: list[Operand] = [xs]
    if s_y is not None:
        given = operands.whole("s_y", s_y, driver, _SCALES)
        if given.span.size != 1:
            raise ArgumentError("s_y", f"of shape {given.shape}", "an array of one element")
        read.append(given)
    device = operands.one_device(read)
    queue = operands.resolve_stream(stream, xs)
    made_scale = [("s_y", (), xs.dtype)] if s_y is None else []
    rows_out = [("y", shape, target)] if straight else []
    columns_out = [("y_t", (columns, count), target)] if turned else []
    order = [*rows_out, *made_scale, *columns_out] if straight else [*columns_out, *made_scale]
    written = operands.new_outputs(device, queue, order, outputs)
    operands.no_overlap(read, [*written, *operands.workspace(driver, workspace)])
    by_name = {name: operand for (name, _, _), operand in zip(order, written, strict=True)}
    scale = by_name["s_y"] if s_y is None else read[1]
    aligned = columns % 16 == 0 and xs.rows_aligned and ("y" not in by_name or by_name["y"].rows_aligned)
    run = column_run(16, count, by_name["y_t"].ptr) if turned else 1
    spec = Specialisation(
        "coat",
        "fp8_division",
        (
            ("DRVFUSE_DTYPE", xs.dtype.cxx),
            ("DRVFUSE_OUT_DTYPE", target.cxx),
            ("DRVFUSE_SCALE_DTYPE", scale.dtype.cxx),
            ("DRVFUSE_WARPS", _WARPS),
            ("DRVFUSE_RUN", run),
            ("DRVFUSE_ALIGNED", int(aligned)),
            ("DRVFUSE_FIND_SCALE", int(s_y is None)),
            ("DRVFUSE_ROWS_OUT", int(straight)),
            ("DRVFUSE_COLUMNS_OUT", int(turned)),
        ),
    )
    kernel = launching.load(device, spec)
    tiles = -(-count // 32) * -(-columns // 128)
    resident = kernel.occupancy(device, 32 * _WARPS) * device.sm_count
    grid = max(1, min(-(-tiles // _WARPS), resident, 512))
    space = acquire(device, queue, workspace, HEADER_BYTES) if s_y is None else None
    parameters = DivisionParams(
        x=xs.ptr,
        scale=scale.ptr,
        y=by_name["y"].ptr if straight else 0,
        y_t=by_name["y_t"].ptr if turned else 0,
        scratch=ScratchParams() if space is None else space.params,
        rows=count,
        batch_rows=count,
        x_stride=xs.stride,
        columns=columns,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    threads, waits = 32 * _WARPS, space is not None
    launching.launch(
        kernel, device, queue, grid, threads, 0, parameters, level, read, written, space, cooperative=waits
    )
    values = [o.span for o in written] if outputs is None else list(outputs)
    results = dict(zip((name for name, _, _ in order), values, strict=True))
    results.setdefault("s_y", s_y)
    if not straight:
        return results["y_t"], results["s_y"]
    return (results["y"], results["s_y"], results["y_t"]) if turned else (results["y"], results["s_y"])
