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
        """The time of a call in which each rank receives `received` bytes."""
        return self.base_us + received / self.bytes_per_us


class Costs(NamedTuple):
    """The constants of a generation of GPUs, or of a machine, for calls that run back to back in a graph with PDL.

    `one_shot` and `two_shot` are all-reduces by push, `fused_one_shot` and `fused_two_shot` the same with a norm.
    `scatter_push` and `scatter_pull` are reduce-scatters. The others are for ops that only move bytes. `move_push` is
    a push to all peers, and `move_relay` one through relays. `move_direct` and `move_staged` move bytes between
    barriers, without staging and with staging.
    """

    one_shot: Cost
    two_shot: Cost
    fused_one_shot: Cost
    fused_two_shot: Cost
    scatter_push: Cost
    scatter_pull: Cost
    move_push: Cost
    move_relay: Cost
    move_direct: Cost
    move_staged: Cost


HOPPER = Costs(
    one_shot=Cost(1.85, 338e3),
    two_shot=Cost(2.75, 350e3),
    fused_one_shot=Cost(2.55, 347e3),
    fused_two_shot=Cost(3.4, 346e3),
    scatter_push=Cost(3.2, 350e3),
    scatter_pull=Cost(7.0, 335e3),
    move_push=Cost(2.5, 310e3),
    move_relay=Cost(3.5, 300e3),
    move_direct=Cost(8.0, 350e3),
    move_staged=Cost(9.0, 300e3),
)
"""The constants of Hopper. Some are measured, and some are estimates:

- The constants of the all-reduces, with and without norm, were measured on 2 H200 (docs/performance.md). For 3 to 8
  GPUs the model computes times from these constants and from the bytes that a rank receives; it was not checked for 3
  to 8 GPUs.
- `scatter_push` and `scatter_pull` are estimates, taken from all-reduces by push_one_shot and one_stage of 16 MiB and
  more, where the choice makes a difference.
- `move_push` and `move_direct` were measured on 2 H200, with kernels that copied the bytes that stay on a rank after
  the bytes that move. Today's kernels copy both at the same time.
- `move_relay` and `move_staged` are estimates. `drvfuse tune` on three GPUs or more measures them.
"""

AMPERE = Costs(
    one_shot=Cost(2.5, 200e3),
    two_shot=Cost(3.6, 215e3),
    fused_one_shot=Cost(4.0, 200e3),
    fused_two_shot=Cost(5.2, 205e3),
    scatter_push=Cost(4.3, 205e3),
    scatter_pull=Cost(9.5, 195e3),
    move_push=Cost(3.4, 180e3),
    move_relay=Cost(4.7, 175e3),
    move_direct=Cost(10.8, 205e3),
    move_staged=Cost(12.0, 175e3),
)
BLACKWELL = Costs(*(Cost(base_us, 2 * bytes_per_us) for base_us, bytes_per_us in HOPPER))
"""Estimates of all constants of Ampere and Blackwell; none was measured. They are Hopper's constants with the bandwidth
of the generation's NVLink. Ampere's base times are longer, those of the fused ops most, as it has no clusters."""


def costs(capability: tuple[int, int]) -> Costs:
    """The constants for devices of compute capability `capability`."""
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
    """The bytes that each rank receives in a fused norm by push_one_shot and by push_two_shot. In push_two_shot a rank
    also receives what the owners of the rows send: whole rows of sums if there is a residual, otherwise results."""
    gathered = row_bytes if residual else result_bytes
    return (ranks - 1) * rows * row_bytes, (ranks - 1) / ranks * rows * (row_bytes + gathered)


def _quicker(one_shot: float, two_shot: float) -> str:
    return "push_one_shot" if one_shot <= two_shot else "push_two_shot"
