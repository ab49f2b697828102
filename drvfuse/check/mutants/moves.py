# SPDX-License-Identifier: Apache-2.0
"""Planted faults of the collectives that move data, and of the reduce-scatters."""

from __future__ import annotations

from functools import partial

from ..moves import moves, moves_in_rounds
from ..mutant import WRONG, Mutant
from ..run import HANGS
from ..shared import repeated
from ..substitutions import NEVER_STAGED
from ..sums import changing_parts

scatter_pull = partial(repeated, op="reduce_scatter", algo="pull", tight=False, graph=False, side=False)

pushed_moves = partial(moves, ranks=2, ops=("all_gather",), algos=("push",), graph=False, timeout=0.002)

MUTANTS = (
    Mutant(
        "scatter-start-barrier-only",
        "a rank ends when it has its part, and the next kernel of its stream writes the input that others still read",
        "hand-written reduce-scatters",
        partial(scatter_pull, private=False),
    ),
    Mutant(
        "scatter-staging-unpublished",
        "a rank reads staged parts of its peers when it has staged its own parts",
        "hand-written reduce-scatters",
        partial(scatter_pull, private=True),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "scatter-empty-part-not-told",
        "a rank that owns no rows does not wait for its peers, and overwrites words that they have not read",
        "push protocols with fewer rows than ranks",
        partial(changing_parts, tight=False, side=False),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "scatter-rounds-of-own-length",
        "a rank without rows in a round does not wait for its peers there, and overwrites words of the round before",
        "push protocols with several rounds in a call",
        partial(changing_parts, tight=True, side=False),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "foreign-words-as-they-are",
        "bytes are pushed unchanged, and some are equal to the word of an empty slot",
        "gathers of integers and FP4 by push protocols that were made for sums",
        pushed_moves,
        HANGS,
    ),
    Mutant(
        "key-cleared-before-all-have-it",
        "one lane clears the key of a warp before the other lanes have read it",
        "push protocols in which a word serves a whole warp",
        pushed_moves,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "keys-only-with-bytes",
        "a warp without bytes for a peer sends no key, so the peer's next bytes overwrite slots that are in use",
        "push protocols whose words move in one direction only, in several rounds",
        partial(moves_in_rounds, ops=("broadcast",) * 3, ranks=2, timeout=0.002),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "moves-no-start-barrier",
        "bytes are stored to a peer's output while earlier kernels of the peer still read it",
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
        "every chunk uses the same half of the workspace, so it is staged while peers still read the chunk before",
        "chunked exchanges through a buffer",
        partial(moves, ranks=3, ops=("in_place",), algos=("pull",), tight=True, graph=False),
    ),
    Mutant(
        "exchange-in-place-not-staged",
        "bytes from a peer overwrite input that this peer still reads",
        "all-to-alls whose output is their input",
        partial(moves, ranks=3, ops=("in_place",), algos=("pull",), tight=True, graph=False),
        host=NEVER_STAGED,
        in_kernels=False,
    ),
    Mutant(
        "scales-stored-with-padding",
        "words of a rank's scales are stored whole, over scales of the next rank",
        "all-gathers of scales by column",
        partial(moves, ops=("arranged",), algos=("push", "pull"), graph=False),
    ),
)
