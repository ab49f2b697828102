// SPDX-License-Identifier: Apache-2.0
// y = act . weight^T for 1 to 8 rows of act, and RMSNorm of the first n_normed columns of y, in one launch.
//
// Layout: act [M, K] and weight [N, K] with row strides, gamma [n_normed], scales of an FP8 weight: one, [N] or
// [N, ceil(K / 128)], of an FP8 act: one, [M] or [M, ceil(K / 128 or 64)]; a bias [N]. normed [M, n_normed] and unnormed
// [M, N - n_normed] are written once. The workspace has a header and a word for each normed sum, M x padded (n_normed
// rounded up to 4).
//
// Sums. A row of the weight is cut into packs of 16 bytes, and 32 packs are a group, one access of a warp. The products of
// a pack are added in order from +0 and, with scales for groups of columns, multiplied by the pack's scale of the weight, then
// by that of act; a group's 32 packs are added by butterfly (xor 16, 8, 4, 2, 1); lane l adds groups l, l + 32, ... in order
// from +0, and a butterfly over the 32 lanes ends it. Then the sum is multiplied by the weight's scale of the tensor or row,
// then by act's of the row, the bias is added, and the epilogue applied, each in fp32: that is y. So the tree depends on K
// and the weight's type alone, and the bits of y do not depend on N, M, n_normed or the grid. Where act and weight have 16
// bits or fewer the product is exact, and fma rounds the sum only; else product and sum are rounded each.
// The norm reads y in fp32, not what is stored of it. Its sum of squares is the tree of reduce.cuh over packs of four columns;
// out = (y * gamma) * (1 / sqrt(sum / n_normed + eps)), rounded once.
//
// Grid: one-dimensional; every block has each gridDim.x-th row, so that the normed ones come first and the finish below hides
// behind the reading of the others. Warps of a block: WARPS_A_ROW warps are a team that has a row, each lane the same PACKS
// places of every row, so that act stays in registers where M is 1; TEAMS of them take turns. SUM_WARPS warps begin the
// stages and add what the teams leave (pipeline.cuh); nothing holds up all warps at once. With DIRECT, for few and short
// rows, there are none: a team is one warp, which adds and publishes its rows itself. The others finish, in the last block;
// elsewhere one of them reads the epoch with DIRECT, and that is all.
//
// Finish and memory ordering. A normed sum is published as one 64-bit word (tag, fp32 bits) by st.relaxed.gpu; the word is
// its own flag, so there is no fence and no counter in the way. The tag is the workspace's next epoch; every publisher has
// read the epoch before, and the finish advances it when it has seen all words of this tag: so a workspace zeroed
// once serves any number of launches in stream order, of any shape, and words of an aborted launch never match. The last
// block polls with ld.relaxed.gpu, and reads nothing else that this launch writes. Epoch accesses are relaxed too: the
// publisher's read comes before its word, which holds it, and the advance after the words are seen.
// All blocks but the last end by themselves, and devices place blocks in index order, so the poll needs no cooperative
// launch and no free multiprocessors. CUDA does not promise that order. In another one the last block would keep a place
// for itself, which stops the others only where the device has no second one for them; that ends as every wait does,
// bounded as scratch.cuh says; its report names the block that has not left its word. After it the epoch advances all the
// same.
//
// The finish counter is zero unless a launch is under way: the last block adds 1 after the wait for the producer, and
// stores 0 at its end. If it did not find 0, two launches share it, or it was never zeroed, and that is reported. Without
// normed rows there is no last block in this sense, and neither counter nor workspace is touched.
//
// PDL: gamma, and the weights of the first stages with their scales for 1 x 128, are fetched before the wait, all else after
// it. Every block triggers: at entry with early_trigger, else when one of its warps has stored its last sums.
//
// Trace: of the last block the finish, of the others the first warp that adds, which with DIRECT multiplies too.
#include "gemv/norm.cuh"
#include "gemv/products.cuh"
#include "gemv/sums.cuh"
#include "sync/pdl.cuh"

