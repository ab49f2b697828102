# SPDX-License-Identifier: Apache-2.0
"""The parser of the whole command line. It does not import the modules of the commands, so that running a command
imports only the module of that command."""

from __future__ import annotations

import argparse
from typing import Any

from .. import __version__
from . import completion
from .bench_parser import add_bench
from .emu_parser import add_emu
from .parsing import Parser, add_driver, command, completed, natural, positive

_TRACED = (
    *("allreduce", "allreduce_many", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *("allreduce_rmsnorm_fp8", "reduce_scatter_rmsnorm_fp8", "rmsnorm_fp8", "gemv"),
)

GROUPS = {
    "try it, and find out what is wrong with a machine": ("demo", "doctor"),
    "run programs": ("run", "emu"),
    "check and watch kernels": ("check", "trace"),
    "measure, on real GPUs": ("bench", "tune"),
}
"""The commands by the headings of `drvfuse --help`."""


def command_line() -> argparse.ArgumentParser:
    """The parser of `drvfuse`."""
    parser = Parser(
        prog="drvfuse",
        usage="drvfuse [--help] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drvfuse {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="drvfuse", help=argparse.SUPPRESS
    )
    _add_demo(commands)
    _add_doctor(commands)
    _add_run(commands)
    add_emu(commands)
    _add_check(commands)
    _add_trace(commands)
    add_bench(commands)
    _add_tune(commands)
    parser.description = _overview(commands)
    return parser


def _overview(commands: Any) -> str:
    """The first part of `drvfuse --help`: all commands, in groups."""
    texts = {listed.dest: listed.help for listed in commands._choices_actions}
    lines = ["Fused multi-GPU collectives on the CUDA driver API, and an emulated driver for machines without a GPU."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:8}{texts[name]}" for name in names)]
    return "\n".join((*lines, "", "drvfuse COMMAND --help has the options of a command."))


def _add_demo(commands: Any) -> None:
    demo = command(commands, "demo", "run the collectives on random data, and compare the results with numpy's")
    demo.add_argument("--gpus", type=positive, default=None, help="GPUs to use (default: 4, or all real ones if fewer)")
    demo.add_argument("--processes", action="store_true", help="one process for each GPU, in place of one for all")
    demo.add_argument("--rows", type=positive, default=32, help="rows of each rank's input (default: 32)")
    demo.add_argument("--cols", type=positive, default=4096, help="columns of each rank's input (default: 4096)")
    add_driver(demo, "default: cuda if it has GPUs, else emu")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _add_doctor(commands: Any) -> None:
    doctor = command(
        commands,
        "doctor",
        "show what is installed, which devices reach one another's memory, and what is wrong",
        "Data is moved and compared between each pair of devices, which takes a few KiB on each. The status is 1 if a "
        "problem is found.",
    )
    add_driver(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


def _add_check(commands: Any) -> None:
    check = command(
        commands,
        "check",
        "run every kernel under many schedules of the emulated driver, and find planted faults",
        "Each case runs with the race detector, and its results are compared with numpy's. A planted fault is a change "
        "of a kernel or of the library that must be found. The status is 1 if a case fails or a fault is not found.",
    )
    check.add_argument("--seeds", type=positive, default=None, help="schedules of each case (default: 20)")
    check.add_argument("--seed", type=natural, default=None, help="the first seed; alone, the only one")
    only = check.add_argument(
        "--only", action="append", metavar="NAME", help="a case or fault, or a pattern; may be repeated"
    )
    completed(only, completion.cases)
    check.add_argument("--jobs", type=positive, default=None, help="processes (default: one per CPU)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def _add_trace(commands: Any) -> None:
    trace = command(
        commands,
        "trace",
        "show in which phases the blocks of an op's kernels spend their time",
        "The op runs on random data. Times of emulated devices mean nothing; their phases do.",
    )
    trace.add_argument(
        "op",
        type=lambda name: name.replace("-", "_"),  # takes hyphens too, as `drvfuse bench` does
        choices=_TRACED,
        metavar="OP",
        help=f"one of {', '.join(_TRACED)}, also with hyphens; the last two run on one device (gemv is "
        "gemv_partial_norm)",
    )
    trace.add_argument(
        "--devices", "--gpus", type=positive, default=None, help="devices to use (default: 4, or all if fewer)"
    )
    trace.add_argument(
        "--shape",
        default=None,
        metavar="MxN",
        help="rows x columns of a rank's input, of all_gather its output; of gemv as for bench",
    )
    algo = trace.add_argument(
        "--algo", default="auto", metavar="NAME", help="one of the op's algorithms (default: auto)"
    )
    completed(algo, completion.algorithms)
    trace.add_argument(
        "--warm", type=natural, default=3, metavar="CALLS", help="calls before the one that is shown (default: 3)"
    )
    trace.add_argument("--out", metavar="FILE", default=None, help="write a Chrome trace (JSON; Perfetto reads it)")
    trace.add_argument("--png", metavar="FILE", default=None, help="write a timeline (needs matplotlib)")
    add_driver(trace)


def _add_run(commands: Any) -> None:
    run = command(
        commands,
        "run",
        "start processes of a Python program, one for each rank of a group",
        "Each process gets the environment variables that df.Group.connect reads. The status is that of the first "
        "process that fails.",
    )
    run.add_argument("-n", type=positive, required=True, metavar="RANKS", help="processes, one for each device")
    add_driver(run)
    run.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module in place of a script"
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script and its arguments"
    )


def _add_tune(commands: Any) -> None:
    tune = command(commands, "tune", 'measure the constants by which algo="auto" chooses, and store them')
    tune.add_argument("--gpus", type=positive, default=2, help="GPUs of the groups to measure for (default: 2)")
    tune.add_argument("--remove", action="store_true", help="go back to the built-in constants")
    add_driver(tune, "default: the `driver` setting; emulated times mean nothing, and are not stored")
