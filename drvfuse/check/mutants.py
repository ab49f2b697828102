# SPDX-License-Identifier: Apache-2.0
"""Faults that other systems have had, planted in drvfuse's kernels: `drvfuse check` must find each of them.

In a kernel a fault is where FAULT has its name (cu/common/faults.cuh), on the host a method that is exchanged for
another (substitutions.py). It comes with a case in which it has its effect; without the fault that case must be clean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..ops.call import faults
from ..ops.call.options import PDLLevel
from . import fp8, gemv, norm, protocols
from .collectives import FUSED, near_32_bits, repeated, two_streams
from .differing import FEW, compared, differing
from .moves import moves, moves_in_rounds
from .push import changing, given_up, several_rounds
from .run import HANGS, Case, Finding, explore
from .scatter import changing_parts
from .substitutions import (
    CLEARED_FLAGS,
    NEVER_STAGED,
    NO_MEETING,
    NO_ORDER,
    NOT_LAUNCHED,
    OTHER_GRID,
    Substitution,
)

WRONG = ("race", "mismatch", "uninitialised")


@dataclass(frozen=True)
class Mutant:
    """`what` is wrong, the kind of system where it was `seen`, the case that shows it, and the kinds of findings that
    count as having found it. It is planted `in_kernels` by its name, on the `host`, or both."""

    name: str
    what: str
    seen: str
    case: Case
    expected: tuple[str, ...] = WRONG
    host: Substitution | None = None
    in_kernels: bool = True

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Calls that are made in the block have the fault."""
        with (
            faults.in_kernels(self.name if self.in_kernels else ""),
            contextlib.nullcontext() if self.host is None else self.host.made(),
        ):
            yield


@dataclass(frozen=True)
class Verdict:
    """The result of the search for a mutant: `seed` is the first under which it was found, `by` the kinds of findings
    there.

    `unexpected` is what was found without the fault, under the same seed.
    """

    name: str
    seed: int | None
    by: tuple[str, ...]
    unexpected: tuple[Finding, ...]

    @property
    def caught(self) -> bool:
        return self.seed is not None


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Verdict:
    """Run a mutant under seed after seed until it is found; then its case without the fault under that seed."""
    name = mutant.name
    for seed in seeds:
        with mutant.planted():
            kinds = {finding.kind for finding in explore(name, mutant.case, seed)}
        if kinds & set(mutant.expected):
            return Verdict(name, seed, tuple(sorted(kinds)), tuple(explore(name, mutant.case, seed)))
    return Verdict(name, None, (), tuple(explore(name, mutant.case, seeds[-1])))


one_stage = partial(repeated, op="allreduce", algo="one_stage", tight=False, graph=False, side=False)
two_stage = partial(repeated, op="allreduce", algo="two_stage", tight=False, graph=False, side=False)
direct_one_stage = partial(one_stage, private=False)
direct_two_stage = partial(two_stage, private=False)
fused_two_stage = partial(
    repeated, op=FUSED, algo="two_stage", private=False, residual=False, tight=False, graph=False, side=False
)

push_rounds = partial(
    repeated, op="allreduce", algo="push_one_shot", private=False, tight=True, graph=False, side=False, pdl=PDLLevel.OFF
)
near_push = partial(near_32_bits, algo="push_one_shot")
near_push_rows = partial(near_32_bits, op=FUSED, algo="push_two_shot")

several_nodes = partial(repeated, op="allreduce", algo="two_stage", nodes=2, tight=False, graph=False, side=False)

scatter_pull = partial(repeated, op="reduce_scatter", algo="pull", tight=False, graph=False, side=False)

staged_multimem = partial(
    repeated, op="allreduce", algo="two_stage", multimem=True, multicast="", tight=False, graph=False, side=False
)

pushed_moves = partial(moves, ranks=2, ops=("all_gather",), algos=("push",), graph=False, timeout=0.002)

few_compared = partial(compared, kinds=FEW, shape=(3, 72), first=False, timeout=0.002)

