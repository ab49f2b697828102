# SPDX-License-Identifier: Apache-2.0
"""Times of COAT's FP8 functions other than RMSNorm, compared with their memory floors: LayerNorm, group scales,
divisions, sums of gradients.

Inputs are those of `fp8_rmsnorm`. Calls use several sets of inputs and outputs in turn, more than L2 holds.
A floor is the bytes of all arrays that a call reads and writes, divided by the bandwidth of a large copy in the same
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..ops.coat import group_scales as groups
from ..ops.coat import layernorm as norm
from ..ops.coat.division import fp8_division, fp8_division_transpose
from ..ops.coat.rmsnorm_backward import fp8_rmsnorm_backward
from ..runtime.array import Array
from ..runtime.device import Device
from ..trace.plot import figure_class
from .coat import EPSILON, QB, inputs
from .timing import microseconds_per_call

SHAPES = ((2048, 4096), (8192, 4096), (4096, 11008))
OPS = (
    "division",
    "division, s_y given",
    "division_transpose",
    "division_transpose, s_y given",
    "layernorm_param_forward",
    "layernorm_noparam_forward",
    "layernorm_param_backward",
    "layernorm_noparam_backward",
    "rmsnorm_pg2pg_forward",
    "add",
    "add_rmsnorm_pg2pg_forward",
    "rmsnorm_backward of 2 gradients",
    "rmsnorm_backward of 3 gradients",
)
HEAD, TEXT_COLUMNS = ["M x N", "fp8_", "us", "spread", "x floor"], 2
_ROTATED_BYTES = 200 << 20

_Call = tuple[Callable[[], object], Sequence[Array]]  # a call, and the arrays that it reads and writes


def _calls(device: Device, rows: int, columns: int) -> Iterator[_Call]:
    """A call of each of OPS, with separate outputs."""

    def call(run: Callable[[Any], object], read: Sequence[Array], *written: tuple[tuple[int, ...], str]) -> _Call:
        outputs = tuple(device.empty(*one) for one in written)
        return partial(run, outputs), [*read, *outputs]

    host_x, host_s, host_w, host_g = inputs(rows, columns)
    x, s, w, b = (device.array(host) for host in (host_x, host_s, host_w, host_w))
    g, g2, g3 = (device.array(host_g) for _ in range(3))
    s_y = device.array(host_s[0, :1])
    mean, rstd = (device.zeros(rows, "float32") for _ in range(2))
    shape = (rows, columns)
    fp8, turned, scale = (shape, "float8_e4m3fn"), (shape[::-1], "float8_e4m3fn"), ((), "bfloat16")
    wide, column, statistic = (shape, "bfloat16"), ((columns,), "bfloat16"), ((rows,), "float32")
    grouped = (fp8, (s.shape, "bfloat16"))
    normed = (fp8, scale, turned, statistic, statistic)

    yield call(lambda out: fp8_division(g, QB, "E4M3", outputs=out), [g], fp8, scale)
    yield call(lambda out: fp8_division(g, QB, "E4M3", s_y, outputs=out), [g, s_y], fp8)
    yield call(lambda out: fp8_division_transpose(g, QB, "E4M3", outputs=out), [g], fp8, scale, turned)
    yield call(lambda out: fp8_division_transpose(g, QB, "E4M3", s_y, outputs=out), [g, s_y], fp8, turned)
    yield call(
        lambda out: norm.fp8_layernorm_param_forward(x, s, w, b, QB, EPSILON, outputs=out), [x, s, w, b], *normed
    )
    yield call(lambda out: norm.fp8_layernorm_noparam_forward(x, s, QB, EPSILON, outputs=out), [x, s], *normed)
    yield call(
        lambda out: norm.fp8_layernorm_param_backward(x, s, g, QB, w, b, mean, rstd, outputs=out),
        [x, s, g, w, mean, rstd],
        *(wide, column, column),
    )
    yield call(
        lambda out: norm.fp8_layernorm_noparam_backward(x, s, g, QB, mean, rstd, outputs=out),
        [x, s, g, mean, rstd],
        wide,
    )
    yield call(
        lambda out: groups.fp8_rmsnorm_pg2pg_forward(x, s, w, QB, EPSILON, outputs=out), [x, s, w], *grouped, statistic
    )
    yield call(lambda out: groups.fp8_add_Ifp_Ifp_Ofp_Og16(g, g2, "E4M3", QB, outputs=out), [g, g2], wide, *grouped)
    yield call(
        lambda out: groups.fp8_add_rmsnorm_pg2pg_forward(g, g2, "E4M3", w, QB, EPSILON, outputs=out),
        [g, g2, w],
        *(wide, *grouped, *grouped, statistic),
    )
    gs = [g, g2, g3]
    yield call(
        lambda out: fp8_rmsnorm_backward(x, s, gs[:2], w, rstd, QB, outputs=out), [x, s, *gs[:2], w, rstd], wide, column
    )
    yield call(lambda out: fp8_rmsnorm_backward(x, s, gs, w, rstd, QB, outputs=out), [x, s, *gs, w, rstd], wide, column)


def measure(device: Device, rows: int, columns: int, bandwidth: float) -> dict[str, Any]:
    """Measure each of OPS: its time, the spread of the time and the memory floor, in microseconds. `bandwidth` is in
    bytes per microsecond."""
    elements = rows * columns
    sets = min(64, max(3, _ROTATED_BYTES // elements))
    least = 20 if elements >= 1 << 24 else 60
    result: dict[str, Any] = {"rows": rows, "columns": columns, "sets": sets, "copy_bytes_a_us": bandwidth}
    for name, calls in zip(OPS, zip(*(_calls(device, rows, columns) for _ in range(sets)), strict=True), strict=True):
        us, spread = microseconds_per_call(device, [one for one, _ in calls], least)
        result[name] = {"us": us, "spread": spread, "floor_us": sum(a.nbytes for a in calls[0][1]) / bandwidth}
    return result


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The lines of the table, whose head is `HEAD`."""
    shape = f"{result['rows']}x{result['columns']}"
    figures = ((op, result[op]["us"], result[op]["spread"], result[op]["floor_us"]) for op in OPS)
    return [[shape, op, f"{us:.2f}", f"{spread:.2f}", f"{us / floor:.2f}"] for op, us, spread, floor in figures]


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the times, divided by the memory floor, as a group of bars for each op."""
    figure = figure_class()(figsize=(13, 6), layout="tight")
    axis = figure.subplots()
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        heights = [result[op]["us"] / result[op]["floor_us"] for op in OPS]
        places = [j + width * (i - (len(results) - 1) / 2) for j in range(len(OPS))]
        axis.bar(places, heights, width, label=f"{result['rows']}x{result['columns']}")
    axis.axhline(1, color="black", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(OPS)), OPS, rotation=40, ha="right")
    axis.set_ylabel("time / memory floor")
    axis.legend()
    figure.savefig(path)
