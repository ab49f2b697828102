# SPDX-License-Identifier: Apache-2.0
"""The gradient of FP8 RMSNorm with COAT's signature, in one launch."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from .. import dtypes
from ..errors import ArgumentError
from . import fp8_call as call
from .fp8_call import Specialisation
from .fp8_rmsnorm import COAT_WARPS, _ceil_div, _common, _types
from .options import PDLLevel
from .options import pdl_level as checked_level

MAX_BACKWARD_COLUMNS = 32768
DW_SEGMENTS = 132


class BackwardParams(ctypes.Structure):
    """`struct BackwardParams` of cu/fp8_rmsnorm_backward.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scales", "g", "weight", "rstd", "dx", "dw", "partials")),
        ("workspace", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "scale_stride", "g_stride")),
        *((name, ctypes.c_int32) for name in ("columns", "segments", "early_trigger", "unused")),
    )


def fp8_workspace_bytes(columns: int) -> int:
    """Bytes that `workspace=` must have for any call with that many columns; zero it once before its first use."""
    return call.HEADER_BYTES + DW_SEGMENTS * -(-columns // 16) * 64


def fp8_rmsnorm_backward(
    x: Any,
    s_x: Any,
    g: Any,
    w: Any,
    v: Any,
    QB: int,
    num_warps: int = COAT_WARPS,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any]:
    """Gradients `(dx, dw)` of RMSNorm for the gradient g of its unquantised output.

    x, s_x, w, QB as in the forward, g bfloat16 in x's shape, v the forward's rstd [M]. dx is bfloat16 in x's shape, dw
    [N] in w's dtype: xhat = x * s_x * v, c1 = mean(xhat * w * g), dx = (w * g - xhat * c1) * v, dw = sum of g * xhat
    over the rows in fp32, rounded once. The same bits in every run and on every device. `num_warps` has no effect.

    `outputs` is (dx, dw); the rest as in the forward. At most 32768 columns.
    """
    level, driver = checked_level(pdl_level), call.driver_of(x, s_x, g, w, v)
    xs, scales, weight, shape = _common(driver, x, s_x, w, QB)
    gradient = call.rows("g", g, driver, ["bfloat16"])
    call.require_shape(gradient, shape, "that of x")
    columns, count = shape[-1], math.prod(shape[:-1])
    saved = call.whole("v", v, driver, ["float32"])
    call.require_shape(saved, (count,), "one for each row of x")
    device = call.one_device((xs, scales, gradient, weight, saved))
    if columns > MAX_BACKWARD_COLUMNS:
        raise ArgumentError("x", f"of {columns} columns", f"of at most {MAX_BACKWARD_COLUMNS} columns")
    queue = call.resolve_stream(stream, xs)
    wanted = [("dx", shape, dtypes.get("bfloat16")), ("dw", (columns,), weight.dtype)]
    written = call.new_outputs(device, queue, wanted, outputs)
    read = [xs, scales, gradient, weight, saved]
    call.no_overlap(read, written)
    dx, dw = written
    space = call.scratch(device, queue, workspace, fp8_workspace_bytes(columns))
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in (xs, gradient, dx)) and weight.ptr % 16 == 0
    packs, team_warps, teams = backward_shape(columns)
    spec = Specialisation(
        "fp8_rmsnorm_backward",
        (
            *_types(xs, weight, QB, aligned),
            ("DRVFUSE_TEAM_WARPS", team_warps),
            ("DRVFUSE_TEAMS", teams),
            ("DRVFUSE_PACKS", packs),
        ),
    )
    kernel = call.load(device, spec)
    segments = min(count, DW_SEGMENTS)
    parameters = BackwardParams(
        x=xs.ptr,
        scales=scales.ptr,
        g=gradient.ptr,
        weight=weight.ptr,
        rstd=saved.ptr,
        dx=dx.ptr,
        dw=dw.ptr,
        partials=space.ptr + call.HEADER_BYTES,
        workspace=space.ptr,
        timeout_ns=call.timeout_ns(),
        rows=count,
        x_stride=xs.stride,
        scale_stride=scales.stride,
        g_stride=gradient.stride,
        columns=columns,
        segments=segments,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    threads = teams * team_warps * 32
    smem = 4 * max((teams - 1) * packs * 8 * team_warps * 32, threads)
    grid = max(1, min(segments, device.sm_count))
    call.launch(kernel, device, queue, grid, threads, smem, parameters, level, read, written, space)
    results = [o.span for o in written] if outputs is None else list(outputs)
    return results[0], results[1]


def backward_shape(columns: int) -> tuple[int, int, int]:
    """(packs a thread, warps a team, teams a block) of the backward kernel; they order dw's sums."""
    row_packs = _ceil_div(columns, 8)
    packs = max(2, _ceil_div(row_packs, 512))
    team_warps = _ceil_div(_ceil_div(row_packs, packs), 32)
    return packs, team_warps, 2 if team_warps in (9, 10) else max(1, 16 // team_warps)
