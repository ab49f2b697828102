# SPDX-License-Identifier: Apache-2.0
"""FP8 quantisation with one scale per tensor, with or without a transposed copy, with COAT's signatures."""

from __future__ import annotations

import math
from typing import Any

from ... import dtypes
from ...dtypes import DType
from ...errors import ArgumentError, Unsupported, require_flag, shown
from ...plans.coat_rows import Division, column_run
from ...plans.definitions import defines
from ...plans.scratch import GRID_BYTES
from ...runtime.array import Array
from ...runtime.interop import ArrayLike
from ...structures import laid_out
from ..call import operands
from ..call.op import op
from ..call.options import PDLLevel
from ..call.planned import Planned, limits, resident
from ..call.prepared import Prepared
from ..call.results import Wanted
from ..call.scratch import ScratchParams
from ..call.streams import StreamArgument
from .fp8_call import Fp8Call, Fp8Params, Options
from .quantised import Outputs, matrix_shape

_INPUTS = ("bfloat16", "float32")
_SCALES = ("bfloat16", "float32", "float16")


@laid_out("coat/fp8_division.cu", parts=(ScratchParams,))
class DivisionParams(Fp8Params):
    """The kernel's parameters."""


@op
def fp8_division_transpose(
    x: ArrayLike,
    QB: int,
    fp8type: str | DType,
    s_y: ArrayLike | None = None,
    stochastic: bool = False,
    only_transposed: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, ...]]:
    """x / s_y in FP8, and its transpose. Returns `(y, s_y, y_t)`, or `(y_t, s_y)` with `only_transposed`.

    x [M, N] or [B, S, N] is bfloat16 or float32, and there may be gaps between its rows. `fp8type` is "E4M3", "E5M2" or
    a dtype. s_y is an array of one element (bfloat16, float16 or float32). If s_y is None, the scale is computed: it is
    a 0-d array (max|x| + 1e-10) / fp8_max, with each step rounded to x's dtype; a NaN in x then makes the scale and all
    results NaN. y has x's shape; y_t is (N, M). The quotient is computed in fp32 and rounded once to FP8, with
    saturation. QB has no effect on the results. stochastic=True is refused, since COAT's stochastic rounding is biased.

    If s_y is given, `outputs` is (y, y_t), or (y_t,) with `only_transposed`. Otherwise it is (y, s_y, y_t) or (y_t,
    s_y). All other options are those of `fp8_rmsnorm_forward`. The rule is
    `drvfuse.reference.coat_rmsnorm.fp8_division`.
    """
    given = Options.of(outputs, stream, pdl_level, workspace)
    require_flag("only_transposed", only_transposed)
    names = ("y_t", "s_y") if only_transposed else ("y", "s_y", "y_t")
    return _divide("fp8_division_transpose", given, names, x, QB, fp8type, s_y, stochastic)


@op
def fp8_division(
    x: ArrayLike,
    QB: int,
    fp8type: str | DType,
    s_y: ArrayLike | None = None,
    stochastic: bool = False,
    *,
    outputs: Outputs = None,
    workspace: ArrayLike | None = None,
    stream: StreamArgument = None,
    pdl_level: PDLLevel = PDLLevel.OFF,
) -> Prepared[tuple[Array, ...]]:
    """`fp8_division_transpose` without the transpose. Returns `(y, s_y)`; `outputs` is (y,) or (y, s_y)."""
    given = Options.of(outputs, stream, pdl_level, workspace)
    return _divide("fp8_division", given, ("y", "s_y"), x, QB, fp8type, s_y, stochastic)


def _divide(
    op: str, given: Options, names: tuple[str, ...], x: Any, QB: Any, fp8type: Any, s_y: Any, stochastic: Any
) -> Prepared[tuple[Array, ...]]:
    """The prepared call of `op`. It returns the results `names`, such as "y" and "s_y", in that order."""
    if require_flag("stochastic", stochastic):
        raise Unsupported("stochastic=True: COAT's stochastic rounding is biased by half a step; pass False")
    if isinstance(QB, bool) or not isinstance(QB, int) or QB < 1:
        raise ArgumentError("QB", shown(QB), "a positive integer")
    target = dtypes.fp8(fp8type, "fp8type")
    driver = operands.driver_of(x=x, s_y=s_y)
    xs = operands.rows("x", x, driver, _INPUTS)
    shape = matrix_shape(xs)
    columns, rows = shape[-1], math.prod(shape[:-1])
    read, find_scale = {"x": xs}, s_y is None
    if not find_scale:
        read["scale"] = operands.whole("s_y", s_y, driver, _SCALES)
        if read["scale"].array.size != 1:
            raise ArgumentError("s_y", f"of shape {read['scale'].shape}", "an array of one element")
    possible: dict[str, Wanted] = {
        "y": ("y", shape, target),
        "s_y": ("s_y", (), xs.dtype),
        "y_t": ("y_t", (columns, rows), target),
    }
    made = [name for name in names if name != "s_y" or find_scale]
    wanted = {"scale" if name == "s_y" else name: possible[name] for name in made}
    call = Fp8Call(op, given, read, wanted, GRID_BYTES)
    scale, y_t, straight = call.arrays["scale"].dtype, call.arrays.get("y_t"), "y" in names
    tile_rows = Division.tile_rows(xs.dtype.itemsize)
    aligned, run = call.aligned("x", "y"), 1 if y_t is None else column_run(tile_rows, rows, y_t.ptr)

    def plan() -> Planned:
        types = defines(dtype=xs.dtype, out_dtype=target, scale_dtype=scale)
        shares = Division(limits(call.device), rows, columns, tile_rows, find_scale)
        tiles = shares.defines + defines(run=run, aligned=aligned)
        ways = defines(find_scale=find_scale, rows_out=straight, columns_out=y_t is not None)
        return call.planned(
            "fp8_division",
            types + tiles + ways,
            lambda kernel: shares.grid(resident(kernel, call.device, shares.threads, shares.shared_bytes)),
            shares.threads,
            DivisionParams(rows=rows, batch_rows=rows),
            smem=shares.shared_bytes,
            waits=find_scale,
        )

    types = xs.dtype, target, scale, find_scale, straight, y_t is not None
    ready = call.ready(("division", types, run, aligned), plan)
    found = {"s_y": s_y, **dict(zip(made, call.values, strict=True))}
    return call.prepared(ready, tuple(found[name] for name in names), workspace=find_scale)
