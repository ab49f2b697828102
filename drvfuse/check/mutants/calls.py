# SPDX-License-Identifier: Apache-2.0
"""Faults of the comparison of calls that differ."""

from __future__ import annotations

from functools import partial

from ...ops.call.options import PDLLevel
from ..differing import FEW, compared, differing
from ..mutant import WRONG, Mutant
from ..run import HANGS

few_compared = partial(compared, kinds=FEW, shape=(3, 72), first=False, timeout=0.002)

MUTANTS = (
    Mutant(
        "call-not-told",
        "a rank does not tell one of its peers which call it makes",
        "checks of calls that some ranks skip",
        few_compared,
        HANGS,
    ),
    Mutant(
        "call-not-awaited",
        "calls are compared if the peer's word happens to be there, and the kernel ends without it otherwise",
        "checks that run beside what they check",
        partial(differing, kind="dtype"),
    ),
    Mutant(
        "calls-of-one-generation",
        "a peer that is a call ahead overwrites its word before it is read",
        "mailboxes of one entry",
        few_compared,
        (*HANGS, "calls"),
    ),
    Mutant(
        "call-not-numbered",
        "the number of a call is the same in every call, as one that a graph has baked in",
        "collectives whose counter is a launch argument, in CUDA graphs",
        few_compared,
        (*HANGS, "calls"),
    ),
    Mutant(
        "call-number-before-pdl-wait",
        "the number of a call is read before the wait for the call in front, which advances it",
        "collectives launched with programmatic dependence and no wait",
        partial(few_compared, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS, "calls"),
    ),
    Mutant(
        "calls-told-by-every-block",
        "every block counts the call and tells the peers",
        "state of a launch that each of its blocks advances",
        few_compared,
        (*WRONG, *HANGS, "calls"),
    ),
    Mutant(
        "call-told-in-halves",
        "the word of a call is stored in two halves, the number first",
        "messages that carry their own readiness, in stores that are split",
        few_compared,
        (*WRONG, *HANGS, "calls"),
    ),
    Mutant(
        "call-told-weakly",
        "the word of a call is stored as ordinary data, which another rank reads at the same time",
        "mailboxes that rely on how hardware stores a word",
        few_compared,
        ("race",),
    ),
)
