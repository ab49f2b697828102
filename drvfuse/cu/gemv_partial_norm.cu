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
// its own flag, so there is no fence and no counter in the way. The tag is the workspace's epoch + 1; every publisher has
// read the epoch before, and the last block advances it when it has seen all words of this tag: so a workspace zeroed
// once serves any number of launches in stream order, of any shape, and words of an aborted launch never match. The last
// block polls with ld.relaxed.gpu, and reads nothing else that this launch writes. Epoch accesses are relaxed too: the
// publisher's read comes before its word, which holds it, and the advance after the words are seen.
// All blocks but the last end by themselves, and blocks become resident in index order, so the poll needs no cooperative
// launch and no free multiprocessors. It is bounded as scratch.cuh says; after it the epoch advances all the same.
//
// The finish counter is zero unless a launch is under way: the last block adds 1 after the wait for the producer, and
// stores 0 at its end. If it did not find 0, two launches share it, or it was never zeroed, and that is reported.
//
// PDL: weights, gamma and scales are fetched before the wait, all else after it. Every block triggers: at entry with
// early_trigger, else as its last act.
#include "fp8_rows.cuh"
#include "pdl.cuh"
#include "reduce.cuh"
#include "scratch.cuh"
#include "trace.cuh"

using Act = DRVFUSE_ACT_DTYPE;
using Weight = DRVFUSE_WEIGHT_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;

constexpr int M = DRVFUSE_M;                      // rows of act
constexpr int WARPS_A_ROW = DRVFUSE_WARPS_A_ROW;
constexpr int TEAMS = DRVFUSE_TEAMS;              // of warps that share a row, in a block
constexpr int PACKS = DRVFUSE_PACKS;              // of a row that a lane has at a time: 1, 2 or 4
constexpr int SLOTS = DRVFUSE_SLOTS;              // rows that a lane has at a time
constexpr int SUM_LANES = DRVFUSE_SUM_LANES;      // a power of two, as many as a row has groups, but 32 at most
constexpr int ACCESS = DRVFUSE_ACCESS;            // bytes of an access that all rows of the weight are aligned to
constexpr bool CHUNKED = DRVFUSE_CHUNKED;         // a team comes back to a row
constexpr bool DEPENDENT = DRVFUSE_DEPENDENT;     // launched with PDL
constexpr bool ACT_ALIGNED = DRVFUSE_ACT_ALIGNED;
constexpr bool NORM_ALIGNED = DRVFUSE_NORM_ALIGNED;  // gamma and normed, to 4 elements
enum class Scales { none, tensor, row, group };
constexpr Scales SCALES = Scales::DRVFUSE_SCALES;

constexpr int W = 16 / sizeof(Weight);  // elements of a pack
constexpr int WARPS = WARPS_A_ROW * TEAMS;
constexpr int STEP = SLOTS * TEAMS;  // rows between barriers
constexpr int SCALE_GROUP = 128;
constexpr bool EXACT = sizeof(Act) < 4 && sizeof(Weight) < 4;
constexpr bool RESIDENT = M == 1 && !CHUNKED && PACKS * W <= 32;  // act in registers
constexpr int TOGETHER = RESIDENT ? SLOTS : 2;                    // rows whose sums are reduced together
constexpr int SUMS = TOGETHER * PACKS;
constexpr int VALUES = SUMS > 8 ? 16 : SUMS > 4 ? 8 : SUMS > 2 ? 4 : SUMS;
static_assert(SUMS <= 16 && SLOTS % TOGETHER == 0, "plan");

constexpr u32 COUNTER_HELD = 4;  // a reason, as those of scratch.cuh

// What the first loads need comes first: a kernel's parameters are fetched by lines.
struct GemvParams {
    const Weight* weight;
    i64 weight_step;  // between rows in bytes, below 2^32
    int columns;      // K
    int n_normed, n_unnormed;
    int blocks;                                            // all but a last one that finishes
    int normed_blocks, normed_share, normed_more;          // the first ones: as many normed rows each, the first ones 1 more
    int unnormed_blocks, unnormed_share, unnormed_more;    // the same of the other rows, counted from the end
    int last_normed, last_unnormed;                        // of the last block
    int early_trigger;
    const Act* act;
    i64 act_stride;  // in elements
    const float* scales;
    int groups;  // of a row
    int chunks;  // how often a team comes to a row
    Out* normed;
    Out* unnormed;
    u64* words;
    const Gamma* gamma;
    u32* finish_counter;  // the caller's, or that of the workspace
    Scratch scratch;
    int padded;   // n_normed rounded up to 4
    int stashed;  // shared memory holds what the last block normalises
    float eps;
};

