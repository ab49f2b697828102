# SPDX-License-Identifier: Apache-2.0
"""Times the same collectives on two groups: one group in one process, the other with a process per GPU.

A CUDA graph of back-to-back calls, which use several sets of inputs in turn, is replayed. The time of a replay is the
slowest rank's, divided by the number of calls; a figure is the median over the replays. The replays of the two groups
alternate, so that changes of the computer's speed affect both. Each group waits while the other one runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from ..comm.group import Group
from ..errors import DrvfuseError
from . import timing
from .collective_calls import launches
from .ops import ALGORITHMS, calls_of
from .settings import Settings
from .timing import Replays

HEAD = ("op", "rows x cols", "algorithm", "in processes", "one process", "+-", "processes", "+-", "ratio")
TEXT_COLUMNS = 4
SHAPES = ((1, 4096), (16, 4096), (64, 8192), (1024, 8192))
PUSHES = ("auto", "push", "push_one_shot", "push_two_shot")
"""The algorithms that are measured by default. Others stage their inputs in a group of processes."""
_COMMAND = [sys.executable, "-m", "drvfuse.bench.process_worker"]


class Workers:
    """A process for each of `ranks` GPUs, which form a group of `nodes` nodes. A context manager, which ends the
    processes."""

    def __init__(self, driver: str, ranks: int, nodes: int = 1) -> None:
        shared = {
            **os.environ,
            "DRVFUSE_DRIVER": driver,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        self._processes = [
            subprocess.Popen(
                [*_COMMAND, str(nodes)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, **asked: Any) -> list[Any]:
        """Send a request to every worker and return the answers by rank. Raises DrvfuseError if a worker has ended; the
        worker's own message is on standard error."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise DrvfuseError(f"the process of rank {rank} ended with status {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            if error is not None:
                process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def measure(
    group: Group,
    workers: Workers,
    ops: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    algos: Sequence[str],
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Yield a result for each op and shape, and for each of `algos` that the op has. `group` has as many ranks as there
    are workers, on the same GPUs. Results of both groups are compared with the reference before the calls are timed."""
    for op in ops:
        known = [algo for algo in algos if algo in ALGORITHMS[op]]
        for rows, cols in shapes if known else ():
            calls = calls_of(group, op, rows, cols, settings.sets)
            for algo in known:
                asked = {"op": op, "algo": algo, "rows": rows, "cols": cols}
                calls.check(algo)  # first, since it raises an error for an algorithm that the group lacks
                in_processes = workers.ask(**asked, sets=settings.sets, calls=settings.calls)[0]
                prepared = calls.prepared(algo)
                with contextlib.closing(Replays(group, launches(prepared), settings.calls)) as replays:
                    pairs = [(replays.microseconds(), max(workers.ask())) for _ in range(timing.REPLAYS)]
                one, several = ([pair[i] for pair in pairs] for i in range(2))
                yield {
                    **asked,
                    "algo": prepared[0].algo,
                    "algo_in_processes": in_processes,
                    "gpus": group.size,
                    "one_process": _figure(one),
                    "processes": _figure(several),
                    "ratio": statistics.median(several) / statistics.median(one),
                }


def _figure(times: Sequence[float]) -> dict[str, float]:
    return {"us": statistics.median(times), "spread": max(times) - min(times)}


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The row of the table. If the group of processes used another algorithm, the row names it."""
    (one, spread), (several, apart) = (
        [f"{result[where][what]:.2f}" for what in ("us", "spread")] for where in ("one_process", "processes")
    )
    other = result["algo_in_processes"] if result["algo_in_processes"] != result["algo"] else ""
    named = [result["op"], f"{result['rows']}x{result['cols']}", result["algo"]]
    return [[*named, other, one, spread, several, apart, f"{result['ratio']:.3f}"]]


def notes(results: Sequence[dict[str, Any]]) -> list[str]:
    """The lines that are printed below the table."""
    worst = max(result["ratio"] for result in results)
    middle = statistics.median(result["ratio"] for result in results)
    return [f"ratio of the times with processes to those in one: median {middle:.3f}, largest {worst:.3f}"]
