# SPDX-License-Identifier: Apache-2.0
"""`drvfuse trace`: one traced call of an op on random data, as tables, a Chrome trace and a timeline."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from .. import dtypes
from ..bench.ops import ALGORITHMS, calls_of
from ..comm.group import Group
from ..errors import ArgumentError, counted, shown
from ..ops.call.options import one_of
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..ops.norm.rmsnorm_fp8 import rmsnorm_fp8
from ..plans.rows import MAX_COLUMNS
from ..runtime.array import Array
from ..runtime.device import Device
from ..runtime.device import device as open_device
from ..runtime.driver import Driver, get_driver
from ..trace.buffer import Trace
from ..trace.plot import check_image
from ..trace.summary import summary
from .shapes import gemv_shape, matrix_shape
from .terminal import progress

_BYTES = 64 << 20
_ROWS_SHAPE = "128x4096"
_GEMV_SHAPE = "2112x7168x1536"


def run_trace(arguments: argparse.Namespace) -> int:
    """Run the op `--warm` times, then once with a trace, and show the phases of its blocks. Returns 0."""
    if arguments.png is not None:
        check_image("--png", arguments.png)  # checked before the run, which may take long
    setup = {"gemv": _gemv, "rmsnorm_fp8": _norm}.get(arguments.op, _collective)(arguments)
    driver = get_driver(arguments.driver)
    with setup(driver) as (trace, launch, title):
        with progress("compiling and running kernels", show=True):
            for _ in range(arguments.warm):
                launch()
            trace.clear()
            launch()
            records = trace.records()
        print(f"{title}, driver {driver.name}")
        print(summary(records, dict(zip(trace.ranks, trace.clocks, strict=True))), end="")
        for path, write in ((arguments.out, trace.chrome), (arguments.png, trace.plot)):
            if path is not None:
                write(path)
                print(f"wrote {path}")
    return 0


_Ready = tuple[Trace, Callable[[], object], str]
_Setup = Callable[[Driver], contextlib.AbstractContextManager[_Ready]]


def _collective(arguments: argparse.Namespace) -> _Setup:
    rows, columns = _rows_shape(arguments, normed="norm" in arguments.op)
    one_of("--algo", arguments.algo, (*ALGORITHMS[arguments.op], "naive"))
    return lambda driver: _open_collective(arguments, driver, rows, columns)


def _rows_shape(arguments: argparse.Namespace, normed: bool) -> tuple[int, int]:
    shape = arguments.shape or _ROWS_SHAPE
    rows, columns = matrix_shape(shape)
    if normed and columns > MAX_COLUMNS:
        raise ArgumentError("--shape", shown(shape), f"of at most {MAX_COLUMNS} columns for {arguments.op}")
    return rows, columns


@contextlib.contextmanager
def _open_collective(arguments: argparse.Namespace, driver: Driver, rows: int, columns: int) -> Iterator[_Ready]:
    present = int(driver.cuDeviceGetCount())
    devices = min(4, present) if arguments.devices is None else arguments.devices
    if devices > min(8, present):
        expected = f"from 1 to {min(8, present)}: the {driver.name} driver has {counted(present, 'device')}"
        raise ArgumentError("--devices", devices, expected)
    with Group.local(devices, driver=driver) as group:
        trace = Trace(group, nbytes=_BYTES)
        (call,) = calls_of(group, arguments.op, rows, columns, sets=1).prepared(arguments.algo, trace=trace)
        yield trace, call.launch, f"{arguments.op}, {rows} x {columns} bfloat16 per rank, {counted(devices, 'device')}"
        group.synchronize()


def _on_one_device(arguments: argparse.Namespace) -> None:
    """Refuse options that an op on one device lacks."""
    if arguments.devices not in (None, 1):
        raise ArgumentError("--devices", arguments.devices, f"1: {arguments.op} runs on one device")
    if arguments.algo != "auto":
        raise ArgumentError("--algo", shown(arguments.algo), f"'auto': {arguments.op} has one algorithm")


def _norm(arguments: argparse.Namespace) -> _Setup:
    _on_one_device(arguments)
    rows, columns = _rows_shape(arguments, normed=True)
    return lambda driver: _open_norm(driver, rows, columns)


@contextlib.contextmanager
def _open_norm(driver: Driver, rows: int, columns: int) -> Iterator[_Ready]:
    device = open_device(0, driver=driver)
    x, gamma = _random(device, (rows, columns), (columns,))
    trace = Trace(device, nbytes=_BYTES)
    call = rmsnorm_fp8.prepare(x, gamma, epsilon=1e-6, trace=trace)
    yield trace, call.launch, f"rmsnorm_fp8, {rows} x {columns} bfloat16"


def _random(device: Device, *shapes: tuple[int, ...]) -> list[Array]:
    random, kind = np.random.default_rng(2024), dtypes.get("bfloat16").numpy
    return [device.array(random.standard_normal(shape, np.float32).astype(kind)) for shape in shapes]


def _gemv(arguments: argparse.Namespace) -> _Setup:
    _on_one_device(arguments)
    n, k, normed = gemv_shape(arguments.shape or _GEMV_SHAPE)
    return lambda driver: _open_gemv(driver, n, k, normed)


@contextlib.contextmanager
def _open_gemv(driver: Driver, n: int, k: int, normed: int) -> Iterator[_Ready]:
    device = open_device(0, driver=driver)
    weight, act, gamma = _random(device, (n, k), (1, k), (normed,))
    trace = Trace(device, nbytes=_BYTES)

    def launch() -> object:
        return gemv_partial_norm(act, weight, gamma, n_normed=normed, epsilon=1e-3, trace=trace)

    yield trace, launch, f"gemv_partial_norm, N {n}, K {k}, n_normed {normed}, bfloat16"