// Normed rows of the block, and its other rows.
struct Rows {
    int normed_first, normed, unnormed_first, unnormed;
};

// `count` rows of the weight from `row` on; a step takes no more than STEP of them.
struct Step {
    int row, count;
};

__device__ __forceinline__ Rows rows_of_block(const GemvParams& p) {
    const int b = blockIdx.x, from_end = p.blocks - 1 - b;
    if (from_end < 0) {
        return {p.n_normed - p.last_normed, p.last_normed, p.n_unnormed - p.last_unnormed, p.last_unnormed};
    }
    Rows rows = {0, 0, 0, 0};
    if (b < p.normed_blocks) {
        rows.normed_first = b * p.normed_share + min(b, p.normed_more);
        rows.normed = p.normed_share + (b < p.normed_more);
    }
    if (from_end < p.unnormed_blocks) {
        rows.unnormed = p.unnormed_share + (from_end < p.unnormed_more);
        rows.unnormed_first =
            p.n_unnormed - from_end * p.unnormed_share - min(from_end, p.unnormed_more) - rows.unnormed;
    }
    return rows;
}

__device__ __forceinline__ void load_narrow(u32 (&word)[4], const char* at, int valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = 0;
    if constexpr (ACCESS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (4 * i < valid) {
                asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(word[i]), "=r"(word[i + 1]) : "l"(at + 4 * i));
            }
        }
    } else if constexpr (ACCESS == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (4 * i < valid) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word[i]) : "l"(at + 4 * i));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16 / ACCESS; ++i) {
            if (ACCESS * i < valid) {
                u32 bits;
                if constexpr (ACCESS == 2) {
                    u16 half;
                    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(at + 2 * i));
                    bits = half;
                } else {
                    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(bits) : "l"(at + i));
                }
                word[ACCESS * i / 4] |= bits << (8 * (ACCESS * i % 4));
            }
        }
    }
}

// Loads 16 bytes of a row of the weight, of which `valid`, if that is less, are in the row; the others become zero.
// Without `wanted` the words stay as they are.
__device__ __forceinline__ void load_weight(u32 (&word)[4], const char* at, bool wanted, int valid) {
    if constexpr (ACCESS == 16) {
        asm volatile(
            "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n"
            "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
            : "l"(at), "r"(u32(wanted)));
    } else {
        if (wanted) load_narrow(word, at, valid);
    }
}
template <typename T>
__device__ __forceinline__ void widen(float (&v)[16 / sizeof(T)], const u32 (&word)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 1) {
            fp8_floats<T>(word[i], v + 4 * i);
        } else {
            Word<T>::unpack(word[i], v + i * Word<T>::per_word);
        }
    }
}

// Elements of act at column `at`, of which `valid` exist; the others are zero.
__device__ __forceinline__ void load_act(Pack<Act, W>& pack, const Act* at, int valid) {
    if constexpr (ACT_ALIGNED) {
#pragma unroll
        for (int i = 0; i < Pack<Act, W>::words; ++i) pack.word[i] = 0;
        if (valid > 0) load_pack(pack, at);
    } else {
        load_elements(pack, at, valid);
    }
}

// What a lane holds of a row while it arrives.
struct Slot {
    u32 word[PACKS][4];
    float scale[SCALES == Scales::group ? PACKS : 1];
};

// The sums over the warp of V values a lane, as by V butterflies. The lane gets that of value lane / (32 / V).
template <int V, int MASK = 16>
__device__ __forceinline__ float butterfly_sums(const float (&v)[V], int lane) {
    if constexpr (MASK == 0) {
        return v[0];
    } else {
        constexpr int KEPT = V > 1 ? V / 2 : 1;
        const bool upper = lane & MASK;
        float kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            const float own = V > 1 && upper ? v[V - KEPT + k] : v[k], given = V > 1 && upper ? v[k] : v[V - KEPT + k];
            kept[k] = __fadd_rn(own, __shfl_xor_sync(0xffffffffu, given, MASK));
        }
        return butterfly_sums<KEPT, MASK / 2>(kept, lane);
    }
}

