# SPDX-License-Identifier: Apache-2.0
"""Times of FP8 RMSNorm forward and backward, compared with the memory floor, torch.compile and COAT's stored times.

Inputs are random. Calls use several sets of inputs in turn, more than L2 holds. "chain" is a chain of dependent
launches with `PDLLevel.OVERLAP_AT_BEGINNING`. The floor is the number of bytes that must move (forward: x and its
scales, qy, qy_t and rstd; backward: x, its scales, g, dx, rstd and dw) divided by the bandwidth of a large copy in the
same run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..ops.call.options import PDLLevel
from ..ops.coat.rmsnorm_backward import fp8_rmsnorm_backward
from ..ops.coat.rmsnorm_forward import fp8_rmsnorm_forward
from ..runtime.device import Device
from ..trace.plot import figure_class
from .timing import microseconds_per_call
from .torch_graph import torch_us_per_call

COAT_US = {  # (M, N): microseconds of COAT's forward and backward, measured once on an H200
    (1, 2048): (6.1, 6.6),
    (16, 4096): (7.9, 9.2),
    (256, 4096): (10.0, 14.6),
    (2048, 2048): (14.9, 32.2),
    (2048, 4096): (21.6, 38.9),
    (8192, 2048): (41.4, 96.8),
    (4096, 5120): (61.2, 80.8),
    (8192, 4096): (72.8, 118.0),
    (4096, 11008): (114.4, 175.1),
    (16384, 4096): (134.4, 222.8),
    (8192, 8192): (148.7, 177.6),
}
SHAPES = tuple(COAT_US)
QB = 16
EPSILON = 1e-5
WAYS = ("forward", "backward")
_ROTATED_BYTES = 200 << 20


def inputs(rows: int, columns: int) -> tuple[npt.NDArray[Any], ...]:
    """x, s_x, w and g in host memory. x and s_x are normally distributed data, quantised in groups."""
    random = np.random.default_rng(rows * 65536 + columns)
    bf16, fp8 = dtypes.get("bfloat16").numpy, dtypes.get("float8_e4m3fn").numpy
    values = random.standard_normal((rows, columns // QB, QB), np.float32)
    scales = (np.abs(values).max(axis=2) + np.float32(1e-10)) / np.float32(448)
    x = (values / scales[..., None]).astype(fp8).reshape(rows, columns)
    w = (1 + 0.2 * random.standard_normal(columns)).astype(bf16)
    g = random.standard_normal((rows, columns), np.float32).astype(bf16)
    return x, scales.astype(bf16), w, g


def measure(device: Device, rows: int, columns: int, bandwidth: float, with_torch: bool = False) -> dict[str, Any]:
    """All figures of one shape, in microseconds; `bandwidth` in bytes per microsecond."""
    elements = rows * columns
    x, s_x, w, g = inputs(rows, columns)
    weight = device.array(w)
    sets = min(64, max(3, _ROTATED_BYTES // max(1, elements)))
    calls: dict[str, list[partial[Any]]] = {way: [] for way in WAYS}
    for _ in range(sets):
        values, scales, gradient = device.array(x), device.array(s_x), device.array(g)
        rstd = device.empty(rows, "float32")
        outputs = (
            device.empty((rows, columns), "float8_e4m3fn"),
            device.empty((), "bfloat16"),
            device.empty((columns, rows), "float8_e4m3fn"),
            rstd,
        )
        gradients = device.empty((rows, columns), "bfloat16"), device.empty(columns, "bfloat16")
        forward = partial(fp8_rmsnorm_forward, values, scales, weight, QB, EPSILON, outputs=outputs)
        backward = partial(fp8_rmsnorm_backward, values, scales, gradient, weight, rstd, QB, outputs=gradients)
        calls["forward"].append(forward)
        calls["backward"].append(backward)
    result: dict[str, Any] = {"rows": rows, "columns": columns, "sets": sets, "copy_bytes_a_us": bandwidth}
    least = 20 if elements >= 1 << 24 else 60
    for way in WAYS:
        result[f"{way}_us"], result[f"{way}_spread"] = microseconds_per_call(device, calls[way], least)
        chain = [partial(call, pdl_level=PDLLevel.OVERLAP_AT_BEGINNING) for call in calls[way]]
        result[f"{way}_chain_us"] = microseconds_per_call(device, chain, least).median
    scale_bytes = 2 * rows * -(-columns // QB)
    result["forward_floor_us"] = (3 * elements + scale_bytes + 4 * rows) / bandwidth
    result["backward_floor_us"] = (5 * elements + scale_bytes + 4 * rows + 4 * columns) / bandwidth
    coat = COAT_US.get((rows, columns), (None, None))
    torch: tuple[float | None, ...] = (None, None)
    if with_torch:
        torch = torch_us(x, s_x, w, g, QB, EPSILON, min(sets, 8))
    for way, stored, compiled in zip(WAYS, coat, torch, strict=True):
        result[f"{way}_coat_us"], result[f"{way}_torch_us"] = stored, compiled
    return result


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The one table line of a shape, in a list; `HEAD` is the table's head."""
    cells = [f"{result['rows']}x{result['columns']}"]
    for way in WAYS:
        us, floor, chain = (result[f"{way}_{figure}"] for figure in ("us", "floor_us", "chain_us"))
        peers = (result[f"{way}_coat_us"], result[f"{way}_torch_us"])
        cells += [f"{us:.2f}", f"{result[f'{way}_spread']:.2f}", f"{us / floor:.2f}", f"{chain:.2f}"]
        cells += ["" if peer is None else f"{peer:.1f}" for peer in peers]
    return [cells]


