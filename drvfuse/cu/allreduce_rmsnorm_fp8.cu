// SPDX-License-Identifier: Apache-2.0
// All-reduce, optional residual addition, RMSNorm and optional FP8 quantisation by row, in one kernel a rank.
//
// Layout. Tensors are [rows, columns], contiguous. A block works on one row at a time and holds it in registers: pack
// i * threads + t (16 bytes of the input) belongs to thread t, i < DRVFUSE_PACKS. Without DRVFUSE_RAGGED tensors are
// 16-byte aligned and `columns` is a multiple of the elements of a pack; with it, rows are read and written element by
// element. Rows in the payload are always whole packs.
//   one_stage  every rank does every row.
//   two_stage  rank k owns a range of rows (balanced). Without residual the owner normalises and quantises, and the
//              others gather its rows and scales. With residual all need the rounded residual_out, so that is gathered,
//              and every rank normalises every row: the same operations on the same bits.
//   STAGED     inputs that peers cannot read: each rank first copies its input, chunk by chunk, into its payload.
//   LOCAL      the sources lie on this device and are complete before the launch: no barrier (algorithm "naive").
// Payload, in chunks of `chunk_rows`; an input row takes packs * 16 bytes, an output row packs * pack bytes, rounded up
// to 16; a block of scales is rounded up to 16 bytes:
//   one_stage staged   two halves of chunk input rows, used in turn
//   two_stage direct   two halves of results, used in turn: chunk output rows, then chunk scales; with residual,
//                      chunk input rows (residual_out)
//   two_stage staged   ranks * chunk input rows, by owner; then one half of results
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks, the same on every rank; block b does rows b, b + blocks, ...
// of each range or chunk. Threads: a multiple of 32 up to 512, at least ceil(packs of a row / DRVFUSE_PACKS).
//
// Numerics. x = +0.0f + rank 0 + ... + rank n-1 (+ residual, rounded to the input's type: residual_out);
// f = 1 / sqrt(sum(x^2) / columns + epsilon); y = (x * (gamma + weight_offset)) * f. IEEE operations, each rounded; the
// order of sum(x^2) is in reduce.cuh. f > 0 and rounding is monotone, so max|y| is f * max|x * g| exactly, and one
// reduction gives both.
//
// Memory ordering. As in allreduce.cu, with rows for packs: block b reads of a peer only what block b there wrote (all
// its threads: the barrier covers the block), or what was complete before that peer's kernel began. The same argument
// frees inputs at completion (end barrier; last chunk's barrier) and the payload's halves. residual_output may be
// residual: a row's residual is read before residual_out of that row is written by the same block, after a barrier or
// by the same thread; a non-owner does not read it. gamma is fetched before the wait for the producer.
//
// Failure. A barrier that gives up makes the block skip the rest; outputs are then undefined (barrier.cuh).
#include "barrier.cuh"
#include "pack16.cuh"
#include "partition.cuh"
#include "pdl.cuh"
#include "reduce.cuh"

using In = DRVFUSE_DTYPE;
using Out = DRVFUSE_OUT_DTYPE;
using Gamma = DRVFUSE_GAMMA_DTYPE;
using Scale = DRVFUSE_SCALES_DTYPE;
constexpr int RANKS = DRVFUSE_RANKS;
constexpr int PACKS = DRVFUSE_PACKS;
constexpr bool RAGGED = DRVFUSE_RAGGED;
constexpr bool STAGED = DRVFUSE_STAGED;
constexpr bool RESIDUAL = DRVFUSE_RESIDUAL;
constexpr bool QUANTISE = sizeof(Out) == 1;
// One stage is for few rows, so gamma is in registers before the row comes; long rows and two stages need these.
constexpr bool KEEP_GAMMA = !DRVFUSE_TWO_STAGE && PACKS <= 2;
constexpr int W = 16 / sizeof(In);
using InPack = Pack<In, W>;
using OutPack = Pack<Out, W>;
// Packs of every source in flight: four to eight loads a thread where the row has as many, and registers are left.
constexpr int WISHED = RANKS > 4 || PACKS * RANKS > 12 ? 1 : RANKS > 2 || PACKS > 3 ? 2 : 4;
constexpr int BATCH = WISHED < PACKS ? WISHED : PACKS;

struct FusedParams {
    Call call;
    const void* gamma;
    const void* residual;
    void* residual_output;
    void* output;
    void* scales;
    int rows;
    int chunk_rows;  // see Payload above, which stays below 4 GiB; unused by one_stage direct
    int columns;
    float epsilon;
    float weight_offset;
    float scale_ub;
};

