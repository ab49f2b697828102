# SPDX-License-Identifier: Apache-2.0
"""`drvfuse demo`: every collective by several algorithms on random data, compared bit for bit with numpy."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import config, dtypes, reference
from ..comm.group import Group
from ..errors import ArgumentError, DriverUnavailable
from ..ops.call.prepared import Prepared
from ..ops.collectives.rows.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..ops.collectives.sums.allreduce import allreduce
from ..plans.rows import MAX_COLUMNS
from ..runtime.device import device
from ..runtime.driver import get_driver
from ..tables import table
from .run import run_ranks
from .terminal import progress

ALGORITHMS = ("push_one_shot", "one_stage", "two_stage", "naive")
DEFAULT_GPUS = 4
EPSILON = 1e-6
OPS = ("allreduce", "allreduce_rmsnorm_fp8")


@dataclass
class Check:
    """The result of one collective by one algorithm: the number of elements that differ from numpy, the bytes that all
    ranks have moved, and the time, if it was measured.
    """

    op: str
    algo: str
    mismatches: int
    local_bytes: int
    remote_bytes: int
    microseconds: float | None = None
    unfused_microseconds: float | None = None


def choose_driver(asked: str | None, gpus: int | None) -> tuple[str, int, str]:
    """Return the driver, the number of GPUs, and a line of text that names both. Falls back to the emulated driver only
    if `asked` is None.

    Raises DriverUnavailable if the driver `asked` cannot be used, and ArgumentError if it has too few devices.
    """
    asked = asked or (config.get("driver") if os.environ.get("DRVFUSE_DRIVER") else None)
    reason = ""
    if asked != "emu":
        try:
            present = int(get_driver("cuda").cuDeviceGetCount())
            if present == 0:
                raise DriverUnavailable("the CUDA driver sees no GPU")
        except DriverUnavailable:
            if asked == "cuda":
                raise
            reason = " (no usable NVIDIA GPU: see `drvfuse doctor`)"
        else:
            chosen = min(DEFAULT_GPUS, present) if gpus is None else gpus
            if not 1 <= chosen <= min(8, present):
                raise ArgumentError("--gpus", chosen, f"from 1 to {min(8, present)}, the number of GPUs")
            name = get_driver("cuda").cuDeviceGetName(128, 0)
            text = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
            return "cuda", chosen, f"driver: cuda, {chosen} x {text}"
    chosen = DEFAULT_GPUS if gpus is None else gpus
    if not 1 <= chosen <= 8:
        raise ArgumentError("--gpus", chosen, "from 1 to 8, the number of emulated devices")
    return "emu", chosen, f"driver: emulated, {chosen} x sm_90a on this CPU{reason}"


def _mismatches(actual: np.ndarray, expected: np.ndarray) -> int:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[expected.dtype.itemsize]
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(actual.size, expected.size, 1)
    return int(np.count_nonzero(actual.view(unsigned) != expected.view(unsigned)))


class Demo:
    """The data, the group and the checks of one run of the demo, for the ranks of this process."""

    def __init__(self, group: Group, rows: int, cols: int) -> None:
        bf16 = dtypes.get("bfloat16").numpy
        random = np.random.default_rng(2024)
        self.group = group
        self.host = [random.standard_normal((rows, cols), np.float32).astype(bf16) for _ in range(group.size)]
        self.gamma = (1 + 0.1 * random.standard_normal(cols, np.float32)).astype(bf16)
        self.inputs = [rank.array(self.host[rank.index]) for rank in group]
        self.gammas = [rank.array(self.gamma) for rank in group]
        self.sum = reference.allreduce(self.host)
        self.fused = reference.allreduce_rmsnorm_fp8(self.host, self.gamma, epsilon=EPSILON)

    def algorithms(self) -> tuple[str, ...]:
        if not self.group.together:  # "naive" needs all ranks in one process
            return tuple(algo for algo in ALGORITHMS if algo != "naive")
        return ALGORITHMS if self.group.peers_readable else ("naive",)

    def prepared(self, op: str, algo: str, **given: Any) -> Prepared[Any]:
        """The call of a collective, with the outputs that are given."""
        if op == "allreduce":
            return allreduce.prepare(self.group, self.inputs, algo=algo, **given)
        return allreduce_rmsnorm_fp8.prepare(self.group, self.inputs, self.gammas, epsilon=EPSILON, algo=algo, **given)

    def check(self, op: str, algo: str) -> Check:
        prepared = self.prepared(op, algo)
        found = prepared.launch()
        self.group.synchronize()
        pairs: list[tuple[Any, Any]] = [(found, self.sum)]
        if op != "allreduce":
            pairs = [(found.output, self.fused.output), (found.scales, self.fused.scales)]
        wrong = sum(_mismatches(array.numpy(), expected) for arrays, expected in pairs for array in arrays)
        return Check(op, algo, wrong, *prepared.traffic)

    def run(self, time_it: bool) -> list[Check]:
        checks = [self.check(op, algo) for op in OPS for algo in self.algorithms()]
        if time_it:
            self._time(checks)
        return checks

    def _time(self, checks: list[Check]) -> None:
        from ..bench.timing import microseconds_per_call

        shape, driver = self.host[0].shape, self.group.driver
        sums = [rank.empty(shape, "bfloat16") for rank in self.group]
        quantised = [rank.empty(shape, "float8_e4m3fn") for rank in self.group]
        scales = [rank.empty(shape[:-1], "float32") for rank in self.group]
        outputs = dict(zip(OPS, ({"outputs": sums}, {"outputs": quantised, "scales": scales}), strict=True))
        left = [min(32, rank.device.sm_count - self.group.max_blocks) for rank in self.group]
        singles = [
            Group.local([rank.device.index], driver=driver, max_blocks=blocks)
            for rank, blocks in zip(self.group, left, strict=True)
        ]
        norms = [
            allreduce_rmsnorm_fp8.prepare(
                single, sums[i], self.gammas[i], epsilon=EPSILON, outputs=quantised[i], scales=scales[i]
            )
            for i, single in enumerate(singles)
        ]

        def microseconds(call: Callable[[], object], algo: str) -> float:
            return microseconds_per_call(self.group, [call], joined=algo == "naive").median

        try:
            for check in checks:
                call = self.prepared(check.op, check.algo, **outputs[check.op])
                check.microseconds = microseconds(call.launch, check.algo)
                if check.op == "allreduce":
                    continue
                plain = self.prepared("allreduce", check.algo, outputs=sums)

                def unfused(plain: Any = plain) -> None:
                    plain.launch()
                    for rank, norm in zip(self.group, norms, strict=True):
                        norm.launch(streams=[rank.stream])

                check.unfused_microseconds = microseconds(unfused, check.algo)
        finally:
            for single in singles:
                single.close()


def _table(checks: list[Check], timed: bool) -> str:
    header = ["collective", "algorithm", "mismatches", "local KiB", "remote KiB", *(["us", "unfused"] if timed else [])]
    rows = []
    for check in checks:
        moved = (f"{count / 1024:,.0f}" for count in (check.local_bytes, check.remote_bytes))
        cells = [check.op, check.algo, str(check.mismatches), *moved]
        if timed:
            cells += ["" if t is None else f"{t:.2f}" for t in (check.microseconds, check.unfused_microseconds)]
        rows.append(cells)
    return table(header, rows, text_columns=2)


def _in_processes(size: int, driver: str, rows: int, cols: int) -> tuple[int, list[Check]]:
    """The checks of a run with a process for each rank, and its exit status."""
    with tempfile.NamedTemporaryFile(prefix="drvfuse-demo-") as results:
        status = run_ranks(["-m", "drvfuse.cli.demo_rank", str(rows), str(cols), results.name], size, driver)
        return status, [] if status else [Check(**found) for found in json.load(results)]


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every output equals numpy's bit for bit, else 1."""
    start = time.perf_counter()
    if arguments.cols > MAX_COLUMNS:
        raise ArgumentError("--cols", arguments.cols, f"at most {MAX_COLUMNS}")
    driver, gpus, line = choose_driver(arguments.driver, arguments.gpus)
    if not arguments.json:
        print(line)
        shape = f"{arguments.rows} x {arguments.cols}"
        print(f"{shape} bfloat16 per rank; outputs compared bit for bit with numpy", flush=True)
    timed = driver == "cuda" and not arguments.processes
    if arguments.processes:
        status, checks = _in_processes(gpus, driver, arguments.rows, arguments.cols)
        if status:
            return status
    else:
        # At most half of the multiprocessors. The others are for groups of one rank, which run the sequences of unfused
        # ops that are timed for comparison.
        blocks = min(64, device(driver=driver).sm_count // 2)
        with (
            Group.local(gpus, driver=driver, max_blocks=blocks) as group,
            progress("compiling and running kernels", show=not arguments.json),
        ):
            checks = Demo(group, arguments.rows, arguments.cols).run(timed)
    ok = all(check.mismatches == 0 for check in checks)
    seconds = time.perf_counter() - start
    if not arguments.json:
        print(_table(checks, timed))
        print(f"{'all outputs equal numpy bit for bit' if ok else 'OUTPUTS DIFFER FROM NUMPY'}, {seconds:.1f} s")
    else:
        result = {
            "driver": driver,
            "gpus": gpus,
            "processes": gpus if arguments.processes else 1,
            "rows": arguments.rows,
            "cols": arguments.cols,
            "ok": ok,
            "checks": [{key: value for key, value in vars(c).items() if value is not None} for c in checks],
            "seconds": round(seconds, 3),
        }
        print(json.dumps(result))
    return 0 if ok else 1
