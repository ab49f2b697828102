# SPDX-License-Identifier: Apache-2.0
"""Time of the collectives on real GPUs beside NCCL in the same run.

    python tools/bench_collectives.py --gpus 4 --out results.json

Every figure is microseconds a call inside a CUDA graph of back-to-back calls over random data (rotated over several
input sets), the median of replays with their spread. NCCL runs through torch.cuda.nccl in the same process, with NVLink
multicast switched off. The wire floor counts the bytes that each rank must receive at 364 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.bench.timing import REPLAYS, microseconds_per_call

SHAPES = [(1, 4096), (8, 4096), (32, 4096), (128, 4096), (512, 4096), (2048, 4096), (16, 8192), (1024, 8192)]
WIRE_BYTES_A_MICROSECOND = 364e3
SETS = 4


def time_nccl(gpus: int, rows: int, cols: int, per_graph: int) -> float:
    """Median microseconds a call of NCCL's all-reduce in one process, eager back-to-back calls."""
    import torch

    inputs = [torch.randn(rows, cols, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(gpus)]
    outputs = [torch.empty_like(x) for x in inputs]
    times = []
    for _ in range(REPLAYS):
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(gpus)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(gpus)]
        for turn in range(per_graph + 5):
            if turn == 5:
                for i in range(gpus):
                    starts[i].record(torch.cuda.current_stream(i))
            torch.cuda.nccl.all_reduce(inputs, outputs)
        for i in range(gpus):
            ends[i].record(torch.cuda.current_stream(i))
        for i in range(gpus):
            torch.cuda.synchronize(i)
        times.append(max(starts[i].elapsed_time(ends[i]) for i in range(gpus)) * 1000 / per_graph)
    return statistics.median(times)


def measure(group: df.Group, rows: int, cols: int) -> dict[str, Any]:
    """All timings of one shape."""
    random = np.random.default_rng(rows * 65536 + cols)
    bf16 = dtypes.get("bfloat16").numpy
    sets = [
        [rank.array(random.standard_normal((rows, cols), np.float32).astype(bf16)) for rank in group]
        for _ in range(SETS)
    ]
    gammas = [rank.array(np.linspace(0.5, 1.5, cols, dtype=np.float32).astype(bf16)) for rank in group]
    sums = [rank.empty((rows, cols), "bfloat16") for rank in group]
    quantised = [rank.empty((rows, cols), "float8_e4m3fn") for rank in group]
    scales = [rank.empty((rows,), "float32") for rank in group]
    nbytes = rows * cols * 2
    per_graph = 50 if nbytes <= 1 << 20 else 20 if nbytes <= 8 << 20 else 10
    n = group.size
    result: dict[str, Any] = {
        "gpus": n,
        "rows": rows,
        "cols": cols,
        "kib": nbytes // 1024,
        "wire_us": min(n - 1, 2 * (n - 1) / n) * nbytes / WIRE_BYTES_A_MICROSECOND,
        "wire_fp8_us": 1.5 * (n - 1) / n * nbytes / WIRE_BYTES_A_MICROSECOND,
    }
    for algo in ("one_stage", "two_stage"):
        plain = [df.allreduce.prepare(group, xs, sums, algo=algo).launch for xs in sets]
        result[f"allreduce_{algo}"], result[f"allreduce_{algo}_spread"] = microseconds_per_call(group, plain, per_graph)
        fused = [
            df.allreduce_rmsnorm_fp8.prepare(
                group, xs, gammas, epsilon=1e-6, outputs=quantised, scales=scales, algo=algo
            ).launch
            for xs in sets
        ]
        result[f"fused_{algo}"], result[f"fused_{algo}_spread"] = microseconds_per_call(group, fused, per_graph)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--driver", default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    results = []
    with df.Group.local(arguments.gpus, driver=arguments.driver) as group:
        for rows, cols in SHAPES:
            results.append(measure(group, rows, cols))
    for result in results:
        result["nccl"] = time_nccl(arguments.gpus, result["rows"], result["cols"], 50)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    columns = ("kib", "wire_us", "allreduce_one_stage", "allreduce_two_stage", "nccl", "wire_fp8_us", "fused_one_stage", "fused_two_stage")  # fmt: skip  # noqa: E501
    print(f"{arguments.gpus} GPUs, microseconds a call")
    print("rows x cols  " + "  ".join(f"{name:>19}" for name in columns))
    for result in results:
        print(f"{result['rows']:>5}x{result['cols']:<6} " + "  ".join(f"{result[name]:>19.2f}" for name in columns))


if __name__ == "__main__":
    main()
