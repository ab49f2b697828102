# SPDX-License-Identifier: Apache-2.0
"""Matrix-vector product and RMSNorm of its first columns, in one launch at the speed of reading the weights."""

from __future__ import annotations

import ctypes
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from ...dtypes import DType
from ...errors import ArgumentError, CaptureError
from ...plans import gemv as gemv_plan
from ...plans.gemv import PACK_BYTES, Shape, Shares
from ...runtime.device import Device
from ...runtime.driver import Driver
from ...runtime.stream import Stream
from ...trace import layout
from ..call import launching, operands
from ..call.launching import Specialisation
from ..call.operands import Operand
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.scratch import STATE_BYTES, ScratchParams, acquire
from ..call.tracing import require_trace

if TYPE_CHECKING:
    from ...trace.buffer import Section, Trace

MAX_ROWS = 8
FLOATS = ("bfloat16", "float16", "float32")
WEIGHTS = (*FLOATS, "float8_e4m3fn")
SCALE_GROUP = 128
_COPY_CAPABILITY = (9, 0)
_KERNEL_SHARED = 4 << 10  # that the kernel has itself, at most
_USERS = 12  # of `struct ScratchState`
_PHASES = 6  # of a block, and two for each stage
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


def gemv_partial_norm(
    act: Any,
    weight: Any,
    gamma: Any,
    *,
    n_normed: int,
    eps: float,
    weight_scales: Any = None,
    normed_output: Any = None,
    unnormed_output: Any = None,
    finish_counter: Any = None,
    trace: Trace | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    stream: Any = None,
) -> tuple[Any, Any]:
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
    block, and can be captured after one with arrays of these shapes on the stream, with both outputs given. Before any
    launch: ArgumentError for arguments that do not fit, Unsupported for NO_WAIT levels and for an FP8 weight on a
    device before compute capability 8.9.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(act, weight, gamma)
    x, w, scales = _inputs(driver, act, weight, weight_scales)
    m, (n, k) = 1 if len(x.shape) == 1 else x.shape[0], w.shape
    normed_count = _count(n_normed, n)
    g = _gamma(driver, gamma, normed_count, x)
    epsilon = real("eps", eps, least=0.0)
    read = [x, w, g] if scales is None else [x, w, g, scales]
    device = operands.one_device(read)
    queue = operands.resolve_stream(stream, x)
    normed, unnormed = _outputs(device, queue, x, n, normed_count, normed_output, unnormed_output)
    counter = _counter(device, finish_counter)
    written = [normed, unnormed, *([] if counter is None else [counter])]
    operands.no_overlap(read, written)
    results = tuple(o.span if v is None else v for o, v in zip(written, (normed_output, unnormed_output), strict=False))
    if not n:
        return results[0], results[1]
    groups = gemv_plan.groups_of_row(k, w.dtype.itemsize)
    shares = Shares.of(n, normed_count, device.sm_count)
    can_copy = _access(w) == PACK_BYTES and device.capability >= _COPY_CAPABILITY
    width, room = PACK_BYTES // w.dtype.itemsize, device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    shape = Shape.of(m, groups, width, shares.most_rows, can_copy)
    if shape.shared_bytes(m) + _KERNEL_SHARED > room:  # of an H100's it never needs too much
        shape = Shape.of(m, groups, width, shares.most_rows, False)
    padded = -(-normed_count // 4) * 4
    space = acquire(device, queue, None, STATE_BYTES + 8 * m * padded, "gemv")
    section = None
    if trace is not None:
        phases = _PHASES + 2 * -(-shares.most_rows // shape.step) * shape.chunks
        traced = require_trace(trace, "device")
        (section,) = traced.sections([device], "gemv_partial_norm", shares.grid, phases, writers=_TRACE_WRITERS)
    spec = _specialise(x, w, g, normed, normed_count, m, k, shape, scales, level, section)
    kernel = launching.load(device, spec)
    smem, stash = shape.shared_bytes(m), 4 * m * padded * (not shape.norm_held(m, normed_count))
    if smem + stash + kernel.attributes(device).shared_bytes > room:
        stash = 0
    parameters = GemvParams(
        weight=w.ptr,
        weight_step=w.stride * w.dtype.itemsize,
        columns=k,
        n_normed=normed_count,
        n_unnormed=n - normed_count,
        **{name: getattr(shares, name) for name in _SHARES},
        polled_from=shares.polled_from,
        early_trigger=int(level is PDLLevel.OVERLAP_AT_BEGINNING),
        act=x.ptr,
        act_stride=x.stride,
        scales=0 if scales is None else scales.ptr,
        groups=groups,
        chunks=shape.chunks,
        normed=normed.ptr,
        unnormed=unnormed.ptr,
        words=space.ptr + STATE_BYTES,
        gamma=g.ptr,
        finish_counter=space.ptr + _USERS if counter is None else counter.ptr,
        scratch=space.params,
        padded=padded,
        stashed=int(stash > 0),
        eps=epsilon,
    )
    launching.launch(
        kernel,
        device,
        queue,
        shares.grid,
        shape.threads(m),
        smem + stash,
        parameters,
        level,
        read,
        written,
        space,
        cooperative=False,
        section=section,
    )
    return results[0], results[1]


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


def _gamma(driver: Driver, gamma: Any, n_normed: int, x: Operand) -> Operand:
    if gamma is None and not n_normed:
        return Operand("gamma", x.span.device.empty(0, x.dtype), (0,), 0, None, False)
    g = operands.whole("gamma", gamma, driver, FLOATS)
    operands.require_shape(g, (n_normed,), "one for each normed column")
    return g


def _count(n_normed: Any, n: int) -> int:
    try:
        count = -1 if isinstance(n_normed, bool) else operator.index(n_normed)
    except TypeError:
        count = -1
    if not 0 <= count <= n:
        raise ArgumentError("n_normed", repr(n_normed), f"an integer from 0 to {n}, the rows of weight")
    return count


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
            operands.one_device((x, found[name]))
            dtype = found[name].dtype
    for name, (value, columns) in wanted.items():
        if value is None:
            if stream.capture_id() is not None:
                raise CaptureError(f"{name}=None allocates, which a capture forbids; pass both outputs")
            array = device.empty((*lead, columns), dtype or x.dtype, stream=stream)
            found[name] = Operand(name, array, array.shape, columns, None, False)
    return found["normed_output"], found["unnormed_output"]


def _counter(device: Device, given: Any) -> Operand | None:
    if given is None:
        return None
    counter = operands.whole("finish_counter", given, device.driver, ["int32", "uint32"], writable=True)
    if counter.span.size != 1:
        raise ArgumentError("finish_counter", f"of shape {counter.shape}", "of one element")
    if counter.span.device is not device:
        raise ArgumentError("finish_counter", f"on device {counter.span.device.index}", f"on device {device.index}")
    return counter


def _access(weight: Operand) -> int:
    """Bytes that all rows of the weight begin and end at a multiple of, up to those of a pack."""
    size, access = weight.dtype.itemsize, PACK_BYTES
    while weight.ptr % access or weight.stride * size % access or weight.shape[1] * size % access:
        access //= 2
    return access


def _specialise(
    x: Operand,
    w: Operand,
    g: Operand,
    normed: Operand,
    n_normed: int,
    m: int,
    k: int,
    shape: Shape,
    scales: Operand | None,
    level: PDLLevel,
    section: Section | None,
) -> Specialisation:
    size = w.dtype.itemsize
    width = PACK_BYTES // size
    step = min(16, width * x.dtype.itemsize)
    act_aligned = k % width == 0 and x.ptr % step == 0 and (m == 1 or x.stride * x.dtype.itemsize % step == 0)
    norm_aligned = n_normed % 4 == 0 and all(o.ptr % (4 * o.dtype.itemsize) == 0 for o in (g, normed))
    kind = "none"
    if scales is not None:
        kind = "group" if len(scales.shape) == 2 else "tensor" if scales.span.size == 1 else "row"
    traced = {} if section is None else layout.defines(section.capacity)
    return Specialisation(
        "gemv",
        "gemv_partial_norm",
        (
            ("DRVFUSE_ACT_DTYPE", x.dtype.cxx),
            ("DRVFUSE_WEIGHT_DTYPE", w.dtype.cxx),
            ("DRVFUSE_GAMMA_DTYPE", g.dtype.cxx),
            ("DRVFUSE_OUT_DTYPE", normed.dtype.cxx),
            ("DRVFUSE_M", m),
            ("DRVFUSE_WARPS_A_ROW", shape.warps_a_row),
            ("DRVFUSE_TEAMS", shape.teams),
            ("DRVFUSE_PACKS", shape.packs),
            ("DRVFUSE_STEP", shape.step),
            ("DRVFUSE_NORM_WARPS", shape.norm_warps(m)),
            ("DRVFUSE_NORM_BATCH", shape.norm_batch(m, n_normed)),
            ("DRVFUSE_NORM_HELD", int(shape.norm_held(m, n_normed))),
            ("DRVFUSE_SUM_LANES", shape.sum_lanes),
            ("DRVFUSE_ACCESS", _access(w)),
            ("DRVFUSE_STAGES", shape.stages),
            ("DRVFUSE_SLOTS", shape.slots),
            ("DRVFUSE_SUM_WARPS", shape.sum_warps),
            ("DRVFUSE_COPIED", int(shape.copied)),
            ("DRVFUSE_CHUNKED", int(shape.chunks > 1)),
            ("DRVFUSE_WHOLE", int(k * size == shape.chunks * shape.warps_a_row * shape.packs * gemv_plan.GROUP_BYTES)),
            ("DRVFUSE_DEPENDENT", int(level is not PDLLevel.OFF)),
            ("DRVFUSE_ACT_ALIGNED", int(act_aligned)),
            ("DRVFUSE_NORM_ALIGNED", int(norm_aligned)),
            ("DRVFUSE_SCALES", kind),
            *traced.items(),
        ),
        fp8=w.dtype.name not in FLOATS,
    )
