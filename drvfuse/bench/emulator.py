# SPDX-License-Identifier: Apache-2.0
"""CPU time that the emulated driver takes for a call of the fused op, with and without its race detector.

The op is prepared and compiled before the measurement; a call is a launch and a synchronisation. The times are CPU
times of the emulator, not times of any GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .. import emu
from ..comm.group import Group
from ..errors import DrvfuseError
from .ops import calls_of

SHAPE = (128, 4096)
ALGORITHMS = ("one_stage", "two_stage", "naive")
HEAD, TEXT_COLUMNS = ["algorithm", "detector", "first s", "slowest s"], 2


def measure(gpus: int, rows: int, cols: int, calls: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield two results for each algorithm, one without and one with the race detector. A result has, for each seed, a
    list of the CPU seconds of each call.

    Raises DrvfuseError if the machine reports something.
    """
    for algo in ALGORITHMS:
        for race in (False, True):
            seconds = [_seconds(algo, race, seed, gpus, rows, cols, calls) for seed in range(seeds)]
            yield {"algo": algo, "race": race, "gpus": gpus, "rows": rows, "cols": cols, "seconds": seconds}


def _seconds(algo: str, race: bool, seed: int, gpus: int, rows: int, cols: int, calls: int) -> list[float]:
    with emu.Machine(devices=gpus, seed=seed, race=race) as machine, Group.local(gpus, driver=machine) as group:
        (call,) = calls_of(group, "allreduce_rmsnorm_fp8", rows, cols, sets=1).prepared(algo)
        seconds = []
        for _ in range(calls):
            start = time.process_time()
            call.launch()
            group.synchronize()
            seconds.append(time.process_time() - start)
        if machine.reports:
            raise DrvfuseError(f"{algo}, seed {seed}: {machine.reports[0]}")
    return seconds


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The one table line of a result, in a list; `HEAD` is the table's head."""
    first = max(seconds[0] for seconds in result["seconds"])
    slowest = max(max(seconds) for seconds in result["seconds"])
    return [[result["algo"], "on" if result["race"] else "off", f"{first:.3f}", f"{slowest:.3f}"]]