class Gemv {
public:
    __device__ __forceinline__ explicit Gemv(const GemvParams& params)
        : p(params), lane(threadIdx.x % 32), column(threadIdx.x / 32 % WARPS_A_ROW), team(threadIdx.x / 32 / WARPS_A_ROW) {
        place = reinterpret_cast<const char*>(p.weight) + u64(u32(team)) * u32(p.weight_step) + pack_index(0, 0) * 16;
    }

    // Begin to load row `s` of the team in a step.
    __device__ __forceinline__ void load(Slot& slot, const Step& step, int s, int chunk) const {
        const char* at = place + u64(u32(step.row)) * u32(p.weight_step) + u64(u32(s * TEAMS)) * u32(p.weight_step);
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int valid = p.columns * int(sizeof(Weight)) - pack_index(chunk, i) * 16;
            const int rows = valid > 0 ? step.count - team : 0;
            const int offset = ((CHUNKED ? chunk * PACKS : 0) + i) * WARPS_A_ROW * 512;
            load_weight(slot.word[i], at + offset, rows > s * TEAMS, valid);
            if constexpr (SCALES == Scales::group) {
                const i64 of_row = (p.columns + SCALE_GROUP - 1) / SCALE_GROUP;
                const float* scale = p.scales + (step.row + s * TEAMS + team) * of_row + pack_index(chunk, i) * W / SCALE_GROUP;
                slot.scale[i] = rows > s * TEAMS ? *scale : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void load_resident_act() {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) load_act_pack(raw_act[i], 0, pack_index(0, i));
        }
    }

    __device__ __forceinline__ void widen_resident_act() {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) to_float(act[i], raw_act[i]);
        }
    }

    // The group sums of a step's rows at `chunk`, into `parts` [STEP][M][groups]. Each slot is loaded anew, for the next
    // chunk or step, once it is used.
    __device__ __forceinline__ void multiply(Slot (&slots)[SLOTS], const Step& next, int next_chunk, int chunk, float* parts) {
#pragma unroll
        for (int s0 = 0; s0 < SLOTS; s0 += TOGETHER) {
            float w[RESIDENT ? 1 : TOGETHER][PACKS][W];
            float scale[TOGETHER][PACKS];
            float sums[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; ++k) sums[k] = 0.0f;
#pragma unroll
            for (int s = 0; s < TOGETHER; ++s) {
                Slot& slot = slots[s0 + s];
                float(&wide)[PACKS][W] = w[RESIDENT ? 0 : s];
#pragma unroll
                for (int i = 0; i < PACKS; ++i) {
                    widen<Weight>(wide[i], slot.word[i]);
                    if constexpr (SCALES == Scales::group) scale[s][i] = slot.scale[i];
                    if constexpr (RESIDENT) sums[s * PACKS + i] = pack_sum(act[i], wide[i], scale[s][i]);
                }
                load(slot, next, s0 + s, next_chunk);
            }
            if constexpr (RESIDENT) {
                deposit(sums, s0, 0, chunk, parts);
            } else {
#pragma unroll 1
                for (int m = 0; m < M; ++m) {
#pragma unroll
                    for (int i = 0; i < PACKS; ++i) {
                        const bool inside = pack_index(chunk, i) * W < p.columns;
                        Pack<Act, W> pack;
                        float a[W];
                        load_act_pack(pack, m, pack_index(chunk, i));
                        to_float(a, pack);
#pragma unroll
                        for (int s = 0; s < TOGETHER; ++s) {
                            sums[s * PACKS + i] = inside ? pack_sum(a, w[s][i], scale[s][i]) : 0.0f;
                        }
                    }
                    deposit(sums, s0, m, chunk, parts);
                }
            }
        }
    }

    // The complete sums of a step, after the barrier. SUM_LANES add a row's groups: with fewer groups than 32 the other
    // lanes of the butterfly would add zeros.
    __device__ __forceinline__ void finish(const Step& step, u32 tag, const float* parts) const {
        constexpr int TOGETHER = 32 / SUM_LANES;
        const int values = min(step.count, STEP) * M, part = lane % SUM_LANES;
#pragma unroll 1
        for (int first = threadIdx.x / 32 * TOGETHER; first < values; first += WARPS * TOGETHER) {
            const int value = first + lane / SUM_LANES;
            float sum = 0.0f;
            if (value < values) {
                for (int group = part; group < p.groups; group += 32) {
                    sum = __fadd_rn(sum, parts[value * p.groups + group]);
                }
            }
#pragma unroll
            for (int mask = SUM_LANES / 2; mask > 0; mask /= 2) {
                sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
            }
            if (part != 0 || value >= values) continue;
            const int row = step.row + value / M, m = value % M;
            if constexpr (SCALES == Scales::tensor) sum = __fmul_rn(sum, *p.scales);
            if constexpr (SCALES == Scales::row) sum = __fmul_rn(sum, p.scales[row]);
            if (row < p.n_normed) {
                const u64 word = u64(tag) << 32 | Word<float>::pack(&sum);
                u64* to = p.words + i64(m) * p.padded + row;
                asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
            } else {
                store_scalar(p.unnormed + i64(m) * p.n_unnormed + (row - p.n_normed), sum);
            }
        }
    }

