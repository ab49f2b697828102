// SPDX-License-Identifier: Apache-2.0
// The columns of a block's rows that RMSNorm's forward of many rows keeps in registers, where the rest of them fills
// shared memory: then nothing is read twice.
//
// They are whole segments behind the resident columns, HELD_COLUMNS for each warp: a lane has 8 rows of one pack, eight
// lanes are over one another and four side by side. A segment's 32 packs are then those of 8 warps and 4 lanes, whose sums
// of squares meet in shared memory, where x is kept later: the tree over a segment begins with the highest bit of a pack's
// number, which is a warp's.
#pragma once
#include "coat/forward_tiles.cuh"

constexpr bool HOLDS = DRVFUSE_HOLDS;
constexpr int HELD_ROWS = 8, HELD_COLUMNS = 4 * PACK;  // of a lane, and of a warp
constexpr int HELD_SEGMENTS = WARPS * HELD_COLUMNS / SEGMENT;
constexpr int PACK_PITCH = BLOCK_ROWS + 8;  // words; four threads read the sums of a row at once
static_assert(!HOLDS || (!LAYER && KNOWN && BLOCK_ROWS == 8 * HELD_ROWS && BATCH == 4), "see above");

class Held {
public:
    // Asks for x, behind the wait for the producer.
    __device__ __forceinline__ explicit Held(const Rows& rows) : rows_(rows) {
#pragma unroll
        for (int q = 0; q < 2; ++q) load_batch(quads_[q], rows.p, rows.global(local()) + 4 * q, column());
        ask_for_weights();
    }

    __device__ __forceinline__ void ask_for_weights() { load_weight_pack(weight_, rows_.p, column()); }

    // The sums and products of the block's rows over these columns, and `largest`, which grows to the largest |w|. Two
    // block barriers, at which nobody has kept x yet; one must follow.
    __device__ __forceinline__ void reduce(float* sums, u32* products, float& largest) {
        float* packs = reinterpret_cast<float*>(rows_.x);  // [segment][pack][row]
        const int pack = threadIdx.x / 32 * 4 + threadIdx.x % 4, first_row = local(), at = column();
        float w[PACK];
        take_phase1_weights(w, largest, weight_);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float squares[BATCH];
            u32 most[BATCH];
            reduce_packs(quads_[q], w, squares, most);
            *reinterpret_cast<float4*>(packs + pack * PACK_PITCH + first_row + 4 * q) =
                make_float4(squares[0], squares[1], squares[2], squares[3]);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                if (threadIdx.x % 4 == r) atomicMax(products + first_row + 4 * q + r, most[r]);
            }
            const u16* scale = quads_[q].scale;
            if (QB == PACK || at % QB == 0) {
                *reinterpret_cast<uint2*>(rows_.scales + rows_.known_scales(first_row + 4 * q, at)) =
                    make_uint2(scale[0] | u32(scale[1]) << 16, scale[2] | u32(scale[3]) << 16);
            }
        }
        __syncthreads();
        // Four threads a row and segment, each with every fourth pack.
        for (int i = threadIdx.x; i < HELD_SEGMENTS * BLOCK_ROWS * 4; i += THREADS) {
            const int own = i % 4, row = i / 4 % BLOCK_ROWS, segment = i / (4 * BLOCK_ROWS);
            const float* of_row = packs + (segment * 32 + own) * PACK_PITCH + row;
            float part[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) part[k] = of_row[4 * k * PACK_PITCH];
#pragma unroll
            for (int half = 4; half > 0; half /= 2) {
#pragma unroll
                for (int k = 0; k < half; ++k) part[k] = __fadd_rn(part[k], part[k + half]);
            }
            float sum = __fadd_rn(part[0], __shfl_xor_sync(0xffffffffu, part[0], 2));
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            if (own == 0) sums[(rows_.p.resident_columns / SEGMENT + segment) * rows_.p.chunk_rows + row] = sum;
        }
        __syncthreads();
    }

    __device__ __forceinline__ void quantise_all(float inverse) {
        const ForwardParams& p = rows_.p;
        const int first_row = local(), at = column();
        const i64 row = rows_.global(first_row);
        const int left = int(max(min(p.rows - row, i64(HELD_ROWS)), i64(0)));
        float w[PACK];
        to_float(w, weight_);
        Turned<HELD_ROWS, PACK> turned;
        u8* to = p.qy + row * p.columns + at;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const float4 four = *reinterpret_cast<const float4*>(rows_.rstd + first_row + 4 * q);
            const uint2 pair =
                *reinterpret_cast<const uint2*>(rows_.scales + rows_.known_scales(first_row + 4 * q, at));
            const float rstd[4] = {four.x, four.y, four.z, four.w};
            const u32 scales[2] = {pair.x, pair.y};
            u32 out[4][PACK / 4];
#pragma unroll
            for (int r = 0; r < 4; ++r, to += p.columns) {
                const float scale = __uint_as_float(r % 2 ? scales[r / 2] & 0xffff0000u : scales[r / 2] << 16);
                float v[PACK];
#pragma unroll
                for (int j = 0; j < 4; ++j) Word<X>::unpack(quads_[q].word[r][j], v + 4 * j);
#pragma unroll
                for (int i = 0; i < PACK; ++i) v[i] = rounded_to_bf16(normalised(v[i], scale, rstd[r], w[i]));
                quantise<X, PACK>(out[r], v, inverse);
                if (4 * q + r < left) store_bytes<PACK, true>(to, out[r], PACK, ALIGNED);
            }
            turned.take(q, out);
        }
        constexpr int BYTES = RUN < HELD_ROWS ? RUN : HELD_ROWS;
        if (left > 0) {
            store_turned<BYTES, ALIGNED, WHOLE, true>(p.qy_t, turned, row, p.rows, p.batch_rows, p.columns, at);
        }
    }

private:
    // The first of the lane's rows, of those of the block, and of its columns.
    __device__ static __forceinline__ int local() { return threadIdx.x % 32 / 4 * HELD_ROWS; }
    __device__ __forceinline__ int column() const {
        return rows_.p.resident_columns + threadIdx.x / 32 * HELD_COLUMNS + threadIdx.x % 4 * PACK;
    }

    const Rows& rows_;
    Batch quads_[2];
    Pack<Weight, PACK> weight_;
};

struct NothingHeld {
    __device__ __forceinline__ explicit NothingHeld(const Rows&) {}
    __device__ __forceinline__ void ask_for_weights() {}
    __device__ __forceinline__ void reduce(float*, u32*, float&) {}
    __device__ __forceinline__ void quantise_all(float) {}
};