_ALL = (
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
        "two_stage tells its peers that its part is there before it has written it",
        "two-shot all-reduces with a flag a block",
        direct_two_stage,
    ),
    Mutant(
        "flag-before-backfill",
        "the flags of blocks that the launch does not have follow the own flag: a larger grid passes early",
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
        "the barrier's counter is read before the wait for the call in front, which advances it",
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
        "threads that do not spin go on without waiting for those that do",
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
        "blocks count themselves without ordering, and the last one advances the state that the others have read",
        "finish counters of split reductions",
        partial(direct_two_stage, blocks=4),
    ),
    Mutant(
        "last-arriver-no-fence",
        "the block that arrives last adds partial results which nothing orders before its atomic",
        "matrix products with a fused norm, split reductions",
        protocols.last_block,
    ),
    # Found by its wrong result under some seeds without a race, rightly: flags count, so a slow peer that waits for a
    # chunk may see the flag of the next one. It is then ordered behind the write of that chunk, and reads its values.
    # A race is what a fast peer makes, whose read the owner's next write does not know.
    Mutant(
        "payload-not-doubled",
        "one half of the workspace serves every chunk, so a chunk is overwritten while peers still gather it",
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
        "the barrier's ordinal does not change from call to call, as one that a graph has baked in",
        "collectives whose counter is a launch argument, in CUDA graphs",
        partial(direct_two_stage, graph=True),
    ),
    Mutant(
        "grids-differ",
        "ranks launch different numbers of blocks",
        "tuners that decide on each rank by itself",
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
        "one rank takes no part",
        "every kernel that waits for a peer",
        partial(direct_two_stage, alone=False),
        HANGS,
        host=NOT_LAUNCHED,
        in_kernels=False,
    ),
    Mutant(
        "rank-not-launched-unbounded",
        "one rank takes no part, and the others wait for ever",
        "every kernel that waits for a peer without a bound",
        partial(direct_two_stage, alone=False),
        ("deadlock",),
        host=NOT_LAUNCHED,
    ),
    Mutant(
        "flags-reset-by-memset",
        "each call zeroes its own counter and flags first, and nothing orders that against peers that have arrived",
        "workspaces that are cleared by a memset before each call",
        partial(direct_two_stage, alone=True),
        (*WRONG, *HANGS),
        host=CLEARED_FLAGS,
        in_kernels=False,
    ),
    Mutant(
        "grid-barrier-relaxed",
        "blocks arrive at the barrier of a grid without releasing what they wrote",
        "hand-written grid barriers, split reductions",
        fp8.layernorm,
    ),
    Mutant(
        "grid-barrier-no-fence",
        "the slots of a grid barrier are polled relaxed, and no fence follows",
        "hand-written grid barriers, split reductions",
        fp8.layernorm,
    ),
    Mutant(
        "no-block-barrier-after-grid-spin",
        "threads go on from a grid barrier without waiting for the warps of their block that still poll",
        "hand-written grid barriers",
        fp8.division,
    ),
    Mutant(
        "fp8-operand-before-pdl-wait",
        "the FP8 forward pass reads its operands before the wait for the kernels that write them",
        "norm kernels launched with programmatic dependence",
        partial(fp8.rmsnorm, pdl=PDLLevel.ON),
    ),
    Mutant(
        "fp8-word-of-any-launch",
        "blocks of the FP8 forward pass take words that the launch before has left",
        "messages that carry their own readiness, and a sentinel that nobody puts back",
        fp8.rmsnorm_rows,
    ),
    Mutant(
        "fp8-pair-of-any-launch",
        "blocks of the FP8 forward pass that hold tiles in registers take sums that the launch before has left",
        "messages that carry their own readiness, and a sentinel that nobody puts back",
        fp8.rmsnorm_tiles,
    ),
    Mutant(
        "fp8-launch-number-too-early",
        "block 0 of the FP8 forward pass advances the number of the launch before the others have read it",
        "words with the number of the launch, which one block advances",
        fp8.rmsnorm_rows,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "norm-scratch-reused",
        "every reduction of a row in shared memory uses the same words",
        "reductions of consecutive rows or values in one block",
        norm.rows,
    ),
    Mutant(
        "norm-input-before-pdl-wait",
        "a norm reads its first row before the wait for the kernel that writes it",
        "norm kernels launched with programmatic dependence",
        partial(norm.rows, pdl=PDLLevel.ON),
    ),
    Mutant(
        "gemv-word-of-any-launch",
        "the block that normalises takes words that the launch before has left",
        "messages that carry their own readiness, and a sentinel that nobody puts back",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-flag-before-value",
        "a word that is its own flag is stored in two halves, the flag first",
        "messages that carry their own readiness, in stores that are split",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-act-before-pdl-wait",
        "the warps that multiply do not wait for the kernel that writes act",
        "matrix products launched with programmatic dependence",
        partial(gemv.partial_norm, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    Mutant(
        "gemv-sums-without-spare-slots",
        "group sums have as many places as stages under way, so a later stage's go where some are still to be added",
        "matrix products whose stages are a ring",
        gemv.partial_norm,
    ),
    Mutant(
        "gemv-copy-over-weights-in-use",
        "a stage is copied into its place in shared memory before the weights there are multiplied",
        "matrix products whose stages are a ring that the copy engine fills",
        gemv.partial_norm,
        (*WRONG, *HANGS),
    ),
    Mutant(
        "gemv-no-block-barrier-before-norm",
        "the sum of squares is added up without waiting for the warps that still poll",
        "matrix products with a fused norm",
        gemv.partial_norm,
    ),
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
        "multimem-no-barrier",
        "the sums of all ranks' staged inputs are loaded without waiting until these are staged",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-no-alias-fence",
        "inputs are written by their own address and loaded by a multicast address with nothing but a barrier between",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-slots-reused",
        "a row is staged in a slot from which other threads of the block still copy results of the chunk before",
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
            shape=(96, 264),  # whose rows of FP8 are copied in other units than they are staged in
        ),
    ),
    Mutant(
        "multimem-red-for-store",
        "results are added to what all ranks have, where they should be stored",
        "hand-written all-reduces by multicast",
        staged_multimem,
    ),
    Mutant(
        "multimem-plain-load",
        "a multicast address is read by an ordinary load",
        "code that takes a multicast address for a pointer",
        staged_multimem,
        (*WRONG, "multicast_plain"),
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
        "exchange-before-sums",
        "partial sums are exchanged before the kernels that make them have ended, or made anew while they are copied",
        "exchanges that are queued on a stream of their own",
        several_nodes,
        host=NO_MEETING,
        in_kernels=False,
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
MUTANTS = {mutant.name: mutant for mutant in _ALL}
"""By name."""
