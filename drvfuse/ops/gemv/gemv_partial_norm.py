# SPDX-License-Identifier: Apache-2.0
"""Matrix-vector product and RMSNorm of its first columns, in one launch at the speed of reading the weights."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any

from ...dtypes import DType
from ...errors import ArgumentError, require_integer
from ...plans.definitions import defines
from ...plans.gemv import MAX_ROWS, PACK_BYTES, Plan, Shares
from ...plans.scratch import STATE_BYTES
from ...runtime.array import Array
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ...runtime.stream import Stream
from ...trace import layout
from ..call import operands
from ..call.faults import planted
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache, Planned, limits
from ..call.prepared import Prepared, on_device
from ..call.results import refuse_capture
from ..call.scratch import ScratchParams, Workspace
from ..call.specialisation import FP8_CAPABILITY, Specialisation, load
from ..call.streams import StreamArgument, resolve_stream
from ..call.tracing import CallTrace
from ..call.turns import DeviceTurns, WorkspaceTurns

if TYPE_CHECKING:
    from ...trace.buffer import Trace

FLOATS = ("bfloat16", "float16", "float32")
WEIGHTS = (*FLOATS, "float8_e4m3fn")
SCALE_GROUP = 128
_USERS = 12  # of `struct ScratchState`
_TRACE_WRITERS = 2  # the last block has one of its own
_SHARES = [field.name for field in dataclasses.fields(Shares) if field.name != "grid"]


class GemvParams(ctypes.Structure):
    """`struct GemvParams` of cu/gemv/params.cuh."""

    _fields_ = (
        ("weight", ctypes.c_uint64),
        ("weight_step", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("columns", "n_normed", "n_unnormed")),
        *((name, ctypes.c_int32) for name in _SHARES),
        *((name, ctypes.c_int32) for name in ("chunks", "groups", "early_trigger", "polled_from", "unused")),
        ("act", ctypes.c_uint64),
        ("act_stride", ctypes.c_int64),
        ("scales", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("normed", "unnormed", "words", "gamma", "finish_counter")),
        ("scratch", ScratchParams),
        ("padded", ctypes.c_int32),
        ("stashed", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("unused_too", ctypes.c_int32),
    )


@op
def gemv_partial_norm(
    act: ArrayLike,
    weight: ArrayLike,
    gamma: ArrayLike | None,
    *,
    n_normed: int,
    eps: float,
    weight_scales: ArrayLike | None = None,
    normed_output: ArrayLike | None = None,
    unnormed_output: ArrayLike | None = None,
    finish_counter: ArrayLike | None = None,
    trace: Trace | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    stream: StreamArgument = None,
) -> Prepared[tuple[Array, Array]]:
    """`(normed, unnormed)` of y = act . weight^T: RMSNorm of the first `n_normed` columns times gamma, and the others.

    act [K] or [M, K] with M up to 8, weight [N, K], gamma [n_normed] (None if 0), each bfloat16, float16 or float32;
    weight also float8_e4m3fn, whose float32 `weight_scales` have the shape () or (1,) for all of it, (N,) for its rows,
    or (N, ceil(K / 128)) for 1 x 128 elements, and are 1 if None. The rows of act and weight may lie apart. Rows of the
    weight that all begin and end at multiples of 16 bytes are read fastest; any others work.

    y is summed in float32, in an order that K and the weight's type alone decide (`drvfuse.reference.gemv`), so its
    bits depend neither on N, M and n_normed nor on the device. normed = (y * gamma) * (1 / sqrt(mean(y^2) + eps)) reads
    the float32 sums and rounds once; eps is float32. The outputs are [n_normed] and [N - n_normed], or [M, ...], both
    of one dtype: that of those given, else act's.

    `finish_counter` is an int32 or uint32 array of one element, zero before its first use and after every launch;
    launches that share one must not run at the same time. By default it is the stream's own. If it was not zero when a
    launch began, the next call on the stream raises GridTimeout, as do `check_device` and `Graph.launch()`; so does a
    wait of more than the `spin_timeout` setting. With `n_normed` 0 nothing waits and it is not used. The words by which
    blocks meet are kept by stream: a captured call must not be replayed while another call runs that was made on the
    stream of the capture.

    With `pdl_level` other than OFF weight, gamma and weight_scales are fetched before the kernel in front has finished:
    it must not write them. The kernel behind may start when a warp of every block has stored its last sums (ON), or
    when every block has begun (OVERLAP_AT_BEGINNING). `trace` is a `Trace` of the device. `stream`: None for the
    device's own, "current" for that of act's framework, or a stream (0 or 1: the legacy default one). The call does not
    block, and can be captured after one with arrays of these shapes on the stream (or after `.prepare`), with both
    outputs given where they have elements. Before any
    launch: ArgumentError for arguments that do not fit, Unsupported for NO_WAIT levels and for an FP8 weight on a
    device before compute capability 8.9.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(act=act, weight=weight, gamma=gamma)
    x, w, scales = _inputs(driver, act, weight, weight_scales)
    m, n = 1 if len(x.shape) == 1 else x.shape[0], w.shape[0]
    normed_count = require_integer("n_normed", n_normed, f"an integer from 0 to {n}, the rows of weight", 0, n)
    g = _gamma(driver, gamma, normed_count)
    epsilon = real("eps", eps, least=0.0)
    read = [operand for operand in (x, w, g, scales) if operand is not None]
    device = operands.one_device(read)
    queue = resolve_stream(device, stream, [x])
    normed, unnormed = _outputs(device, queue, x, n, normed_count, normed_output, unnormed_output)
    counter = _counter(device, finish_counter)
    written = [normed, unnormed, *([] if counter is None else [counter])]
    operands.no_overlap(read, written)
    result: Any = tuple(
        operand.array if given is None else given
        for operand, given in ((normed, normed_output), (unnormed, unnormed_output))
    )
    if not n:
        return on_device("gemv_partial_norm", DeviceTurns(device), queue, result, read, written, None)
    call = _Call(device, x, w, g, scales, normed, normed_count, m, level)
    traced = None if trace is None else CallTrace([device], trace, "device")
    if traced is None:
        plan, planned = device.part(PlanCache).get(call.key, call.plan)
        ready = planned.take()
    else:
        plan, planned = call.plan(traced)
        ready = planned.take([section.parameters for section in traced.sections])
    fields = {"act": x, "weight": w, "gamma": g, "scales": scales}
    fields |= {"normed": normed, "unnormed": unnormed, "finish_counter": counter}
    for field, operand in fields.items():
        ready.point(field, 0 if operand is None else operand.ptr)
    parameters = ready.parameters
    parameters.weight_step, parameters.act_stride, parameters.eps = w.stride * w.dtype.itemsize, x.stride, epsilon
    own_counter = counter is None

    def bind(space: Workspace) -> None:
        parameters.words, parameters.scratch = space.ptr + STATE_BYTES, space.params
        if own_counter:
            parameters.finish_counter = space.ptr + _USERS

    turns = WorkspaceTurns(device, queue, None, STATE_BYTES + plan.words_bytes, bind, "gemv")
    return on_device("gemv_partial_norm", turns, queue, result, read, written, ready, traced)


