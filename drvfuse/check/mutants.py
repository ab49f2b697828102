# SPDX-License-Identifier: Apache-2.0
"""Faults that other systems have had, planted in drvfuse's kernels: `drvfuse check` must find each of them.

A fault is edits of sources (edits.py) and a case in which it has its effect; unedited, that case must be clean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..ops.call.options import PDLLevel
from . import fp8, gemv, protocols
from .collectives import near_32_bits, repeated, two_streams
from .edits import Edit, HostEdit, SourceEdit, applied
from .run import HANGS, Case, Finding, explore

WRONG = ("race", "mismatch", "uninitialised")


@dataclass(frozen=True)
class Mutant:
    """`what` is wrong, the kind of system where it was `seen`, the edits that plant it, the case that shows it, and the
    kinds of findings that count as having found it."""

    what: str
    seen: str
    edits: tuple[Edit, ...]
    case: Case
    expected: tuple[str, ...] = WRONG


@dataclass(frozen=True)
class Verdict:
    """How the hunt for a mutant ended: `seed` is the first under which it was found, `by` the kinds of findings there.

    `unexpected` is what was found without the edits, under the same seed.
    """

    name: str
    seed: int | None
    by: tuple[str, ...]
    unexpected: tuple[Finding, ...]

    @property
    def caught(self) -> bool:
        return self.seed is not None


def hunt(name: str, mutant: Mutant, seeds: Sequence[int]) -> Verdict:
    """Run a mutant under seed after seed until it is found; then its case without the edits under that seed."""
    for seed in seeds:
        with applied(mutant.edits):
            kinds = {finding.kind for finding in explore(name, mutant.case, seed)}
        if kinds & set(mutant.expected):
            return Verdict(name, seed, tuple(sorted(kinds)), tuple(explore(name, mutant.case, seed)))
    return Verdict(name, None, (), tuple(explore(name, mutant.case, seeds[-1])))


PUBLISH = "if (!barrier.arrive_and_wait(true)) return;\n"
FUSED = "allreduce_rmsnorm_fp8"
EPOCH = "epoch_ = *epoch_word(own);"
ADMIT = "rank.order.admit(stream, rank.index)"
POLLS = "        for (u32 polls = 1;; ++polls) {\n"

one_stage = partial(repeated, op="allreduce", algo="one_stage", tight=False, graph=False, side=False)
two_stage = partial(repeated, op="allreduce", algo="two_stage", tight=False, graph=False, side=False)
direct_one_stage = partial(one_stage, private=False)
direct_two_stage = partial(two_stage, private=False)
fused_two_stage = partial(
    repeated, op=FUSED, algo="two_stage", private=False, residual=False, tight=False, graph=False, side=False
)


def barrier(old: str, new: str) -> SourceEdit:
    return SourceEdit("sync/barrier.cuh", old, new)


def grid_barrier(old: str, new: str) -> SourceEdit:
    return SourceEdit("sync/grid_barrier.cuh", old, new)


MUTANTS: dict[str, Mutant] = {
    "start-barrier-only": Mutant(
        "one_stage ends without a barrier, and the next kernel of the stream writes the input",
        "fused all-reduce and norm of an inference engine",
        (
            SourceEdit(
                "collectives/allreduce.cu",
                f"#if !DRVFUSE_LOCAL\n    {PUBLISH}    barrier.finish();",
                "#if !DRVFUSE_LOCAL\n    barrier.finish();",
            ),
        ),
        direct_one_stage,
    ),
    "no-start-barrier": Mutant(
        "one_stage reads its peers' inputs without waiting until they are written",
        "hand-written one-shot all-reduces",
        (
            SourceEdit(
                "collectives/allreduce.cu",
                "#if !DRVFUSE_LOCAL\n    Barrier<RANKS> barrier(p.call, trace);\n"
                "    if (!barrier.arrive_and_wait(false)) return;\n",
                "#if !DRVFUSE_LOCAL\n    Barrier<RANKS> barrier(p.call, trace);\n",
            ),
        ),
        direct_one_stage,
    ),
    "flag-before-data": Mutant(
        "two_stage tells its peers that its part is there before it has written it",
        "two-shot all-reduces with a flag a block",
        (
            SourceEdit(
                "collectives/allreduce.cu",
                "        const i64 begin = part.start(p.call.rank) + done;\n",
                f"        const i64 begin = part.start(p.call.rank) + done;\n        {PUBLISH}",
            ),
            SourceEdit("collectives/allreduce.cu", f"        {PUBLISH}        gather(", "        gather("),
        ),
        direct_two_stage,
    ),
    "flag-before-backfill": Mutant(
        "the flags of blocks that the launch does not have follow the own flag: a larger grid passes early",
        "fused all-reduce of an inference kernel library, fixed since",
        (
            SourceEdit(
                "slots.cu",
                "    if (threadIdx.x >= 32 && peer < ranks) backfill(peers, peer, rank, step);\n    __syncthreads();\n"
                "    if (threadIdx.x < ranks) {\n        set(peers, peer, blockIdx.x, rank, step);\n",
                "    if (threadIdx.x < ranks) set(peers, peer, blockIdx.x, rank, step);\n    __syncthreads();\n"
                "    if (threadIdx.x >= 32 && peer < ranks) backfill(peers, peer, rank, step);\n"
                "    if (threadIdx.x < ranks) {\n",
            ),
        ),
        protocols.slots,
    ),
    "operand-before-pdl-wait": Mutant(
        "a residual is fetched together with gamma, before the wait for the kernel that may write it",
        "fused all-reduce of an inference kernel library, fixed since",
        (
            SourceEdit(
                "collectives/norm_rows.cuh",
                "                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, index(i), p);\n",
                "                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, index(i), p);\n"
                "                if (RESIDUAL && has(i)) load_of_row(early_, p.residual, blockIdx.x, index(i), p);\n",
            ),
            SourceEdit(
                "collectives/norm_rows.cuh",
                "        load_of_row(pack, p_.residual, row, at, p_);\n",
                "        if (KEEP_GAMMA && PACKS == 1 && row == blockIdx.x) pack = early_;\n"
                "        else load_of_row(pack, p_.residual, row, at, p_);\n",
            ),
            SourceEdit("collectives/norm_rows.cuh", "    u32 done_;\n", "    u32 done_;\n    InPack early_;\n"),
        ),
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
    "state-before-pdl-wait": Mutant(
        "the barrier's counter is read before the wait for the call in front, which advances it",
        "collectives launched with programmatic dependence and no wait",
        (
            SourceEdit(
                "collectives/allreduce.cu",
                "    wait_for_producer();\n    trace.start();\n    two_stage(p, trace DRVFUSE_EPILOGUE_ARGUMENT);\n",
                "    two_stage(p, trace DRVFUSE_EPILOGUE_ARGUMENT);\n    wait_for_producer();\n",
            ),
        ),
        partial(direct_two_stage, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    "gpu-scope-release": Mutant(
        "the flag for another GPU is released at the scope of this GPU",
        "serving stacks, after CUDA changed a default",
        (barrier("st.release.sys.global.u64", "st.release.gpu.global.u64"),),
        direct_two_stage,
    ),
    "gpu-scope-acquire": Mutant(
        "the flag of another GPU is acquired at the scope of this GPU",
        "multicast kernels and their barriers",
        (barrier("ld.acquire.sys.global.u64", "ld.acquire.gpu.global.u64"),),
        direct_two_stage,
    ),
    "relaxed-flag-store": Mutant(
        "the flag is stored without release",
        "arrival counter of an inference engine, hangs and wrong sums on sm_90",
        (barrier("st.release.sys.global.u64", "st.relaxed.sys.global.u64"),),
        direct_two_stage,
    ),
    "relaxed-flag-load": Mutant(
        "the flag is polled without acquire",
        "hand-written spins",
        (barrier("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"),),
        direct_two_stage,
    ),
    "volatile-flag-store": Mutant(
        "the flag is volatile on both sides, in a barrier that guards data",
        "barriers of the first custom all-reduces",
        (
            barrier("st.release.sys.global.u64", "st.volatile.global.u64"),
            barrier("ld.acquire.sys.global.u64", "ld.volatile.global.u64"),
        ),
        direct_two_stage,
    ),
    "no-block-barrier-after-spin": Mutant(
        "threads that do not spin go on without waiting for those that do",
        "hand-written barriers",
        (barrier("const bool all = !__syncthreads_or(aborted_);", "const bool all = !aborted_;"),),
        direct_two_stage,
    ),
    "no-block-barrier-before-release": Mutant(
        "the flag is released while other threads of the block still write",
        "hand-written barriers",
        (barrier("if (publish) __syncthreads();", ""),),
        direct_two_stage,
    ),
    "last-arriver-relaxed": Mutant(
        "blocks count themselves without ordering, and the last one advances the state that the others have read",
        "finish counters of split reductions",
        (barrier("atom.acq_rel.gpu.global.add.u32", "atom.relaxed.gpu.global.add.u32"),),
        partial(direct_two_stage, blocks=4),
    ),
    "last-arriver-no-fence": Mutant(
        "the block that arrives last adds partial results which nothing orders before its atomic",
        "matrix products with a fused norm, split reductions",
        (SourceEdit("last_block.cu", "    __threadfence();\n", "", times=2),),
        protocols.last_block,
    ),
    # Found by its wrong result under some seeds without a race, rightly: flags count, so a slow peer that waits for a
    # chunk may see the flag of the next one. It is then ordered behind the write of that chunk, and reads its values.
    # A race is what a fast peer makes, whose read the owner's next write does not know.
    "payload-not-doubled": Mutant(
        "one half of the workspace serves every chunk, so a chunk is overwritten while peers still gather it",
        "chunked two-shot all-reduces",
        (SourceEdit("collectives/allreduce.cu", "if (!STAGED) results = chunk * OUT_BYTES - results;", ""),),
        partial(repeated, op="allreduce", algo="two_stage", private=False, tight=True, graph=False, side=False),
    ),
    "gathered-before-barrier": Mutant(
        "FP8 rows are gathered from their owners without a barrier in between",
        "fused two-shot all-reduce and norm",
        (SourceEdit(f"collectives/{FUSED}.cu", f"        {PUBLISH}        const int most", "        const int most"),),
        fused_two_stage,
    ),
    "scratch-reused": Mutant(
        "the shared words of a row's reduction are written for the next row while slow warps still read them",
        "fused norms with a row loop",
        (
            SourceEdit("common/reduce.cuh", "scratch.sums[row % 2]", "scratch.sums[0]"),
            SourceEdit("common/reduce.cuh", "scratch.maxima[row % 2]", "scratch.maxima[0]"),
        ),
        partial(repeated, op=FUSED, algo="one_stage", private=False, tight=False, graph=False, side=False, blocks=1),
    ),
    "ordinals-of-32-bits": Mutant(
        "the barrier compares 32-bit ordinals, which wrap",
        "counters of long-running engines",
        (barrier("if (seen >= expected) return true;", "if (u32(seen) >= u32(expected)) return true;"),),
        near_32_bits,
        (*WRONG, *HANGS),
    ),
    "ordinals-of-the-host": Mutant(
        "the barrier's ordinal does not change from call to call, as one that a graph has baked in",
        "collectives whose counter is a launch argument, in CUDA graphs",
        (barrier("*epoch_word(own) = epoch_ + ordinal_;", ""),),
        partial(direct_two_stage, graph=True),
    ),
    "grids-differ": Mutant(
        "ranks launch different numbers of blocks",
        "tuners that decide on each rank by itself",
        (
            HostEdit(
                "drvfuse.ops.collectives.plan",
                "launches",
                "(shape.blocks, 1, 1)",
                "(max(1, shape.blocks - rank.index % 2), 1, 1)",
            ),
        ),
        partial(direct_two_stage, blocks=4),
        (*WRONG, *HANGS),
    ),
    "two-streams": Mutant(
        "two calls on two streams use one workspace at the same time",
        "one communicator on two streams of a serving stack",
        (HostEdit("drvfuse.ops.call.prepared", "Prepared._order", ADMIT, "pass"),),
        two_streams,
        (*WRONG, *HANGS),
    ),
    "rank-not-launched": Mutant(
        "one rank takes no part",
        "every kernel that waits for a peer",
        (
            HostEdit(
                "drvfuse.ops.collectives.plan",
                "Direct.launch_all",
                "zip(self.launches, streams, strict=True)",
                "zip(self.launches[1:], streams[1:], strict=True)",
            ),
        ),
        partial(direct_two_stage, alone=False),
        HANGS,
    ),
    "rank-not-launched-unbounded": Mutant(
        "one rank takes no part, and the others wait for ever",
        "every kernel that waits for a peer without a bound",
        (
            HostEdit(
                "drvfuse.ops.collectives.plan",
                "Direct.launch_all",
                "zip(self.launches, streams, strict=True)",
                "zip(self.launches[1:], streams[1:], strict=True)",
            ),
            barrier(POLLS, "        while (load_acquire(flag) < expected) {}\n        return true;\n" + POLLS),
        ),
        partial(direct_two_stage, alone=False),
        ("deadlock",),
    ),
    "flags-reset-by-memset": Mutant(
        "each call zeroes its own counter and flags first, and nothing orders that against peers that have arrived",
        "workspaces that are cleared by a memset before each call",
        (
            HostEdit(
                "drvfuse.ops.call.prepared",
                "Prepared._order",
                ADMIT,
                f"{ADMIT}\n    with rank.device.use():\n        rank.device.driver.cuMemsetD8Async("
                "self.group.workspace.pointers[position], 0, 4096, stream.handle)",
            ),
        ),
        partial(direct_two_stage, alone=True),
        (*WRONG, *HANGS),
    ),
    "grid-barrier-relaxed": Mutant(
        "blocks arrive at the barrier of a grid without releasing what they wrote",
        "hand-written grid barriers, split reductions",
        (grid_barrier("st.release.gpu.global.u64", "st.relaxed.gpu.global.u64"),),
        fp8.layernorm,
    ),
    "grid-barrier-no-fence": Mutant(
        "the slots of a grid barrier are polled relaxed, and no fence follows",
        "hand-written grid barriers, split reductions",
        (grid_barrier('        asm volatile("fence.acq_rel.gpu;" ::: "memory");\n', ""),),
        fp8.layernorm,
    ),
    "no-block-barrier-after-grid-spin": Mutant(
        "threads go on from a grid barrier without waiting for the warps of their block that still poll",
        "hand-written grid barriers",
        (SourceEdit("sync/scratch.cuh", "return !__syncthreads_or(failed);", "return !failed;"),),
        fp8.division,
    ),
    "fp8-operand-before-pdl-wait": Mutant(
        "the FP8 forward pass reads its operands before the wait for the kernels that write them",
        "norm kernels launched with programmatic dependence",
        (
            SourceEdit("coat/fp8_rmsnorm_forward.cu", "    wait_for_producer();\n", ""),
            SourceEdit(
                "coat/fp8_rmsnorm_forward.cu", "    tell(words, 0,", "    wait_for_producer();\n    tell(words, 0,"
            ),
        ),
        partial(fp8.rmsnorm, pdl=PDLLevel.ON),
    ),
    "fp8-word-of-any-launch": Mutant(
        "blocks of the FP8 forward pass take words that the launch before has left",
        "messages that carry their own readiness, and a sentinel that nobody puts back",
        (SourceEdit("sync/grid_words.cuh", "u32(seen[i] >> 32) != epoch", "u32(seen[i] >> 32) == 0"),),
        fp8.rmsnorm_rows,
    ),
    "fp8-launch-number-too-early": Mutant(
        "block 0 of the FP8 forward pass advances the number of the launch before the others have read it",
        "words with the number of the launch, which one block advances",
        (
            SourceEdit(
                "coat/fp8_rmsnorm_forward_rows.cu",
                "    ScratchUse use(p.scratch, gridDim.x > 1);\n",
                "    ScratchUse use(p.scratch, gridDim.x > 1);\n"
                "    if (threadIdx.x + blockIdx.x == 0) ptx::store_relaxed_gpu(&p.scratch.state->epoch, use.epoch());\n",
            ),
        ),
        fp8.rmsnorm_rows,
        (*WRONG, *HANGS),
    ),
    "gemv-word-of-any-launch": Mutant(
        "the block that normalises takes words that the launch before has left",
        "messages that carry their own readiness, and a sentinel that nobody puts back",
        (SourceEdit("gemv/norm.cuh", "late |= tag_of(w[k], i) ^ tag", "late |= tag_of(w[k], i) == 0"),),
        gemv.partial_norm,
    ),
    "gemv-flag-before-value": Mutant(
        "a word that is its own flag is stored in two halves, the flag first",
        "messages that carry their own readiness, in stores that are split",
        (
            SourceEdit(
                "gemv/result.cuh",
                "leave_word(word, tag, Word<float>::pack(&sum));",
                'asm volatile("st.relaxed.gpu.global.u32 [%0 + 4], %1; st.relaxed.gpu.global.u32 [%0], %2;"'
                '::"l"(word), "r"(tag), "r"(Word<float>::pack(&sum)) : "memory");',
            ),
        ),
        gemv.partial_norm,
    ),
    "gemv-act-before-pdl-wait": Mutant(
        "the warps that multiply do not wait for the kernel that writes act",
        "matrix products launched with programmatic dependence",
        (
            SourceEdit(
                "gemv/gemv_partial_norm.cu",
                "    wait_for_producer();\n    if constexpr (DEPENDENT) products",
                "    if constexpr (DEPENDENT) products",
            ),
        ),
        partial(gemv.partial_norm, pdl=PDLLevel.OVERLAP_AT_BEGINNING),
        (*WRONG, *HANGS),
    ),
    "gemv-sums-without-spare-slots": Mutant(
        "group sums have as many places as stages under way, so a later stage's go where some are still to be added",
        "matrix products whose stages are a ring",
        (
            SourceEdit(
                "gemv/gemv_partial_norm.cu",
                "parts + stage.slot() * PARTS",
                "parts + stage.index % STAGES * PARTS",
                times=2,
            ),
        ),
        gemv.partial_norm,
    ),
    "gemv-copy-over-weights-in-use": Mutant(
        "a stage is copied into its place in shared memory before the weights there are multiplied",
        "matrix products whose stages are a ring that the copy engine fills",
        (
            SourceEdit(
                "gemv/gemv_partial_norm.cu",
                "ring + stage.slot() * (STEP * SLICE)",
                "ring + stage.index % STAGES * (STEP * SLICE)",
            ),
            SourceEdit(
                "gemv/pipeline.cuh", "ring + (stage.slot() * STEP + r)", "ring + (stage.index % STAGES * STEP + r)"
            ),
        ),
        gemv.partial_norm,
        (*WRONG, *HANGS),
    ),
    "gemv-no-block-barrier-before-norm": Mutant(
        "the sum of squares is added up without waiting for the warps that still poll",
        "matrix products with a fused norm",
        (
            SourceEdit(
                "gemv/norm.cuh", '        asm volatile("bar.sync 1, ', '        if (false) asm volatile("bar.sync 1, '
            ),
        ),
        gemv.partial_norm,
    ),
}
