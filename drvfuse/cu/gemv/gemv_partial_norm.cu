// SPDX-License-Identifier: Apache-2.0
// A matrix-vector product of few rows, and RMSNorm of a part of the result, in one launch.
//
// Computes, for act [M, K] with M of 1 to 8, and weight [N, K]:
//   y = epilogue(act . weight^T + bias)               fp32, not stored
//   normed = (y * gamma) * (1 / sqrt(mean of y^2 + epsilon)) over the first n_normed columns of y       [M, n_normed]
//   unnormed = the other columns of y, rounded                                                      [M, N - n_normed]
// act and weight may be FP8 with scales, which multiply sums of products. The scales of the weight are one number, [N]
// or [N, ceil(K / 128)], those of act one number, [M] or [M, ceil(K / 128 or 64)]. act and weight have row strides,
// gamma is [n_normed] and the bias [N]. The norm reads y in fp32, not the stored outputs; its result is rounded once.
//
// Order of sums. A row of the weight consists of packs of 16 bytes. A group is 32 packs, one access of a warp. The
// products of a pack are added in order from +0. If a scale belongs to 64 or 128 columns (a group scale), this sum is
// multiplied by the weight's scale for the pack, then by act's scale for the pack. The 32 packs of a group are added by
// butterfly (xor 16, 8, 4, 2, 1). Lane l adds groups l, l + 32, ... in order from +0, and the 32 lanes are added by
// butterfly. The sum is multiplied by the weight's scale of the tensor or row, then by act's scale of the row. Then the
// bias is added and the epilogue applied, each in fp32. So the order depends only on K and the weight's type, and the
// bits of y do not depend on N, M, n_normed or the grid. If act and weight have at most 16 bits, products are exact and
// fma rounds only the sum; otherwise product and sum are both rounded. The norm's sum of squares has the order of
// reduce.cuh over packs of four columns.
//
// Division. Block b multiplies rows b, b + gridDim.x, ... of the weight by act. The first n_normed rows of the weight,
// which give the normed columns of y (normed rows), are thus multiplied first, and the last block can compute the norm
// (the finish, below) while other rows are read. The warps of a block have different work:
//   multiply   TEAMS teams of WARPS_A_ROW warps. A team multiplies a stage, which is some rows or a chunk of them; each
//              lane has PACKS packs of a row, at the same columns in every row. Team s % TEAMS takes stage s.
//   add        SUM_WARPS warps start the loads of stages and add the group sums of the teams (pipeline.cuh).
//   finish     The remaining warps of the last block compute the norm (norm.cuh). In other blocks the remaining warps
//              end at once, except that with DIRECT one warp of each block first reads the epoch.
// With DIRECT, for few and short rows, SUM_WARPS is 0: a team is one warp, which adds and publishes its rows itself.
// After the block barrier at the beginning, no barrier stops all warps of a block at once.
//
// Storage. Registers: the weights, unless COPIED; act, if M is 1. Shared memory: with COPIED the weights of the stages
// in flight, in a ring; group sums; in the last block gamma and products with gamma, if they fit. Workspace: a word for
// each normed sum, M x padded words (padded is n_normed rounded up to a multiple of 4).
//
// Memory ordering. A normed sum is published as one 64-bit word (tag, fp32 bits) by st.relaxed.gpu. The word is its own
// flag, so no fence and no counter is needed. The tag is the workspace's next epoch. Every thread that publishes has
// read the epoch before, and the finish advances the epoch when it has read all words with this tag. So a workspace
// that was zeroed once serves any number of launches in stream order, of any shape, and words of an aborted launch
// never match. The last block polls with ld.relaxed.gpu, and reads nothing else that this launch writes. Accesses to
// the epoch are relaxed too: a block reads the epoch before it stores a word, which contains the epoch, and the finish
// stores the next epoch after it has read the words.
//
// Progress. All blocks but the last end without waiting for other blocks, and devices place blocks in index order, so
// the launch need not be cooperative. CUDA does not guarantee that order. In another order the last block could occupy
// a multiprocessor while it waits, which stops the other blocks only if no other multiprocessor has room for them. The
// wait of the last block ends by the time-out of scratch.cuh at the latest, and a report then names a block that has
// not published its word. After a time-out the epoch advances too.
//
// Finish counter. The counter is 0 unless a launch is running: the last block adds 1 after the wait for the producer,
// and stores 0 at its end. If the last block finds another value than 0, two launches share the counter, or the counter
// was never zeroed, and the block reports that. Without normed rows no block does a finish, and neither counter nor
// workspace is accessed.
//
// PDL. Before the wait for the producer a block reads only gamma, the weights of the first stages, and their scales if
// these are group scales. Every block triggers: with early_trigger at its entry, else when the first of its warps has
// stored its last sums.
//
// Trace. The last block records its finish. Every other block records its first warp that adds group sums; with DIRECT,
// that warp also multiplies.
#include "gemv/norm.cuh"
#include "gemv/products.cuh"
#include "gemv/sums.cuh"
#include "sync/pdl.cuh"

