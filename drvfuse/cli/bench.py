# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench`: an op beside its floor and its peers on a real GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from ..bench import fp8_rmsnorm
from ..bench.timing import copy_bandwidth
from ..errors import ArgumentError, Unsupported
from ..runtime.device import device
from .terminal import progress, table


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentError("--shape", repr(text), "rows x columns, such as 8192x4096")
    rows, columns = map(int, parts)
    if columns % fp8_rmsnorm.QB:
        raise ArgumentError("--shape", repr(text), f"of columns that are a multiple of {fp8_rmsnorm.QB}")
    return rows, columns


def _require(option: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unsupported(f"{option} needs the package {package}, which is not installed")


def run_bench(arguments: argparse.Namespace) -> int:
    """Time every shape and print the table; JSON and the plot go to the files asked for. Returns the exit status."""
    shapes = [_shape(text) for text in arguments.shape] if arguments.shape else list(fp8_rmsnorm.SHAPES)
    if arguments.plot:
        _require("--plot", "matplotlib")
    if arguments.torch:
        _require("--torch", "torch")
    gpu = device(arguments.device, driver="cuda")
    results = []
    with progress("measuring", show=True):
        bandwidth = copy_bandwidth(gpu)
        for rows, columns in shapes:
            results.append(fp8_rmsnorm.measure(gpu, rows, columns, bandwidth, arguments.torch))
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(results, indent=1))
    print(f"{gpu.name}: a copy moves {bandwidth / 1e6:.2f} TB/s; x floor: over the bytes of the op at that rate")
    print(table(fp8_rmsnorm.HEAD, [fp8_rmsnorm.row(result) for result in results], text_columns=1))
    if arguments.plot:
        fp8_rmsnorm.plot(results, Path(arguments.plot))
    return 0