__device__ __forceinline__ int packs_of_row(const FusedParams& p) { return (p.columns + W - 1) / W; }
__device__ __forceinline__ u32 input_stride(const FusedParams& p) { return packs_of_row(p) * u32(sizeof(InPack)); }
__device__ __forceinline__ u32 output_stride(const FusedParams& p) {
    return (packs_of_row(p) * u32(sizeof(OutPack)) + 15) / 16 * 16;
}

// Pack `index` of row `row` of a user's tensor.
template <typename T>
__device__ __forceinline__ void load_of_row(Pack<T, W>& pack, const void* tensor, int row, int index,
                                            const FusedParams& p) {
    const char* address = static_cast<const char*>(tensor) + (i64(row) * p.columns + index * W) * sizeof(T);
    if constexpr (RAGGED) {
        load_elements(pack, address, p.columns - index * W);
    } else {
        load_pack(pack, address);
    }
}

template <typename T>
__device__ __forceinline__ void store_of_row(void* tensor, int row, int index, const FusedParams& p,
                                             const Pack<T, W>& pack) {
    char* address = static_cast<char*>(tensor) + (i64(row) * p.columns + index * W) * sizeof(T);
    if constexpr (RAGGED) {
        store_elements(address, pack, p.columns - index * W);
    } else {
        store_pack(address, pack);
    }
}

// How a row is quantised: the scale as stored (y ~ q * scale) and what y is multiplied by.
struct Quantisation {
    float scale;
    float inverse;
};

template <typename Q, typename S>
__device__ __forceinline__ Quantisation quantisation(float maximum, float upper_bound) {
    const float largest = rounded<S>(maximum);
    const float bound = rounded<S>(upper_bound);
    const float limit = bound < largest ? bound : largest;  // NaN stays NaN
    const float scale = rounded<S>(__fdiv_rn(limit, Finite<Q>::max));
    const float inverse = __fdiv_rn(1.0f, scale);
    const float largest_float = __uint_as_float(0x7f7fffffu);
    return {scale, fabsf(inverse) <= largest_float ? inverse : 0.0f};  // 0 for a scale that is 0, tiny or NaN
}

// Hides where the pack comes from, so that its conversion to fp32 is not hoisted out of the loop over rows: the
// registers for a row's gamma in fp32 would be twice as many, or four times.
template <typename T>
__device__ __forceinline__ void keep_packed(Pack<T, W>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<T, W>::words; ++i) asm volatile("" : "+r"(pack.word[i]));
}

