# SPDX-License-Identifier: Apache-2.0
"""Which algorithm `algo="auto"` selects: the one that is quickest in a model with two constants per algorithm.

Every algorithm gives the same bits, so the choice is a matter of time alone. All ranks decide alike, as the model reads
only shapes and the constants of the group. `drvfuse tune` measures constants on a machine. Otherwise built-in constants
are used, for the lowest compute capability of the group's devices and for GPUs that are all connected by NVLink.
"""

from __future__ import annotations

from typing import NamedTuple

ALGORITHMS = ("push_one_shot", "push_two_shot")


class Cost(NamedTuple):
    """The time of a call: `base_us` plus the bytes that each rank receives, divided by `bytes_per_us`."""

    base_us: float
    bytes_per_us: float

    def microseconds(self, received: float) -> float:
        """The time of a call in which each rank receives that many bytes."""
        return self.base_us + received / self.bytes_per_us


class Costs(NamedTuple):
    """The constants of a generation of GPUs, or of a machine, for calls that run back to back in a graph with PDL."""

    one_shot: Cost
    two_shot: Cost
    fused_one_shot: Cost
    fused_two_shot: Cost


HOPPER = Costs(Cost(1.85, 338e3), Cost(2.75, 350e3), Cost(2.55, 347e3), Cost(3.4, 346e3))
"""Measured on 2 H200 (docs/performance.md); the times of 3 to 8 GPUs follow from the bytes that they receive."""

AMPERE = Costs(Cost(2.5, 200e3), Cost(3.6, 215e3), Cost(4.0, 200e3), Cost(5.2, 205e3))
BLACKWELL = Costs(Cost(1.85, 676e3), Cost(2.75, 700e3), Cost(2.55, 694e3), Cost(3.4, 692e3))
"""Estimates, not measured: Hopper's constants with the bandwidth of the generation's NVLink; Ampere's base times are
longer, those of rows most, as it has no clusters."""


def costs(capability: tuple[int, int]) -> Costs:
    """The constants for devices of that compute capability."""
    return BLACKWELL if capability >= (10, 0) else HOPPER if capability >= (9, 0) else AMPERE


def allreduce_algorithm(costs: Costs, ranks: int, nbytes: int) -> str:
    """Algorithm for an all-reduce of `nbytes` per rank, where every rank can write its peers' memory."""
    one_shot, two_shot = allreduce_received(ranks, nbytes)
    return _quicker(costs.one_shot.microseconds(one_shot), costs.two_shot.microseconds(two_shot))


def fused_algorithm(
    costs: Costs, ranks: int, row_bytes: int, result_bytes: int, rows: int, residual: bool = False
) -> str:
    """Algorithm for the fused norm of `rows` rows of `row_bytes` each, whose results have `result_bytes`."""
    one_shot, two_shot = fused_received(ranks, row_bytes, result_bytes, rows, residual)
    return _quicker(costs.fused_one_shot.microseconds(one_shot), costs.fused_two_shot.microseconds(two_shot))


def allreduce_received(ranks: int, nbytes: int) -> tuple[float, float]:
    """The bytes that each rank receives by push_one_shot and by push_two_shot."""
    return (ranks - 1) * nbytes, 2 * (ranks - 1) / ranks * nbytes


def fused_received(ranks: int, row_bytes: int, result_bytes: int, rows: int, residual: bool) -> tuple[float, float]:
    """The bytes that each rank receives in a fused norm by push_one_shot and by push_two_shot. The latter gathers whole
    rows with a residual, else results."""
    gathered = row_bytes if residual else result_bytes
    return (ranks - 1) * rows * row_bytes, (ranks - 1) / ranks * rows * (row_bytes + gathered)


def _quicker(one_shot: float, two_shot: float) -> str:
    return "push_one_shot" if one_shot <= two_shot else "push_two_shot"
