# SPDX-License-Identifier: Apache-2.0
"""`drvfuse trace`: one traced call of an op on random data, as tables, a Chrome trace and a timeline."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..errors import ArgumentError, Unsupported
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..plans.collectives import MAX_COLUMNS
from ..runtime.device import device as open_device
from ..runtime.driver import Driver, get_driver
from ..trace.buffer import Trace
from ..trace.plot import check_image
from .shapes import gemv_shape, matrix_shape
from .terminal import progress

_BYTES = 64 << 20
_COLLECTIVE_SHAPE = "128x4096"
_GEMV_SHAPE = "2112x7168x1536"


def run_trace(arguments: argparse.Namespace) -> int:
    """Run the op `--warm` times, then once more, and show what its blocks did. Returns 0."""
    try:
        from rich.console import Console

        from ..trace.summary import show
    except ModuleNotFoundError:
        raise Unsupported("drvfuse trace needs rich: pip install 'drvfuse[cli]'") from None
    if arguments.png is not None:
        check_image("--png", arguments.png)  # or it would be refused only after the run
    setup = _gemv(arguments) if arguments.op == "gemv" else _collective(arguments)
    driver = get_driver(arguments.driver)
    with setup(driver) as (trace, launch, title):
        with progress("compiling and running kernels", show=True):
            for _ in range(arguments.warm):
                launch()
            trace.clear()
            launch()
            records = trace.records()
        console = Console()
        console.print(f"{title}, driver {driver.name}", highlight=False)
        show(console, records, dict(zip(trace.ranks, trace.clocks, strict=True)))
        for path, write in ((arguments.out, trace.chrome), (arguments.png, trace.plot)):
            if path is not None:
                write(path)
                console.print(f"wrote {path}", highlight=False)
    return 0


_Ready = tuple[Trace, Callable[[], object], str]
_Setup = Callable[[Driver], contextlib.AbstractContextManager[_Ready]]


def _collective(arguments: argparse.Namespace) -> _Setup:
    shape = arguments.shape or _COLLECTIVE_SHAPE
    rows, columns = matrix_shape(shape)
    if arguments.op != "allreduce" and columns > MAX_COLUMNS:
        raise ArgumentError("--shape", repr(shape), f"of at most {MAX_COLUMNS} columns for {arguments.op}")
    return lambda driver: _open_collective(arguments, driver, rows, columns)


@contextlib.contextmanager
def _open_collective(arguments: argparse.Namespace, driver: Driver, rows: int, columns: int) -> Iterator[_Ready]:
    present = int(driver.cuDeviceGetCount())
    devices = min(4, present) if arguments.devices is None else arguments.devices
    if devices > min(8, present):
        expected = f"from 1 to {min(8, present)}, as the {driver.name} driver has them"
        raise ArgumentError("--devices", devices, expected)
    random = np.random.default_rng(2024)
    with Group.local(devices, driver=driver) as group:
        trace = Trace(group, nbytes=_BYTES)
        inputs = [rank.array(_bf16(random.standard_normal((rows, columns), np.float32))) for rank in group]
        if arguments.op == "allreduce":
            launch: Callable[[], object] = allreduce.prepare(group, inputs, algo=arguments.algo, trace=trace).launch
        else:
            gamma = _bf16(1 + 0.1 * random.standard_normal(columns, np.float32))
            gammas = [rank.array(gamma) for rank in group]
            launch = allreduce_rmsnorm_fp8.prepare(
                group, inputs, gammas, epsilon=1e-6, algo=arguments.algo, trace=trace
            ).launch

        yield trace, launch, f"{arguments.op}, {rows} x {columns} bfloat16 per rank, {devices} devices"
        group.synchronize()


def _gemv(arguments: argparse.Namespace) -> _Setup:
    if arguments.devices not in (None, 1):
        raise ArgumentError("--devices", arguments.devices, "1: gemv runs on one device")
    if arguments.algo != "auto":
        raise ArgumentError("--algo", arguments.algo, "auto: gemv has one algorithm")
    n, k, normed = gemv_shape(arguments.shape or _GEMV_SHAPE)
    return lambda driver: _open_gemv(driver, n, k, normed)


@contextlib.contextmanager
def _open_gemv(driver: Driver, n: int, k: int, normed: int) -> Iterator[_Ready]:
    random = np.random.default_rng(2024)
    device = open_device(0, driver=driver)
    weight, act, gamma = (
        device.array(_bf16(random.standard_normal(shape, np.float32))) for shape in ((n, k), (1, k), normed)
    )
    trace = Trace(device, nbytes=_BYTES)

    def launch() -> object:
        return gemv_partial_norm(act, weight, gamma, n_normed=normed, eps=1e-3, trace=trace)

    yield trace, launch, f"gemv_partial_norm, N {n}, K {k}, n_normed {normed}, bfloat16"


def _bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(dtypes.get("bfloat16").numpy)
