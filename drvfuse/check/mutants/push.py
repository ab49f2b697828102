# SPDX-License-Identifier: Apache-2.0
"""Faults of the push protocol, whose words carry their own readiness."""

from __future__ import annotations

from functools import partial

from ...ops.call.options import PDLLevel
from ..collectives import FUSED, near_32_bits, repeated
from ..mutant import WRONG, Mutant
from ..push import changing, given_up, several_rounds
from ..run import HANGS

push_rounds = partial(
    repeated, op="allreduce", algo="push_one_shot", private=False, tight=True, graph=False, side=False, pdl=PDLLevel.OFF
)

near_push = partial(near_32_bits, algo="push_one_shot")

near_push_rows = partial(near_32_bits, op=FUSED, algo="push_two_shot")

MUTANTS = (
    Mutant(
        "slot-not-cleared",
        "a slot keeps the words of the call that consumed them, which the call after the next takes for its own",
        "push protocols whose words carry their own readiness",
        near_push,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "clear-of-half",
        "a slot is cleared by half, as for a type of half the size",
        "push protocols in which calls of several types share slots",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "codes-without-marks",
        "eight FP4 codes of -6, whose word means that nothing is there yet, are sent as they are",
        "push protocols for data that may hold the word of an empty slot",
        partial(near_push_rows, shape=(9, 512), form="nvfp4", timeout=0.002),
        HANGS,
    ),
    Mutant(
        "epoch-by-one-thread",
        "one thread advances the epoch, and warps that have not read it yet take the other half of the slots",
        "prototypes of push protocols, which hung",
        partial(near_push, shape=(1, 1040), timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "no-greeting",
        "a rank that owns no rows sends nothing, so nobody knows that it has cleared its slots",
        "push protocols with fewer rows than ranks",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "order-of-distance",
        "the sum adds the ranks in the order of their distance, which is another one on every rank",
        "push protocols that name slots by distance",
        changing,
    ),
    Mutant(
        "no-cluster-barrier",
        "a block sends to the shared memory of another one that may not have begun",
        "norms whose rows are shared by the blocks of a cluster",
        near_push_rows,
        (*WRONG, *HANGS, "misaligned", "out_of_bounds", "cluster"),
    ),
    Mutant(
        "no-fence-between-rounds",
        "nothing orders the clear of a slot before the words of the next round, by which the peer knows of it",
        "push protocols with several rounds in a call",
        push_rounds,
    ),
    Mutant(
        "no-fence-before-last-results",
        "nothing orders what an owner has heard before its results, by which others know of the clears of third ranks",
        "push protocols with several rounds in a call and results made by owners",
        several_rounds,
    ),
    Mutant(
        "epoch-before-pdl-wait",
        "the epoch is read before the wait for the call in front, which advances it, so two calls take the same slots",
        "push protocols launched with programmatic dependence",
        partial(near_push, timeout=0.002, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "epoch-of-each-block",
        "every block counts its own calls, so a block that a small grid lacks takes the other half of the slots later",
        "push protocols whose state is an array by block",
        changing,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "slot-cleared-before-use",
        "a slot is cleared when its receiver comes to it, and what has arrived by then is lost",
        "push protocols that clear the slots of a call at its beginning",
        partial(near_push, timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "poll-beside-shuffle",
        "lanes poll by votes of the whole warp while lanes that want nothing are at the shuffles of the row's sum",
        "norms of rows that do not fill their last warp",
        partial(near_push_rows, timeout=0.002),
        ("warp_mismatch", *HANGS),
    ),
    Mutant(
        "exit-after-abort",
        "a thread that gives up exits, and the other blocks of its cluster send to it or wait for it",
        "prototypes of push protocols, whose context was lost",
        given_up,
        ("cluster_absent", "deadlock"),
    ),
)
