# SPDX-License-Identifier: Apache-2.0
"""`drvfuse bench`: ops beside their floors and peers on real GPUs, and what the emulated driver costs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..bench import (
    collectives,
    collectives_report,
    emulator,
    fp8_rmsnorm,
    fp8_siblings,
    fused_forms,
    gemv,
    host,
    moves,
    nodes,
    processes,
    rmsnorm_fp8,
    stored_peers,
    trace_cost,
)
from ..bench.forms import FORMS
from ..bench.ops import ALGORITHMS
from ..bench.settings import EMULATED, Settings
from ..bench.timing import copy_bandwidth
from ..comm.group import Group
from ..errors import ArgumentError, DriverUnavailable, Unsupported
from ..ops.call.options import one_of
from ..plans.collectives import MAX_BLOCKS, MAX_COLUMNS
from ..runtime.device import Device, device
from ..runtime.driver import Driver, get_driver
from ..runtime.multicast_support import VETOES, refuse_vetoed, require_multicast
from ..trace.plot import check_image
from .shapes import gemv_shape, matrix_shape
from .terminal import progress, table

Started = tuple[str, Iterator[dict[str, Any]]]
"""The heading of the table, and its rows: an iterator, which measures each row when it is asked for it."""


_Shape = TypeVar("_Shape", bound=tuple[int, ...])


def _shapes(
    arguments: argparse.Namespace, parse: Callable[[str], _Shape], default: Sequence[_Shape]
) -> Sequence[_Shape]:
    return [parse(text) for text in arguments.shape] if arguments.shape else default


def _fp8_shape(text: str) -> tuple[int, int]:
    rows, columns = matrix_shape(text)
    if columns % fp8_rmsnorm.QB:
        raise ArgumentError("--shape", repr(text), f"of columns that are a multiple of {fp8_rmsnorm.QB}")
    return rows, columns


@contextlib.contextmanager
def _real(multicast: bool = False) -> Iterator[None]:
    if multicast:
        refuse_vetoed()
    else:
        os.environ.update(VETOES)  # set before a peer is loaded that would create multicast objects
    try:
        yield
    except DriverUnavailable as error:  # its advice to use emulated GPUs does not help here
        why = "a benchmark needs a GPU, as emulated times mean nothing; `drvfuse doctor` says what is missing"
        raise DriverUnavailable(why) from error


def _gpu(arguments: argparse.Namespace) -> Device:
    with _real():
        return device(arguments.device, driver="cuda")


def _floor(gpu: Device) -> tuple[str, float]:
    bandwidth = copy_bandwidth(gpu)
    note = f"{gpu.name}: a copy moves {bandwidth / 1e6:.2f} TB/s; x floor: over the bytes of the op at that rate"
    return note, bandwidth


def _fp8(arguments: argparse.Namespace) -> Started:
    shapes, gpu = _shapes(arguments, _fp8_shape, fp8_rmsnorm.SHAPES), _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (fp8_rmsnorm.measure(gpu, *shape, bandwidth, arguments.torch) for shape in shapes)


def _siblings(arguments: argparse.Namespace) -> Started:
    shapes, gpu = _shapes(arguments, _fp8_shape, fp8_siblings.SHAPES), _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (fp8_siblings.measure(gpu, *shape, bandwidth) for shape in shapes)


def _rmsnorm_fp8(arguments: argparse.Namespace) -> Started:
    shapes = _row_shapes(arguments, rmsnorm_fp8.SHAPES)
    gpu = _gpu(arguments)
    note, bandwidth = _floor(gpu)
    return note, (rmsnorm_fp8.measure(gpu, *shape, bandwidth, arguments.torch) for shape in shapes)


def _gemv(arguments: argparse.Namespace) -> Started:
    if arguments.rows > 8:
        raise ArgumentError("--rows", arguments.rows, "from 1 to 8")
    if arguments.torch and arguments.rows > 1:
        raise Unsupported("--torch times torch's versions with one row of act")
    shapes, gpu = _shapes(arguments, gemv_shape, gemv.SHAPES), _gpu(arguments)
    bench = gemv.Bench(gpu, arguments.torch)
    note = f"{gpu.name}: microseconds per call, bfloat16, {arguments.rows} rows of act; read: a kernel that only reads"
    return note, (bench.measure(*shape, arguments.rows) for shape in shapes)


def _on_group(arguments: argparse.Namespace, measure: Callable[[Group], Iterator[dict[str, Any]]]) -> Started:
    with _real():
        group = Group.local(arguments.gpus, driver="cuda")

    def results() -> Iterator[dict[str, Any]]:
        with group:
            yield from measure(group)

    return f"{group.size} x {group.ranks[0].device.name}: microseconds per call, bfloat16", results()


def _collectives(arguments: argparse.Namespace) -> Started:
    op = arguments.benchmark.replace("-", "_")
    shapes = [matrix_shape(text, "--shapes") for text in arguments.shapes or ()] or stored_peers.shapes()
    for rows, columns in shapes:
        if op != "allreduce" and columns > MAX_COLUMNS:
            raise ArgumentError("--shapes", repr(f"{rows}x{columns}"), f"of at most {MAX_COLUMNS} columns")
    multimem = getattr(arguments, "multimem", False)
    known = (*collectives_report.ALGORITHMS, *(collectives_report.MULTIMEM if multimem else ()))
    algos = [one_of("--algos", algo, known) for algo in arguments.algos or known]
    residuals = [False] if op == "allreduce" else [False, True] if arguments.residual is None else [arguments.residual]
    with_peers = _with_peers(arguments)
    group = _group(arguments, multimem)
    measured = partial(collectives.measure, group, op, shapes, algos, residuals, _settings(arguments), with_peers)
    return _head(arguments, op, group), _while_open(group, lambda: measured(multimem))


def _with_peers(arguments: argparse.Namespace) -> bool:
    """Whether peers are measured: where torch is installed, unless the option says otherwise."""
    emulated, installed = arguments.driver == "emu", _installed("torch")
    if arguments.peers and emulated:
        raise Unsupported("--peers needs real GPUs: on emulated ones only drvfuse runs")
    if arguments.peers:
        _require("--peers", "torch")
    return arguments.peers is not False and installed and not emulated


def _group(arguments: argparse.Namespace, multimem: bool = False) -> Group:
    """The group of `--gpus` devices, with blocks on all multiprocessors unless told otherwise."""
    with contextlib.nullcontext() if arguments.driver == "emu" else _real(multimem):
        driver = _driver_of(arguments, least=2)
        if multimem:
            require_multicast([device(index, driver=driver) for index in range(arguments.gpus)])
        blocks = arguments.max_blocks or min(MAX_BLOCKS, device(0, driver=driver).sm_count)
        return Group.local(arguments.gpus, driver=driver, max_blocks=blocks)


def _while_open(
    group: Group, measure: Callable[[], Iterator[dict[str, Any]]], *others: contextlib.AbstractContextManager[Any]
) -> Iterator[dict[str, Any]]:
    """The results of `measure`, whose group is closed behind them."""
    with group, contextlib.ExitStack() as open_too:
        for other in others:
            open_too.enter_context(other)
        yield from measure()


def _settings(arguments: argparse.Namespace, calls: int = Settings.calls) -> Settings:
    return EMULATED if arguments.driver == "emu" else Settings(calls=calls)


def _head(arguments: argparse.Namespace, what: str, group: Group) -> str:
    """The line above a table of collectives."""
    note = f"{what}, {group.size} x {group[0].device.name}, bfloat16{_meaning(group.driver)}"
    asked = getattr(arguments, "peers", False) is not False
    return f"{note}; peers need torch, which is not installed" if asked and not _installed("torch") else note


def _moves(arguments: argparse.Namespace) -> Started:
    op = arguments.benchmark.replace("-", "_")
    known = ALGORITHMS[op]
    algos = [one_of("--algos", algo, known) for algo in arguments.algos or known]
    with_peers = _with_peers(arguments)
    group = _group(arguments)
    kib, settings = arguments.kib or moves.KIB, _settings(arguments, calls=40)
    return _head(arguments, op, group), _while_open(
        group, lambda: moves.measure(group, op, kib, algos, settings, with_peers)
    )


def _fused_forms(arguments: argparse.Namespace) -> Started:
    ops, shapes = _ops(arguments, fused_forms.OPS), _row_shapes(arguments, fused_forms.SHAPES)
    forms = [one_of("--form", name, tuple(FORMS)) for name in arguments.form or FORMS]
    for name in arguments.form or ():
        for rows, columns in shapes:
            if not FORMS[name].fits(columns):
                raise ArgumentError("--shape", repr(f"{rows}x{columns}"), f"of columns that {name} divides")
    group = _group(arguments)
    measured = partial(fused_forms.measure, group, ops, shapes, forms, _settings(arguments, calls=40))
    return _head(arguments, "fused norms", group), _while_open(group, measured)


def _row_shapes(arguments: argparse.Namespace, default: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The shapes given, of rows that can be normed."""
    shapes = _shapes(arguments, lambda text: matrix_shape(text, "--shape"), default)
    for rows, columns in shapes:
        if columns > MAX_COLUMNS:
            raise ArgumentError("--shape", repr(f"{rows}x{columns}"), f"of at most {MAX_COLUMNS} columns")
    return shapes