private:
    __device__ __forceinline__ int group_index(int chunk, int i) const {
        return (chunk * PACKS + i) * WARPS_A_ROW + column;
    }

    __device__ __forceinline__ int pack_index(int chunk, int i) const { return group_index(chunk, i) * 32 + lane; }

    __device__ __forceinline__ void load_act_pack(Pack<Act, W>& pack, int m, int index) const {
        load_act(pack, p.act + m * p.act_stride + i64(index) * W, p.columns - index * W);
    }

    static __device__ __forceinline__ float pack_sum(const float (&a)[W], const float (&w)[W], float scale) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < W; ++e) {
            sum = EXACT ? __fmaf_rn(a[e], w[e], sum) : __fadd_rn(sum, __fmul_rn(a[e], w[e]));
        }
        return SCALES == Scales::group ? __fmul_rn(sum, scale) : sum;
    }

    __device__ __forceinline__ void deposit(float (&sums)[VALUES], int s0, int m, int chunk, float* parts) const {
        const float total = butterfly_sums(sums, lane);
        const int value = lane / (32 / VALUES);
        const int group = group_index(chunk, value % PACKS);
        if (lane % (32 / VALUES) == 0 && value < SUMS && group < p.groups) {
            parts[(((s0 + value / PACKS) * TEAMS + team) * M + m) * p.groups + group] = total;
        }
    }

    const GemvParams& p;
    const int lane, column, team;
    const char* place;  // this lane's, in the team's first row of the weight
    Pack<Act, W> raw_act[RESIDENT ? PACKS : 1];
    float act[RESIDENT ? PACKS : 1][W];
};

// ---- the last block ----

constexpr int NORM_WARPS = DRVFUSE_NORM_WARPS;  // that finish a row of act: a power of two
constexpr int TURNS = 32 / NORM_WARPS;          // groups of a warp, of 32
constexpr int BATCH = TURNS < 4 ? TURNS : 4;    // packs a lane reads at a time
static_assert(NORM_WARPS * M <= WARPS, "a warp for each row of act");

struct Words {
    u64 word[4];
};

__device__ __forceinline__ void load_words_relaxed(Words& w, const u64* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[0]), "=l"(w.word[1]) : "l"(at) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(w.word[2]), "=l"(w.word[3]) : "l"(at + 2) : "memory");
}

// Whether the first `columns` of the words carry the tag.
__device__ __forceinline__ bool ready(const Words& w, u32 tag, int columns) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) all = all && (i >= columns || u32(w.word[i] >> 32) == tag);
    return all;
}

__device__ __forceinline__ void load_gamma(float (&g)[4], const GemvParams& p, int pack) {
    Pack<Gamma, 4> packed;
    if constexpr (NORM_ALIGNED) {
        load_pack(packed, p.gamma + 4 * pack);
    } else {
        load_elements(packed, p.gamma + 4 * pack, p.n_normed - 4 * pack);
    }
    to_float(g, packed);
}

__device__ __forceinline__ void prefetch_gamma(const GemvParams& p) {
#pragma unroll 1
    for (int i = threadIdx.x * 32; i < p.n_normed; i += 32 * WARPS * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.gamma + i));
    }
}

