# SPDX-License-Identifier: Apache-2.0
"""The gradient of FP8 RMSNorm with COAT's signature, in one launch."""

from __future__ import annotations

import ctypes
import math
import operator
from typing import Any, NamedTuple

from ... import dtypes
from ...errors import ArgumentError
from ...plans.coat_backward import DW_SEGMENTS, BackwardShape
from ...plans.coat_forward import WORDS_BYTES
from ...runtime.device import Device
from ...runtime.driver import Driver
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.options import pdl_level as checked_level
from ..call.scratch import HEADER_BYTES, ScratchParams, acquire
from .quantised import column_weights, quantised_rows
from .rmsnorm_forward import COAT_WARPS

MAX_BACKWARD_COLUMNS = 32768
MAX_GRADIENTS = 3
_SLICE = 32
_MAX_RING = 8
_LONG = 12  # rows of a team, from which on two are on their way, and dx of the last two waits for the sums to leave
_RING_CAPABILITY = (9, 0)
# Behind what the other ops have in a workspace: these words are 0 between launches.
_WORDS_AT = -(-max(WORDS_BYTES, HEADER_BYTES) // 16) * 16


class BackwardParams(ctypes.Structure):
    """`struct BackwardParams` of cu/coat/backward_rows.cuh."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("g", ctypes.c_uint64 * MAX_GRADIENTS),
        *((name, ctypes.c_uint64) for name in ("weight", "rstd", "mean", "dx", "dw", "db", "words")),
        ("scratch", ScratchParams),
        ("x_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("g_stride", ctypes.c_int64 * MAX_GRADIENTS),
        *((name, ctypes.c_int32) for name in ("columns", "segments", "segment_rows", "longer")),
        *((name, ctypes.c_int32) for name in ("early_trigger", "unused")),
    )


def fp8_workspace_bytes(columns: int) -> int:
    """Bytes that `workspace=` must have for any call with that many columns; zero them once before its first use."""
    try:
        count = operator.index(columns)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError("columns", repr(columns), "an integer, at least 1")
    return _WORDS_AT + 4 * DW_SEGMENTS * (count + count // 16 + 1024)  # at least `team_columns`, twice for 2 * N


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

    x, s_x, w, QB as in the forward, v the forward's rstd [M]. g is bfloat16 in x's shape, or a list or tuple of up to
    three such arrays: then it is g[0] + g[1] + g[2], each addition rounded to bfloat16, as adding them before gives. dx
    is bfloat16 in x's shape, dw [N] in w's dtype: xhat = x * s_x * v, c1 = mean(xhat * w * g), dx = (w * g - xhat * c1)
    * v, dw = sum of g * xhat over the rows in fp32, rounded once. The same bits in every run and on every device.
    `num_warps` has no effect. A NaN in a row of x, in its scales or in v makes that row of dx and all of dw's columns
    that it touches NaN; in g or w also only its row, or its column, and c1 of the rows.

    With `pdl_level` the kernel reads nothing before its wait for the producer; its dependents may start after its last
    store of dw (ON), or right after that wait (OVERLAP_AT_BEGINNING), and must wait themselves before they read.

    `outputs` is (dx, dw). `workspace` is a uint8 array of `fp8_workspace_bytes(N)`, zeroed once, for one launch at a
    time; the rest as in the forward. At most 32768 columns. Waits between blocks are bounded by `spin_timeout`: then dw
    is not written, and the next call with that workspace raises GridTimeout, as do `check_device` and `Graph.launch()`.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(x, s_x, *as_list(g), w, v)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weight = column_weights(driver, w, shape[-1])
    gradients = gradient_operands(driver, g, shape)
    inputs = Inputs(xs, scales, gradients, weight, row_values("v", v, driver, shape), None)
    dx, dw = run(inputs, shape, QB, outputs, workspace, stream, level)
    return dx, dw


class Inputs(NamedTuple):
    """What a gradient reads. With a mean it is LayerNorm's; only RMSNorm's needs a weight."""

    x: Operand
    scales: Operand
    gradients: list[Operand]
    weight: Operand | None
    rstd: Operand
    mean: Operand | None

    @property
    def all(self) -> list[Operand]:
        maybe = (self.weight, self.rstd, self.mean)
        return [self.x, self.scales, *self.gradients, *(operand for operand in maybe if operand is not None)]


def as_list(g: Any) -> list[Any]:
    return list(g) if isinstance(g, (list, tuple)) else [g]


def gradient_operands(driver: Driver, g: Any, shape: tuple[int, ...]) -> list[Operand]:
    """g, or the arrays whose sum it is, checked."""
    values = as_list(g)
    if not 1 <= len(values) <= MAX_GRADIENTS:
        raise ArgumentError("g", f"{len(values)} arrays", f"1 to {MAX_GRADIENTS} arrays")
    names = ["g"] if len(values) == 1 else [f"g[{i}]" for i in range(len(values))]
    found = [operands.rows(name, value, driver, ["bfloat16"]) for name, value in zip(names, values, strict=True)]
    for gradient in found:
        operands.require_shape(gradient, shape, "that of x")
    return found


def row_values(name: str, value: Any, driver: Driver, shape: tuple[int, ...]) -> Operand:
    """What the forward has saved of each row."""
    saved = operands.whole(name, value, driver, ["float32"])
    operands.require_shape(saved, (math.prod(shape[:-1]),), "one for each row of x")
    return saved


def run(
    inputs: Inputs, shape: tuple[int, ...], QB: int, outputs: Any, workspace: Any, stream: Any, level: PDLLevel
) -> list[Any]:
    """The launch: dx, then with a weight dw, and for LayerNorm db."""
    xs, weight, mean = inputs.x, inputs.weight, inputs.mean
    columns, count = shape[-1], math.prod(shape[:-1])
    device = operands.one_device(inputs.all)
    if columns > MAX_BACKWARD_COLUMNS:
        raise ArgumentError("x", f"of {columns} columns", f"of at most {MAX_BACKWARD_COLUMNS} columns")
    queue = operands.resolve_stream(stream, xs)
    names = () if weight is None else ("dw",) if mean is None else ("dw", "db")
    sums = [(name, (columns,), weight.dtype) for name in names if weight is not None]
    wanted = [("dx", shape, dtypes.get("bfloat16")), *sums]
    written = operands.new_outputs(device, queue, wanted, outputs)
    operands.no_overlap(inputs.all, [*written, *operands.workspace(device.driver, workspace)])
    plan = BackwardShape.of(count, columns)
    if not sums and plan.few:  # no sums over rows, for which blocks take columns
        plan = plan._replace(segments=min(count, DW_SEGMENTS), teams=plan.block_teams, few=False)
    wide = (xs, *inputs.gradients, written[0])
    aligned = columns % 16 == 0 and all(o.rows_aligned for o in wide) and (weight is None or weight.ptr % 16 == 0)
    smem = plan.sum_bytes(len(sums)) if sums else 0
    ring = 0 if plan.few or not aligned else _ring_slots(device, plan, inputs, count, columns, QB, smem)
    smem += ring * plan.block_teams * _slot_bytes(inputs, columns, QB)
    kept = int(ring > 0 and plan.team_rows(count) >= _LONG and mean is None)
    kernel = launching.load(device, _specialise(plan, inputs, QB, columns, aligned, ring, kept))
    parameters = BackwardParams(
        x=xs.ptr,
        scales=inputs.scales.ptr,
        rstd=inputs.rstd.ptr,
        mean=0 if mean is None else mean.ptr,
        dx=written[0].ptr,
        x_stride=xs.stride,
        scale_stride=inputs.scales.stride,
        columns=columns,
        segments=plan.segments,
        segment_rows=count if plan.few else count // max(plan.segments, 1),
        longer=count % max(plan.segments, 1),
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
    )
    parameters.g[: len(inputs.gradients)] = [gradient.ptr for gradient in inputs.gradients]
    parameters.g_stride[: len(inputs.gradients)] = [gradient.stride for gradient in inputs.gradients]
    space, waits = None, bool(sums) and not plan.few
    if weight is not None:
        parameters.weight, parameters.dw = weight.ptr, written[1].ptr
        parameters.db = 0 if mean is None else written[2].ptr
    if sums and (waits or workspace is not None):
        space = acquire(device, queue, workspace, fp8_workspace_bytes(columns * len(sums)))
        parameters.words, parameters.scratch = space.ptr + _WORDS_AT, space.params
    read = inputs.all
    useful = max(-(-count // plan.block_teams), -(-columns // _SLICE)) if plan.few else plan.segments
    grid = max(1, min(useful, device.sm_count))
    launching.launch(
        kernel, device, queue, grid, plan.threads, smem, parameters, level, read, written, space, cooperative=waits
    )
    return [o.span for o in written] if outputs is None else list(outputs)


def _slot_bytes(inputs: Inputs, columns: int, QB: int) -> int:
    """`Ring::slot_bytes` of cu/coat/backward_ring.cuh."""
    return -(-(columns * (1 + 2 * len(inputs.gradients)) + columns // QB * 2) // 128) * 128


def _ring_slots(
    device: Device, plan: BackwardShape, inputs: Inputs, rows: int, columns: int, QB: int, used: int
) -> int:
    """Rows of each team that are on their way through shared memory; 0: none, since bulk copies cannot bring them, they
    do not fit, or each block has one row only."""
    if device.capability < _RING_CAPABILITY or rows <= plan.segments:
        return 0
    if columns % (8 * QB) or not inputs.scales.rows_aligned:
        return 0
    slot = plan.block_teams * _slot_bytes(inputs, columns, QB)
    room = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - 4096 - used
    # Two keep memory busy. More help a block that has few, up to half of them; else some multiprocessors get ahead of
    # others, and the launch ends with the slowest. Measured on an H200.
    team_rows = plan.team_rows(rows)
    wanted = 2 if team_rows >= _LONG else min(team_rows // 2 + 1, (128 << 10) // slot)
    slots = min(max(wanted, 2), room // slot, _MAX_RING)
    return slots if slots >= 2 else 0


def _specialise(
    plan: BackwardShape, inputs: Inputs, QB: int, columns: int, aligned: bool, ring: int, kept: int
) -> Specialisation:
    defines = (
        ("DRVFUSE_DTYPE", inputs.x.dtype.cxx),
        ("DRVFUSE_WEIGHT_DTYPE", (inputs.weight or inputs.scales).dtype.cxx),
        ("DRVFUSE_GROUP", QB),
        ("DRVFUSE_CENTRED", int(inputs.mean is not None)),
        ("DRVFUSE_WEIGHTED", int(inputs.weight is not None)),
        ("DRVFUSE_ALIGNED", int(aligned)),
        ("DRVFUSE_TEAM_WARPS", plan.team_warps),
        ("DRVFUSE_TEAMS", plan.block_teams),
        ("DRVFUSE_PACKS", plan.packs),
        ("DRVFUSE_GRADIENTS", len(inputs.gradients)),
        ("DRVFUSE_FULL", int(aligned and columns == plan.team_columns)),
    )
    if plan.few:
        return Specialisation("coat", "fp8_rmsnorm_backward_few", defines)
    most = max(1, -(-plan.segments // plan.strands))  # no rows have no segments
    more = (("DRVFUSE_RING", ring), ("DRVFUSE_KEPT", kept), ("DRVFUSE_STRANDS", plan.strands), ("DRVFUSE_MOST", most))
    return Specialisation("coat", "fp8_rmsnorm_backward", (*defines, *more))
