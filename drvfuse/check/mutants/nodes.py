# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the collectives over several nodes."""

from __future__ import annotations

from functools import partial

from ..moves import moves
from ..mutant import Mutant
from ..nodes import failing_bytes, failing_sums
from ..shared import repeated
from ..substitutions import NO_BARRIER_FIRST, NO_MEETING

several_nodes = partial(repeated, op="allreduce", algo="two_stage", nodes=2, tight=False, graph=False, side=False)

exchanges_over_nodes = partial(
    moves, ops=("in_place", "all_to_all"), algos=("push", "pull"), ranks=4, nodes=2, graph=False
)

MUTANTS = (
    Mutant(
        "node-sums-no-start-barrier",
        "a rank starts the sums of its node before the inputs of its peers are written",
        "hierarchical all-reduces without a barrier at their start",
        partial(several_nodes, private=False),
    ),
    Mutant(
        "node-sums-staging-unpublished",
        "the flag of a block is set while other threads of the block still stage inputs",
        "staged reduce-scatters with one flag per block",
        partial(several_nodes, private=True),
    ),
    Mutant(
        "node-results-before-barrier",
        "a rank gathers the results of its peers when its own results are complete",
        "hierarchical all-reduces that rely on the exchange between nodes as a barrier inside a node",
        partial(several_nodes, private=False),
    ),
    Mutant(
        "exchange-before-sums",
        "partial sums are exchanged before the kernels that make them have ended, or overwritten while they are copied",
        "exchanges that are queued on a separate stream",
        several_nodes,
        host=NO_MEETING,
        in_kernels=False,
    ),
    Mutant(
        "node-payload-in-use",
        "rows for another node are stored to a peer's workspace while others still read what the peer has staged there",
        "an earlier state of this all-to-all over nodes",
        exchanges_over_nodes,
        host=NO_BARRIER_FIRST,
        in_kernels=False,
    ),
    Mutant(
        "node-status-not-written",
        "a kernel that gives up does not write its status, so that of an earlier call is sent with its partial sums",
        "hierarchical all-reduces that report a failure to the host alone",
        failing_sums,
    ),
    Mutant(
        "node-status-not-read",
        "the kernel after the exchange ignores the status of the partial sums",
        "hierarchical all-reduces whose failures stay in the node",
        failing_sums,
    ),
    Mutant(
        "node-words-not-read",
        "the kernel after an exchange of bytes ignores the abort words of the senders",
        "collectives over several nodes whose failures stay in the node",
        failing_bytes,
    ),
)