constexpr int FIRST_WRITER = DIRECT ? 0 : FIRST_SUM_THREAD;  // the thread that writes the trace, except for the finish
constexpr u32 COUNTER_HELD = 4;                              // ScratchReport::reason: the finish counter was not 0

// A warp's signal, sent once, that it has published its part of the block's first `polled_from` rows. The warps that
// compute the norm poll only after every publishing warp of their block has sent its signal.
class Announcement {
public:
    __device__ __forceinline__ explicit Announcement(Pipeline& pipeline) : pipeline_(pipeline), sent_(false) {}

    __device__ __forceinline__ void send_if(bool due) {
        if (!due || sent_) return;
        sent_ = true;
        if (threadIdx.x % 32 == 0) pipeline_.published.arrive();
    }

private:
    Pipeline& pipeline_;
    bool sent_;
};

// The work of a warp that multiplies.
__device__ __forceinline__ void multiply(const GemvParams& p, const Rows& rows, const Results& results,
                                         Pipeline& pipeline, u32 ring, float* parts, BlockTrace<FIRST_WRITER>& trace) {
    Products products(p, rows, results);
    Stage stage = Stage::at(threadIdx.x / 32 / WARPS_A_ROW, p);
    LoadedRow loaded[STEP] = {};
    // Issued before the loads of the weights, since act would otherwise arrive after the weights.
    if constexpr (!DEPENDENT) products.load_act_ahead();
#pragma unroll
    for (int s = 0; s < STEP; ++s) products.load(loaded[s], stage, s);
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
            announcement.send_if(stage.first >= p.polled_from);
        } else {
            pipeline.full[stage.slot()].wait(stage.parity());
        }
        products.multiply(loaded, stage, next, ring + weights_slot(stage) * (STEP * SLICE),
                          parts + sums_slot(stage) * PARTS, tag);
        if constexpr (DIRECT) {
            trace.lap(TraceRole::multiply);
        } else {
            __syncwarp();
            if (threadIdx.x % 32 == 0) pipeline.done[stage.slot()].arrive();
        }
        stage = next;
    }
    if constexpr (DIRECT) announcement.send_if(true);
}