// One block's share of a call: the steps that a row goes through.
class Rows {
public:
    __device__ __forceinline__ Rows(const FusedParams& p, RowScratch& scratch)
        : p_(p), scratch_(scratch), packs_(packs_of_row(p)), done_(0) {
        refresh();
        if constexpr (KEEP_GAMMA) {
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                if (has(i)) load_of_row(gamma_[i], p.gamma, 0, index(i), p);
            }
        }
    }

    // x = the sum over the ranks; load(pack, source, index) reads one pack of the row.
    template <typename Load>
    __device__ __forceinline__ void sum(float (&x)[PACKS][W], const Load& load) {
        refresh();
#pragma unroll
        for (int first = 0; first < PACKS; first += BATCH) {
            InPack packs[BATCH][RANKS];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int source = 0; source < RANKS; ++source) {
                    if (first + b < PACKS && has(first + b)) load(packs[b][source], source, index(first + b));
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (first + b < PACKS && has(first + b)) sum_packs(x[first + b], packs[b]);
            }
        }
    }

    // x = x + residual, rounded; store(index, pack) takes residual_out.
    template <typename Store>
    __device__ __forceinline__ void add_residual(float (&x)[PACKS][W], int row, const Store& store) {
        refresh();
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) store(index(i), add_residual_pack(x[i], row, index(i)));
        }
    }

    // sum() and add_residual() for a row whose values are needed no more: only one pack at a time is in registers.
    template <typename Load, typename Store>
    __device__ __forceinline__ void sum_with_residual(int row, const Load& load, const Store& store) {
#pragma unroll 1
        for (int at = threadIdx.x; at < packs_; at += blockDim.x) {
            InPack packs[RANKS];
#pragma unroll
            for (int source = 0; source < RANKS; ++source) load(packs[source], source, at);
            float x[W];
            sum_packs(x, packs);
            store(at, add_residual_pack(x, row, at));
        }
    }

    // Normalise and quantise x; store(index, pack) takes the output, store_scale(s) runs on one thread. All threads.
    template <typename Store, typename StoreScale>
    __device__ __forceinline__ void normalise(float (&x)[PACKS][W], const Store& store, const StoreScale& store_scale) {
        refresh();
        float squares[PACKS];
        u32 maximum = 0;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            squares[i] = 0.0f;
            if (has(i)) {
                float g[W];
                gamma(g, i);
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    squares[i] = __fadd_rn(squares[i], __fmul_rn(x[i][k], x[i][k]));
                    x[i][k] = __fmul_rn(x[i][k], __fadd_rn(g[k], p_.weight_offset));
                    // A ragged row's padding is x = 0, which must not become 0 * infinity.
                    if (!RAGGED || index(i) * W + k < p_.columns)
                        maximum = max(maximum, __float_as_uint(x[i][k]) & 0x7fffffffu);
                }
            }
        }
        const RowStatistics row = reduce_row(scratch_, done_++, squares, maximum);
        const float mean = __fdiv_rn(row.sum_of_squares, float(p_.columns));
        const float f = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p_.epsilon)));
        float inverse = 1.0f;
        if constexpr (QUANTISE) {
            const Quantisation scale = quantisation<Out, Scale>(__fmul_rn(row.maximum, f), p_.scale_ub);
            inverse = scale.inverse;
            if (threadIdx.x == 0) store_scale(scale.scale);
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) {
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    x[i][k] = __fmul_rn(x[i][k], f);
                    if constexpr (QUANTISE) x[i][k] = __fmul_rn(x[i][k], inverse);
                }
                OutPack pack;
                from_float(pack, x[i]);
                store(index(i), pack);
            }
        }
    }

    // normalise() into row `row` of the outputs.
    __device__ __forceinline__ void normalise_to_output(float (&x)[PACKS][W], int row) {
        normalise(
            x, [&](int at, const OutPack& pack) { store_of_row(p_.output, row, at, p_, pack); },
            [&](float scale) { store_scalar(static_cast<Scale*>(p_.scales) + row, scale); });
    }

    // Copy the own input's row to `staging`.
    __device__ __forceinline__ void stage(char* staging, int row) const {
#pragma unroll 2
        for (int at = threadIdx.x; at < packs_; at += blockDim.x) {
            InPack pack;
            load_of_row(pack, p_.call.input, row, at, p_);
            store_pack(staging + at * sizeof(InPack), pack);
        }
    }

    // Read a row of residual_out from a payload, and store it to row `row` of residual_output.
    __device__ __forceinline__ void take_residual(float (&x)[PACKS][W], const char* from, int row) {
        refresh();
        InPack packs[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) load_pack(packs[i], from + index(i) * sizeof(InPack));
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (has(i)) {
                store_of_row(p_.residual_output, row, index(i), p_, packs[i]);
                to_float(x[i], packs[i]);
            }
        }
    }

private:
    // Begins each step. Hides that the thread's index does not change: otherwise the offsets of all packs in all
    // tensors are hoisted out of the loop over rows, and take more registers than there are.
    __device__ __forceinline__ void refresh() {
        thread_ = threadIdx.x;
        asm volatile("" : "+r"(thread_));
    }

    __device__ __forceinline__ int index(int i) const { return i * blockDim.x + thread_; }
    __device__ __forceinline__ bool has(int i) const { return index(i) < packs_; }

    __device__ __forceinline__ InPack add_residual_pack(float (&x)[W], int row, int at) const {
        InPack pack;
        float residual[W];
        load_of_row(pack, p_.residual, row, at, p_);
        to_float(residual, pack);
#pragma unroll
        for (int k = 0; k < W; ++k) x[k] = __fadd_rn(x[k], residual[k]);
        from_float(pack, x);
        to_float(x, pack);
        return pack;
    }

    __device__ __forceinline__ void gamma(float (&g)[W], int i) const {
        Pack<Gamma, W> pack;
        if constexpr (KEEP_GAMMA) {
            pack = gamma_[i];
            keep_packed(pack);
        } else {
            load_of_row(pack, p_.gamma, 0, index(i), p_);
        }
        to_float(g, pack);
    }

    const FusedParams& p_;
    RowScratch& scratch_;
    const int packs_;
    int thread_;
    u32 done_;
    Pack<Gamma, W> gamma_[KEEP_GAMMA ? PACKS : 1];
};

#if !DRVFUSE_TWO_STAGE

