# SPDX-License-Identifier: Apache-2.0
"""FP8 RMSNorm with COAT's signatures, in one launch. The gradient is in `fp8_rmsnorm_backward`.

Real value = stored FP8 x scale. x is [M, N] or [B, S, N], e4m3fn or e5m2, with bf16 scales for each 1 x QB elements of
a row. All arrays may be drvfuse Arrays or any DLPack or CUDA-array-interface object; x, s_x and g may be column slices
of wider arrays. The rounding rules are those of `drvfuse.reference_fp8`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from .. import dtypes
from ..errors import ArgumentError
from ..runtime.device import Device
from ..runtime.driver import Driver
from . import fp8_call as call
from .fp8_call import Operand, Specialisation
from .options import PDLLevel, pdl_level, real
from .scratch import ScratchParams

MAX_FORWARD_COLUMNS = 32768
COAT_WARPS = 8
_OWN_ELEMENTS = 3 << 20


class ForwardParams(ctypes.Structure):
    """`struct ForwardParams` of cu/fp8_rmsnorm_forward.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scales", "weight", "qy", "qy_t", "scale", "rstd")),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride", "scale_stride")),
        ("columns", ctypes.c_int32),
        ("resident_rows", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("early_trigger", ctypes.c_int32),
    )


def fp8_rmsnorm_forward(
    x: Any,
    s_x: Any,
    w: Any,
    QB: int,
    eps: float,
    transpose_output_2d: bool = False,
    *,
    outputs: Any = None,
    workspace: Any = None,
    stream: Any = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> tuple[Any, Any, Any, tuple[Any, Any, int]]:
    """Quantised RMSNorm of x: `(qy, s_y, qy_t, (w, rstd, num_warps))`.

    x [M, N] or [B, S, N] FP8, s_x [..., ceil(N / QB)] bfloat16, w [N] bfloat16 or float32, QB 16, 32, 64 or 128.
    qy has x's shape and dtype, s_y is a 0-d bfloat16 with real value = qy * s_y, rstd [M] float32. qy_t is (N, M); for
    3-D x without `transpose_output_2d` it is (B, N, S) with qy_t[b] = qy[b].T.

    y = (x * s_x * rstd) * w in fp32; s_y = bf16((max|y| + 1e-10) / fp8_max); qy = FP8(bf16(y) / s_y). No rows give
    s_y of an all-zero tensor. A row whose y are all NaN (one NaN in x does that) makes s_y NaN, and so every qy; other
    NaN stay in their column. An infinite y makes s_y infinite: every finite y becomes 0.

    `outputs` is (qy, s_y, qy_t, rstd), else they are allocated. `workspace` is a uint8 array of
    `fp8_workspace_bytes(N)`, zeroed once, for one launch at a time; by default one is cached for each stream. `stream`:
    None for the device's own, "current" for that of x's framework, or a stream. The launch is cooperative, does not
    block and can be captured with outputs given. ArgumentError for arguments that do not fit, before any launch.
    """
    level, driver = _level(pdl_level), call.driver_of(x, s_x, w)
    xs, scales, weight, shape = _common(driver, x, s_x, w, QB)
    epsilon = real("eps", eps, least=0.0)
    if not isinstance(transpose_output_2d, bool):
        raise ArgumentError("transpose_output_2d", repr(transpose_output_2d), "True or False")
    device = call.one_device((xs, scales, weight))
    columns, count = shape[-1], math.prod(shape[:-1])
    if columns > MAX_FORWARD_COLUMNS:
        raise ArgumentError("x", f"of {columns} columns", f"of at most {MAX_FORWARD_COLUMNS} columns")
    batched = len(shape) == 3 and not transpose_output_2d
    queue = call.resolve_stream(stream, xs)
    turned = (shape[0], columns, shape[1]) if batched else (columns, count)
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    wanted = [("qy", shape, xs.dtype), ("s_y", (), bf16), ("qy_t", turned, xs.dtype), ("rstd", (count,), f32)]
    written = call.new_outputs(device, queue, wanted, outputs)
    read = [xs, scales, weight]
    call.no_overlap(read, written)
    qy, s_y, qy_t, rstd = written
    batch_rows = shape[1] if batched else count
    space = call.scratch(device, queue, workspace, call.HEADER_BYTES)
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in (xs, qy)) and weight.ptr % 16 == 0
    plan = _ForwardPlan(device, count, columns, QB, aligned)
    spec = plan.specialise(xs, weight, _run(plan.tile_rows, batch_rows, qy_t.ptr))
    kernel = call.load(device, spec)
    resident, smem = plan.residency(kernel.attributes(device).shared_bytes, weight.dtype.itemsize)
    parameters = ForwardParams(
        x=xs.ptr,
        scales=scales.ptr,
        weight=weight.ptr,
        qy=qy.ptr,
        qy_t=qy_t.ptr,
        scale=s_y.ptr,
        rstd=rstd.ptr,
        scratch=space.params,
        rows=count,
        batch_rows=max(batch_rows, 1),
        x_stride=xs.stride,
        scale_stride=scales.stride,
        columns=columns,
        resident_rows=resident,
        epsilon=epsilon,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    call.launch(kernel, device, queue, plan.grid, plan.threads, smem, parameters, level, read, written, space)
    results = [o.span for o in written] if outputs is None else list(outputs)
    return results[0], results[1], results[2], (w, results[3], COAT_WARPS)


def _level(value: Any) -> PDLLevel:
    return pdl_level(value)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _types(x: Operand, weight: Operand, QB: int, aligned: bool) -> tuple[tuple[str, str | int], ...]:
    return (
        ("DRVFUSE_DTYPE", x.dtype.cxx),
        ("DRVFUSE_WEIGHT_DTYPE", weight.dtype.cxx),
        ("DRVFUSE_GROUP", QB),
        ("DRVFUSE_ALIGNED", int(aligned)),
    )


def _common(driver: Driver, x: Any, s_x: Any, w: Any, QB: Any) -> tuple[Operand, Operand, Operand, tuple[int, ...]]:
    """x, s_x and w, checked against one another."""
    if isinstance(QB, bool) or QB not in call.GROUPS:
        raise ArgumentError("QB", repr(QB), "one of " + ", ".join(map(str, call.GROUPS)))
    xs = call.rows("x", x, driver, call.FP8)
    shape = xs.shape
    if len(shape) not in (2, 3) or not shape[-1]:
        raise ArgumentError("x", f"of shape {shape}", "of shape [M, N] or [B, S, N] with N of at least 1")
    columns = shape[-1]
    scales = call.rows("s_x", s_x, driver, ["bfloat16"])
    wanted = (*shape[:-1], -(-columns // QB))
    if scales.shape != wanted:
        raise ArgumentError("s_x", f"of shape {scales.shape}", f"of shape {wanted}, ceil(N / QB) scales a row")
    weight = call.whole("w", w, driver, call.WEIGHTS)
    call.require_shape(weight, (columns,), "one for each column of x")
    return xs, scales, weight, shape


def _run(tile_rows: int, batch_rows: int, address: int) -> int:
    """Bytes of a column of qy_t that one store can take: they must be aligned and stay in one batch."""
    run = tile_rows
    while run > 1 and (batch_rows % run or address % run):
        run //= 2
    return run if run >= 4 else 1


class _ForwardPlan:
    """Grid, tiles and which rows stay on the chip. Results do not depend on it."""

    def __init__(self, device: Device, rows: int, columns: int, QB: int, aligned: bool) -> None:
        self.device, self.rows, self.columns, self.QB, self.aligned = device, rows, columns, QB, aligned
        multiprocessors = device.sm_count
        self.warps = 16
        self.own = rows * columns >= _OWN_ELEMENTS and rows >= 12 * multiprocessors
        if self.own:
            self.warps_a_row, self.tile_rows, self.tile_columns = 1, 16, 8
            self.row_lanes = 2 if rows >= 28 * multiprocessors else 1
            self.grid = min(multiprocessors, -(-rows // (self.row_lanes * self.tile_rows)))
        else:
            self.warps_a_row = 8 if rows < 16 * multiprocessors else 1
            self.tile_rows, self.tile_columns, self.row_lanes = 4, 8, 8
            if 2 < rows <= multiprocessors:
                self.warps, self.tile_columns = 8, 4  # a block a row, and small tiles: latency counts
            tiles = _ceil_div(rows, 32) * _ceil_div(columns, 4 * self.tile_columns)
            teams = self.warps // self.warps_a_row
            blocks = -(-rows // teams)
            self.grid = max(1, min(multiprocessors, max(blocks, -(-tiles // self.warps) if blocks > 1 else 1)))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def specialise(self, x: Operand, weight: Operand, run: int) -> Specialisation:
        return Specialisation(
            "fp8_rmsnorm_forward",
            (
                *_types(x, weight, self.QB, self.aligned),
                ("DRVFUSE_WARPS", self.warps),
                ("DRVFUSE_WARPS_A_ROW", self.warps_a_row),
                ("DRVFUSE_SLOTS", min(8 // self.warps_a_row, _ceil_div(self.columns, 512))),
                ("DRVFUSE_TILE_ROWS", self.tile_rows),
                ("DRVFUSE_TILE_COLUMNS", self.tile_columns),
                ("DRVFUSE_ROW_LANES", self.row_lanes),
                ("DRVFUSE_RUN", run),
                ("DRVFUSE_OWN", int(self.own)),
            ),
        )

    def residency(self, static_bytes: int, weight_bytes: int) -> tuple[int, int]:
        """(rows of a block that stay in shared memory, dynamic shared memory)."""
        packs = -(-self.columns // 16)
        base = _ceil_div(packs * 4, 16) * 16 + packs * 16 * weight_bytes
        if not self.own:
            return 0, base
        row = packs * 16 + 2 * ((packs * 16 // self.QB + 8) // 8 * 8)
        room = self.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - static_bytes - base
        step = self.row_lanes * self.tile_rows
        most = _ceil_div(_ceil_div(self.rows, step), self.grid) * step
        resident = max(0, min(most, room // row))
        return resident, base + resident * row
