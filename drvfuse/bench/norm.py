# SPDX-License-Identifier: Apache-2.0
"""Times of RMSNorm with quantisation on one device, compared with its memory floor and torch.compile.

Inputs are random and bfloat16. Calls use several sets of inputs and outputs in turn, more than L2 holds. A floor is the
bytes of all arrays that a call reads and writes, divided by the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..ops.norm.rmsnorm_fp8 import rmsnorm_fp8
from ..runtime.array import Array
from ..runtime.device import Device
from ..trace.plot import figure_class
from . import forms
from .forms import Form
from .timing import microseconds_per_call
from .torch_graph import torch_us_per_call

SHAPES = (
    (1, 4096),
    (1, 8192),
    (16, 8192),
    (128, 8192),
    (512, 8192),
    (2048, 4096),
    (2048, 8192),
    (8192, 4096),
    (8192, 8192),
    (4096, 16384),
    (65536, 128),
)
EPSILON = 1e-6
HEAD, TEXT_COLUMNS = ["rows x columns", "quantisation", "us", "spread", "x floor", "compiled"], 2
_ROTATED_BYTES = 200 << 20


FORMS = {
    "row": forms.FORMS["row"],
    "row, residual": forms.FORMS["residual"],
    "group": forms.FORMS["group-128"],
    "group, residual": forms.FORMS["residual-group-128"],
    "MXFP8": forms.FORMS["mxfp8-tiles"],
    "NVFP4": forms.FORMS["nvfp4-tiles"],
}
"""Quantisations, some with a residual. Some have a version in torch."""

Host = npt.NDArray[Any]
_Call = tuple[Callable[[], object], Sequence[Array]]  # a call, and the arrays that it reads and writes


def _call(device: Device, form: Form, host: Host) -> _Call:
    """A call with new arrays."""
    made, (rows, columns) = form.quantisation, host.shape
    x, gamma = device.array(host), device.array(host[0])
    given: dict[str, Any] = {"output": device.empty(made.output_shape(x.shape), made.output_dtype(x.dtype))}
    shape = made.scales_shape((rows,), columns)
    if made.scales is not None and shape is not None:
        given["scales"] = device.empty(shape, made.scales)
    if form.residual:
        given |= {"residual": device.array(host[::-1].copy()), "residual_output": device.empty(x.shape, x.dtype)}
    run = partial(rmsnorm_fp8, x, gamma, epsilon=EPSILON, quantisation=made, **given)
    return run, [x, gamma, *given.values()]


def measure(device: Device, rows: int, columns: int, bandwidth: float, with_torch: bool = False) -> dict[str, Any]:
    """Measure each of FORMS: its time, the spread of the time and the memory floor, in microseconds. `bandwidth` is in
    bytes per microsecond."""
    random = np.random.default_rng(rows * 65536 + columns)
    host = random.standard_normal((rows, columns), np.float32).astype(dtypes.get("bfloat16").numpy)
    sets = min(64, max(3, _ROTATED_BYTES // (3 * rows * columns)))
    least = 20 if rows * columns >= 1 << 24 else 60
    result: dict[str, Any] = {"rows": rows, "columns": columns, "sets": sets, "copy_bytes_a_us": bandwidth}
    for name, form in FORMS.items():
        if form.quantisation.group and columns % form.quantisation.group:
            continue
        calls = [_call(device, form, host) for _ in range(sets)]
        us, spread = microseconds_per_call(device, [one for one, _ in calls], least)
        result[name] = {"us": us, "spread": spread, "floor_us": sum(a.nbytes for a in calls[0][1]) / bandwidth}
    if with_torch:
        for name, us in torch_us(rows, columns, EPSILON, sets, least).items():
            if name in result:
                result[name]["compiled_us"] = us
    return result


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The lines of the table, whose head is `HEAD`."""
    shape = f"{result['rows']}x{result['columns']}"
    found = [(name, result[name]) for name in FORMS if name in result]
    return [
        [
            *(shape, name, f"{one['us']:.2f}", f"{one['spread']:.2f}", f"{one['us'] / one['floor_us']:.2f}"),
            f"{one['compiled_us']:.2f}" if "compiled_us" in one else "",
        ]
        for name, one in found
    ]


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the times, divided by the memory floor, over the number of elements. There is a line for each of FORMS; the
    lines of torch.compile are dotted."""
    figure = figure_class()(figsize=(9, 5), layout="tight")
    axis = figure.subplots()
    for name in FORMS:
        found = sorted((r["rows"] * r["columns"], r[name]) for r in results if name in r)
        elements = [each for each, _ in found]
        (line,) = axis.plot(elements, [one["us"] / one["floor_us"] for _, one in found], "o-", label=name)
        if all("compiled_us" in one for _, one in found):
            compiled = [one["compiled_us"] / one["floor_us"] for _, one in found]
            axis.plot(elements, compiled, "x:", color=line.get_color())
    axis.axhline(1, color="black", linewidth=1, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("elements")
    axis.set_ylabel("time / memory floor")
    axis.legend()
    figure.savefig(path)


_GROUP = 128
_FP8_MAX = 448.0


def torch_us(rows: int, columns: int, epsilon: float, sets: int, least: int) -> dict[str, float]:
    """Microseconds per call for those of `rmsnorm_fp8.FORMS` that have a version in torch, by name. Calls use `sets`
    sets of random bfloat16 inputs in turn."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes

    def quantise(y: Any, parts: int) -> tuple[Any, Any]:
        pieces = y.view(rows, parts, columns // parts)
        scale = pieces.abs().amax(2, keepdim=True) / _FP8_MAX
        codes = (pieces / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return codes.view(rows, columns), scale.view(rows, parts)

    def norm(x: Any, gamma: Any) -> Any:
        return (x * gamma.float()) * torch.rsqrt(x.square().mean(1, keepdim=True) + epsilon)

    def plain(parts: int) -> Callable[..., Any]:
        return lambda x, residual, gamma: quantise(norm(x.float(), gamma), parts)

    def added(parts: int) -> Callable[..., Any]:
        def run(x: Any, residual: Any, gamma: Any) -> Any:
            total = x + residual
            return *quantise(norm(total.float(), gamma), parts), total

        return run

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    gamma = normal(columns)
    inputs = [(normal(rows, columns), normal(rows, columns), gamma) for _ in range(sets)]
    inputs *= -(-least // sets)
    forms = {"row": plain(1), "row, residual": added(1)}
    if columns % _GROUP == 0:
        forms |= {"group": plain(columns // _GROUP), "group, residual": added(columns // _GROUP)}
    return {name: torch_us_per_call(torch.compile(form), inputs) for name, form in forms.items()}