// One row: load(pack, source, index) reads a pack of it.
template <typename Load>
__device__ __forceinline__ void whole_row(Rows& rows, const FusedParams& p, int row, const Load& load) {
    float x[PACKS][W];
    rows.sum(x, load);
    if constexpr (RESIDUAL)
        rows.add_residual(x, row,
                          [&](int at, const InPack& pack) { store_of_row(p.residual_output, row, at, p, pack); });
    rows.normalise_to_output(x, row);
}

__device__ __forceinline__ void one_stage(Rows& rows, const FusedParams& p) {
#if !DRVFUSE_STAGED
#if !DRVFUSE_LOCAL
    Barrier<RANKS> barrier(p.call);
    if (!barrier.arrive_and_wait(false)) return;
#endif
#pragma unroll 1
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        whole_row(rows, p, row, [&](InPack& pack, int source, int at) {
            load_of_row(pack, p.call.sources[source], row, at, p);
        });
    }
#if !DRVFUSE_LOCAL
    if (!barrier.arrive_and_wait(true)) return;
    barrier.finish();
#endif
#else
    const u32 stride = input_stride(p);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    u32 half = 0;
    Barrier<RANKS> barrier(p.call);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (int begin = 0; begin < p.rows; begin += p.chunk_rows) {
        const int count = p.rows - begin < p.chunk_rows ? p.rows - begin : p.chunk_rows;
#pragma unroll 1
        for (int j = blockIdx.x; j < count; j += gridDim.x) rows.stage(own + half + j * stride, begin + j);
        if (!barrier.arrive_and_wait(true)) return;
#pragma unroll 1
        for (int j = blockIdx.x; j < count; j += gridDim.x) {
            whole_row(rows, p, begin + j, [&](InPack& pack, int source, int at) {
                load_pack(pack, payload(p.call.workspaces[source]) + half + j * stride + at * sizeof(InPack));
            });
        }
        half = p.chunk_rows * stride - half;
    }
    barrier.finish();
#endif
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_rmsnorm_fp8_one_stage(const __grid_constant__ FusedParams p) {
    __shared__ RowScratch scratch;
    if (p.call.early_trigger) launch_dependents();
    Rows rows(p, scratch);
    wait_for_producer();
    one_stage(rows, p);
    if (!p.call.early_trigger) launch_dependents();
}

#else

// Copy one row of `bytes` from every other rank's payload at `offset` to the output, B bytes a thread and step, three
// owners at once, beginning with the next rank. `row(owner)` is the output's row, or negative if that owner has none.
template <int B, typename Row>
__device__ __forceinline__ void gather_rows(const FusedParams& p, u32 offset, u32 bytes, const Row& row) {
    constexpr int OWNERS = RANKS < 3 ? 1 : RANKS < 4 ? 2 : 3;
#pragma unroll 1
    for (int first = 1; first < RANKS; first += OWNERS) {
        const char* from[OWNERS];
        char* to[OWNERS];
        bool exists[OWNERS];
#pragma unroll
        for (int i = 0; i < OWNERS; ++i) {
            const int owner = (p.call.rank + first + i) % RANKS;
            const int into = row(owner);
            exists[i] = first + i < RANKS && into >= 0;
            from[i] = payload(p.call.workspaces[owner]) + offset;
            to[i] = static_cast<char*>(p.output) + i64(into) * bytes;
        }
#pragma unroll 1
        for (u32 at = threadIdx.x * B; at < bytes; at += blockDim.x * B) {
            u32 words[OWNERS][B / 4];
#pragma unroll
            for (int i = 0; i < OWNERS; ++i) {
                if (exists[i]) load_words<B / 4>(words[i], from[i] + at);
            }
#pragma unroll
            for (int i = 0; i < OWNERS; ++i) {
                if (exists[i]) store_words<B / 4>(to[i] + at, words[i]);
            }
        }
    }
}

// The same for rows whose bytes in the output are not aligned: element by element.
template <typename Row>
__device__ __forceinline__ void gather_ragged(const FusedParams& p, u32 offset, const Row& row) {
#pragma unroll 1
    for (int step = 1; step < RANKS; ++step) {
        const int owner = (p.call.rank + step) % RANKS;
        if (row(owner) < 0) continue;
#pragma unroll 1
        for (int at = threadIdx.x; at < packs_of_row(p); at += blockDim.x) {
            OutPack pack;
            load_pack(pack, payload(p.call.workspaces[owner]) + offset + at * sizeof(OutPack));
            store_of_row(p.output, row(owner), at, p, pack);
        }
    }
}

