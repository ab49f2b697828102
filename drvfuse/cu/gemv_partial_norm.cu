// SPDX-License-Identifier: Apache-2.0
// y = act . weight^T for 1 to 8 rows of act, and RMSNorm of the first n_normed columns of y, in one launch.
//
// Layout: act [M, K] and weight [N, K] with row strides, gamma [n_normed], scales of an FP8 weight: one, [N] or
// [N, ceil(K / 128)]. normed [M, n_normed] and unnormed [M, N - n_normed] are written once. The workspace has a header and
// a word for each normed sum, M x padded (n_normed rounded up to 4).
//
// Sums. A row of the weight is cut into packs of 16 bytes, and 32 packs are a group, one access of a warp. The products of
// a pack are added in order from +0 and, with scales for 1 x 128, multiplied by the pack's scale; a group's 32 packs are
// added by butterfly (xor 16, 8, 4, 2, 1); lane l adds groups l, l + 32, ... in order from +0, and a butterfly over the 32
// lanes ends it; the scale of the tensor or row is multiplied last. So the tree depends on K and the weight's type alone,
// and the bits of y do not depend on N, M, n_normed or the grid. Where act and weight have 16 bits or fewer the product is
// exact, and fma rounds the sum only; else product and sum are rounded each.
// The norm reads these fp32 sums, not what is stored of them. Its sum of squares is the tree of reduce.cuh over packs of
// four columns; out = (y * gamma) * (1 / sqrt(sum / n_normed + eps)), rounded once.
//
// Grid: one-dimensional. A team of WARPS_A_ROW warps has a row of the weight, each lane the same PACKS places of every row,
// so that act stays in registers where M is 1; SLOTS rows are in flight. SLOTS x TEAMS rows are a step: its group sums meet
// in shared memory, of which two sets take turns, so that one barrier a step is enough.
// A block has an even share of the normed rows, which come first, and then of the others, so that the finish below hides
// behind the reading of the others. The last block has no others: it finishes.
//
// Finish and memory ordering. A normed sum is published as one 64-bit word (tag, fp32 bits) by st.relaxed.gpu; the word is
// its own flag, so there is no fence and no counter in the way. The tag is the workspace's next epoch; every publisher has
// read the epoch before, and the last block advances it when it has seen all words of this tag: so a workspace zeroed
// once serves any number of launches in stream order, of any shape, and words of an aborted launch never match. The last
// block polls with ld.relaxed.gpu, and reads nothing else that this launch writes. Epoch accesses are relaxed too: the
// publisher's read comes before its word, which holds it, and the advance after the words are seen.
// All blocks but the last end by themselves, and devices place blocks in index order, so the poll needs no cooperative
// launch and no free multiprocessors. CUDA does not promise that order. In another one the last block would keep a place
// for itself, which stops the others only where the device has no second one for them; that ends as every wait does,
// bounded as scratch.cuh says; its report names block 0 whichever block is missing (finding it costs registers that
// spill). After it the epoch advances all the same.
//
// The finish counter is zero unless a launch is under way: the last block adds 1 after the wait for the producer, and
// stores 0 at its end. If it did not find 0, two launches share it, or it was never zeroed, and that is reported. Without
// normed rows there is no last block in this sense, and neither counter nor workspace is touched.
//
// PDL: weights, gamma and scales are fetched before the wait, all else after it. Every block triggers: at entry with
// early_trigger, else as its last act.
#include "gemv_norm.cuh"
#include "gemv_rows.cuh"
#include "pdl.cuh"

constexpr u32 COUNTER_HELD = 4;  // a reason, as those of scratch.cuh

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    gemv_partial_norm(const __grid_constant__ GemvParams p DRVFUSE_TRACE_PARAMETER) {
    __shared__ float buckets[M][32];
    __shared__ u32 tag;
    extern __shared__ float4 shared[];
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    if (p.early_trigger) launch_dependents();
    const Rows rows = rows_of_block(p);
    const int normed_steps = (rows.normed + STEP - 1) / STEP;
    const int steps = normed_steps + (rows.unnormed + STEP - 1) / STEP;
    const bool last = int(blockIdx.x) == p.blocks;
    const auto step_at = [&](int index) -> Step {
        if (index < normed_steps) return {rows.normed_first + index * STEP, rows.normed - index * STEP};
        const int done = (index - normed_steps) * STEP;
        return {p.n_normed + rows.unnormed_first + done, rows.unnormed - done};
    };
    Gemv gemv(p);
    u32 epoch = 0, aborted = 0;
    const auto load_after_producer = [&] {
        gemv.load_resident_act();
        if (threadIdx.x == 0) {  // not all warps: their reads of one word would meet in one place
            asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(epoch), "=r"(aborted)
                         : "l"(p.scratch.state)
                         : "memory");
        }
    };
    Step step = step_at(0);
    Slot slots[SLOTS] = {};
    if constexpr (!DEPENDENT) load_after_producer();  // ahead of the weights, else they would come after them
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) gemv.load(slots[s], step, s, 0);
    if (last) prefetch_gamma(p);
    wait_for_producer();
    trace.start();
    if constexpr (DEPENDENT) load_after_producer();
    gemv.widen_resident_act();
    u32 held = 0;
    if (last && threadIdx.x == 0) held = atomicAdd(p.finish_counter, 1u);
    trace.need(slots[0].word);
    trace.lap(TraceRole::load);
    float* parts = reinterpret_cast<float*>(shared);
    const int set = STEP * M * p.groups;
    for (int index = 0; index < steps; ++index) {
        const Step next = step_at(index + 1);
        for (int chunk = 0; CHUNKED && chunk + 1 < p.chunks; ++chunk) {
            gemv.multiply(slots, step, chunk + 1, chunk, parts);
        }
        gemv.multiply(slots, next, 0, CHUNKED ? p.chunks - 1 : 0, parts);
        trace.lap(TraceRole::multiply);
        if (index == 0 && threadIdx.x == 0) tag = next_epoch(epoch);
        __syncthreads();
        gemv.finish(step, tag, parts);
        step = next;
        parts += index % 2 ? -set : set;
        trace.lap(TraceRole::store);
    }
    if (last) {
        if (steps == 0) {
            if (threadIdx.x == 0) tag = next_epoch(epoch);
            __syncthreads();
        }
        normalise(p, tag, shared + (2 * set + 3) / 4, buckets, trace);
        if (threadIdx.x == 0) {
            set_scratch_word(&p.scratch.state->epoch, next_epoch(epoch));
            atomicExch(p.finish_counter, 0u);
            if (held != 0) {
                const bool own = p.finish_counter == &p.scratch.state->users;
                give_up(p.scratch, own ? IN_USE : COUNTER_HELD, blockIdx.x, 0, held);
            }
            if (aborted != 0) report_abort(p.scratch);
        }
    }
    trace.exit();
    if (!p.early_trigger) launch_dependents();
}
