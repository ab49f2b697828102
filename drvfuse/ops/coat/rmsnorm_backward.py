# SPDX-License-Identifier: Apache-2.0
"""The gradient of FP8 RMSNorm with COAT's signature, in one launch."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ... import dtypes
from ...errors import ArgumentError
from ...plans.coat_backward import MAX_COLUMNS, MAX_GRADIENTS, BackwardPlan, workspace_bytes
from ...plans.scratch import SUMS_AT
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ..call import operands, results, scratch
from ..call.faults import planted
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache, Planned, limits
from ..call.prepared import Prepared, on_device, op
from ..call.scratch import ScratchParams, Workspace
from ..call.specialisation import FP8_CAPABILITY, Defines, Specialisation
from ..call.streams import StreamArgument, resolve_stream
from ..call.turns import DeviceTurns, WorkspaceTurns
from .quantised import COAT_WARPS, Outputs, column_weights, quantised_rows, require_columns

Gradients = ArrayLike | Sequence[ArrayLike]
R = TypeVar("R")


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
    return workspace_bytes(count)


@op
def fp8_rmsnorm_backward(
    x: ArrayLike,
    s_x: ArrayLike,
    g: Gradients,
    w: ArrayLike,
    v: ArrayLike,
    QB: int,
    num_warps: int = COAT_WARPS,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, Array]]:
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
    level, driver = checked_level(pdl_level), operands.driver_of(x=x, s_x=s_x, **named(g), w=w, v=v)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    weight = column_weights(driver, w, shape[-1])
    gradients = gradient_operands(driver, g, shape)
    inputs = Inputs(xs, scales, gradients, weight, row_values("v", v, driver, shape), None)
    return gradient("fp8_rmsnorm_backward", inputs, QB, outputs, workspace, stream, level, lambda dx, dw: (dx, dw))


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


def named(g: Any) -> dict[str, Any]:
    """g, or the arrays whose sum it is, by their names."""
    if not isinstance(g, (list, tuple)) or len(g) == 1:
        return {"g": g[0] if isinstance(g, (list, tuple)) else g}
    return {f"g[{i}]": array for i, array in enumerate(g)}


def gradient_operands(driver: Driver, g: Any, shape: tuple[int, ...]) -> list[Operand]:
    """g, or the arrays whose sum it is, checked."""
    values = named(g)
    if not 1 <= len(values) <= MAX_GRADIENTS:
        raise ArgumentError("g", f"{len(values)} arrays", f"1 to {MAX_GRADIENTS} arrays")
    found = [operands.rows(name, value, driver, ["bfloat16"]) for name, value in values.items()]
    for gradient in found:
        operands.require_shape(gradient, shape, "that of x")
    return found


def row_values(name: str, value: Any, driver: Driver, shape: tuple[int, ...]) -> Operand:
    """What the forward has saved of each row."""
    saved = operands.whole(name, value, driver, ["float32"])
    operands.require_shape(saved, (math.prod(shape[:-1]),), "one for each row of x")
    return saved


def gradient(
    name: str,
    inputs: Inputs,
    QB: int,
    outputs: Any,
    workspace: Any,
    stream: Any,
    level: PDLLevel,
    result: Callable[..., R],
) -> Prepared[R]:
    """The call of the op `name`, which returns `result` of dx, then with a weight dw, and for LayerNorm db."""
    xs, scales, weight, mean = inputs.x, inputs.scales, inputs.weight, inputs.mean
    shape, read = xs.shape, inputs.all
    device = operands.one_device(read)
    require_columns(xs, MAX_COLUMNS)
    queue = resolve_stream(device, stream, xs)
    names = () if weight is None else ("dw",) if mean is None else ("dw", "db")
    sums = [(each, shape[-1:], weight.dtype) for each in names if weight is not None]
    written, values = results.outputs(device, queue, [("dx", shape, dtypes.get("bfloat16")), *sums], outputs)
    nbytes = workspace_bytes(shape[-1] * max(1, len(sums)))
    own = scratch.checked(workspace, device.driver, device, nbytes)
    operands.no_overlap(read, [*written, *own])
    call = _Call(device, inputs, written[0], QB, len(sums), level)
    plan, planned = device.part(PlanCache).get(call.key, call.plan)
    ready = planned.take()
    parameters = ready.parameters
    parameters.x, parameters.scales, parameters.rstd = xs.ptr, scales.ptr, inputs.rstd.ptr
    parameters.x_stride, parameters.scale_stride = xs.stride, scales.stride
    parameters.mean, parameters.weight = mean.ptr if mean is not None else 0, weight.ptr if weight is not None else 0
    parameters.dx, parameters.dw, parameters.db = ([operand.ptr for operand in written] + [0, 0])[:3]
    for position, operand in enumerate(inputs.gradients):
        parameters.g[position], parameters.g_stride[position] = operand.ptr, operand.stride

    def bind(space: Workspace) -> None:
        parameters.words, parameters.scratch = space.ptr + SUMS_AT, space.params

    turns = DeviceTurns(device)
    if sums and (plan.waits or own):
        turns = WorkspaceTurns(device, queue, own[0].array if own else None, nbytes, bind)
    return on_device(name, turns, queue, result(*values), read, written, ready)


class _Call:
    """What the kernel and its launch depend on: shapes, types, and what addresses are multiples of."""

    def __init__(self, device: Device, inputs: Inputs, dx: Operand, QB: int, sums: int, level: PDLLevel) -> None:
        self.device, self.QB, self.sums, self.level = device, QB, sums, level
        weight, shape = inputs.weight, inputs.x.shape
        self.rows, self.columns, self.gradients = math.prod(shape[:-1]), shape[-1], len(inputs.gradients)
        self.centred, self.weighted = inputs.mean is not None, weight is not None
        self.dtypes = inputs.x.dtype, (weight or inputs.scales).dtype
        wide = (inputs.x, *inputs.gradients, dx)
        weight_aligned = weight is None or weight.ptr % 16 == 0
        self.aligned = self.columns % 16 == 0 and weight_aligned and all(o.rows_aligned for o in wide)
        self.scales_aligned = inputs.scales.rows_aligned
        sizes = self.rows, self.columns, QB, self.gradients, sums
        kinds = self.centred, self.weighted, self.aligned, self.scales_aligned
        self.key = ("backward", sizes, kinds, self.dtypes, level, planted())

    def plan(self) -> tuple[BackwardPlan, Planned]:
        """How rows and columns are shared out, and the kernel with what it takes of that."""
        plan = BackwardPlan.of(
            limits(self.device),
            self.rows,
            self.columns,
            self.QB,
            self.gradients,
            self.sums,
            centred=self.centred,
            aligned=self.aligned,
            scales_aligned=self.scales_aligned,
        )
        segment_rows, longer = plan.shape.shares(self.rows)
        template = BackwardParams(
            columns=self.columns,
            segments=plan.shape.segments,
            segment_rows=segment_rows,
            longer=longer,
            early_trigger=int(self.level is PDLLevel.OVERLAP_AT_BEGINNING),
        )
        spec, threads, smem = self._specialise(plan), plan.shape.threads, plan.shared_bytes
        waits, pdl = plan.waits, self.level
        return plan, Planned(self.device, spec, plan.grid, threads, template, smem=smem, waits=waits, pdl=pdl)

    def _specialise(self, plan: BackwardPlan) -> Specialisation:
        shape = plan.shape
        defines: Defines = (
            ("DRVFUSE_DTYPE", self.dtypes[0].cxx),
            ("DRVFUSE_WEIGHT_DTYPE", self.dtypes[1].cxx),
            ("DRVFUSE_GROUP", self.QB),
            ("DRVFUSE_CENTRED", int(self.centred)),
            ("DRVFUSE_WEIGHTED", int(self.weighted)),
            ("DRVFUSE_ALIGNED", int(self.aligned)),
            ("DRVFUSE_TEAM_WARPS", shape.team_warps),
            ("DRVFUSE_TEAMS", shape.block_teams),
            ("DRVFUSE_PACKS", shape.packs),
            ("DRVFUSE_GRADIENTS", self.gradients),
            ("DRVFUSE_FULL", int(self.aligned and self.columns == shape.team_columns)),
        )
        if shape.few:
            return Specialisation("coat", "fp8_rmsnorm_backward_few", defines, capability=FP8_CAPABILITY)
        defines += (
            ("DRVFUSE_RING", plan.ring),
            ("DRVFUSE_KEPT", int(plan.kept)),
            ("DRVFUSE_STRANDS", shape.strands),
            ("DRVFUSE_MOST", max(1, -(-shape.segments // shape.strands))),  # no rows have no segments
        )
        return Specialisation("coat", "fp8_rmsnorm_backward", defines, capability=FP8_CAPABILITY)
