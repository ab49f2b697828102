# SPDX-License-Identifier: Apache-2.0
"""Matrix-vector product and RMSNorm of its first columns, in one launch at the speed of reading the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import require_integer
from ...plans.scratch import STATE_BYTES
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ..call import operands
from ..call.epilogue import Epilogue
from ..call.epilogue_parameters import EpilogueParameters
from ..call.op import op
from ..call.options import PDLLevel, real
from ..call.options import pdl_level as checked_level
from ..call.planned import PlanCache
from ..call.prepared import Prepared, on_device
from ..call.scratch import Workspace
from ..call.streams import StreamArgument, resolve_stream
from ..call.tracing import CallTrace
from ..call.turns import DeviceTurns, WorkspaceTurns
from . import arguments
from .kernel import Call

if TYPE_CHECKING:
    from ...trace.buffer import Trace

_USERS = 12  # offset of `users` in `struct ScratchState`


@op
def gemv_partial_norm(
    act: ArrayLike,
    weight: ArrayLike,
    gamma: ArrayLike | None,
    *,
    n_normed: int,
    epsilon: float,
    act_scales: ArrayLike | None = None,
    weight_scales: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    epilogue: Epilogue | None = None,
    normed_output: ArrayLike | None = None,
    unnormed_output: ArrayLike | None = None,
    finish_counter: ArrayLike | None = None,
    trace: Trace | None = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
    stream: StreamArgument = None,
) -> Prepared[tuple[Array, Array]]:
    """y = act . weight^T, with RMSNorm of its first `n_normed` columns. Returns `(normed, unnormed)`: the first columns
    after the norm, and the other columns of y.

    act is [K] or [M, K] with M up to 8, weight is [N, K], and gamma is [n_normed], None if that is 0. Each is bfloat16,
    float16 or float32. The weight may also be float8_e4m3fn. Its float32 `weight_scales` then have the shape () or (1,)
    for one scale, (N,) for a scale per row, or (N, ceil(K / 128)) for a scale per 1 x 128 elements; None means 1.
    There may be gaps between the rows of act and of weight. Rows of the weight are read fastest if all of them begin
    and end at multiples of 16 bytes.

    act may also be float8_e4m3fn or float8_e5m2, with any type of weight. Its float32 `act_scales` then have the shape
    () for one scale, act.shape[:-1] for a scale per row, or (*act.shape[:-1], ceil(K / 128)) or ceil(K / 64) for a
    scale per group of 128 or 64 columns; None means 1. `rmsnorm_fp8` and `allreduce_rmsnorm_fp8` give such scales.

    y is summed in float32, in an order that depends only on K and the weight's type (`drvfuse.reference.gemv`), so its
    bits depend neither on N, M and n_normed nor on the device. `bias` [N], bfloat16, float16 or float32, is added to
    the scaled sums. Then `epilogue` is applied to all columns, also to those that are normed: in the epilogue `x` is
    the sum, `i` the index in y [M, N], `row` the row of act, `col` the row of the weight, and `rank` is 0;
    `Prepared.set` replaces its parameters. normed = (y * gamma) * (1 / sqrt(mean(y^2) + epsilon)) reads the float32
    values and is rounded once; epsilon is float32. The outputs are [n_normed] and [N - n_normed], or for an act [M, K]
    they are [M, n_normed] and [M, N - n_normed]. Both have the same dtype: that of the given outputs; if none is given,
    act's, or bfloat16 for an FP8 act.

    `finish_counter` is an int32 or uint32 array of one element. It must be zero before its first use, and is zero after
    every launch; launches that share a counter must not run at the same time. By default each stream has its own
    counter. If the counter is not zero when a launch begins, or if blocks wait longer than the setting `spin_timeout`,
    GridTimeout is raised by the next call on the stream, by `check_device` or by `Graph.launch()`. If `n_normed` is 0,
    nothing waits and the counter is not used. Each stream has words by which blocks exchange sums, so a captured call
    must not be replayed while another call runs that was made on the stream of the capture.

    With a `pdl_level` other than OFF, weight, gamma and weight_scales are read before the previous kernel has finished,
    so that kernel must not write them. The next kernel may start when a warp of every block has stored its last sums
    (ON), or when every block has begun (OVERLAP_AT_BEGINNING). `trace` is a `Trace` of the device. `stream` is None for
    the device's own stream, "current" for that of act's framework, or a stream (0 or 1: the legacy default stream). The
    call does not block. It can be captured after a call with arrays of these shapes on the stream (or after
    `.prepare`), if outputs that have elements are given. Raises before any launch: ArgumentError for arguments that do
    not fit, CompileError for an epilogue that does not compile, and Unsupported for NO_WAIT levels and for an FP8 act
    or weight on a device before compute capability 8.9.
    """
    level, driver = checked_level(pdl_level), operands.driver_of(act=act, weight=weight, gamma=gamma)
    scales = {"act_scales": act_scales, "weight_scales": weight_scales}
    given = arguments.inputs(driver, act=act, weight=weight, bias=bias, **scales)
    x, n = given.act, given.weight.shape[0]
    normed_count = require_integer("n_normed", n_normed, f"an integer from 0 to {n}, weight's number of rows", 0, n)
    given = given._replace(gamma=arguments.gamma(driver, gamma, normed_count))
    epsilon = real("epsilon", epsilon, least=0.0)
    device = operands.one_device(given.present)
    bound = None if epilogue is None else EpilogueParameters.of([device], epilogue)
    more = [] if bound is None else bound.operands[0]
    queue = resolve_stream(device, stream, [x])
    normed, unnormed = arguments.outputs(device, queue, x, n, normed_count, normed_output, unnormed_output)
    counter = arguments.counter(device, finish_counter)
    read = [*given.present, *more]
    written = [normed, unnormed, *([] if counter is None else [counter])]
    operands.no_overlap(read, written)
    result: Any = tuple(
        operand.array if value is None else value
        for operand, value in ((normed, normed_output), (unnormed, unnormed_output))
    )
    if not n:
        return on_device("gemv_partial_norm", DeviceTurns(device), queue, result, read, written, None)
    call = Call(device, given, normed, normed_count, bound, level)
    structures = [] if bound is None else list(bound.structures)
    traced = None if trace is None else CallTrace([device], trace, "device")
    if traced is None:
        plan, planned = device.part(PlanCache).get(call.key, call.plan)
        ready = planned.take(structures)
    else:
        plan, planned = call.plan(traced)
        ready = planned.take([*structures, *(section.parameters for section in traced.sections)])
    fields = {"act": x, "weight": given.weight, "gamma": given.gamma, "scales": given.weight_scales}
    fields |= {"act_scales": given.act_scales, "bias": given.bias}
    fields |= {"normed": normed, "unnormed": unnormed, "finish_counter": counter}
    for field, operand in fields.items():
        ready.point(field, 0 if operand is None else operand.ptr)
    parameters, w = ready.parameters, given.weight
    parameters.weight_step, parameters.act_stride, parameters.epsilon = w.stride * w.dtype.itemsize, x.stride, epsilon
    own_counter = counter is None

    def bind(space: Workspace) -> None:
        parameters.words, parameters.scratch = space.ptr + STATE_BYTES, space.params
        if own_counter:
            parameters.finish_counter = space.ptr + _USERS

    turns = WorkspaceTurns(device, queue, None, STATE_BYTES + plan.words_bytes, bind, "gemv")
    return on_device("gemv_partial_norm", turns, queue, result, read, written, ready, traced, bound)