def _inputs(driver: Driver, act: Any, weight: Any, weight_scales: Any) -> tuple[Operand, Operand, Operand | None]:
    x = operands.rows("act", act, driver, FLOATS)
    w = operands.rows("weight", weight, driver, WEIGHTS)
    if len(w.shape) != 2 or not w.shape[1]:
        raise ArgumentError("weight", f"of shape {w.shape}", "of shape [N, K] with K of at least 1")
    if w.stride * w.dtype.itemsize >= 1 << 31:
        raise ArgumentError("weight", f"with rows {w.stride} elements apart", "with rows less than 2 GiB apart")
    n, k = w.shape
    if n >= 1 << 31:
        raise ArgumentError("weight", f"of shape {w.shape}", "of less than 2^31 rows")
    if len(x.shape) not in (1, 2) or x.shape[-1] != k or not 1 <= (1, *x.shape)[-2] <= MAX_ROWS:
        raise ArgumentError(
            "act", f"of shape {x.shape}", f"of shape [{k}] or [M, {k}], K as weight's, M 1 to {MAX_ROWS}"
        )
    if weight_scales is None:
        return x, w, None
    if w.dtype.name in FLOATS:
        raise ArgumentError("weight_scales", "given", f"None for a weight of {w.dtype}")
    scales = operands.whole("weight_scales", weight_scales, driver, ["float32"])
    allowed = ((), (1,), (n,), (n, -(-k // SCALE_GROUP)))
    if scales.shape not in allowed:
        raise ArgumentError(
            "weight_scales", f"of shape {scales.shape}", f"of shape () or (1,), {allowed[2]} or {allowed[3]}"
        )
    return x, w, scales


def _gamma(driver: Driver, gamma: Any, n_normed: int) -> Operand | None:
    if gamma is None and not n_normed:
        return None
    g = operands.whole("gamma", gamma, driver, FLOATS)
    operands.require_shape(g, (n_normed,), "one for each normed column")
    return g


def _outputs(
    device: Device, stream: Stream, x: Operand, n: int, n_normed: int, normed: Any, unnormed: Any
) -> tuple[Operand, Operand]:
    """Both outputs, checked or allocated; of act's dtype where neither is given."""
    lead = x.shape[:-1]
    dtype: DType | None = None
    found: dict[str, Operand] = {}
    wanted = {"normed_output": (normed, n_normed), "unnormed_output": (unnormed, n - n_normed)}
    for name, (value, columns) in wanted.items():
        if value is not None:
            found[name] = operands.whole(name, value, device.driver, FLOATS, writable=True)
            if dtype not in (None, found[name].dtype):
                raise ArgumentError(f"{name}.dtype", str(found[name].dtype), f"{dtype}, as that of normed_output")
            operands.require_shape(found[name], (*lead, columns), "that of the result")
            if found[name].device is not device:
                operands.one_device((x, found[name]))
            dtype = found[name].dtype
    for name, (value, columns) in wanted.items():
        if value is None:
            if columns:  # an array without elements takes no memory
                refuse_capture([stream], name)
            found[name] = operands.made(name, device.empty((*lead, columns), dtype or x.dtype, stream=stream))
    return found["normed_output"], found["unnormed_output"]


def _counter(device: Device, given: Any) -> Operand | None:
    if given is None:
        return None
    counter = operands.whole("finish_counter", given, device.driver, ["int32", "uint32"], writable=True)
    if counter.array.size != 1:
        raise ArgumentError("finish_counter", f"of shape {counter.shape}", "of one element")
    if counter.array.device is not device:
        raise ArgumentError("finish_counter", f"on device {counter.array.device.index}", f"on device {device.index}")
    return counter


def _access(weight: Operand) -> int:
    """Bytes that all rows of the weight begin and end at a multiple of, up to those of a pack."""
    size, access = weight.dtype.itemsize, PACK_BYTES
    while weight.ptr % access or weight.stride * size % access or weight.shape[1] * size % access:
        access //= 2
    return access


class _Call:
    """What the kernel and its launch depend on: shapes, types, and what addresses are multiples of."""

    def __init__(
        self,
        device: Device,
        x: Operand,
        w: Operand,
        g: Operand | None,
        scales: Operand | None,
        normed: Operand,
        n_normed: int,
        m: int,
        level: PDLLevel,
    ) -> None:
        self.device, self.m, self.n_normed, self.level = device, m, n_normed, level
        self.n, self.k = w.shape
        self.dtypes = x.dtype, w.dtype, x.dtype if g is None else g.dtype, normed.dtype
        self.access = _access(w)
        width = PACK_BYTES // w.dtype.itemsize
        step, row = min(16, width * x.dtype.itemsize), x.stride * x.dtype.itemsize
        self.act_aligned = self.k % width == 0 and x.ptr % step == 0 and (m == 1 or row % step == 0)
        ends = (normed,) if g is None else (normed, g)
        self.norm_aligned = n_normed % 4 == 0 and all(o.ptr % (4 * o.dtype.itemsize) == 0 for o in ends)
        self.scales = "none"
        if scales is not None:
            self.scales = "group" if len(scales.shape) == 2 else "tensor" if scales.array.size == 1 else "row"
        shapes = m, self.n, self.k, n_normed
        alignment = self.access, self.act_aligned, self.norm_aligned
        types = tuple(dtype.name for dtype in self.dtypes)
        self.key = ("gemv", shapes, types, alignment, self.scales, level.value, planted())

    def plan(self, trace: CallTrace | None = None) -> tuple[Plan, Planned]:
        """How the work is shared out, and the kernel with what it takes of that. A trace gets a section."""
        bounds, size = limits(self.device), self.dtypes[1].itemsize
        plan = Plan.of(bounds, self.m, self.n, self.k, size, self.n_normed, self.access)
        traced: dict[str, int] = {}
        if trace is not None:
            (section,) = trace.reserve("gemv_partial_norm", plan.shares.grid, plan.phases, writers=_TRACE_WRITERS)
            traced = layout.defines(section.capacity)
        spec = self._specialise(plan, traced)
        own = load(self.device, spec).attributes(self.device).shared_bytes
        smem, stashed = plan.shared_bytes(bounds.shared_bytes - own)
        template = GemvParams(
            columns=self.k,
            n_normed=self.n_normed,
            n_unnormed=self.n - self.n_normed,
            **{name: getattr(plan.shares, name) for name in _SHARES},
            polled_from=plan.shares.polled_from,
            early_trigger=int(self.level is PDLLevel.OVERLAP_AT_BEGINNING),
            groups=plan.groups,
            chunks=plan.shape.chunks,
            padded=plan.padded,
            stashed=int(stashed),
        )
        threads = plan.shape.threads(self.m)
        return plan, Planned(self.device, spec, plan.shares.grid, threads, template, smem=smem, pdl=self.level)

    def _specialise(self, plan: Plan, traced: dict[str, int]) -> Specialisation:
        act, weight, gamma, out = self.dtypes
        shape = plan.shape
        every = (
            *defines(act_dtype=act, weight_dtype=weight, gamma_dtype=gamma, out_dtype=out, m=self.m),
            *defines(warps_a_row=shape.warps_a_row, teams=shape.teams, packs=shape.packs, step=shape.step),
            *defines(norm_warps=shape.norm_warps(self.m), norm_batch=plan.norm_batch, norm_held=plan.norm_held),
            *defines(sum_lanes=shape.sum_lanes, access=self.access, stages=shape.stages, slots=shape.slots),
            *defines(sum_warps=shape.sum_warps, copied=shape.copied, chunked=shape.chunks > 1, whole=plan.whole),
            *defines(dependent=self.level is not PDLLevel.OFF, act_aligned=self.act_aligned),
            *defines(norm_aligned=self.norm_aligned, scales=self.scales),
            *traced.items(),
        )
        capability = (0, 0) if weight.name in FLOATS else FP8_CAPABILITY
        return Specialisation("gemv", "gemv_partial_norm", every, capability=capability)
