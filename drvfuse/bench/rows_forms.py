# SPDX-License-Identifier: Apache-2.0
"""Times of every form of the fused norms, and of the all-gather of quantised rows with scales. Each is compared with
the time of the plain form and with the wire time.

The plain form is FP8 with a scale per row; it is measured first for every shape. "auto" chooses the algorithm of a
form. The form's wire time is the number of bytes that each rank receives by that algorithm, divided by the rate of
large copies from each rank to the next in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import dtypes
from ..comm.group import Group
from ..errors import Unsupported
from ..plans import tuning
from . import rows_calls, timing
from .collective_calls import LEVELS, CollectiveCalls
from .floors import Links
from .forms import FORMS, PLAIN, Form
from .moves_gather import gathers
from .ops import calls_of
from .settings import Settings
from .sizes import sets_of

OPS = (*rows_calls.OPS, "all_gather")
SHAPES = ((1, 8192), (128, 8192), (2048, 8192), (8192, 8192))
HEAD = ["op", "rows x cols", "form", "PDL", "algo", "us", "spread", "x row", "wire", "x wire", "- wire"]
TEXT_COLUMNS = 5


def received_bytes(op: str, algo: str, ranks: int, rows: int, columns: int, form: Form) -> float:
    """The number of bytes that each rank receives in a call. By algorithm or op, these bytes are:

    - push_one_shot: the 16-bit inputs of all other ranks. If the workspace is too small for push_one_shot, one_stage
      runs in its place, and receives the same number of bytes.
    - push_two_shot: the other ranks' inputs for the rank's own rows, and the results of all other rows. The results are
      the residual output if there is one, otherwise codes, scales and normed rows.
    - reduce_scatter_rmsnorm_fp8: the other ranks' inputs for the rank's own rows.
    - all_gather: the codes and scales of all other rows.
    """
    source, of_norm = dtypes.get("bfloat16"), form.head_columns or columns
    row_bytes = columns * source.itemsize
    if op == "reduce_scatter_rmsnorm_fp8":
        return (ranks - 1) / ranks * rows * row_bytes
    if op == "all_gather":
        made = form.quantisation
        return (ranks - 1) / ranks * rows * (made.row_bytes(columns, source) + made.row_scale_bytes(columns))
    if form.residual:
        sent = columns * dtypes.get(form.residual).itemsize
    else:
        sent = form.quantisation.row_bytes(columns, source) + (row_bytes if form.normed else 0)
        sent += columns // of_norm * form.quantisation.row_scale_bytes(of_norm)
    both = tuning.fused_received(ranks, row_bytes, sent, rows, False)
    return both[algo == "push_two_shot"]


def timed(op: str, columns: int, forms: Sequence[str]) -> list[str]:
    """The forms that are timed for an op and a number of columns: the plain one, and those of `forms` that fit."""
    every = dict.fromkeys((PLAIN, *forms))
    return [name for name in every if FORMS[name].fits(columns) and (op != "all_gather" or FORMS[name].gathered)]


def measure(
    group: Group, ops: Sequence[str], shapes: Sequence[tuple[int, int]], forms: Sequence[str], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield a result for each op, each shape, and each form that fits the shape's number of columns. Raises Unsupported
    without peer access."""
    if not group.peers_readable:
        raise Unsupported("this benchmark needs peer access between all GPUs of the group, to time copies between them")
    rate = Links(group, settings.link_bytes).bytes_per_us(10)
    for op in ops:
        for rows, columns in shapes:
            sets = sets_of(2 * rows * columns, settings.sets)
            plain: dict[str, Any] = {}
            for name in timed(op, columns, forms):
                form = FORMS[name]
                times = _calls(group, op, rows, columns, sets, form).times("auto", settings.calls)
                plain = plain or times
                yield {
                    **{"op": op, "rows": rows, "cols": columns, "form": name, "gpus": group.size},
                    **{"device": group[0].device.name, "link_bytes_per_us": rate, "calls": settings.calls},
                    "wire_us": received_bytes(op, times["algo"], group.size, rows, columns, form) / rate,
                    "times": times,
                    "x_row": {level: times[level]["us"] / plain[level]["us"] for level in LEVELS},
                }


def _calls(group: Group, op: str, rows: int, columns: int, sets: int, form: Form) -> CollectiveCalls:
    if op == "all_gather":
        return gathers(group, rows, columns, sets, form.quantisation)
    return calls_of(group, op, rows, columns, sets, form)


def lines(result: dict[str, Any]) -> list[list[str]]:
    """A line for each level of PDL."""
    return [_line(result, level) for level in LEVELS]


def _line(result: dict[str, Any], level: str) -> list[str]:
    us, spread = (result["times"][level][what] for what in ("us", "spread"))
    wire = result["wire_us"]
    cells = [result["op"], f"{result['rows']}x{result['cols']}", result["form"], level, result["times"]["algo"]]
    cells += [f"{us:.2f}", f"{spread:.2f}", f"{result['x_row'][level]:.2f}"]
    return [*cells, f"{wire:.2f}", f"{us / wire:.2f}", f"{us - wire:.2f}"]


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """The notes below the table: how the times were measured."""
    first = results[0]
    return [
        f"microseconds per call, median and (largest - smallest) of {timing.REPLAYS} replays; at least "
        f"{first['calls']} calls per graph; results were equal to the reference bit for bit before",
        f"wire: what a rank receives by the algorithm, at {first['link_bytes_per_us'] / 1e3:.0f} GB/s: copies, each "
        "rank to the next; x row: over the form of the first line of the shape",
    ]