// The work of a warp that adds group sums.
__device__ __forceinline__ void add(const GemvParams& p, const Rows& rows, const Results& results, Pipeline& pipeline,
                                    u32 ring, const float* parts, BlockTrace<FIRST_WRITER>& trace) {
    const int sum_warp = (threadIdx.x - FIRST_SUM_THREAD) / 32;
    if (threadIdx.x == FIRST_SUM_THREAD) pipeline.init();
    __syncthreads();
    // Only one thread of the block reads the epoch, since all blocks read the same address.
    const bool reads = threadIdx.x == FIRST_SUM_THREAD && rows.normed > 0;
    u32 epoch = 0, tag = 0;
    if (!DEPENDENT && reads) epoch = ptx::load_relaxed_gpu(&p.scratch.state->epoch);  // loaded before the weights
    for (int i = sum_warp; i < STAGES; i += SUM_WARPS) pipeline.begin(Stage::at(i, p), p, rows, ring);
    wait_for_producer();
    trace.start();
    if (DEPENDENT && reads) epoch = ptx::load_relaxed_gpu(&p.scratch.state->epoch);
    Sums sums(p, rows, results);
    Announcement announcement(pipeline);
    for (Stage stage = Stage::at(sum_warp, p); stage.first < rows.count;
         stage = Stage::at(stage.index + SUM_WARPS, p)) {
        announcement.send_if(stage.first >= p.polled_from);
        pipeline.full[stage.slot()].wait(stage.parity());
        pipeline.begin(Stage::at(stage.index + STAGES, p), p, rows, ring);
        // The epoch is awaited only after the first copies have begun, since these must not wait for it.
        if (stage.index == sum_warp && rows.normed > 0) {
            if (reads) pipeline.set_tag(epoch);
            pipeline.epoch_read.wait(0);
            tag = pipeline.tag;
        }
        pipeline.done[stage.slot()].wait(stage.parity());
        trace.lap(TraceRole::multiply);
        sums.add(stage, tag, parts + sums_slot(stage) * PARTS);
        trace.lap(TraceRole::store);
    }
    announcement.send_if(true);
}

// The work of a warp that computes the norm, in the last block: waits for the normed sums of all blocks, normalises and
// stores them.
__device__ __forceinline__ void finish(const GemvParams& p, Pipeline& pipeline, float4* stash, float (*buckets)[32],
                                       BlockTrace<FIRST_NORM_THREAD>& trace) {
    Norm norm(p, stash, buckets);
    const bool leads = threadIdx.x == FIRST_NORM_THREAD;
    // `counter` is the value of the finish counter before this launch: 0, unless another launch was using it.
    u32 epoch, aborted, counter = 0;
    const auto read_state = [&] {
        ptx::load_relaxed_gpu_v2(epoch, aborted, p.scratch.state);
        if (DIRECT && leads) pipeline.set_tag(epoch);
    };
    __syncthreads();
    if constexpr (!DEPENDENT) read_state();
    norm.load();
    wait_for_producer();
    if constexpr (DEPENDENT) read_state();
    trace.start();
    if (leads) counter = atomicAdd(p.finish_counter, 1u);
    const u32 tag = next_epoch(epoch);
    // The words of other blocks arrive soon after this wait; earlier polls would slow down this block's loads.
    pipeline.published.wait(0);
    trace.lap(TraceRole::sync);
    const float factor = norm.factor(tag, trace);
    trace.need(factor);
    trace.lap(TraceRole::apply_reduce);
    norm.store(factor);
    if (leads) {  // all words were read, so the epoch may advance
        ptx::store_relaxed_gpu(&p.scratch.state->epoch, tag);
        atomicExch(p.finish_counter, 0u);
    }
    trace.lap(TraceRole::apply_store);
    if (leads && counter != 0) {
        const bool is_workspace = p.finish_counter == &p.scratch.state->users;
        give_up(p.scratch, is_workspace ? IN_USE : COUNTER_HELD, blockIdx.x, 0, counter);
    }
    if (leads && aborted != 0) report_abort(p.scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv_partial_norm(const __grid_constant__ GemvParams p DRVFUSE_EPILOGUE_PARAMETER DRVFUSE_TRACE_PARAMETER) {
    __shared__ Pipeline pipeline;
    __shared__ float buckets[M][32];
    // Aligned to 128 bytes, since bulk copies to other addresses are slower (mbarrier.cuh).
    extern __shared__ __align__(128) float shared[];
    BlockTrace<FIRST_WRITER> trace{DRVFUSE_TRACE_ARGUMENT};
    BlockTrace<FIRST_NORM_THREAD> trace_b{DRVFUSE_TRACE_ARGUMENT};
    const Rows rows(p);
    const Results results(p, rows, Epilogue{DRVFUSE_EPILOGUE_ARGUMENT});
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
            pipeline.set_tag(ptx::load_relaxed_gpu(&p.scratch.state->epoch));
        }
    }
}
