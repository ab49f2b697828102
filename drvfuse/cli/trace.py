# SPDX-License-Identifier: Apache-2.0
"""`drvfuse trace`: one traced call of an op on random data, as tables, a Chrome trace and a timeline."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..errors import ArgumentError, Unsupported
from ..ops.allreduce import allreduce
from ..ops.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..runtime.driver import get_driver
from ..trace.buffer import Trace
from .terminal import progress

_BYTES = 64 << 20


def run_trace(arguments: argparse.Namespace) -> int:
    """Run the op `--warm` times, then once more, and show what its blocks did. Returns 0."""
    try:
        from rich.console import Console

        from ..trace.summary import show
    except ModuleNotFoundError:
        raise Unsupported("drvfuse trace needs rich: pip install 'drvfuse[cli]'") from None
    if arguments.png is not None:
        from ..trace.plot import figure_class

        figure_class()  # or it would be missed only after the run
    driver = get_driver(arguments.driver)
    present = int(driver.cuDeviceGetCount())
    devices = min(4, present) if arguments.devices is None else arguments.devices
    if devices > min(8, present):
        raise ArgumentError("--devices", devices, f"from 1 to {min(8, present)}, as the {driver.name} driver has them")
    with Group.local(devices, driver=driver) as group:
        trace = Trace(group, nbytes=_BYTES)
        with progress("compiling and running kernels", show=True):
            launch = _prepared(group, trace, arguments.op, arguments.shape, arguments.algo)
            for _ in range(arguments.warm + 1):  # the last one is what is seen
                launch()
            group.synchronize()
            records = trace.records()
        rows, columns = arguments.shape
        console = Console()
        console.print(f"{arguments.op}, {rows} x {columns} bfloat16 a rank, {devices} devices, driver {driver.name}")
        show(console, records, dict(zip(trace.ranks, trace.clocks, strict=True)))
        for path, write in ((arguments.out, trace.chrome), (arguments.png, trace.plot)):
            if path is not None:
                write(path)
                console.print(f"wrote {path}", highlight=False)
    return 0


def _prepared(group: Group, trace: Trace, op: str, shape: tuple[int, int], algo: str) -> Callable[[], object]:
    random = np.random.default_rng(2024)
    bf16 = dtypes.get("bfloat16").numpy
    inputs = [rank.array(random.standard_normal(shape, np.float32).astype(bf16)) for rank in group]
    if op == "allreduce":
        return allreduce.prepare(group, inputs, algo=algo, trace=trace).launch
    gamma = (1 + 0.1 * random.standard_normal(shape[1], np.float32)).astype(bf16)
    gammas = [rank.array(gamma) for rank in group]
    return allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, epsilon=1e-6, algo=algo, trace=trace).launch
