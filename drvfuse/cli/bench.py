# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench`: an op beside its floor and its peers on a real GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..bench import fp8_rmsnorm, fp8_siblings, gemv, host
from ..bench.timing import copy_bandwidth
from ..errors import ArgumentError, DriverUnavailable, Unsupported
from ..runtime.device import Device, device
from ..runtime.driver import get_driver
from ..trace.plot import check_image
from .shapes import gemv_shape, matrix_shape
from .terminal import progress, table

Measure = Callable[..., dict[str, Any]]


def _fp8_shape(text: str) -> tuple[int, int]:
    rows, columns = matrix_shape(text)
    if columns % fp8_rmsnorm.QB:
        raise ArgumentError("--shape", repr(text), f"of columns that are a multiple of {fp8_rmsnorm.QB}")
    return rows, columns


def _floor(gpu: Device) -> tuple[str, float]:
    bandwidth = copy_bandwidth(gpu)
    return f"a copy moves {bandwidth / 1e6:.2f} TB/s; x floor: over the bytes of the op at that rate", bandwidth


def _fp8(gpu: Device, torch: bool) -> tuple[str, Measure]:
    note, bandwidth = _floor(gpu)
    return note, lambda rows, columns: fp8_rmsnorm.measure(gpu, rows, columns, bandwidth, torch)


def _siblings(gpu: Device, torch: bool) -> tuple[str, Measure]:
    if torch:
        raise ArgumentError("--torch", "given", "left out: fp8-siblings has no peers in torch")
    note, bandwidth = _floor(gpu)
    return note, lambda rows, columns: fp8_siblings.measure(gpu, rows, columns, bandwidth)


def _gemv(gpu: Device, torch: bool) -> tuple[str, Measure]:
    return "microseconds a call, bfloat16, one token; read: a kernel that only reads", gemv.Bench(gpu, torch).measure


_OPS: dict[str, tuple[Any, Callable[[str], tuple[int, ...]], Callable[[Device, bool], tuple[str, Measure]]]] = {
    "fp8-rmsnorm": (fp8_rmsnorm, _fp8_shape, _fp8),
    "fp8-siblings": (fp8_siblings, _fp8_shape, _siblings),
    "gemv": (gemv, gemv_shape, _gemv),
}


def _require(option: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unsupported(f"{option} needs the package {package}, which is not installed")


def _run_host(arguments: argparse.Namespace) -> int:
    """Time calls on the host and print the table; JSON goes to the file asked for. Returns the exit status."""
    for option in ("shape", "torch", "plot"):
        if getattr(arguments, option):
            raise ArgumentError(f"--{option}", "given", "left out: host has shapes of its own, no peers and no chart")
    driver = get_driver(arguments.driver)
    present = int(driver.cuDeviceGetCount())
    ranks = min(4, present) if arguments.devices is None else arguments.devices
    if ranks > min(8, present):
        raise ArgumentError("--devices", ranks, f"from 1 to {min(8, present)}, as the {driver.name} driver has them")
    with progress("measuring", show=True):
        results = host.measure(driver, ranks)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1))
    note = "" if driver.name == "cuda" else "; on emulated GPUs the times mean nothing"
    print(f"microseconds of the calling thread a call, driver {driver.name}{note}")
    print(table(host.HEAD, [line for result in results for line in host.lines(result)], host.TEXT_COLUMNS))
    return 0


def run_bench(arguments: argparse.Namespace) -> int:
    """Time every shape and print the table; JSON and the plot go to the files asked for. Returns the exit status."""
    if arguments.op == "host":
        return _run_host(arguments)
    for option in ("driver", "devices"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"--{option}", "given", "left out but for host: the others run on one real GPU")
    op, shape, start = _OPS[arguments.op]
    shapes = [shape(text) for text in arguments.shape] if arguments.shape else list(op.SHAPES)
    if arguments.plot:
        _require("--plot", "matplotlib")
        check_image("--plot", arguments.plot)
    if arguments.torch:
        _require("--torch", "torch")
    try:
        gpu = device(arguments.device, driver="cuda")
    except DriverUnavailable as error:  # whose advice, to ask for emulated GPUs, is none here
        why = "a benchmark needs a GPU, as emulated times mean nothing; `drvfuse doctor` says what is missing"
        raise DriverUnavailable(why) from error
    results = []
    with progress("measuring", show=True):
        note, measure = start(gpu, arguments.torch)
        for one in shapes:
            results.append(measure(*one))
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(results, indent=1))
    print(f"{gpu.name}: {note}")
    print(table(op.HEAD, [line for result in results for line in op.lines(result)], text_columns=op.TEXT_COLUMNS))
    if arguments.plot:
        op.plot(results, Path(arguments.plot))
    return 0
