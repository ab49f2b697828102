# SPDX-License-Identifier: Apache-2.0
"""Command line: `drvfuse` = `python -m drvfuse`. Exit status: 0 fine, 1 a check failed, 2 wrong usage or no driver,
130 interrupted; of `drvfuse run` that of the first process that failed; of `drvfuse emu run` 1 if anything was found,
else that of the program."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import __version__, errors
from .cli.options import check_files


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is {'not positive' if least else 'negative'}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is above {most}")
        return value

    return parse


_natural, _positive = _at_least(0), _at_least(1)


class _Parser(argparse.ArgumentParser):
    """Errors of a command have the command's own usage, and are in plain words."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would leave them to the parser of all commands
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"ignored explicit argument (.*)", r"\1 is no value that it takes", message))


def _add_benchmarks(benchmarks: Any) -> None:
    out, shapes, gpu, gpus, torch, driver, blocks = (argparse.ArgumentParser(add_help=False) for _ in range(7))
    out.add_argument("--out", metavar="FILE", default=None, help="write the figures as JSON")
    shapes.add_argument("--shape", action="append", metavar="MxN", help="rows x columns; may be repeated")
    gpu.add_argument("--device", type=_natural, default=0, help="the GPU (default: 0)")
    gpu.add_argument("--plot", metavar="FILE", default=None, help="write a chart (needs matplotlib)")
    gpus.add_argument("--gpus", type=_positive, default=2, help="GPUs to use (default: 2)")
    torch.add_argument("--torch", action="store_true", help="time torch's versions too")
    driver.add_argument(
        "--driver", choices=("cuda", "emu"), default="cuda", help="emu: emulated GPUs, whose times mean nothing"
    )
    blocks.add_argument(
        "--max-blocks",
        type=_positive,
        metavar="N",
        help="multiprocessors that the group's kernels may use (default: all)",
    )
    for name, parents, text in (
        ("fp8-rmsnorm", [gpu, shapes, torch], "FP8 RMSNorm, forward and backward"),
        ("fp8-siblings", [gpu, shapes], "the other FP8 functions"),
        ("gemv", [gpu, torch], "a few rows times a weight, with RMSNorm of the first columns"),
        ("rmsnorm-fp8", [gpu, shapes, torch], "RMSNorm with quantisation of rows, on one device"),
        ("trace-cost", [gpus], "collectives and GEMV without and with a trace"),
    ):
        parser = benchmarks.add_parser(name, parents=[*parents, out], help=text)
        if name == "gemv":
            parser.add_argument("--rows", type=_positive, default=1, help="rows of act, up to 8 (default: 1)")
            parser.add_argument(
                "--shape",
                action="append",
                metavar="NxK[xNORMED]",
                help="rows x columns of the weight, and the rows that are normed (default: 3/4); may be repeated",
            )
    both = argparse.ArgumentParser(add_help=False, parents=[blocks, driver])
    both.add_argument(
        "--shapes", nargs="+", metavar="MxN", help="rows x columns (default: 24, from 1x4096 to 2048x8192)"
    )
    both.add_argument(
        "--algos",
        nargs="+",
        metavar="NAME",
        help="algorithms (default: one_stage two_stage push_one_shot push_two_shot auto)",
    )
    both.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="NCCL and torch's symmetric memory (default: where torch is installed)",
    )
    both.add_argument("--plot", metavar="FILE", default=None, help="write a chart (needs matplotlib)")
    plain = benchmarks.add_parser("allreduce", parents=[gpus, both, out], help="all-reduce, beside floors and peers")
    plain.add_argument(
        "--multimem",
        action="store_true",
        help="with the algorithms by multicast, on inputs and outputs in multicast memory: creates multicast objects, "
        "and is refused where the site forbids them",
    )
    fused = benchmarks.add_parser(
        "allreduce-rmsnorm-fp8", parents=[gpus, both, out], help="all-reduce + RMSNorm + FP8, beside floors and peers"
    )
    fused.add_argument("--residual", action=argparse.BooleanOptionalAction, help="with a residual (default: both)")
    moves = argparse.ArgumentParser(add_help=False, parents=[blocks, driver])
    moves.add_argument(
        "--kib", nargs="+", type=_positive, metavar="N", help="of the larger of input and output (default: 1 to 131072)"
    )
    moves.add_argument(
        "--algos", nargs="+", metavar="NAME", help="algorithms (default: all that move as few bytes as possible)"
    )
    moves.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, help="NCCL (default: where torch is installed)"
    )
    scatters = "reduce-scatter", "reduce-scatter-rmsnorm-fp8"
    for name in ("all-gather", "all-to-all", "allreduce-many", "broadcast", *scatters):
        benchmarks.add_parser(name, parents=[gpus, moves, out], help=f"{name}, beside the wire and NCCL")
    every = argparse.ArgumentParser(add_help=False, parents=[driver])
    every.add_argument("--op", nargs="+", metavar="NAME", help="collectives, by the names of their benchmarks")
    forms = benchmarks.add_parser(
        "fused-forms",
        parents=[gpus, shapes, every, blocks, out],
        help="fused norms, and gathers of rows with scales, in every form",
    )
    forms.add_argument("--form", nargs="+", metavar="NAME", help="such as static, mxfp8-tiles, layer (default: all)")
    processes = benchmarks.add_parser(
        "processes",
        parents=[gpus, shapes, every, out],
        help="collectives with a process for each GPU, beside one process",
    )
    processes.add_argument(
        "--algos", nargs="+", metavar="NAME", help="algorithms (default: auto and those that push; others are staged)"
    )
    nodes = benchmarks.add_parser(
        "nodes", parents=[gpus, shapes, every, out], help="collectives over several nodes by NCCL, beside one node"
    )
    for parser, default in ((processes, 1), (nodes, 2)):
        text = f"number of nodes into which the GPUs are divided (default: {default})"
        parser.add_argument("--nodes", type=_positive, default=default, help=text)
    benchmarks.add_parser("host", parents=[gpus, driver, out], help="what calls cost the calling thread")
    emulator = benchmarks.add_parser("emulator", parents=[out], help="CPU time of the emulated driver; needs no GPU")
    for option, default in (("--gpus", 4), ("--calls", 8), ("--seeds", 2)):
        emulator.add_argument(option, type=_positive, default=default, help=f"(default: {default})")
    emulator.add_argument("--shape", metavar="MxN", default=None, help="rows x columns (default: 128x4096)")


