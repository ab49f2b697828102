# SPDX-License-Identifier: Apache-2.0
"""Faults of the all-reduces over several nodes."""

from __future__ import annotations

from functools import partial

from ..collectives import repeated
from ..mutant import Mutant
from ..substitutions import NO_MEETING

several_nodes = partial(repeated, op="allreduce", algo="two_stage", nodes=2, tight=False, graph=False, side=False)

MUTANTS = (
    Mutant(
        "node-sums-no-start-barrier",
        "the sums of a node are begun before the peers' inputs are written",
        "hierarchical all-reduces that take the end of the last one for the start of the next",
        partial(several_nodes, private=False),
    ),
    Mutant(
        "node-sums-staging-unpublished",
        "a flag says that inputs are staged, of a block whose other threads are still at it",
        "staged reduce-scatters with a flag a block",
        partial(several_nodes, private=True),
    ),
    Mutant(
        "node-results-before-barrier",
        "results are gathered as soon as the own ones are there",
        "hierarchical all-reduces whose exchange is taken for a barrier of the node",
        partial(several_nodes, private=False),
    ),
    Mutant(
        "exchange-before-sums",
        "partial sums are exchanged before the kernels that make them have ended, or made anew while they are copied",
        "exchanges that are queued on a stream of their own",
        several_nodes,
        host=NO_MEETING,
        in_kernels=False,
    ),
)
