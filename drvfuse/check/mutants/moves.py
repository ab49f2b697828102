# SPDX-License-Identifier: Apache-2.0
"""Faults of the collectives that move data, and of the reduce-scatters."""

from __future__ import annotations

from functools import partial

from ..collectives import repeated
from ..moves import moves, moves_in_rounds
from ..mutant import WRONG, Mutant
from ..run import HANGS
from ..scatter import changing_parts
from ..substitutions import NEVER_STAGED

scatter_pull = partial(repeated, op="reduce_scatter", algo="pull", tight=False, graph=False, side=False)

pushed_moves = partial(moves, ranks=2, ops=("all_gather",), algos=("push",), graph=False, timeout=0.002)

MUTANTS = (
    Mutant(
        "scatter-start-barrier-only",
        "a rank that has its part ends, and the next kernel of its stream writes the input that others still read",
        "hand-written reduce-scatters",
        partial(scatter_pull, private=False),
    ),
    Mutant(
        "scatter-staging-unpublished",
        "staged parts are read as soon as the own ones are staged",
        "hand-written reduce-scatters",
        partial(scatter_pull, private=True),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "scatter-empty-part-not-told",
        "a rank that owns no rows hears of nobody, and sends words over those that others have not taken",
        "push protocols with fewer rows than ranks",
        partial(changing_parts, tight=False, side=False),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "scatter-rounds-of-own-length",
        "a rank that has no rows left in a round hears of nobody there, and sends words over those of the round before",
        "push protocols with several rounds in a call",
        partial(changing_parts, tight=True, side=False),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "foreign-words-as-they-are",
        "bytes are pushed as they are, and some look like a slot to which nothing has come",
        "gathers of integers and FP4 by push protocols that were made for sums",
        pushed_moves,
        HANGS,
    ),
    Mutant(
        "key-cleared-before-all-have-it",
        "the lane that clears a warp's key does so before other lanes have seen it",
        "push protocols in which a word serves a whole warp",
        pushed_moves,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "keys-only-with-bytes",
        "a warp without bytes for a peer sends it nothing, so the peer's next bytes come over slots that are in use",
        "push protocols whose words go one way alone, in several rounds",
        partial(moves_in_rounds, ops=("broadcast",) * 3, ranks=2, timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "moves-no-start-barrier",
        "bytes are stored to a peer's output while kernels in front of the peer's call still read it",
        "hand-written gathers that store to the outputs of others",
        partial(moves, ranks=2, ops=("broadcast",), algos=("put",), graph=False),
    ),
    Mutant(
        "moves-no-end-barrier",
        "a call ends before its peers have stored all of its output",
        "hand-written gathers that store to the outputs of others",
        partial(moves, ranks=2, ops=("broadcast",), algos=("put",), graph=False),
    ),
    Mutant(
        "moves-payload-not-doubled",
        "one half of the workspace serves every chunk, which is staged while peers still read the one before",
        "chunked exchanges by way of a buffer",
        partial(moves, ranks=3, ops=("in_place",), algos=("pull",), tight=True, graph=False),
    ),
    Mutant(
        "exchange-in-place-not-staged",
        "what comes from a peer is written over what that peer still reads",
        "all-to-alls whose outputs are their inputs",
        partial(moves, ranks=3, ops=("in_place",), algos=("pull",), tight=True, graph=False),
        host=NEVER_STAGED,
        in_kernels=False,
    ),
)
