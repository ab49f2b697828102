# SPDX-License-Identifier: Apache-2.0
"""What calls cost on the host.

    python tools/bench_host.py --gpus 2 --out host.json

Microseconds of the calling thread for a call of small arrays, which no call waits for: the median over bursts of
`BURST` calls, and the middle half of the bursts. "launches alone" queues the same kernels by `Launch` only, the least
that a call can cost here. `--profile NAME` prints the profile of one of the calls.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import drvfuse as df
from drvfuse import dtypes

BURST = 50  # of calls, whose launches fit into a stream's queue
BURSTS = 41
Call = Callable[[], object]


def timed(call: Call, wait: Call) -> dict[str, float]:
    """Microseconds of a call: the median, and the bounds of the middle half."""
    times = []
    for _ in range(BURSTS + 1):
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - start) / BURST * 1e6)
        wait()
    low, middle, high = np.quantile(times[1:], (0.25, 0.5, 0.75))
    return {"us": float(middle), "from": float(low), "to": float(high)}


def collectives(group: df.Group) -> dict[str, Call]:
    """The calls that are measured, by name."""
    random, bf16 = np.random.default_rng(0), dtypes.get("bfloat16").numpy
    xs = [rank.array(random.standard_normal((1, 4096), np.float32).astype(bf16)) for rank in group]
    gammas = [rank.array(random.standard_normal(4096, np.float32).astype(bf16)) for rank in group]
    ys = [rank.empty((1, 4096), "bfloat16") for rank in group]
    fused = [rank.empty((1, 4096), "float8_e4m3fn") for rank in group]
    scales = [rank.empty(1, "float32") for rank in group]
    prepared = df.allreduce.prepare(group, xs, ys)
    assert prepared._schedule is not None
    launches = [launch for (launch,) in prepared._schedule.launches]
    streams = [rank.stream for rank in group]

    def alone() -> None:
        for launch, stream in zip(launches, streams, strict=True):
            launch(stream)

    return {
        "launches alone": alone,
        "Prepared.launch()": prepared.launch,
        "allreduce(group, xs, ys)": lambda: df.allreduce(group, xs, ys),
        "allreduce(group, xs)": lambda: df.allreduce(group, xs),
        "naive(group, xs, ys)": lambda: df.allreduce(group, xs, ys, algo="naive"),
        "fused(group, xs, gammas, outputs, scales)": lambda: df.allreduce_rmsnorm_fp8(
            group, xs, gammas, epsilon=1e-6, outputs=fused, scales=scales
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--driver", default="cuda")
    parser.add_argument("--profile", default=None, metavar="NAME")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    with df.Group.local(arguments.gpus, driver=arguments.driver) as group:
        calls = collectives(group)
        for call in calls.values():
            call()
        group.synchronize()
        if arguments.profile:
            with cProfile.Profile() as profile:
                for _ in range(BURST):
                    calls[arguments.profile]()
            group.synchronize()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            return
        found = {name: timed(call, group.synchronize) for name, call in calls.items()}
    for name, time_of in found.items():
        print(f"{name:<42} {time_of['us']:>8.1f} us   ({time_of['from']:.1f} to {time_of['to']:.1f})")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
