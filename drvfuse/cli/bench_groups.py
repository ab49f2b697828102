# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of groups: collectives in one process, in several and over nodes, calls on the host, and traces.

Each function checks the options of its benchmark, opens what it needs, and returns what is to be printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..bench import collectives, collectives_report, host, moves, nodes, processes, rows_forms, stored_peers, trace_cost
from ..bench.forms import FORMS
from ..bench.ops import ALGORITHMS
from ..bench.settings import EMULATED, Settings
from ..comm.group import Group
from ..errors import ArgumentError, Unsupported, counted, shown
from ..ops.call.options import one_of
from ..plans.rows import MAX_COLUMNS
from ..plans.shared import MAX_BLOCKS
from ..runtime.device import device
from ..runtime.driver import Driver, get_driver
from ..runtime.multicast_support import require_multicast
from .bench_options import Started, installed, ops_of, real, require, row_shapes
from .shapes import matrix_shape


def time_collectives(arguments: argparse.Namespace) -> Started:
    op = arguments.benchmark.replace("-", "_")
    shapes = [matrix_shape(text, "--shapes") for text in arguments.shapes or ()] or stored_peers.shapes()
    for rows, columns in shapes:
        if op != "allreduce" and columns > MAX_COLUMNS:
            raise ArgumentError("--shapes", shown(f"{rows}x{columns}"), f"of at most {MAX_COLUMNS} columns")
    multimem = getattr(arguments, "multimem", False)
    known = (*collectives_report.ALGORITHMS, *(collectives_report.MULTIMEM if multimem else ()))
    algos = [one_of("--algos", algo, known) for algo in arguments.algos or known]
    residuals = [False] if op == "allreduce" else [False, True] if arguments.residual is None else [arguments.residual]
    with_peers = _with_peers(arguments)
    group = _group(arguments, multimem)
    measured = partial(collectives.measure, group, op, shapes, algos, residuals, _settings(arguments), with_peers)
    return _head(arguments, op, group), _while_open(group, lambda: measured(multimem)), len(shapes) * len(residuals)


def _with_peers(arguments: argparse.Namespace) -> bool:
    """Whether peers are measured: as `--peers` or `--no-peers` says; without these options, if torch is installed and
    the GPUs are real."""
    emulated = arguments.driver == "emu"
    if arguments.peers and emulated:
        raise Unsupported("--peers needs real GPUs: on emulated ones only drvfuse runs")
    if arguments.peers:
        require("--peers", "torch")
    return arguments.peers is not False and installed("torch") and not emulated


def _group(arguments: argparse.Namespace, multimem: bool = False) -> Group:
    """The group of `--gpus` devices. By default its calls may have blocks on all multiprocessors."""
    with _gpus(arguments, multimem):
        driver = _driver_of(arguments, least=2)
        if multimem:
            require_multicast([device(index, driver=driver) for index in range(arguments.gpus)])
        blocks = arguments.max_blocks or min(MAX_BLOCKS, device(0, driver=driver).sm_count)
        return Group.local(arguments.gpus, driver=driver, max_blocks=blocks)