def _ops(arguments: argparse.Namespace, known: Iterable[str]) -> list[str]:
    """The ops that are asked for, by the names of their benchmarks; by default all."""
    names = {op.replace("_", "-"): op for op in known}
    return [names[one_of("--op", name, tuple(names))] for name in arguments.op or names]


def _trace_cost(arguments: argparse.Namespace) -> Started:
    return _on_group(arguments, trace_cost.measure)


def _host(arguments: argparse.Namespace) -> Started:
    driver = _driver_of(arguments, least=1)
    note = f"microseconds of the calling thread per call, driver {driver.name}{_meaning(driver)}"
    return note, iter(host.measure(driver, arguments.gpus))


def _driver_of(arguments: argparse.Namespace, least: int) -> Driver:
    """The driver, which has as many devices as `--gpus` asks for."""
    driver = get_driver(arguments.driver)
    most = min(8, int(driver.cuDeviceGetCount()))
    if not least <= arguments.gpus <= most:
        raise ArgumentError("--gpus", arguments.gpus, f"from {least} to {most}, as the {driver.name} driver has them")
    return driver


def _meaning(driver: Driver) -> str:
    return "" if driver.name == "cuda" else "; on emulated GPUs the times mean nothing"


def _processes(arguments: argparse.Namespace) -> Started:
    ops, shapes = _ops(arguments, ALGORITHMS), _row_shapes(arguments, processes.SHAPES)
    emulated, every = arguments.driver == "emu", tuple(dict.fromkeys(algo for op in ops for algo in ALGORITHMS[op]))
    algos = [one_of("--algos", algo, every) for algo in arguments.algos or ()]
    if emulated and arguments.nodes > 1:
        raise Unsupported("--nodes needs NCCL, which has no emulated form; `drvfuse bench nodes` runs in one process")
    if emulated and not os.environ.get("DRVFUSE_EMU_MACHINE"):
        raise Unsupported("--driver emu needs DRVFUSE_EMU_MACHINE, a machine that the processes share")
    with contextlib.nullcontext() if emulated else _real():
        driver = _driver_of(arguments, least=2)
        exchange = "nccl" if arguments.nodes > 1 else None
        group = Group.local(arguments.gpus, driver=driver, nodes=_nodes_of(arguments), exchange=exchange)
    workers = processes.Workers(arguments.driver, group.size, arguments.nodes)
    measured = partial(processes.measure, group, workers, ops, shapes, algos or processes.PUSHES, _settings(arguments))
    return _head(arguments, "collectives", group), _while_open(group, measured, workers)


