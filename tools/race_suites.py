# SPDX-License-Identifier: Apache-2.0
"""Score the race detector on public suites of small racy kernels, which are no part of the project.

    python -m tools.race_suites --scor SCOR --indigo INDIGO [--only PATTERN] [--seeds N] [--race strict] [--list]

SCOR is a checkout of ScoR (github.com/csl-iisc/ScoR), of which the microbenchmarks run. INDIGO is a directory with
`indigo_sources` and `input`: CUDA sources of the Indigo suite and graphs for them, as the artifact of HiRace has them
(its directory `indigo`). A file's name says whether its kernel has a race: in ScoR "race" or "norace", in Indigo
"atomicBug", "guardBug", "syncBug" or "raceBug". Indigo's "boundsBug" files read beyond arrays, which ends the kernel,
and are left out. A race counts as found if a run under any of the seeds reports one.

Host code is cut away, and NVRTC compiles the rest. ScoR means by `volatile` an access that a compiler must not remove,
not a strong one, so it is compiled with `-Dvolatile=`; `--volatile` leaves it as it is.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import drvfuse as df
from drvfuse import emu
from drvfuse.errors import CompileError, DriverError

_RACY = ("atomicBug", "guardBug", "syncBug", "raceBug")
_GRAPH = "power_law_200n_1000e.egr"
_THREADS = 128  # threads per block in Indigo: several warps
_FUNCTION = re.compile(r"^[ \t]*[A-Za-z_][^;{}#]*\)\s*\{", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A kernel, whether it has a race, its launch configuration, and a function that makes its arguments."""

    suite: str
    name: str
    kernel: str
    source: str
    racy: bool
    grid: int
    block: int
    arguments: Callable[[df.Device], tuple[Any, ...]]


def device_code(text: str) -> str:
    """A CUDA source without comments, includes and host functions. Lines keep their numbers."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"^#include.*$", "", text, flags=re.MULTILINE)
    at = 0
    while found := _FUNCTION.search(text, at):
        end = _closing(text, found.end())
        head = found.group()
        if "__global__" in head or "__device__" in head or head.split()[0] in ("struct", "namespace"):
            at = end
            continue
        text = text[: found.start()] + "\n" * text.count("\n", found.start(), end) + text[end:]
        at = found.start()
    return text


def _closing(text: str, at: int) -> int:
    depth = 1
    while depth and at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def scor(root: Path, keeps_volatile: bool) -> Iterator[Case]:
    """The microbenchmarks of ScoR."""
    for path in sorted((root / "microbenchmarks" / "src").glob("*.cu")):
        text = path.read_text()
        blocks, threads = (
            int(re.search(rf"#define {name}\s+(\d+)", text).group(1))  # type: ignore[union-attr]
            for name in ("NBLOCKS", "TPERBLK")
        )
        code = device_code(text)
        source = code if keeps_volatile else "#define volatile\n#line 1\n" + code
        yield Case(
            "ScoR",
            path.stem,
            "kmain",
            source,
            path.stem.startswith("race"),
            blocks,
            threads,
            lambda d: (d.zeros(4, "uint32"),),
        )


def indigo(root: Path) -> Iterator[Case]:
    """A case for each CUDA program of Indigo, on one graph. The path of a program says whether a thread, a warp or a
    block processes a node."""
    graph = np.fromfile(root / "input" / _GRAPH, np.int32)
    nodes, edges = int(graph[0]), int(graph[1])
    nindex, nlist = graph[2 : 3 + nodes], graph[3 + nodes : 3 + nodes + edges]
    random = np.random.default_rng(1)
    size = max(nodes, edges)
    data1, data2 = (random.integers(0, limit, size, np.int32) for limit in (nodes, edges))
    data1[0] = data2[0] = 0

    def arguments(device: df.Device) -> tuple[Any, ...]:
        return (*(device.array(values) for values in (nindex, nlist, data1, data2)), nodes)

    for path in sorted((root / "indigo_sources").rglob("*.cu")):
        name = path.stem
        if "boundsBug" in name:
            continue
        each = 32 if "_warp" in path.parent.name else _THREADS if "_block" in path.parent.name else 1
        blocks = 3 if "persistent" in name else -(-nodes * each // _THREADS)
        racy = any(bug in name for bug in _RACY)
        yield Case("Indigo", name, "test_kernel", device_code(path.read_text()), racy, blocks, _THREADS, arguments)


def run(case: Case, seed: int, profile: str) -> tuple[list[Any], str]:
    """Run a case under a seed. Returns the reported races, and the error of the launch or the compiler, or ""."""
    with emu.Machine(devices=1, seed=seed, race=profile, check_initialised=False) as machine:
        device = df.device(0, driver=machine)
        try:
            module = df.compile(case.source, names=(case.kernel,), driver=machine, name=f"{case.name}.cu")
        except CompileError as error:
            return [], "not compiled: " + " ".join(str(error).splitlines()[:2])
        arguments = case.arguments(device)
        device.synchronize()
        module[case.kernel].prepare(case.grid, case.block, *arguments, device=device)(device.stream)
        failure = ""
        try:
            device.synchronize()
        except DriverError as error:
            failure = error.name or str(error)
        return [report for report in machine.reports if report.kind == "race"], failure


def judge(case: Case, seeds: range, profile: str) -> tuple[str, str]:
    """The verdict on a case and its details. Seeds after the first one that reports a race do not run."""
    detail = ""
    for seed in seeds:
        races, failure = run(case, seed, profile)
        if failure.startswith("not compiled"):
            return "not compiled", failure
        detail = str(races[0]) if races else failure or detail
        if races:
            return ("found" if case.racy else "false"), detail
    return ("missed" if case.racy else "clean"), detail


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.race_suites", description=__doc__.splitlines()[0])
    parser.add_argument("--scor", type=Path)
    parser.add_argument("--indigo", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth case")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--race", choices=("hardware", "strict"), default="hardware")
    parser.add_argument("--volatile", action="store_true", help="ScoR's volatile accesses stay strong")
    parser.add_argument("--list", action="store_true", help="a line for each case")
    asked = parser.parse_args()
    cases = [*(scor(asked.scor, asked.volatile) if asked.scor else ()), *(indigo(asked.indigo) if asked.indigo else ())]
    cases = [case for case in cases if fnmatch.fnmatch(case.name, asked.only)][:: asked.every]
    if not cases:
        parser.error("no case: give --scor or --indigo, and a pattern that fits")
    table: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    for case in cases:
        verdict, detail = judge(case, range(asked.seeds), asked.race)
        row = table.setdefault(case.suite, {})
        row[verdict] = row.get(verdict, 0) + 1
        if asked.list or verdict in ("missed", "false", "not compiled"):
            print(f"{verdict:8} {case.name}: {detail}", flush=True)
    columns = ("found", "missed", "clean", "false", "not compiled")
    print(f"{'suite':8}" + "".join(f"{name:>14}" for name in columns))
    for suite, row in table.items():
        print(f"{suite:8}" + "".join(f"{row.get(name, 0):14}" for name in columns))
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