def _while_open(group: Group, measure: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields the results of `measure`, then closes the group."""
    with group:
        yield from measure()


def _gpus(arguments: argparse.Namespace, multimem: bool = False) -> contextlib.AbstractContextManager[None]:
    """A `with` block that uses the driver of `--driver`. On real GPUs it forbids multicast unless `multimem` is
    true."""
    return contextlib.nullcontext() if arguments.driver == "emu" else real(multimem)


def _settings(arguments: argparse.Namespace, calls: int = Settings.calls) -> Settings:
    return EMULATED if arguments.driver == "emu" else Settings(calls=calls)


def _head(arguments: argparse.Namespace, what: str, group: Group) -> str:
    """The line above a table of collectives."""
    note = f"{what}, {group.size} x {group[0].device.name}, bfloat16{_meaning(group.driver)}"
    asked = getattr(arguments, "peers", False) is not False
    return f"{note}; peers need torch, which is not installed" if asked and not installed("torch") else note


def time_moves(arguments: argparse.Namespace) -> Started:
    op = arguments.benchmark.replace("-", "_")
    known = ALGORITHMS[op]
    algos = [one_of("--algos", algo, known) for algo in arguments.algos or known]
    with_peers = _with_peers(arguments)
    group = _group(arguments)
    kib, settings = arguments.kib or moves.KIB, _settings(arguments, calls=40)
    measured = partial(moves.measure, group, op, kib, algos, settings, with_peers)
    return _head(arguments, op, group), _while_open(group, measured), len(kib)


def time_forms(arguments: argparse.Namespace) -> Started:
    ops, shapes = ops_of(arguments, rows_forms.OPS), row_shapes(arguments, rows_forms.SHAPES)
    forms = [one_of("--form", name, tuple(FORMS)) for name in arguments.form or FORMS]
    for name in arguments.form or ():
        for rows, columns in shapes:
            if not FORMS[name].fits(columns):
                raise ArgumentError(
                    "--shape",
                    shown(f"{rows}x{columns}"),
                    f"rows x columns, columns a multiple of the group or head size of the form {name}",
                )
    group = _group(arguments)
    measured = partial(rows_forms.measure, group, ops, shapes, forms, _settings(arguments, calls=40))
    total = sum(len(rows_forms.timed(op, columns, forms)) for op in ops for _, columns in shapes)
    return _head(arguments, "fused norms", group), _while_open(group, measured), total


def time_traces(arguments: argparse.Namespace) -> Started:
    with real():
        group = Group.local(arguments.gpus, driver="cuda")
    note = f"{group.size} x {group[0].device.name}: microseconds per call, bfloat16"
    return note, _while_open(group, lambda: trace_cost.measure(group)), trace_cost.RESULTS


def time_host(arguments: argparse.Namespace) -> Started:
    driver = _driver_of(arguments, least=1)
    note = f"microseconds of the calling thread per call, driver {driver.name}{_meaning(driver)}"
    return note, host.measure(driver, arguments.gpus), host.RESULTS


def _driver_of(arguments: argparse.Namespace, least: int) -> Driver:
    """The driver that `--driver` names. Raises Unsupported if it has fewer than `least` devices, and ArgumentError if
    fewer than `--gpus`."""
    driver = get_driver(arguments.driver)
    most = min(8, int(driver.cuDeviceGetCount()))
    if most < least:
        needed = counted(least, "device")
        raise Unsupported(f"this benchmark needs at least {needed}, and the {driver.name} driver has {most}")
    if not least <= arguments.gpus <= most:
        present = f"the {driver.name} driver has {counted(most, 'device')}"
        raise ArgumentError("--gpus", arguments.gpus, f"from {least} to {most}: {present}")
    return driver


def _meaning(driver: Driver) -> str:
    return "" if driver.name == "cuda" else "; on emulated GPUs the times mean nothing"


def time_processes(arguments: argparse.Namespace) -> Started:
    ops, shapes = ops_of(arguments, ALGORITHMS), row_shapes(arguments, processes.SHAPES)
    emulated, every = arguments.driver == "emu", tuple(dict.fromkeys(algo for op in ops for algo in ALGORITHMS[op]))
    algos = [one_of("--algos", algo, every) for algo in arguments.algos or ()]
    if emulated and arguments.nodes > 1:
        raise Unsupported("--nodes needs NCCL, which has no emulated form; `drvfuse bench nodes` runs in one process")
    if emulated and not os.environ.get("DRVFUSE_EMU_MACHINE"):
        raise Unsupported(
            "--driver emu needs a machine that the processes share: start one with `drvfuse emu serve`, and set "
            "DRVFUSE_EMU_MACHINE to its address"
        )
    several = arguments.nodes > 1
    with _gpus(arguments):
        driver = _driver_of(arguments, least=2)
        exchange = "nccl" if several else None
        group = Group.local(arguments.gpus, driver=driver, nodes=_nodes_of(arguments), exchange=exchange)
    algos = algos or (["auto"] if several else list(processes.PUSHES))

    def measured() -> Iterator[dict[str, Any]]:
        with processes.Workers(arguments.driver, group.size, arguments.nodes) as workers:
            yield from processes.measure(group, workers, ops, shapes, algos, _settings(arguments))

    total = len(shapes) * sum(algo in ALGORITHMS[op] for op in ops for algo in algos)
    return _head(arguments, "collectives", group), _while_open(group, measured), total


def time_nodes(arguments: argparse.Namespace) -> Started:
    ops, shapes = ops_of(arguments, ALGORITHMS), row_shapes(arguments, nodes.SHAPES)
    with _gpus(arguments):
        driver = _driver_of(arguments, least=2)
    if arguments.nodes < 2:
        raise ArgumentError("--nodes", arguments.nodes, "at least 2")
    settings, count = _settings(arguments, calls=40), _nodes_of(arguments)
    exchange = "in_process" if arguments.driver == "emu" else "nccl"
    measured = nodes.measure(driver, arguments.gpus, count, exchange, ops, shapes, settings)
    return f"{arguments.gpus} GPUs as {arguments.nodes} nodes{_meaning(driver)}", measured, len(ops) * len(shapes)


def _nodes_of(arguments: argparse.Namespace) -> int:
    if arguments.gpus % arguments.nodes:
        raise ArgumentError("--nodes", arguments.nodes, f"a number that divides the {arguments.gpus} GPUs")
    return int(arguments.nodes)