constexpr int FIRST_WRITER = DIRECT ? 0 : FIRST_SUM_THREAD;  // the first thread that writes a trace: the warps that add
constexpr u32 COUNTER_HELD = 4;                              // a reason, like those in scratch.cuh

// Signals once to the warps that compute the norm that this warp has published all the sums for which they wait before
// polling.
class Announcement {
public:
    __device__ __forceinline__ explicit Announcement(Pipeline& pipeline) : pipeline_(pipeline), made_(false) {}

    __device__ __forceinline__ void make(bool now) {
        if (!now || made_) return;
        made_ = true;
        if (threadIdx.x % 32 == 0) pipeline_.published.arrive();
    }

private:
    Pipeline& pipeline_;
    bool made_;
};

__device__ __forceinline__ void multiply(const GemvParams& p, const Rows& rows, const Results& results,
                                         Pipeline& pipeline, u32 ring, float* parts, BlockTrace<FIRST_WRITER>& trace) {
    Products products(p, rows, results);
    Stage stage = Stage::at(threadIdx.x / 32 / WARPS_A_ROW, p);
    Slot slots[STEP] = {};
    if constexpr (!DEPENDENT) products.load_act_ahead();  // ahead of the weights, else it would come after them
#pragma unroll
    for (int s = 0; s < STEP; ++s) products.load(slots[s], stage, s);
    __syncthreads();
    if (!FAULT("gemv-act-before-pdl-wait")) wait_for_producer();
    if constexpr (DEPENDENT) products.load_act_ahead();
    if constexpr (DIRECT) trace.start();
    products.widen_resident_act();
    u32 tag = 0;
    if (DIRECT && rows.normed > 0) {
        pipeline.epoch_read.wait(0);
        tag = pipeline.tag;
    }
    Announcement announcement(pipeline);
    while (stage.first < rows.count) {
        const Stage next = Stage::at(stage.index + TEAMS, p);
        if constexpr (DIRECT) {
            announcement.make(stage.first >= p.polled_from);
        } else {
            pipeline.full[stage.slot()].wait(stage.parity());
        }
        products.multiply(slots, stage, next, ring + weights_slot(stage) * (STEP * SLICE),
                          parts + sums_slot(stage) * PARTS, tag);
        if constexpr (DIRECT) {
            trace.lap(TraceRole::multiply);
        } else {
            __syncwarp();
            if (threadIdx.x % 32 == 0) pipeline.done[stage.slot()].arrive();
        }
        stage = next;
    }
    if constexpr (DIRECT) announcement.make(true);
}

__device__ __forceinline__ void add(const GemvParams& p, const Rows& rows, const Results& results, Pipeline& pipeline,
                                    u32 ring, const float* parts, BlockTrace<FIRST_WRITER>& trace) {
    const int turn = (threadIdx.x - FIRST_SUM_THREAD) / 32;
    if (threadIdx.x == FIRST_SUM_THREAD) pipeline.init();
    __syncthreads();
    // Only one thread reads the word, since all blocks read the same address.
    const bool reads = threadIdx.x == FIRST_SUM_THREAD && rows.normed > 0;
    u32 epoch = 0, tag = 0;
    if (!DEPENDENT && reads) epoch = ptx::load_relaxed_gpu(&p.scratch.state->epoch);  // ahead of the weights, like act
    for (int i = turn; i < STAGES; i += SUM_WARPS) pipeline.begin(Stage::at(i, p), p, rows, ring);
    wait_for_producer();
    trace.start();
    if (DEPENDENT && reads) epoch = ptx::load_relaxed_gpu(&p.scratch.state->epoch);
    Sums sums(p, rows, results);
    Announcement announcement(pipeline);
    for (Stage stage = Stage::at(turn, p); stage.first < rows.count; stage = Stage::at(stage.index + SUM_WARPS, p)) {
        announcement.make(stage.first >= p.polled_from);
        pipeline.full[stage.slot()].wait(stage.parity());
        pipeline.begin(Stage::at(stage.index + STAGES, p), p, rows, ring);
        if (stage.index == turn && rows.normed > 0) {  // not before: what is begun must not wait for the epoch
            if (reads) pipeline.tell(epoch);
            pipeline.epoch_read.wait(0);
            tag = pipeline.tag;
        }
        pipeline.done[stage.slot()].wait(stage.parity());
        trace.lap(TraceRole::multiply);
        sums.add(stage, tag, parts + sums_slot(stage) * PARTS);
        trace.lap(TraceRole::store);
    }
    announcement.make(true);
}

