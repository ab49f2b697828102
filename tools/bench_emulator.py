# SPDX-License-Identifier: Apache-2.0
"""CPU time that the emulated driver takes for one call of the fused op, with and without its race detector.

    python tools/bench_emulator.py [--gpus 4] [--rows 128] [--cols 4096] [--calls 8] [--seeds 2]

The op is prepared and compiled before; a call is launch and synchronise. Each line is an algorithm: the first call and
the slowest one, over all seeds, in CPU seconds of this process. These are times of this program, not of any GPU.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import drvfuse as df
from drvfuse import dtypes, emu

ALGORITHMS = ("one_stage", "two_stage", "naive")


def measure(algo: str, race: bool, seed: int, options: Any) -> list[float]:
    """CPU seconds of each call. Fails where a call leaves a report."""
    bf16 = dtypes.get("bfloat16").numpy
    random = np.random.default_rng(seed)
    seconds = []
    with (
        emu.Machine(devices=options.gpus, seed=seed, race=race) as machine,
        df.Group.local(options.gpus, driver=machine) as group,
    ):
        shape = (options.rows, options.cols)
        inputs = [rank.array(random.standard_normal(shape, np.float32).astype(bf16)) for rank in group]
        gammas = [rank.array(np.ones(options.cols, bf16)) for rank in group]
        prepared = df.allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, epsilon=1e-6, algo=algo)
        for _ in range(options.calls):
            start = time.process_time()
            prepared.launch()
            group.synchronize()
            seconds.append(time.process_time() - start)
        if machine.reports:
            raise SystemExit(f"{algo}: {machine.reports[0]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("gpus", 4), ("rows", 128), ("cols", 4096), ("calls", 8), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"fused op, {options.gpus} GPUs, {options.rows} x {options.cols} bfloat16: CPU seconds a call")
    print("algorithm   detector   first   slowest")
    for algo in ALGORITHMS:
        for race in (False, True):
            runs = [measure(algo, race, seed, options) for seed in range(options.seeds)]
            first, slowest = max(run[0] for run in runs), max(max(run) for run in runs)
            print(f"{algo:11} {'on' if race else 'off':8} {first:7.2f} {slowest:9.2f}", flush=True)


if __name__ == "__main__":
    main()