// Waits for all normed sums and normalises them. `stash` has room for M x padded floats, if p.stashed.
__device__ __forceinline__ void normalise(const GemvParams& p, u32 tag, float4* stash, float (*buckets)[32], Trace& trace) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m = warp / NORM_WARPS, part = warp % NORM_WARPS;
    const int packs = p.padded / 4, rounds = (packs + 1023) / 1024;
    const u64* words = p.words + i64(m) * p.padded;
    float4* products = stash + i64(m) * packs;
    Patience patience(p.scratch);
    if (m < M) {
        float bucket[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; ++t) bucket[t] = 0.0f;
        for (int round = 0; round < rounds; ++round) {
#pragma unroll
            for (int t0 = 0; t0 < TURNS; t0 += BATCH) {
                const int first = ((round * 32) + t0 * NORM_WARPS + part) * 32 + lane;
                if (first - lane >= packs) break;
                Words w[BATCH];
                float g[BATCH][4];
#pragma unroll
                for (int t = 0; t < BATCH; ++t) {
                    const int pack = first + t * NORM_WARPS * 32;
                    if (pack < packs) load_words_relaxed(w[t], words + i64(pack) * 4);
                    if (pack < packs && p.stashed) load_gamma(g[t], p, pack);
                }
#pragma unroll
                for (int t = 0; t < BATCH; ++t) {
                    const int pack = first + t * NORM_WARPS * 32;
                    float squares = 0.0f;
                    if (pack < packs) {
                        const int columns = p.n_normed - 4 * pack;
                        while (!ready(w[t], tag, columns)) {
                            if (!patience.goes_on(0, tag, u32(w[t].word[0] >> 32))) break;
                            load_words_relaxed(w[t], words + i64(pack) * 4);
                        }
                        float y[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            y[i] = i < columns ? __uint_as_float(u32(w[t].word[i])) : 0.0f;
                            squares = __fadd_rn(squares, __fmul_rn(y[i], y[i]));
                        }
                        if (p.stashed) {
                            products[pack] = make_float4(__fmul_rn(y[0], g[t][0]), __fmul_rn(y[1], g[t][1]),
                                                         __fmul_rn(y[2], g[t][2]), __fmul_rn(y[3], g[t][3]));
                        }
                    }
                    __syncwarp();
                    bucket[t0 + t] = __fadd_rn(bucket[t0 + t], butterfly_sum(squares));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            if (lane == 0) buckets[m][t * NORM_WARPS + part] = bucket[t];
        }
    }
    trace.lap(TraceRole::apply_load);
    __syncthreads();
    if (m >= M) return;
    const float mean = __fdiv_rn(butterfly_sum(buckets[m][lane]), float(p.n_normed));
    const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
    trace.need(factor);
    trace.lap(TraceRole::apply_reduce);
    for (int group = part; group * 32 < packs; group += NORM_WARPS) {
        const int pack = group * 32 + lane;
        if (pack >= packs) break;
        float y[4];
        if (p.stashed) {
            const float4 product = products[pack];
            y[0] = product.x, y[1] = product.y, y[2] = product.z, y[3] = product.w;
        } else {
            Words w;
            float g[4];
            load_words_relaxed(w, words + i64(pack) * 4);
            load_gamma(g, p, pack);
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(__uint_as_float(u32(w.word[i])), g[i]);
        }
        Pack<Out, 4> out;
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(y[i], factor);
        from_float(out, y);
        Out* to = p.normed + i64(m) * p.n_normed + 4 * pack;
        if constexpr (NORM_ALIGNED) {
            store_pack(to, out);
        } else {
            store_elements(to, out, p.n_normed - 4 * pack);
        }
    }
    trace.lap(TraceRole::apply_store);
}

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
        if (index == 0 && threadIdx.x == 0) tag = epoch + 1;
        __syncthreads();
        gemv.finish(step, tag, parts);
        step = next;
        parts += index % 2 ? -set : set;
        trace.lap(TraceRole::store);
    }
    if (last) {
        if (steps == 0) {
            if (threadIdx.x == 0) tag = epoch + 1;
            __syncthreads();
        }
        normalise(p, tag, shared + (2 * set + 3) / 4, buckets, trace);
        if (threadIdx.x == 0) {
            set_scratch_word(&p.scratch.state->epoch, epoch + 1);
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
