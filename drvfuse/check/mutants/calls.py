# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the comparison of the ranks' calls."""

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
        "a rank does not send the word of its call to one of its peers",
        "checks of calls that some ranks skip",
        few_compared,
        HANGS,
    ),
    Mutant(
        "call-not-awaited",
        "a kernel compares calls only if the peer's word has arrived already, and does not wait for it",
        "checks that do not delay the checked operation",
        partial(differing, kind="dtype"),
    ),
    Mutant(
        "calls-of-one-generation",
        "a peer that is one call ahead overwrites its word before it is read",
        "mailboxes of one entry",
        few_compared,
        (*HANGS, "calls"),
    ),
    Mutant(
        "call-not-numbered",
        "the number of a call is the same in every call, like a launch argument in a graph",
        "collectives whose counter is a launch argument, in CUDA graphs",
        few_compared,
        (*HANGS, "calls"),
    ),
    Mutant(
        "call-number-before-pdl-wait",
        "the number of a call is read before the wait for the previous call, which advances it",
        "collectives launched with programmatic dependence and no wait",
        partial(few_compared, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS, "calls"),
    ),
    Mutant(
        "calls-told-by-every-block",
        "every block counts the call and sends its word to the peers",
        "launches in which every block advances the state of the launch",
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