// The last block's work: it normalises the sums of all blocks.
__device__ __forceinline__ void finish(const GemvParams& p, Pipeline& pipeline, float4* stash, float (*buckets)[32],
                                       BlockTrace<FIRST_NORM_THREAD>& trace) {
    Norm norm(p, stash, buckets);
    const bool leads = threadIdx.x == FIRST_NORM_THREAD;
    u32 epoch, aborted, held = 0;
    const auto read_state = [&] {
        ptx::load_relaxed_gpu_v2(epoch, aborted, p.scratch.state);
        if (DIRECT && leads) pipeline.tell(epoch);
    };
    __syncthreads();
    if constexpr (!DEPENDENT) read_state();
    norm.load();
    wait_for_producer();
    if constexpr (DEPENDENT) read_state();
    trace.start();
    if (leads) held = atomicAdd(p.finish_counter, 1u);
    const u32 tag = next_epoch(epoch);
    pipeline.published.wait(0);  // the others' are there soon: polling earlier would slow down what this block reads
    trace.lap(TraceRole::sync);
    const float factor = norm.factor(tag, trace);
    trace.need(factor);
    trace.lap(TraceRole::apply_reduce);
    norm.store(factor);
    if (leads) {  // all words are seen
        ptx::store_relaxed_gpu(&p.scratch.state->epoch, tag);
        atomicExch(p.finish_counter, 0u);
    }
    trace.lap(TraceRole::apply_store);
    if (leads && held != 0) {
        const bool own = p.finish_counter == &p.scratch.state->users;
        give_up(p.scratch, own ? IN_USE : COUNTER_HELD, blockIdx.x, 0, held);
    }
    if (leads && aborted != 0) report_abort(p.scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv_partial_norm(const __grid_constant__ GemvParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    __shared__ Pipeline pipeline;
    __shared__ float buckets[M][32];
    extern __shared__ __align__(128) float shared[];  // mbarrier.cuh says why 128
    BlockTrace<FIRST_WRITER> trace{DRVFUSE_TRACE_ARGUMENT};
    BlockTrace<FIRST_NORM_THREAD> trace_b{DRVFUSE_TRACE_ARGUMENT};
    const Rows rows(p);
    const Results results(p, rows DRVFUSE_EPILOGUE_ARGUMENT);
    const u32 ring = u32(__cvta_generic_to_shared(shared));
    float* parts = shared + (COPIED ? SLOTS * STEP * SLICE / 4 : 0);
    const bool finishes = blockIdx.x == gridDim.x - 1 && p.n_normed != 0;
    if (p.early_trigger) launch_dependents();
    if (DIRECT && threadIdx.x == FIRST_NORM_THREAD) pipeline.init();
    if (threadIdx.x < FIRST_NORM_THREAD) {
        if (threadIdx.x < FIRST_SUM_THREAD) {
            multiply(p, rows, results, pipeline, ring, parts, trace);
        } else {
            add(p, rows, results, pipeline, ring, parts, trace);
        }
        if (!finishes) trace.exit();
        if (!p.early_trigger && (DIRECT || threadIdx.x >= FIRST_SUM_THREAD)) launch_dependents();
    } else if (finishes) {
        finish(p, pipeline, reinterpret_cast<float4*>(parts + (SLOTS * PARTS + 3) / 4 * 4), buckets, trace_b);
        trace_b.exit();
    } else {
        __syncthreads();
        if (DIRECT && threadIdx.x == FIRST_NORM_THREAD && rows.normed > 0) {
            wait_for_producer();
            pipeline.tell(ptx::load_relaxed_gpu(&p.scratch.state->epoch));
        }
    }
}
