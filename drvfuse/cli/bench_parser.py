# SPDX-License-Identifier: Apache-2.0
"""The options of `drvfuse bench`, and the sentences that say what each benchmark measures and with what it compares."""

from __future__ import annotations

import argparse
from typing import Any

from . import completion
from .parsing import add_driver, command, completed, natural, positive

_GRAPHS = "A time is that of a call in a CUDA graph of calls, without and with PDL."
_COPY = "a copy of as many bytes"
_EMULATED = "emu: emulated GPUs, whose times mean nothing (default: cuda)"


def add_bench(commands: Any) -> None:
    """Add `drvfuse bench` with its benchmarks."""
    bench = command(
        commands,
        "bench",
        "time ops on real GPUs against their lower bounds and other libraries, or time the emulated driver",
        "Lower bounds and other libraries are measured in the same run.",
    )
    benchmarks = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_on_one_gpu(benchmarks)
    _add_sums(benchmarks)
    _add_moves(benchmarks)
    _add_comparisons(benchmarks)
    _add_costs(benchmarks)


def _options() -> argparse.ArgumentParser:
    """A parser of options that several benchmarks have."""
    return argparse.ArgumentParser(add_help=False)


def _out() -> argparse.ArgumentParser:
    out = _options()
    out.add_argument("--out", metavar="FILE", default=None, help="write the figures as JSON")
    return out


def _plot() -> argparse.ArgumentParser:
    plot = _options()
    plot.add_argument("--plot", metavar="FILE", default=None, help="write a chart (needs matplotlib)")
    return plot


def _shapes() -> argparse.ArgumentParser:
    shapes = _options()
    shapes.add_argument("--shape", action="append", metavar="MxN", help="rows x columns; may be repeated")
    return shapes


def _gpus() -> argparse.ArgumentParser:
    gpus = _options()
    gpus.add_argument("--gpus", type=positive, default=2, help="GPUs to use (default: 2)")
    return gpus


def _driver() -> argparse.ArgumentParser:
    driver = _options()
    add_driver(driver, _EMULATED, default="cuda")
    return driver


def _blocks() -> argparse.ArgumentParser:
    blocks = _options()
    blocks.add_argument(
        "--max-blocks",
        type=positive,
        metavar="N",
        help="multiprocessors that the group's kernels may use (default: all)",
    )
    return blocks


def _add_algos(parser: argparse.ArgumentParser, text: str) -> None:
    completed(parser.add_argument("--algos", nargs="+", metavar="NAME", help=text), completion.algorithms)


def _add_peers(parser: argparse.ArgumentParser, what: str) -> None:
    text = f"{what} (default: where torch is installed)"
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, help=text)


def _add_on_one_gpu(benchmarks: Any) -> None:
    gpu = _options()
    gpu.add_argument("--device", type=natural, default=0, help="the GPU (default: 0)")
    torch = _options()
    torch.add_argument("--torch", action="store_true", help="time torch's versions too")
    common = [gpu, _plot(), _out()]
    command(
        benchmarks,
        "fp8-rmsnorm",
        f"time FP8 RMSNorm, forward and backward, against {_COPY}, torch.compile and COAT",
        "COAT's times are stored ones; torch.compile is measured with --torch.",
        parents=[*common, _shapes(), torch],
    )
    command(
        benchmarks,
        "fp8-siblings",
        f"time the other FP8 functions of COAT against {_COPY}",
        "These are LayerNorm, the norms with scales of groups, the divisions, and sums of gradients.",
        parents=[*common, _shapes()],
    )
    gemv = command(
        benchmarks,
        "gemv",
        "time the GEMV with partial RMSNorm against kernels that only read the weight, and torch",
        "torch's versions are measured with --torch.",
        parents=[*common, torch],
    )
    gemv.add_argument("--rows", type=positive, default=1, help="rows of act, up to 8 (default: 1)")
    gemv.add_argument(
        "--shape",
        action="append",
        metavar="NxK[xNORMED]",
        help="rows x columns of the weight, and the rows that are normed (default: 3/4); may be repeated",
    )
    command(
        benchmarks,
        "rmsnorm-fp8",
        f"time RMSNorm with quantisation of rows on one GPU against {_COPY}, and torch.compile",
        "torch.compile is measured with --torch.",
        parents=[*common, _shapes(), torch],
    )