def _add_emulator(commands: Any) -> None:
    emu = commands.add_parser("emu", description="emulated GPUs for programs that were written for cuda-python")
    emu = emu.add_subparsers(dest="emu_command", metavar="COMMAND", required=True)
    held = "hold a machine that several processes use, each with DRVFUSE_EMU_MACHINE"
    serve = emu.add_parser("serve", help=held, description=held)
    serve.add_argument("--devices", type=_positive, default=8, help="emulated GPUs, up to 8 (default: 8)")
    serve.add_argument("--arch", default="sm_90a", help="what they are (default: sm_90a)")
    serve.add_argument("--seed", type=_natural, default=0, help="of the order in which work runs (default: 0)")
    serve.add_argument(
        "--race", nargs="?", choices=("hardware", "strict"), const="hardware", default=False, help="report data races"
    )
    serve.add_argument("--delay-stores", action="store_true", help="show stores late where nothing orders them")
    serve.add_argument("--record", metavar="FILE", default=None, help="write the order of calls to a file")
    serve.add_argument("--replay", metavar="FILE", default=None, help="repeat the order of such a file")
    serve.add_argument(
        "--address", metavar="ADDRESS", default=None, help='"unix:@NAME" or "unix:/PATH" (default: a name nobody has)'
    )
    run = emu.add_parser(
        "run",
        usage="drvfuse emu run [--race[=strict]] [--devices N] [--seed N] [other options] SCRIPT ... | -m MODULE ...",
        help="run a program that was written for cuda-python, as it is",
        description="Runs a Python program on emulated GPUs: cuda-python's modules are switched in its process. What "
        "is found is printed when it ends, and the status is 1 then, else the program's own.",
        allow_abbrev=False,
    )
    run.add_argument("--devices", type=_at_least(1, 8), help="emulated GPUs, up to 8 (default: 8)")
    run.add_argument("--arch", help="what they are (default: sm_90a)")
    run.add_argument("--seed", type=_natural, help="of the order in which work runs (default: 0)")
    for option, profile, text in (  # separate options, so that the word behind --race is never taken for its value
        ("--race", "hardware", "report data races"),
        ("--race=hardware", "hardware", "the same"),
        ("--race=strict", "strict", "report also what hardware orders beyond the PTX memory model"),
    ):
        run.add_argument(option, dest="race", action="store_const", const=profile, help=text)
    run.add_argument("--delay-stores", action="store_true", help="show stores late where nothing orders them")
    run.add_argument("--share", action="store_true", help="processes that the program starts use its machine")
    run.add_argument("--report", metavar="FILE.json", help="write what was found, and on what machine, as JSON")
    run.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module in place of a script"
    )
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script and its arguments")


_GROUPS = {
    "try it, and find out what is wrong with a machine": ("demo", "doctor"),
    "run programs": ("run", "emu"),
    "check and watch kernels": ("check", "trace"),
    "measure, on real GPUs": ("bench", "tune"),
}


