# SPDX-License-Identifier: Apache-2.0
"""All-reduce and the fused op, by each algorithm, beside NCCL and the wire.

Inputs are random bfloat16, several sets of them in turn. The wire floor is the bytes that each rank must receive at
364 GB/s; that of the fused op has a gather of FP8. The fused op has no residual and float32 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes
from ..comm.group import Group
from ..ops.call.prepared import Prepared
from ..ops.collectives.allreduce import allreduce
from ..ops.collectives.allreduce_rmsnorm_fp8 import allreduce_rmsnorm_fp8
from ..trace.buffer import Trace
from .timing import microseconds_per_call

SHAPES = ((1, 4096), (8, 4096), (32, 4096), (128, 4096), (512, 4096), (2048, 4096), (16, 8192), (1024, 8192))
ALGORITHMS = ("one_stage", "two_stage")
OPS = ("allreduce", "fused")
_FIGURES = [f"{op} {algo}" for op in OPS for algo in ALGORITHMS]
HEAD = ["rows x cols", "KiB", "wire", "FP8 wire", *(cell for name in _FIGURES for cell in (name, "spread")), "NCCL"]
TEXT_COLUMNS = 1
_WIRE_BYTES_PER_US = 364e3
_SETS = 4


class Inputs:
    """Random inputs of a shape on each rank, in several sets, and outputs that the calls share."""

    def __init__(self, group: Group, rows: int, cols: int, sets: int = _SETS) -> None:
        random, bf16 = np.random.default_rng(rows * 65536 + cols), dtypes.get("bfloat16").numpy
        self._group, shape = group, (rows, cols)
        self._sets = [
            [rank.array(random.standard_normal(shape, np.float32).astype(bf16)) for rank in group] for _ in range(sets)
        ]
        gamma = np.linspace(0.5, 1.5, cols, dtype=np.float32).astype(bf16)
        self._sums = [rank.empty(shape, "bfloat16") for rank in group]
        self._norm: dict[str, Any] = {
            "epsilon": 1e-6,
            "outputs": [rank.empty(shape, "float8_e4m3fn") for rank in group],
            "scales": [rank.empty((rows,), "float32") for rank in group],
        }
        self._gammas = [rank.array(gamma) for rank in group]

    def calls(self, op: str, algo: str, trace: Trace | None = None) -> list[Callable[[], object]]:
        """Prepared launches of one of `OPS`, one for each set."""
        prepare: Callable[..., Prepared[Any]]
        if op == "allreduce":
            prepare = partial(allreduce.prepare, self._group, outputs=self._sums)
        else:
            prepare = partial(allreduce_rmsnorm_fp8.prepare, self._group, gammas=self._gammas, **self._norm)
        return [prepare(inputs=xs, algo=algo, trace=trace).launch for xs in self._sets]


def calls_per_graph(rows: int, cols: int) -> int:
    """How many calls a graph has, at least: fewer of long ones."""
    nbytes = 2 * rows * cols
    return 50 if nbytes <= 1 << 20 else 20 if nbytes <= 8 << 20 else 10


def measure(group: Group, rows: int, cols: int, with_torch: bool = False) -> dict[str, Any]:
    """All figures of one shape, in microseconds per call."""
    n, nbytes = group.size, 2 * rows * cols
    result: dict[str, Any] = {
        "gpus": n,
        "rows": rows,
        "cols": cols,
        "kib": nbytes // 1024,
        "wire_us": min(n - 1, 2 * (n - 1) / n) * nbytes / _WIRE_BYTES_PER_US,
        "wire_fp8_us": 1.5 * (n - 1) / n * nbytes / _WIRE_BYTES_PER_US,
    }
    inputs = Inputs(group, rows, cols)
    for op in OPS:
        for algo in ALGORITHMS:
            timing = microseconds_per_call(group, inputs.calls(op, algo), calls_per_graph(rows, cols))
            result[f"{op}_{algo}"], result[f"{op}_{algo}_spread"] = timing
    if with_torch:
        from .collectives_torch import nccl_us

        result["nccl"] = nccl_us([rank.device.index for rank in group], rows, cols)
    return result


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The lines of the table for one shape, which is one; `HEAD` is its head."""
    cells = [f"{result['rows']}x{result['cols']}", str(result["kib"])]
    cells += [f"{result[key]:.2f}" for key in ("wire_us", "wire_fp8_us")]
    for name in _FIGURES:
        key = name.replace(" ", "_")
        cells += [f"{result[key]:.2f}", f"{result[f'{key}_spread']:.2f}"]
    return [[*cells, f"{result['nccl']:.2f}" if "nccl" in result else ""]]