def _add_sums(benchmarks: Any) -> None:
    common = _options()
    common.add_argument(
        "--shapes", nargs="+", metavar="MxN", help="rows x columns (default: 24, from 1x4096 to 2048x8192)"
    )
    _add_algos(common, "algorithms (default: one_stage two_stage push_one_shot push_two_shot auto)")
    _add_peers(common, "NCCL and torch's symmetric memory")
    parents = [_gpus(), _blocks(), _driver(), common, _plot(), _out()]
    against = "against the time of its bytes on the links, a copy of them between the GPUs, NCCL and torch"
    plain = command(benchmarks, "allreduce", f"time all-reduce {against}", _GRAPHS, parents=parents)
    plain.add_argument(
        "--multimem",
        action="store_true",
        help="with the algorithms by multicast, on inputs and outputs in multicast memory: creates multicast objects, "
        "and is refused where the site forbids them",
    )
    fused = command(
        benchmarks,
        "allreduce-rmsnorm-fp8",
        f"time all-reduce + RMSNorm + FP8 {against}",
        "Other libraries run their all-reduce, then a compiled norm.",
        _GRAPHS,
        parents=parents,
    )
    fused.add_argument("--residual", action=argparse.BooleanOptionalAction, help="with a residual (default: both)")


def _add_moves(benchmarks: Any) -> None:
    common = _options()
    common.add_argument(
        "--kib", nargs="+", type=positive, metavar="N", help="of the larger of input and output (default: 1 to 131072)"
    )
    _add_algos(common, "algorithms (default: all that move as few bytes as possible)")
    _add_peers(common, "NCCL")
    for name, what in (
        ("all-gather", "all-gather"),
        ("all-to-all", "all-to-all"),
        ("allreduce-many", "the all-reduce of many tensors"),
        ("broadcast", "broadcast"),
        ("reduce-scatter", "reduce-scatter"),
        ("reduce-scatter-rmsnorm-fp8", "reduce-scatter + RMSNorm + FP8 with a residual"),
    ):
        command(
            benchmarks,
            name,
            f"time {what} against the time of its bytes on the links, and NCCL",
            _GRAPHS,
            parents=[_gpus(), _blocks(), _driver(), common, _out()],
        )


def _add_comparisons(benchmarks: Any) -> None:
    ops = _options()
    option = ops.add_argument("--op", nargs="+", metavar="NAME", help="collectives, by the names of their benchmarks")
    completed(option, completion.ops)
    common = [_gpus(), _shapes(), _driver(), ops, _out()]
    forms = command(
        benchmarks,
        "fused-forms",
        "time the fused norms, and gathers of rows with scales, in every form against the plain form",
        "The plain form is FP8 with a scale per row. The time of a form's bytes on the links is measured too.",
        parents=[*common, _blocks()],
    )
    option = forms.add_argument(
        "--form", nargs="+", metavar="NAME", help="such as static, mxfp8-tiles, layer (default: all)"
    )
    completed(option, completion.forms)
    processes = command(
        benchmarks,
        "processes",
        "time collectives with a process for each GPU against the same kernels in one process",
        parents=common,
    )
    _add_algos(processes, "algorithms (default: auto and those that push; others are staged)")
    nodes = command(
        benchmarks,
        "nodes",
        "time collectives over several nodes against one node, and the exchange between the nodes alone",
        "The GPUs of this machine are divided into nodes, which exchange data by NCCL.",
        parents=common,
    )
    for parser, default in ((processes, 1), (nodes, 2)):
        text = f"number of nodes into which the GPUs are divided (default: {default})"
        parser.add_argument("--nodes", type=positive, default=default, help=text)


def _add_costs(benchmarks: Any) -> None:
    command(
        benchmarks,
        "host",
        "time what a call costs the calling thread, against its bare launches and a graph of it",
        parents=[_gpus(), _driver(), _out()],
    )
    command(
        benchmarks,
        "trace-cost",
        "time collectives and the GEMV with a trace against the same calls without",
        parents=[_gpus(), _out()],
    )
    emulator = command(
        benchmarks,
        "emulator",
        "time the emulated driver's CPU work for a call with its race detector against that without",
        "No GPU is needed. The call is all-reduce + RMSNorm + FP8.",
        parents=[_out()],
    )
    for option, default, text in (
        ("--gpus", 4, "emulated GPUs"),
        ("--calls", 8, "calls with each seed"),
        ("--seeds", 2, "seeds, each of which runs the work in another order"),
    ):
        emulator.add_argument(option, type=positive, default=default, help=f"{text} (default: {default})")
    emulator.add_argument("--shape", metavar="MxN", default=None, help="rows x columns (default: 128x4096)")