def _nodes(arguments: argparse.Namespace) -> Started:
    ops, shapes = _ops(arguments, ALGORITHMS), _row_shapes(arguments, nodes.SHAPES)
    with contextlib.nullcontext() if arguments.driver == "emu" else _real():
        driver = _driver_of(arguments, least=2)
    if arguments.nodes < 2:
        raise ArgumentError("--nodes", arguments.nodes, "at least 2")
    settings, count = _settings(arguments, calls=40), _nodes_of(arguments)
    exchange = "in_process" if arguments.driver == "emu" else "nccl"
    measured = nodes.measure(driver, arguments.gpus, count, exchange, ops, shapes, settings)
    return f"{arguments.gpus} GPUs as {arguments.nodes} nodes{_meaning(driver)}", measured


def _nodes_of(arguments: argparse.Namespace) -> int:
    if arguments.gpus % arguments.nodes:
        raise ArgumentError("--nodes", arguments.nodes, f"a number that divides the {arguments.gpus} GPUs")
    return int(arguments.nodes)


def _emulator(arguments: argparse.Namespace) -> Started:
    rows, cols = matrix_shape(arguments.shape) if arguments.shape else emulator.SHAPE
    note = f"emulated driver, {arguments.gpus} GPUs, fused op, {rows} x {cols} bfloat16: CPU seconds per call"
    return note, emulator.measure(arguments.gpus, rows, cols, arguments.calls, arguments.seeds)


_BENCHMARKS: dict[str, tuple[Any, Callable[[argparse.Namespace], Started]]] = {
    "all-gather": (moves, _moves),
    "all-to-all": (moves, _moves),
    "allreduce": (collectives_report, _collectives),
    "allreduce-many": (moves, _moves),
    "allreduce-rmsnorm-fp8": (collectives_report, _collectives),
    "broadcast": (moves, _moves),
    "emulator": (emulator, _emulator),
    "fp8-rmsnorm": (fp8_rmsnorm, _fp8),
    "fp8-siblings": (fp8_siblings, _siblings),
    "fused-forms": (fused_forms, _fused_forms),
    "gemv": (gemv, _gemv),
    "host": (host, _host),
    "nodes": (nodes, _nodes),
    "processes": (processes, _processes),
    "rmsnorm-fp8": (rmsnorm_fp8, _rmsnorm_fp8),
    "reduce-scatter": (moves, _moves),
    "reduce-scatter-rmsnorm-fp8": (moves, _moves),
    "trace-cost": (trace_cost, _trace_cost),
}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _require(option: str, package: str) -> None:
    if not _installed(package):
        raise Unsupported(f"{option} needs the package {package}, which is not installed")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and print the table; JSON and the plot go to the files asked for. Returns the exit status."""
    module, start = _BENCHMARKS[arguments.benchmark]
    plot = getattr(arguments, "plot", None)
    if plot:
        _require("--plot", "matplotlib")
        check_image("--plot", plot)
    if getattr(arguments, "torch", False):
        _require("--torch", "torch")
    results = []
    with progress("measuring", show=True):
        note, measured = start(arguments)
        for result in measured:
            results.append(result)
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