__device__ __forceinline__ void two_stage(Rows& rows, const FusedParams& p) {
    const int chunk = p.chunk_rows;
    const u32 in_stride = input_stride(p);
    const u32 out_stride = RESIDUAL ? in_stride : output_stride(p);
    const u32 scales_offset = chunk * out_stride;
    const u32 half_bytes = scales_offset + (RESIDUAL || !QUANTISE ? 0 : (chunk * u32(sizeof(Scale)) + 15) / 16 * 16);
    const Partition<int, RANKS> part(p.rows);
    char* const own = payload(p.call.workspaces[p.call.rank]);
    u32 results = STAGED ? RANKS * chunk * in_stride : 0;
    Barrier<RANKS> barrier(p.call);
    if (!barrier.arrive_and_wait(false)) return;
#pragma unroll 1
    for (int done = 0; done < part.largest(); done += chunk) {
        if constexpr (STAGED) {
#pragma unroll 1
            for (int owner = 0; owner < RANKS; ++owner) {
                const int count = part.in_chunk(owner, done, chunk);
#pragma unroll 1
                for (int j = blockIdx.x; j < count; j += gridDim.x)
                    rows.stage(own + (owner * chunk + j) * in_stride, part.start(owner) + done + j);
            }
            if (!barrier.arrive_and_wait(true)) return;
        }
        const int begin = part.start(p.call.rank) + done;
        const int mine = part.in_chunk(p.call.rank, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < mine; j += gridDim.x) {
            const auto load = [&](InPack& pack, int source, int at) {
                if constexpr (STAGED) {
                    load_pack(pack, payload(p.call.workspaces[source]) + (p.call.rank * chunk + j) * in_stride +
                                        at * sizeof(InPack));
                } else {
                    load_of_row(pack, p.call.sources[source], begin + j, at, p);
                }
            };
            if constexpr (RESIDUAL) {
                rows.sum_with_residual(begin + j, load, [&](int at, const InPack& pack) {
                    store_pack(own + results + j * out_stride + at * sizeof(InPack), pack);
                });
            } else {
                float x[PACKS][W];
                rows.sum(x, load);
                rows.normalise(
                    x,
                    [&](int at, const OutPack& pack) {
                        store_pack(own + results + j * out_stride + at * sizeof(OutPack), pack);
                        store_of_row(p.output, begin + j, at, p, pack);
                    },
                    [&](float scale) {
                        store_scalar(reinterpret_cast<Scale*>(own + results + scales_offset) + j, scale);
                        store_scalar(static_cast<Scale*>(p.scales) + begin + j, scale);
                    });
            }
        }
        if (!barrier.arrive_and_wait(true)) return;
        const int most = part.in_chunk(0, done, chunk);
#pragma unroll 1
        for (int j = blockIdx.x; j < most; j += gridDim.x) {
            const auto row = [&](int owner) -> int {
                return j < part.in_chunk(owner, done, chunk) ? part.start(owner) + done + j : -1;
            };
            if constexpr (RESIDUAL) {
#pragma unroll 1
                for (int step = 0; step < RANKS; ++step) {
                    const int owner = (p.call.rank + step) % RANKS;
                    if (row(owner) < 0) continue;
                    float x[PACKS][W];
                    rows.take_residual(x, payload(p.call.workspaces[owner]) + results + j * out_stride, row(owner));
                    rows.normalise_to_output(x, row(owner));
                }
            } else {
                const u32 bytes = p.columns * u32(sizeof(Out));
                if constexpr (RAGGED) {
                    gather_ragged(p, results + j * out_stride, row);
                } else if (bytes % 16 == 0) {
                    gather_rows<16>(p, results + j * out_stride, bytes, row);
                } else {
                    gather_rows<sizeof(OutPack)>(p, results + j * out_stride, bytes, row);
                }
                const int owner = threadIdx.x;
                if (QUANTISE && owner < RANKS && owner != p.call.rank && row(owner) >= 0) {
                    const char* scales = payload(p.call.workspaces[owner]) + results + scales_offset;
                    copy_scalar(static_cast<Scale*>(p.scales) + row(owner), reinterpret_cast<const Scale*>(scales) + j);
                }
            }
        }
        if (!STAGED) results = half_bytes - results;
    }
    barrier.finish();
}

extern "C" __global__ void __launch_bounds__(512, 1)
    allreduce_rmsnorm_fp8_two_stage(const __grid_constant__ FusedParams p) {
    __shared__ RowScratch scratch;
    if (p.call.early_trigger) launch_dependents();
    Rows rows(p, scratch);
    wait_for_producer();
    two_stage(rows, p);
    if (!p.call.early_trigger) launch_dependents();
}

#endif