def _overview(commands: Any) -> str:
    """The first part of `drvfuse --help`: all commands, in groups."""
    lines = ["Fused multi-GPU collectives on the CUDA driver API, and an emulated driver for machines without a GPU."]
    for title, names in _GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:8}{commands.choices[name].description}" for name in names)]
    return "\n".join((*lines, "", "drvfuse COMMAND --help has the options of a command."))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="drvfuse",
        usage="drvfuse [--help] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drvfuse {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="drvfuse", help=argparse.SUPPRESS
    )

    demo = commands.add_parser("demo", description="run the collectives on random data and compare with numpy")
    demo.add_argument(
        "--gpus", type=_positive, default=None, help="GPUs to use (default: 4, or all real ones if fewer)"
    )
    demo.add_argument("--processes", action="store_true", help="one process for each GPU, in place of one for all")
    demo.add_argument("--rows", type=_positive, default=32, help="of each rank's input (default: 32)")
    demo.add_argument("--cols", type=_positive, default=4096, help="of each row (default: 4096)")
    demo.add_argument("--driver", choices=("cuda", "emu"), default=None, help="default: cuda if it has GPUs, else emu")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of the table")

    _add_emulator(commands)

    doctor = commands.add_parser("doctor", description="what is installed, which devices see each other, what is wrong")
    doctor.add_argument("--driver", choices=("cuda", "emu"), default=None, help="default: the `driver` setting")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of the report")

    check = commands.add_parser(
        "check", description="run every kernel under many emulated schedules, and faults that must be found"
    )
    check.add_argument("--seeds", type=_positive, default=None, help="schedules of each case (default: 20)")
    check.add_argument("--seed", type=_natural, default=None, help="the first seed; alone, the only one")
    check.add_argument("--only", action="append", metavar="NAME", help="a case or fault, or a pattern; may be repeated")
    check.add_argument("--jobs", type=_positive, default=None, help="processes (default: one per CPU)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")

    bench = commands.add_parser(
        "bench", description="time ops on real GPUs beside their floors and their peers, and the emulated driver"
    )
    _add_benchmarks(bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True))

    trace = commands.add_parser("trace", description="show what the blocks of an op do when")
    collectives = ("allreduce", "allreduce_many", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
    norms = ("allreduce_rmsnorm_fp8", "reduce_scatter_rmsnorm_fp8")
    ops = (*collectives, *norms, "rmsnorm_fp8", "gemv")
    trace.add_argument(
        "op",
        type=lambda name: name.replace("-", "_"),  # as in `drvfuse bench`
        choices=ops,
        metavar="OP",
        help=f"one of {', '.join(ops)}, also with hyphens; the last two run on one device (gemv is gemv_partial_norm)",
    )
    trace.add_argument("--devices", type=_positive, default=None, help="devices to use (default: 4, or all if fewer)")
    trace.add_argument(
        "--shape",
        default=None,
        metavar="MxN",
        help="rows x columns of a rank's input, of all_gather its output; of gemv as for bench",
    )
    trace.add_argument("--algo", default="auto", metavar="NAME", help="one of the op's algorithms (default: auto)")
    trace.add_argument(
        "--warm", type=_natural, default=3, metavar="CALLS", help="calls before the one that is shown (default: 3)"
    )
    trace.add_argument("--out", metavar="FILE", default=None, help="write a Chrome trace (JSON; Perfetto reads it)")
    trace.add_argument("--png", metavar="FILE", default=None, help="write a timeline (needs matplotlib)")
    trace.add_argument("--driver", choices=("cuda", "emu"), default=None, help="default: the `driver` setting")

    run = commands.add_parser("run", description="start processes of a program, one for each rank of a group")
    run.add_argument("-n", type=_positive, required=True, metavar="RANKS", help="processes, one for each device")
    run.add_argument("--driver", choices=("cuda", "emu"), default=None, help="default: the `driver` setting")
    run.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module in place of a script"
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script and its arguments"
    )

    tune = commands.add_parser("tune", description='measure the constants by which algo="auto" chooses, and store them')
    tune.add_argument("--gpus", type=_positive, default=2, help="GPUs of the groups to measure for (default: 2)")
    tune.add_argument("--remove", action="store_true", help="go back to the built-in constants")
    tune.add_argument(
        "--driver",
        choices=("cuda", "emu"),
        default=None,
        help="default: the `driver` setting; emulated times mean nothing, and are not stored",
    )
    parser.description = _overview(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments. Returns the exit status."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: this call answers, and ends the process
        importlib.import_module("argcomplete").autocomplete(parser)
    arguments = parser.parse_args(argv)
    try:
        check_files(arguments)
        # only the module of this command is imported
        module = importlib.import_module(f".cli.{arguments.command}", __package__)
        status: int = getattr(module, f"run_{arguments.command}")(arguments)
        return status
    except (errors.DrvfuseError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = None  # the reader of stdout has gone, and the interpreter would flush stdout at exit
        print(f"drvfuse {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"drvfuse {arguments.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
