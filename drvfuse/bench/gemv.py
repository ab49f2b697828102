# SPDX-License-Identifier: Apache-2.0
"""Times of the GEMV with partial RMSNorm, compared with kernels that only read the weights, and with torch.

All arrays are bfloat16, and act has one row by default. Calls use several weights in turn, more than L2 holds. "read"
is the fastest of some kernels that load the same bytes and compute nothing. drvfuse's figures differ in how many
columns of the output are normed: no column in "none", all columns in "all", and in all other figures as many as the
benchmark's shape says. "normed" is an ordinary launch with a bfloat16 weight. "ON" and "EARLY" are chains of dependent
launches, with `PDLLevel.ON` and `PDLLevel.OVERLAP_AT_BEGINNING`. "traced" records a trace. "FP8 weight" has a
float8_e4m3fn weight and a scale for each of its rows. "FP8 act" has this weight, a float8_e4m3fn act, and a scale for
each group of 128 columns of act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import dtypes
from ..ops.call.options import PDLLevel
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..runtime.array import Array, view
from ..runtime.device import Device
from ..runtime.module import compile
from ..trace.buffer import Trace
from ..trace.plot import figure_class
from .timing import microseconds_per_call
from .torch_graph import torch_us_per_call

MODEL = (2112, 7168, 1536)
SHAPES = (
    MODEL,
    *((n, k, 3 * n // 4) for n in (512, 1024, 2048, 4096, 8192, 16384) for k in (1024, 2048, 4096, 8192, 16384)),
)
EPSILON = 1e-3
OURS = ("none", "normed", "all", "ON", "EARLY", "traced", "FP8 weight", "FP8 act")
PEERS = ("cublas", "cublas + norm", "compiled")
HEAD, TEXT_COLUMNS = ["N x K (normed)", "read", *OURS, "normed / read", *PEERS], 1
_ROTATED_BYTES = 256 << 20
CALLS = 64  # the minimum number of calls per graph
_FP8 = "float8_e4m3fn"
_READERS = ((256, 1, 8), (256, 2, 8), (256, 4, 8), (256, 8, 4), (512, 1, 8), (512, 2, 8), (512, 4, 4), (1024, 2, 4))

_READ = """
extern "C" __global__ void __launch_bounds__(THREADS) read(const uint4* from, long long count, unsigned* out) {
    const long long step = (long long)gridDim.x * THREADS;
    unsigned all = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += LOADS * step) {
        uint4 v[LOADS] = {};
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (i + k * step < count) v[k] = __ldg(from + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) all ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (all == 0x12345678) *out = all;
}
"""


class Bench:
    """A device with random weights in one allocation of `rotated_bytes` (None: 256 MiB). Successive calls use different
    parts of the allocation.
    """

    def __init__(self, device: Device, with_torch: bool = False, rotated_bytes: int | None = None) -> None:
        self._device, self._torch, self._random = device, with_torch, np.random.default_rng(0)
        self._pool = self._weight_bytes(rotated_bytes or _ROTATED_BYTES)
        self._out = device.zeros(1, "uint32")

    def _weight_bytes(self, nbytes: int) -> Array:
        bits = self._random.integers(0, 1 << 16, nbytes // 2, np.uint16)
        return self._device.array(bits & np.uint16(0xBFF7))  # makes all values finite, also as FP8

    def measure(self, n: int, k: int, n_normed: int, rows: int = 1) -> dict[str, Any]:
        """All times of one shape with `rows` rows of act, in microseconds per call. Torch's times are for one row."""

        def ours(n_normed: int, level: PDLLevel = PDLLevel.OFF, trace: Trace | None = None, **dtypes: str) -> float:
            return self._time(self.calls(n, k, n_normed, level, trace, rows=rows, **dtypes))

        times = {
            "none": ours(0),
            "normed": ours(n_normed),
            "all": ours(n),
            "ON": ours(n_normed, level=PDLLevel.ON),
            "EARLY": ours(n_normed, level=PDLLevel.OVERLAP_AT_BEGINNING),
            "traced": ours(n_normed, trace=Trace(self._device, nbytes=64 << 20)),
            "FP8 weight": ours(n_normed, weight=_FP8),
            "FP8 act": ours(n_normed, weight=_FP8, act=_FP8),
        }
        if self._torch:
            times |= dict(zip(PEERS, torch_us(n, k, n_normed, EPSILON, _ROTATED_BYTES), strict=True))
        return {
            "n": n,
            "k": k,
            "n_normed": n_normed,
            "rows": rows,
            "bytes": 2 * n * k,
            "read": self.read(n, k),
            **times,
        }

    def weights(self, n: int, k: int, dtype: str = "bfloat16") -> list[Array]:
        """Weights that share no memory; each begins at a multiple of 128 bytes."""
        step = -(-dtypes.get(dtype).itemsize * n * k // 128) * 128
        if step > self._pool.nbytes:
            self._pool = self._weight_bytes(step)
        many = min(2 * CALLS, self._pool.nbytes // step)
        return [view(self._pool.ptr + i * step, (n, k), dtype, self._device, owner=self._pool) for i in range(many)]

    def read(self, n: int, k: int) -> float:
        """The time of the fastest kernel that only reads the weights."""
        device, times = self._device, []
        for threads, blocks, loads in _READERS:
            kernel = compile(_READ, driver=device.driver, defines={"THREADS": threads, "LOADS": loads})["read"]
            launches = [
                kernel.prepare(blocks * device.sm_count, threads, w, w.nbytes // 16, self._out, device=device)
                for w in self.weights(n, k)
            ]
            times.append(self._time([partial(launch, device.stream) for launch in launches]))
        return min(times)

    def calls(
        self,
        n: int,
        k: int,
        n_normed: int,
        level: PDLLevel = PDLLevel.OFF,
        trace: Trace | None = None,
        *,
        rows: int = 1,
        act: str = "bfloat16",
        weight: str = "bfloat16",
    ) -> list[Callable[[], object]]:
        """A call of the op with each of the weights. An FP8 weight has a scale for each row. An FP8 act has a scale for
        each group of 128 columns of a row.
        """
        device, random = self._device, self._random
        x = device.array(random.standard_normal((rows, k)).astype(dtypes.get(act).numpy))
        gamma = device.array(random.standard_normal(n_normed).astype(dtypes.get("bfloat16").numpy))
        scales: dict[str, Any] = {}
        for name, dtype, shape in (("act_scales", act, (rows, -(-k // 128))), ("weight_scales", weight, (n,))):
            if dtype == _FP8:
                scales[name] = device.array(random.uniform(0.5, 2, shape).astype(np.float32))
        call = partial(
            gemv_partial_norm,
            **scales,
            n_normed=n_normed,
            epsilon=EPSILON,
            normed_output=device.empty((rows, n_normed), "bfloat16"),
            unnormed_output=device.empty((rows, n - n_normed), "bfloat16"),
            pdl_level=level,
            trace=trace,
        )
        return [partial(call, x, each, gamma) for each in self.weights(n, k, weight)]

    def _time(self, calls: Sequence[Callable[[], object]]) -> float:
        return microseconds_per_call(self._device, calls, CALLS).median


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The one table line of a shape, in a list; `HEAD` is the table's head."""
    cells = [f"{result['n']}x{result['k']} ({result['n_normed']})", *(f"{result[key]:.2f}" for key in ("read", *OURS))]
    cells.append(f"{result['normed'] / result['read']:.2f}")
    return [cells + [f"{result[key]:.1f}" if key in result else "" for key in PEERS]]


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the times, each divided by the time of a kernel that only reads the weight, over the bytes of the weight.

    There is a line for each K. The lines of "compiled", which is torch.compile, are dotted.
    """
    figure = figure_class()(figsize=(15, 5), layout="tight")
    axes = figure.subplots(1, 3, sharey=True)
    titles = {"none": "no normed column", "normed": "alone", "EARLY": "dependent launches, OVERLAP_AT_BEGINNING"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for k in sorted({r["k"] for r in results}):
            rows = sorted((r for r in results if r["k"] == k), key=lambda r: r["bytes"])
            sizes = [r["bytes"] / 2**20 for r in rows]
            (line,) = axis.plot(sizes, [r[key] / r["read"] for r in rows], "o-", label=f"K {k}")
            if key == "normed" and all("compiled" in r for r in rows):
                axis.plot(sizes, [r["compiled"] / r["read"] for r in rows], "x:", color=line.get_color())
        axis.axhline(1, color="black", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("MiB of weights")
        axis.set_title(title)
    axes[0].set_ylabel("time / time of a kernel that only reads")
    axes[0].legend()
    figure.savefig(path)


_CALLS = 64


def torch_us(n: int, k: int, n_normed: int, epsilon: float, rotated_bytes: int) -> tuple[float, float, float]:
    """Microseconds per call of cuBLAS alone, of cuBLAS and a compiled norm, and of a compiled product and norm. Calls
    use random bfloat16 weights in turn, of about `rotated_bytes` in all."""
    import torch

    torch._dynamo.reset()  # without this, torch stops compiling after a few shapes
    many = max(1, min(_CALLS, rotated_bytes // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(many)]
    act = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    gamma = torch.randn(n_normed, device="cuda", dtype=torch.bfloat16)

    def norm(y: Any) -> Any:
        first = y[:, :n_normed].float()
        factor = torch.rsqrt(first.square().mean(1, keepdim=True) + epsilon)
        return ((first * gamma) * factor).bfloat16(), y[:, n_normed:]

    compiled = torch.compile(norm)
    arguments = [(weights[turn % many],) for turn in range(-(-_CALLS // many) * many)]
    return (
        torch_us_per_call(lambda w: act @ w.t(), arguments),
        torch_us_per_call(lambda w: compiled(act @ w.t()), arguments),
        torch_us_per_call(torch.compile(lambda w: norm((act * w).float().sum(1)[None])), arguments),
    )