_FIGURES = ("us", "spread", "x floor", "chain", "COAT", "torch")
HEAD, TEXT_COLUMNS = ["M x N", *(f"{way} {what}" for way in ("fwd", "bwd") for what in _FIGURES)], 1


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the times of the forward and backward pass for each shape, next to those of COAT and torch.compile and the
    memory floor."""
    figure = figure_class()(figsize=(13, 5), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    places = range(len(results))
    for axis, way in zip(axes, WAYS, strict=True):
        series = (("drvfuse", f"{way}_us"), ("COAT (stored)", f"{way}_coat_us"), ("torch.compile", f"{way}_torch_us"))
        for offset, (label, key) in enumerate(series):
            heights = [result[key] or 0 for result in results]
            axis.bar([i + 0.27 * (offset - 1) for i in places], heights, 0.27, label=label)
        floors = [result[f"{way}_floor_us"] for result in results]
        axis.plot(places, floors, "_", color="black", markersize=24, label="memory floor")
        names = [f"{result['rows']}x{result['columns']}" for result in results]
        axis.set_xticks(places, names, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.set_title(f"FP8 RMSNorm {way}")
    most = max(result[f"{way}_us"] for result in results for way in WAYS)
    axes[0].set_ylim(0.5, 4 * most)
    axes[0].set_ylabel("microseconds")
    axes[0].legend()
    figure.savefig(path)


def torch_us(
    x: npt.NDArray[Any],
    s_x: npt.NDArray[Any],
    w: npt.NDArray[Any],
    g: npt.NDArray[Any],
    QB: int,
    epsilon: float,
    sets: int,
) -> tuple[float, float]:
    """Microseconds per call of forward (tensor maximum, qy, qy_t, rstd) and of backward. The arguments are arrays of
    e4m3 and bfloat16 in host memory."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes
    rows, columns = x.shape

    def tensor(host: npt.NDArray[Any], dtype: Any) -> Any:
        raw = host.view(np.uint8 if host.dtype.itemsize == 1 else np.int16)
        return torch.from_numpy(raw.copy()).cuda().view(dtype)

    def forward(x: Any, s: Any, w: Any) -> Any:
        values = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        rstd = torch.rsqrt(values.square().mean(1) + epsilon)
        y = values * rstd[:, None] * w.float()
        scale = ((y.abs().amax() + 1e-10) / 448.0).bfloat16()
        q = (y.bfloat16().float() / scale.float()).to(torch.float8_e4m3fn)
        return q, scale, q.view(torch.uint8).t().contiguous(), rstd

    def backward(x: Any, s: Any, g: Any, w: Any, rstd: Any) -> Any:
        values = (x.float().view(rows, -1, QB) * s.float()[..., None]).view(rows, columns)
        normed = values * rstd[:, None]
        gradient = g.float()
        weighted = w.float() * gradient
        mean = (normed * weighted).mean(1, keepdim=True)
        return ((weighted - normed * mean) * rstd[:, None]).bfloat16(), (gradient * normed).sum(0).bfloat16()

    bf16 = torch.bfloat16
    a, s, weight, d = tensor(x, torch.float8_e4m3fn), tensor(s_x, bf16), tensor(w, bf16), tensor(g, bf16)
    rstd = forward(a, s, weight)[3]
    copies = [(a.clone(), s.clone(), d.clone()) for _ in range(sets)]
    return (
        torch_us_per_call(torch.compile(forward), [(a, s, weight) for a, s, _ in copies]),
        torch_us_per_call(torch.compile(backward), [(a, s, d, weight, rstd) for a, s, d in copies]),
    )
