# SPDX-License-Identifier: Apache-2.0
"""FP8 RMSNorm with COAT's signatures, in one launch. The gradient is in `fp8_rmsnorm_backward`.

Real value = stored FP8 x scale. x is [M, N] or [B, S, N], e4m3fn or e5m2, with bf16 scales for each 1 x QB elements of
a row. All arrays may be drvfuse Arrays or any DLPack or CUDA-array-interface object; x, s_x and g may be column slices
of wider arrays. The rounding rules are those of `drvfuse.reference.coat_rmsnorm`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ... import dtypes
from ...errors import ArgumentError
from ...plans.coat_forward import MAX_COLUMNS, WORDS_BYTES, column_run, forward_plan
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.scratch import ScratchParams, acquire
from .quantised import column_weights, quantised_rows

COAT_WARPS = 8


class ForwardParams(ctypes.Structure):
    """`struct ForwardParams` of cu/coat/forward.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "scales", "weight", "qy", "qy_t", "scale", "rstd")),
        ("scratch", ScratchParams),
        *((name, ctypes.c_int64) for name in ("rows", "batch_rows", "x_stride", "scale_stride")),
        *((name, ctypes.c_int32) for name in ("columns", "groups", "longer", "part_columns")),
        *((name, ctypes.c_int32) for name in ("resident_columns", "chunk_rows")),
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
    None for the device's own, "current" for that of x's framework, or a stream (0 or 1: the legacy default one). The
    launch is cooperative (with few elements a single block), does not block and can be captured with outputs given.
    Waits between blocks are bounded by `spin_timeout`: then the outputs are undefined, and the next call with that
    workspace raises GridTimeout. N is at most 262144. ArgumentError for arguments that do not fit, before any launch.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, w)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weight = column_weights(driver, w, shape[-1])
    epsilon = real("eps", eps, least=0.0)
    if not isinstance(transpose_output_2d, bool):
        raise ArgumentError("transpose_output_2d", repr(transpose_output_2d), "True or False")
    device = operands.one_device((xs, scales, weight))
    columns, count = shape[-1], math.prod(shape[:-1])
    if columns > MAX_COLUMNS:
        raise ArgumentError("x", f"of {columns} columns", f"of at most {MAX_COLUMNS} columns")
    batched = len(shape) == 3 and not transpose_output_2d
    queue = operands.resolve_stream(stream, xs)
    turned = (shape[0], columns, shape[1]) if batched else (columns, count)
    bf16, f32 = dtypes.get("bfloat16"), dtypes.get("float32")
    wanted = [("qy", shape, xs.dtype), ("s_y", (), bf16), ("qy_t", turned, xs.dtype), ("rstd", (count,), f32)]
    written = operands.new_outputs(device, queue, wanted, outputs)
    read = [xs, scales, weight]
    qy, s_y, qy_t, rstd = written
    batch_rows = shape[1] if batched else count
    space = acquire(device, queue, workspace, WORDS_BYTES)
    operands.no_overlap(read, [*written, *operands.workspace(driver, workspace)])
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in (xs, qy)) and weight.ptr % 16 == 0
    plan = forward_plan(device, count, columns, QB)
    run = column_run(plan.tile_rows, batch_rows, qy_t.ptr)
    defines = (*_types(xs, weight, QB, aligned), *plan.defines(aligned), ("DRVFUSE_RUN", run))
    kernel = launching.load(device, Specialisation("coat", plan.kernel, defines))
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
        groups=plan.groups,
        longer=plan.longer,
        part_columns=plan.part_columns,
        resident_columns=plan.resident_columns,
        chunk_rows=plan.chunk_rows,
        epsilon=epsilon,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    launched = (plan.grid, plan.threads, plan.shared_bytes)
    launching.launch(kernel, device, queue, *launched, parameters, level, read, written, space)
    results = [o.span for o in written] if outputs is None else list(outputs)
    return results[0], results[1], results[2], (w, results[3], COAT_WARPS)


def _types(x: Operand, weight: Operand, QB: int, aligned: bool) -> tuple[tuple[str, str | int], ...]:
    return (
        ("DRVFUSE_DTYPE", x.dtype.cxx),
        ("DRVFUSE_WEIGHT_DTYPE", weight.dtype.cxx),
        ("DRVFUSE_GROUP", QB),
        ("DRVFUSE_ALIGNED", int(aligned)),
    )
