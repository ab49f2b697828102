# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the all-reduces by multicast."""

from __future__ import annotations

from functools import partial

from ..mutant import WRONG, Mutant
from ..shared import FUSED, repeated

staged_multimem = partial(
    repeated, op="allreduce", algo="two_stage", multimem=True, multicast="", tight=False, graph=False, side=False
)

MUTANTS = (
    Mutant(
        "multimem-no-barrier",
        "the sums of all ranks' inputs are loaded before the inputs are staged on all ranks",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-no-alias-fence",
        "inputs are written by their own address and loaded by a multicast address, and there is no fence.proxy.alias",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-slots-reused",
        "a row is staged in memory from which other threads of the block still copy results of the chunk before",
        "an early version of the fused op by multicast",
        partial(
            repeated,
            op=FUSED,
            algo="two_stage",
            multimem=True,
            multicast="",
            residual=False,
            tight=True,
            graph=False,
            side=False,
            shape=(96, 264),  # FP8 rows of this length are staged and copied in units of different sizes
        ),
    ),
    Mutant(
        "multimem-red-for-store",
        "results are added to the outputs of all ranks instead of being stored",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-plain-load",
        "a multicast address is read by an ordinary load",
        "code that uses a multicast address as an ordinary pointer",
        staged_multimem,
        (*WRONG, "multicast_plain"),
    ),
)
