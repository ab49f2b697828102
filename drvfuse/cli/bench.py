# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench`: the benchmarks by name, the start of those that `bench_groups` lacks, and the printed table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..bench import (
    coat,
    coat_siblings,
    collectives_report,
    emulator,
    gemv,
    host,
    moves,
    nodes,
    norm,
    processes,
    rows_forms,
    trace_cost,
)
from ..bench.timing import copy_bandwidth
from ..errors import ArgumentError, Unsupported, shown
from ..runtime.device import Device, device
from ..tables import table
from ..trace.plot import check_image
from . import bench_groups
from .bench_options import Started, real, require, row_shapes, shapes_of
from .shapes import gemv_shape, matrix_shape
from .terminal import counting


def _fp8_shape(text: str) -> tuple[int, int]:
    rows, columns = matrix_shape(text)
    if columns % coat.QB:
        raise ArgumentError("--shape", shown(text), f"rows x columns, columns a multiple of {coat.QB}")
    return rows, columns


def _gpu(arguments: argparse.Namespace) -> Device:
    with real():
        return device(arguments.device, driver="cuda")


def _floor(gpu: Device) -> tuple[str, float]:
    bandwidth = copy_bandwidth(gpu)
    note = f"{gpu.name}: a copy moves {bandwidth / 1e6:.2f} TB/s; x floor: over the bytes of the op at that rate"
    return note, bandwidth


def _fp8(arguments: argparse.Namespace) -> Started:
    shapes, gpu = shapes_of(arguments, _fp8_shape, coat.SHAPES), _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (coat.measure(gpu, *shape, bandwidth, arguments.torch) for shape in shapes), len(shapes)


def _siblings(arguments: argparse.Namespace) -> Started:
    shapes, gpu = shapes_of(arguments, _fp8_shape, coat_siblings.SHAPES), _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (coat_siblings.measure(gpu, *shape, bandwidth) for shape in shapes), len(shapes)


def _rmsnorm_fp8(arguments: argparse.Namespace) -> Started:
    shapes = row_shapes(arguments, norm.SHAPES)
    gpu = _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (norm.measure(gpu, *shape, bandwidth, arguments.torch) for shape in shapes), len(shapes)


def _gemv(arguments: argparse.Namespace) -> Started:
    if arguments.rows > 8:
        raise ArgumentError("--rows", arguments.rows, "from 1 to 8")
    if arguments.torch and arguments.rows > 1:
        raise Unsupported("--torch measures torch's versions with one row of act only; leave out --rows")
    shapes, gpu = shapes_of(arguments, gemv_shape, gemv.SHAPES), _gpu(arguments)
    bench = gemv.Bench(gpu, arguments.torch)
    note = f"{gpu.name}: microseconds per call, bfloat16, {arguments.rows} rows of act; read: a kernel that only reads"
    return note, (bench.measure(*shape, arguments.rows) for shape in shapes), len(shapes)


def _emulator(arguments: argparse.Namespace) -> Started:
    rows, cols = matrix_shape(arguments.shape) if arguments.shape else emulator.SHAPE
    note = f"emulated driver, {arguments.gpus} GPUs, fused op, {rows} x {cols} bfloat16: CPU seconds per call"
    return (
        note,
        emulator.measure(arguments.gpus, rows, cols, arguments.calls, arguments.seeds),
        2 * len(emulator.ALGORITHMS),
    )


_BENCHMARKS: dict[str, tuple[Any, Callable[[argparse.Namespace], Started]]] = {
    "all-gather": (moves, bench_groups.time_moves),
    "all-to-all": (moves, bench_groups.time_moves),
    "allreduce": (collectives_report, bench_groups.time_collectives),
    "allreduce-many": (moves, bench_groups.time_moves),
    "allreduce-rmsnorm-fp8": (collectives_report, bench_groups.time_collectives),
    "broadcast": (moves, bench_groups.time_moves),
    "emulator": (emulator, _emulator),
    "fp8-rmsnorm": (coat, _fp8),
    "fp8-siblings": (coat_siblings, _siblings),
    "fused-forms": (rows_forms, bench_groups.time_forms),
    "gemv": (gemv, _gemv),
    "host": (host, bench_groups.time_host),
    "nodes": (nodes, bench_groups.time_nodes),
    "processes": (processes, bench_groups.time_processes),
    "rmsnorm-fp8": (norm, _rmsnorm_fp8),
    "reduce-scatter": (moves, bench_groups.time_moves),
    "reduce-scatter-rmsnorm-fp8": (moves, bench_groups.time_moves),
    "trace-cost": (trace_cost, bench_groups.time_traces),
}


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON and plot files of the options. Returns the exit status."""
    module, start = _BENCHMARKS[arguments.benchmark]
    plot = getattr(arguments, "plot", None)
    if plot:
        require("--plot", "matplotlib")
        check_image("--plot", plot)
    if getattr(arguments, "torch", False):
        require("--torch", "torch")
    results = []
    note, measured, total = start(arguments)
    with counting(f"results of bench {arguments.benchmark}", total, show=True) as done:
        for result in measured:
            results.append(result)
            done()
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(results, indent=1))
    print(note)
    rows = [line for result in results for line in module.lines(result)]
    used = [i for i in range(len(module.HEAD)) if any(row[i] for row in rows)]
    head, *rows = ([row[i] for i in used] for row in (module.HEAD, *rows))
    print(table(head, rows, text_columns=sum(i < module.TEXT_COLUMNS for i in used)))
    for line in getattr(module, "notes", lambda results: [])(results):
        print(line)
    if plot:
        module.plot(results, Path(plot))
    return 0
