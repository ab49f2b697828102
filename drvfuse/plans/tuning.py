# SPDX-License-Identifier: Apache-2.0
"""Which algorithm `algo="auto"` takes: one table of thresholds, by size and number of ranks.

Every algorithm gives the same bits, so the choice is a matter of time alone. All ranks decide alike, as the table
reads nothing but shapes.
"""

from __future__ import annotations

_ALWAYS = 1 << 62

ALLREDUCE_ONE_STAGE_BYTES = {1: _ALWAYS, 2: _ALWAYS, 4: 192 << 10}
"""Largest input that one stage is taken for, by ranks; 512 KiB for numbers of ranks not listed.

2 and 4 ranks: measured on H200 (docs/performance.md). The others are guesses.
"""

FUSED_TWO_STAGE_BYTES = {
    1: (_ALWAYS, _ALWAYS),
    2: (8 << 20, 8 << 20),
    3: (512 << 10, 256 << 10),
    4: (128 << 10, 256 << 10),
}
"""Least bytes of the input rows that one rank owns for two stages, by ranks: (without residual, with residual).

80 KiB for numbers of ranks not listed. 2 and 4 ranks without residual: measured on H200; the others are guesses.
"""


def allreduce_algorithm(ranks: int, nbytes: int) -> str:
    """Algorithm for an all-reduce of `nbytes` per rank, where every rank can read its peers' memory."""
    return "one_stage" if nbytes <= ALLREDUCE_ONE_STAGE_BYTES.get(ranks, 512 << 10) else "two_stage"


def fused_algorithm(ranks: int, rows: int, row_bytes: int, residual: bool) -> str:
    """Algorithm for the fused norm of `rows` input rows of `row_bytes` each."""
    without, with_residual = FUSED_TWO_STAGE_BYTES.get(ranks, (80 << 10, 80 << 10))
    owned = -(-rows // ranks) * row_bytes
    return "two_stage" if owned >= (with_residual if residual else without) else "one_stage"
