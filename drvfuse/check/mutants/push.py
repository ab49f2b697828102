# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the push protocol."""

from __future__ import annotations

from functools import partial

from ...ops.call.options import PDLLevel
from ..mutant import WRONG, Mutant
from ..push import changing, given_up, several_rounds
from ..run import HANGS
from ..shared import FUSED, near_32_bits, repeated

push_rounds = partial(
    repeated, op="allreduce", algo="push_one_shot", private=False, tight=True, graph=False, side=False, pdl=PDLLevel.OFF
)

near_push = partial(near_32_bits, algo="push_one_shot")

near_push_rows = partial(near_32_bits, op=FUSED, algo="push_two_shot")

MUTANTS = (
    Mutant(
        "slot-not-cleared",
        "words stay in a slot after they were read, and the call after the next one takes them as its own",
        "push protocols whose words carry their own readiness",
        near_push,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "clear-of-half",
        "only half of a slot is cleared, as for a type of half the size",
        "push protocols in which calls of several types share slots",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "codes-without-keys",
        "eight FP4 codes of -6 are sent unchanged, though their word is that of an empty slot",
        "push protocols for data that may hold the word of an empty slot",
        partial(near_push_rows, shape=(9, 512), form="nvfp4", timeout=0.002),
        HANGS,
    ),
    Mutant(
        "scales-without-offset",
        "four E8M0 scales that are NaN are sent unchanged, though their word is that of an empty slot",
        "push protocols for data that may hold the word of an empty slot",
        partial(near_push_rows, shape=(9, 512), form="mxfp8", timeout=0.002),
        HANGS,
    ),
    Mutant(
        "epoch-by-one-thread",
        "one thread advances the epoch, and warps that read it later use the wrong half of the slots",
        "prototypes of push protocols that hung",
        partial(near_push, shape=(1, 1040), timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "no-greeting",
        "a rank that owns no rows sends nothing, so its peers do not know whether it has cleared its slots",
        "push protocols with fewer rows than ranks",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "order-of-distance",
        "a rank adds the ranks in the order of their distance from itself, which differs between ranks",
        "push protocols that number slots by distance",
        changing,
    ),
    Mutant(
        "no-cluster-barrier",
        "a block writes to the shared memory of another block, which may not have started yet",
        "norms whose rows are shared by the blocks of a cluster",
        near_push_rows,
        (*WRONG, *HANGS, "misaligned", "out_of_bounds", "cluster"),
    ),
    Mutant(
        "no-fence-between-rounds",
        "nothing orders the clear of a slot before the words of the next round, which allow the peer to use it again",
        "push protocols with several rounds in a call",
        push_rounds,
    ),
    Mutant(
        "no-fence-before-last-results",
        "nothing orders the words that an owner has received before its results, so clears of slots may come too late",
        "push protocols with several rounds in a call and results made by owners",
        several_rounds,
    ),
    Mutant(
        "epoch-before-pdl-wait",
        "the epoch is read before the wait for the previous call, which advances it, so two calls use the same slots",
        "push protocols launched with programmatic dependence",
        partial(near_push, timeout=0.002, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "epoch-of-each-block",
        "every block counts its own calls, so after a call with a small grid blocks use different halves of the slots",
        "push protocols with state for each block",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "slot-cleared-before-use",
        "the receiver clears a slot before it reads it, and words that have arrived already are lost",
        "push protocols that clear the slots of a call at its beginning",
        partial(near_push, timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "poll-beside-shuffle",
        "lanes poll by votes of the whole warp while lanes without words are already at the shuffles of the row's sum",
        "norms of rows that do not fill their last warp",
        partial(near_push_rows, timeout=0.002),
        ("warp_mismatch", *HANGS),
    ),
    Mutant(
        "exit-after-abort",
        "a thread that gives up exits, while other blocks of its cluster write to its shared memory or wait for it",
        "prototypes of push protocols that lost the context",
        given_up,
        ("cluster_absent", "deadlock"),
    ),
)
