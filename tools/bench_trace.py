# SPDX-License-Identifier: Apache-2.0
"""What tracing costs on real GPUs, and how good the clocks are.

    python tools/bench_trace.py --gpus 2 --out trace.json

Microseconds a call inside a CUDA graph of back-to-back calls over some sets of inputs in turn, without and with a
trace: replays of the two graphs take turns, and their medians are compared; "spread" is the larger distance between the
quartiles. The GEMV runs on the first GPU, with weights that L2 does not hold. Then the clocks, measured several times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.bench.timing import Replays

SHAPES = [(1, 4096), (128, 4096), (512, 4096), (2048, 4096)]
SETS = 4
GEMV = (2112, 7168, 1536)  # N, K, normed columns
GEMV_SETS = 8
ROUNDS = 60
Calls = Sequence[Callable[[], object]]


def compared(where: df.Group | df.Device, calls: Callable[[df.Trace | None], Calls], per_graph: int) -> dict[str, Any]:
    """Time of the calls without and with a trace."""
    trace = df.Trace(where, nbytes=32 << 20)
    graphs = [Replays(where, calls(given), per_graph) for given in (None, trace)]
    times = np.array([[graph.microseconds() for graph in graphs] for _ in range(ROUNDS)])
    (low_off, off, high_off), (low_on, on, high_on) = np.quantile(times, (0.25, 0.5, 0.75), axis=0).T.tolist()
    for graph in graphs:
        graph.close()
    return {
        "off_us": off, "on_us": on, "overhead": on / off - 1, "spread_us": max(high_off - low_off, high_on - low_on),
        "events": int(trace.records().size),
    }  # fmt: skip


def gemv(device: df.Device, n: int, k: int, n_normed: int) -> dict[str, Any]:
    """The GEMV with partial norm."""
    bf16, random = dtypes.get("bfloat16").numpy, np.random.default_rng(n)
    weights = [device.array(random.standard_normal((n, k), np.float32).astype(bf16)) for _ in range(GEMV_SETS)]
    act, gamma = (device.array(random.standard_normal(length).astype(bf16)) for length in (k, n_normed))
    out = {
        "normed_output": device.empty(n_normed, "bfloat16"),
        "unnormed_output": device.empty(n - n_normed, "bfloat16"),
    }

    def calls(trace: df.Trace | None) -> Calls:
        return [
            lambda weight=weight: df.gemv_partial_norm(
                act, weight, gamma, n_normed=n_normed, eps=1e-6, trace=trace, **out
            )
            for weight in weights
        ]

    return {"op": "gemv_partial_norm", "algo": "", "rows": n, "cols": k} | compared(device, calls, 64)


def collective(group: df.Group, op: str, rows: int, cols: int, algo: str) -> dict[str, Any]:
    """A collective."""
    random = np.random.default_rng(rows)
    bf16 = dtypes.get("bfloat16").numpy
    sets = [
        [rank.array(random.standard_normal((rows, cols), np.float32).astype(bf16)) for rank in group]
        for _ in range(SETS)
    ]
    gammas = [rank.array(np.linspace(0.5, 1.5, cols, dtype=np.float32).astype(bf16)) for rank in group]

    def calls(trace: df.Trace | None) -> Calls:
        if op == "allreduce":
            return [df.allreduce.prepare(group, xs, algo=algo, trace=trace).launch for xs in sets]
        return [
            df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1e-6, algo=algo, trace=trace).launch
            for xs in sets
        ]

    per_graph = 50 if rows <= 128 else 12
    return {"op": op, "algo": algo, "rows": rows, "cols": cols} | compared(group, calls, per_graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--driver", default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"gpus": arguments.gpus, "overhead": [], "clocks": []}
    with df.Group.local(arguments.gpus, driver=arguments.driver) as group:
        trace = df.Trace(group)
        for _ in range(5):
            trace.records()
            found["clocks"].append([asdict(clock) for clock in trace.clocks])
        for rows, cols in SHAPES:
            for op in ("allreduce", "allreduce_rmsnorm_fp8"):
                for algo in ("one_stage", "two_stage"):
                    found["overhead"].append(collective(group, op, rows, cols, algo))
    found["overhead"].append(gemv(df.device(0, driver=arguments.driver), *GEMV))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    for clocks in found["clocks"]:
        for rank, clock in enumerate(clocks):
            print(f"rank {rank}: " + "  ".join(f"{name} {value:.4g}" for name, value in clock.items()))
    print(f"{'op':<22} {'algo':<10} {'shape':>10} {'off us':>8} {'on us':>8} {'cost':>7} {'spread us':>10}")
    for row in found["overhead"]:
        shape = f"{row['rows']}x{row['cols']}"
        print(
            f"{row['op']:<22} {row['algo']:<10} {shape:>10} {row['off_us']:>8.2f} {row['on_us']:>8.2f} "
            f"{row['overhead']:>7.1%} {row['spread_us']:>10.2f}"
        )


if __name__ == "__main__":
    main()
