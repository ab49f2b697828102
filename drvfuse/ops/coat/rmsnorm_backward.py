# SPDX-License-Identifier: Apache-2.0
"""The gradient of FP8 RMSNorm with COAT's signature, in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ... import dtypes
from ...errors import ArgumentError, counted, require_integer
from ...plans.coat_backward import MAX_COLUMNS, MAX_GRADIENTS, BackwardPlan, few_rows, workspace_bytes
from ...plans.definitions import defines
from ...plans.scratch import SUMS_AT
from ...runtime.array import Array
from ...runtime.driver import Driver
from ...runtime.interop import ArrayLike
from ...structures import laid_out
from ..call import operands
from ..call.op import op
from ..call.operands import Operand
from ..call.options import PDLLevel
from ..call.planned import Planned, limits
from ..call.prepared import Prepared
from ..call.scratch import ScratchParams, Workspace
from ..call.streams import StreamArgument
from .fp8_call import Fp8Call, Fp8Params, Options
from .quantised import COAT_WARPS, Outputs, column_weights, quantised_rows, require_columns, weight_type

Gradients = ArrayLike | Sequence[ArrayLike]
"""An array, or a sequence of up to three arrays, which means their sum."""
R = TypeVar("R")


@laid_out("coat/backward_rows.cuh", parts=(ScratchParams,))
class BackwardParams(Fp8Params):
    """The parameters of all kernels of the backward pass."""

    def bind(self, space: Workspace) -> None:
        self.words, self.scratch = space.ptr + SUMS_AT, space.params


def fp8_workspace_bytes(columns: int) -> int:
    """The number of bytes that a workspace needs for calls with `columns` columns, an integer of at least 1.

    The caller allocates a uint8 array of that size, zeroes it once, and passes it as `workspace`.
    """
    return workspace_bytes(require_integer("columns", columns, "an integer, at least 1", 1))


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
    """The gradients `(dx, dw)` of RMSNorm for the gradient g of its unquantised output.

    x, s_x, w and QB are those of the forward pass, and v [M] is its rstd. g is bfloat16 in x's shape. A list or tuple
    of up to three such arrays means the sum g[0] + g[1] + g[2], with each addition rounded to bfloat16. dx is
    bfloat16 in x's shape, and dw [N] has w's dtype: xhat = x * s_x * v, c1 = mean(xhat * w * g), dx = (w * g - xhat *
    c1) * v, dw = sum of g * xhat over the rows in fp32, rounded once. The bits are the same in every run and on every
    device. `num_warps` has no effect. A NaN propagates as in these formulas: through c1 into the whole row of dx, and
    through the sum over the rows into its column of dw.

    With a `pdl_level` other than OFF the kernel reads only w before its wait for the previous kernel. Dependent kernels
    may start after the last store of dw (ON), or right after the kernel's own wait (OVERLAP_AT_BEGINNING); they must
    wait before they read.

    `outputs` is (dx, dw). `workspace` is a uint8 array of `fp8_workspace_bytes(N)` bytes, which is zeroed once and
    serves one launch at a time. All other options are those of the forward pass. N is at most 32768. If blocks wait for
    one another longer than `spin_timeout`, dw is not written, and GridTimeout is raised by the next call with the
    workspace, by `check_device` or by `Graph.launch()`. The order of every sum is that of
    `drvfuse.reference.coat_rmsnorm.fp8_rmsnorm_backward`.
    """
    given, name = Options.of(outputs, stream, pdl_level, workspace), "fp8_rmsnorm_backward"
    return gradient(name, given, x, s_x, g, QB, {"w": w}, {"v": v}, lambda dx, dw: (dx, dw))


def gradient(
    name: str,
    given: Options,
    x: Any,
    s_x: Any,
    g: Any,
    QB: Any,
    affine: Mapping[str, Any],
    saved: Mapping[str, Any],
    result: Callable[..., R],
) -> Prepared[R]:
    """The prepared call of the op `name`. It returns `result(dx, ...)`, with the gradient of each array in `affine`.

    `affine` has w for RMSNorm, w and b for LayerNorm, or nothing. `saved` are the values that the forward pass has
    saved for each row: v, the rstd, and for LayerNorm m, the mean.
    """
    summed = _named(g)
    driver = operands.driver_of(x=x, s_x=s_x, **summed, **affine, **saved)
    xs, scales, shape = quantised_rows(driver, x, s_x, QB)
    require_columns(xs, MAX_COLUMNS)
    weights = column_weights(driver, shape[-1], affine)
    weights.pop("bias", None)  # the kernel does not get b, as no gradient depends on it
    gradients = _gradients(driver, summed, shape)
    read = {"x": xs, "scales": scales, **weights, **_row_values(driver, saved, shape)}
    weight, sums, centred = weight_type(read), len(affine), "m" in saved
    wanted = {"dx": ("dx", shape, dtypes.get("bfloat16"))}
    wanted |= {f"d{each}": (f"d{each}", shape[-1:], weight) for each in affine}
    call = Fp8Call(name, given, read, wanted, workspace_bytes(shape[-1] * max(1, sums)), gradients)
    aligned = call.aligned("x", "dx", "weight") and all(each.rows_aligned for each in gradients)

    def plan() -> Planned:
        plan = BackwardPlan.of(
            limits(call.device),
            *(call.rows, call.columns, QB, len(gradients), sums),
            centred=centred,
            aligned=aligned,
            scales_aligned=scales.rows_aligned,
        )
        shape = plan.shape
        segment_rows, longer = shape.shares(call.rows)
        full = aligned and call.columns == shape.team_columns
        every = defines(dtype=xs.dtype, weight_dtype=weight, group=QB, centred=centred, weighted=bool(weights))
        every += defines(aligned=aligned, team_warps=shape.team_warps, teams=shape.block_teams, packs=shape.packs)
        every += defines(gradients=len(gradients), full=full)
        if shape.few:
            every += defines(weights_first=given.level is PDLLevel.OVERLAP_AT_BEGINNING)
        else:
            # A tensor without rows has no segments, but the macro must be at least 1.
            most = max(1, -(-shape.segments // shape.strands))
            every += defines(ring=plan.ring, kept=plan.kept, strands=shape.strands, most=most)
        kernel = "fp8_rmsnorm_backward_few" if shape.few else "fp8_rmsnorm_backward"
        template = BackwardParams(segments=shape.segments, segment_rows=segment_rows, longer=longer)
        smem, waits = plan.shared_bytes, plan.waits
        return call.planned(kernel, every, plan.grid, shape.threads, template, smem=smem, waits=waits)

    kinds = len(gradients), sums, centred, bool(weights), aligned, scales.rows_aligned
    ready = call.ready(("backward", QB, kinds, xs.dtype, weight), plan)
    ready.point("g", *(operand.ptr for operand in gradients))
    for position, operand in enumerate(gradients):
        ready.parameters.g_stride[position] = operand.stride
    waits = not few_rows(call.rows, call.columns)
    return call.prepared(ready, result(*call.values), workspace=sums > 0 and (waits or bool(call.own)))


def _named(g: Any) -> dict[str, Any]:
    """The arrays whose sum is g. The keys are their names in messages: "g", or "g[0]", "g[1]", ..."""
    if not isinstance(g, (list, tuple)) or len(g) == 1:
        return {"g": g[0] if isinstance(g, (list, tuple)) else g}
    return {f"g[{i}]": array for i, array in enumerate(g)}


def _gradients(driver: Driver, values: Mapping[str, Any], shape: tuple[int, ...]) -> list[Operand]:
    if not 1 <= len(values) <= MAX_GRADIENTS:
        raise ArgumentError("g", counted(len(values), "array"), f"1 to {MAX_GRADIENTS} arrays")
    found = [operands.rows(name, value, driver, ["bfloat16"]) for name, value in values.items()]
    for operand in found:
        operands.require_shape(operand, shape, "that of x")
    return found


def _row_values(driver: Driver, saved: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Operand]:
    """The operands of rstd and mean, which the forward pass has saved, by the kernel parameter that gets the
    address."""
    fields = {"m": "mean", "v": "rstd"}
    found = {fields[name]: operands.whole(name, value, driver, ["float32"]) for name, value in saved.items()}
    for operand in found.values():
        operands.require_shape(operand, (math.prod(shape[:-1]),), "one for each row of x")
    return found
