# SPDX-License-Identifier: Apache-2.0
"""Planted faults of pull all-reduces: in barriers, in their flags and counters, and in launches that use barriers."""

from __future__ import annotations

from functools import partial

from ...ops.call.options import PDLLevel
from .. import protocols
from ..mutant import WRONG, Mutant
from ..run import HANGS
from ..shared import FUSED, near_32_bits, repeated, two_streams
from ..substitutions import CLEARED_FLAGS, NO_ORDER, NOT_LAUNCHED, OTHER_GRID

one_stage = partial(repeated, op="allreduce", algo="one_stage", tight=False, graph=False, side=False)

direct_one_stage = partial(one_stage, private=False)

two_stage = partial(repeated, op="allreduce", algo="two_stage", tight=False, graph=False, side=False)

direct_two_stage = partial(two_stage, private=False)

fused_two_stage = partial(
    repeated, op=FUSED, algo="two_stage", private=False, residual=False, tight=False, graph=False, side=False
)

MUTANTS = (
    Mutant(
        "start-barrier-only",
        "one_stage ends without a barrier, and the next kernel of the stream writes the input",
        "fused all-reduce and norm of an inference engine",
        direct_one_stage,
    ),
    Mutant(
        "no-start-barrier",
        "one_stage reads its peers' inputs without waiting until they are written",
        "hand-written one-shot all-reduces",
        direct_one_stage,
    ),
    Mutant(
        "flag-before-data",
        "two_stage sets the flag for its part of the sums before it has written them",
        "two-shot all-reduces with one flag per block",
        direct_two_stage,
    ),
    Mutant(
        "flag-before-backfill",
        "a block also sets the flags of blocks that its grid lacks, so a later call with more blocks passes too early",
        "fused all-reduce of an inference kernel library, fixed since",
        protocols.slots,
    ),
    Mutant(
        "operand-before-pdl-wait",
        "a residual is fetched together with gamma, before the wait for the kernel that may write it",
        "fused all-reduce of an inference kernel library, fixed since",
        partial(
            repeated,
            op=FUSED,
            algo="one_stage",
            residual=True,
            graph=False,
            side=False,
            pdl=PDLLevel.OVERLAP_AT_BEGINNING,
        ),
    ),
    Mutant(
        "state-before-pdl-wait",
        "the barrier's counter is read before the wait for the previous call, which advances it",
        "collectives launched with programmatic dependence and no wait",
        partial(direct_two_stage, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "gpu-scope-release",
        "the flag for another GPU is released at the scope of this GPU",
        "serving stacks, after CUDA changed a default",
        direct_two_stage,
    ),
    Mutant(
        "gpu-scope-acquire",
        "the flag of another GPU is acquired at the scope of this GPU",
        "multicast kernels and their barriers",
        direct_two_stage,
    ),
    Mutant(
        "relaxed-flag-store",
        "the flag is stored without release",
        "arrival counter of an inference engine, hangs and wrong sums on sm_90",
        direct_two_stage,
    ),
    Mutant(
        "relaxed-flag-load",
        "the flag is polled without acquire",
        "hand-written spins",
        direct_two_stage,
    ),
    Mutant(
        "volatile-flag-store",
        "the flag is volatile on both sides, in a barrier that guards data",
        "barriers of the first custom all-reduces",
        direct_two_stage,
    ),
    Mutant(
        "no-block-barrier-after-spin",
        "threads that do not spin continue without waiting for those that do",
        "hand-written barriers",
        direct_two_stage,
    ),
    Mutant(
        "no-block-barrier-before-release",
        "the flag is released while other threads of the block still write",
        "hand-written barriers",
        direct_two_stage,
    ),
    Mutant(
        "last-arriver-relaxed",
        "blocks count their arrival by relaxed atomics, and the last block advances state that others may still read",
        "finish counters of split reductions",
        partial(direct_two_stage, blocks=4),
    ),
    Mutant(
        "last-arriver-no-fence",
        "the last block adds partial results of other blocks, and no fence orders these before the counter",
        "matrix products with a fused norm, split reductions",
        protocols.last_block,
    ),
    # Under some seeds this fault gives a wrong result, and the detector rightly reports no race. Flags count, so a slow
    # peer that waits for a chunk may see the flag of the next chunk. Then its read is ordered after the write of the
    # next chunk, and reads the values of that chunk. There is a race if the peer is fast: nothing orders its read
    # before that write.
    Mutant(
        "payload-not-doubled",
        "every chunk uses the same half of the workspace, so a chunk is overwritten while peers still gather it",
        "chunked two-shot all-reduces",
        partial(repeated, op="allreduce", algo="two_stage", private=False, tight=True, graph=False, side=False),
    ),
    Mutant(
        "gathered-before-barrier",
        "FP8 rows are gathered from their owners without a barrier in between",
        "fused two-shot all-reduce and norm",
        fused_two_stage,
    ),
    Mutant(
        "scratch-reused",
        "the shared words of a row's reduction are written for the next row while slow warps still read them",
        "fused norms with a row loop",
        partial(repeated, op=FUSED, algo="one_stage", private=False, tight=False, graph=False, side=False, blocks=1),
    ),
    Mutant(
        "ordinals-of-32-bits",
        "the barrier compares 32-bit ordinals, which wrap",
        "counters of long-running engines",
        near_32_bits,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "ordinals-of-the-host",
        "the barrier's ordinal is the same in every call, like a launch argument in a graph",
        "collectives whose counter is a launch argument, in CUDA graphs",
        partial(direct_two_stage, graph=True),
    ),
    Mutant(
        "grids-differ",
        "ranks launch different numbers of blocks",
        "tuners that decide on each rank separately",
        partial(direct_two_stage, blocks=4),
        (*WRONG, *HANGS),
        host=OTHER_GRID,
        in_kernels=False,
    ),
    Mutant(
        "two-streams",
        "two calls on two streams use one workspace at the same time",
        "one communicator on two streams of a serving stack",
        two_streams,
        (*WRONG, *HANGS),
        host=NO_ORDER,
        in_kernels=False,
    ),
    Mutant(
        "rank-not-launched",
        "one rank is not launched",
        "every kernel that waits for a peer",
        partial(direct_two_stage, alone=False),
        HANGS,
        host=NOT_LAUNCHED,
        in_kernels=False,
    ),
    Mutant(
        "rank-not-launched-unbounded",
        "one rank is not launched, and the others wait for ever",
        "every kernel that waits for a peer without a bound",
        partial(direct_two_stage, alone=False),
        ("deadlock",),
        host=NOT_LAUNCHED,
    ),
    Mutant(
        "flags-reset-by-memset",
        "each call first zeroes its counter and flags, also flags that peers have already set for this call",
        "workspaces that are cleared by a memset before each call",
        partial(direct_two_stage, alone=True),
        (*WRONG, *HANGS),
        host=CLEARED_FLAGS,
        in_kernels=False,
    ),
)
