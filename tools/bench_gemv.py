# SPDX-License-Identifier: Apache-2.0
"""Time of the GEMV with partial RMSNorm on a GPU, beside a kernel that only reads the weights, and torch.

    python tools/bench_gemv.py --out gemv.json --plot gemv.png --torch

Every figure is microseconds a call inside a CUDA graph of back-to-back calls, bfloat16, one token; the weights are
rotated over copies of 256 MiB together, so that L2 does not serve them. "read" is the fastest of some kernels that load
the same bytes and add nothing up; "alone" is without PDL, "chain" with PDLLevel.OVERLAP_AT_BEGINNING; "gemv" has no
normed column, "all_normed" no other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.bench.timing import microseconds_per_call
from drvfuse.bench.torch_graph import torch_us_per_call

MODEL = (2112, 7168, 1536)
GRID = [(n, k) for n in (512, 1024, 2048, 4096, 8192, 16384) for k in (1024, 2048, 4096, 8192, 16384)]
ROTATED_BYTES = 256 << 20
EPS = 1e-3
READERS = ((256, 2, 8), (512, 1, 8), (512, 2, 4), (256, 4, 4))  # threads, blocks a multiprocessor, loads in flight

READ = """
extern "C" __global__ void __launch_bounds__(THREADS) read(const uint4* from, long long count, unsigned* out) {
    const long long step = (long long)gridDim.x * THREADS;
    unsigned all = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += LOADS * step) {
        uint4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (i + k * step < count) v[k] = __ldg(from + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (i + k * step < count) all ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
        }
    }
    if (all == 0x12345678) *out = all;
}
"""


class Bench:
    """One device with random weights, as many as are rotated, in one piece."""

    def __init__(self, device: df.Device) -> None:
        self.device, self.random = device, np.random.default_rng(0)
        bits = self.random.integers(0, 1 << 16, ROTATED_BYTES // 2, np.uint16) & np.uint16(0xBFFF)  # all finite
        self.pool, self.out = device.array(bits), device.zeros(1, "uint32")

    def weights(self, n: int, k: int) -> list[df.Array]:
        nbytes = 2 * n * k
        many = max(1, min(128, ROTATED_BYTES // nbytes))
        return [
            df.view(self.pool.ptr + i * nbytes, (n, k), "bfloat16", self.device, owner=self.pool) for i in range(many)
        ]

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        return microseconds_per_call(self.device, calls, 64).median

    def read(self, n: int, k: int) -> float:
        """The fastest reader."""
        times = []
        for threads, blocks, loads in READERS:
            kernel = df.compile(READ, driver=self.device.driver, defines={"THREADS": threads, "LOADS": loads})["read"]
            grid = blocks * self.device.sm_count
            launches = [kernel.prepare(grid, threads, w, w.nbytes // 16, self.out) for w in self.weights(n, k)]
            times.append(self.time([lambda launch=launch: launch(self.device.stream) for launch in launches]))
        return min(times)

    def ours(self, n: int, k: int, n_normed: int, level: df.PDLLevel = df.PDLLevel.OFF) -> float:
        bf16 = dtypes.get("bfloat16").numpy
        act = self.device.array(self.random.standard_normal(k).astype(bf16))
        gamma = self.device.array(self.random.standard_normal(n_normed).astype(bf16))
        normed, unnormed = self.device.empty(n_normed, "bfloat16"), self.device.empty(n - n_normed, "bfloat16")

        def call(weight: df.Array) -> None:
            df.gemv_partial_norm(
                act,
                weight,
                gamma,
                n_normed=n_normed,
                eps=EPS,
                normed_output=normed,
                unnormed_output=unnormed,
                pdl_level=level,
            )

        return self.time([lambda weight=weight: call(weight) for weight in self.weights(n, k)])

    def measure(self, n: int, k: int, n_normed: int) -> dict[str, Any]:
        """All figures of one shape but torch's."""
        return {
            "n": n,
            "k": k,
            "n_normed": n_normed,
            "bytes": 2 * n * k,
            "read": self.read(n, k),
            "gemv": self.ours(n, k, 0),
            "alone": self.ours(n, k, n_normed),
            "all_normed": self.ours(n, k, n),
            "chain": self.ours(n, k, n_normed, df.PDLLevel.OVERLAP_AT_BEGINNING),
        }


def torch_times(n: int, k: int, n_normed: int) -> dict[str, float]:
    """cuBLAS and a compiled norm, and all of it compiled, the weights rotated likewise."""
    import torch

    torch._dynamo.reset()  # else it gives up compiling after a few shapes
    many = max(1, min(64, ROTATED_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(many)]
    act = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    gamma = torch.randn(n_normed, device="cuda", dtype=torch.bfloat16)

    def norm(y: Any) -> Any:
        first = y[:, :n_normed].float()
        return ((first * gamma) * torch.rsqrt(first.square().mean(1, keepdim=True) + EPS)).bfloat16(), y[:, n_normed:]

    compiled = torch.compile(norm)
    whole = torch.compile(lambda w: norm((act * w).float().sum(1)[None]))
    found = {}
    for name, function in (
        ("cublas_gemv", lambda w: act @ w.t()),
        ("cublas_norm", lambda w: compiled(act @ w.t())),
        ("torch_compile", whole),
    ):
        turns = -(-64 // many) * many
        found[name] = torch_us_per_call(function, [(weights[turn % many],) for turn in range(turns)])
    return found


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Times over those of the reading kernel, by the bytes of the weight, a line for each K."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), sharey=True)
    for axis, (key, title) in zip(
        axes, (("gemv", "no normed column"), ("alone", "3/4 normed"), ("chain", "3/4 normed, PDL")), strict=True
    ):
        for k in sorted({r["k"] for r in results}):
            rows = [r for r in results if r["k"] == k]
            axis.plot([r["bytes"] / 2**20 for r in rows], [r[key] / r["read"] for r in rows], "o-", label=f"K {k}")
        axis.axhline(1, color="black", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("MiB of weights")
        axis.set_title(title)
    axes[0].set_ylabel("time / time of a kernel that only reads")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--torch", action="store_true", help="time cuBLAS and torch.compile too")
    arguments = parser.parse_args()
    device = df.device(0, driver="cuda")
    bench, results = Bench(device), []
    keys = ["read", "gemv", "alone", "all_normed", "chain"]
    keys += ["cublas_gemv", "cublas_norm", "torch_compile"] if arguments.torch else []
    print(f"{device.name}\n{'N x K (normed)':>22} " + " ".join(f"{key:>13}" for key in keys))
    for n, k, n_normed in (MODEL, *((n, k, 3 * n // 4) for n, k in GRID)):
        result = bench.measure(n, k, n_normed)
        if arguments.torch:
            result |= torch_times(n, k, n_normed)
        results.append(result)
        print(f"{f'{n}x{k} ({n_normed})':>22} " + " ".join(f"{result[key]:>13.2f}" for key in keys), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
