// SPDX-License-Identifier: Apache-2.0
// Stores a warp's tile of FP8 values, and its transpose, from registers to memory.
//
// Each lane has TR rows by TC columns, and ROW_LANES lanes lie over one another. A lane passes four rows at a time,
// which are stored in rows and also transposed in registers; after the last rows TR bytes of each column are stored. To
// write whole sectors of 32 bytes, ROW_LANES * TR is at least 32 unless the tensor has fewer rows.
#pragma once
#include "common/fp8_rows.cuh"

template <int TR, int TC>
struct Turned {
    u32 word[TC][TR / 4];  // the rows of each column

    // Rows 4 * quad to 4 * quad + 3.
    __device__ __forceinline__ void take(int quad, const u32 (&rows)[4][TC / 4]) {
#pragma unroll
        for (int j = 0; j < TC / 4; ++j) {
            const u32 four[4] = {rows[0][j], rows[1][j], rows[2][j], rows[3][j]};
            u32 columns[4];
            transpose_bytes(four, columns);
#pragma unroll
            for (int k = 0; k < 4; ++k) word[4 * j + k][quad] = columns[k];
        }
    }
};

// The value rounded to bf16, as a float. F2FP computes it as the upper half of a pair whose lower half is 0.
__device__ __forceinline__ float rounded_to_bf16(float value) { return __uint_as_float(ptx::bf16x2(value, 0.0f)); }

// TC values divided by a scale, which is given as its reciprocal.
template <typename X, int TC>
__device__ __forceinline__ void quantise(u32 (&out)[TC / 4], float (&v)[TC], float inverse) {
#pragma unroll
    for (int i = 0; i < TC; ++i) v[i] = __fmul_rn(v[i], inverse);
#pragma unroll
    for (int j = 0; j < TC / 4; ++j) out[j] = Word<X>::pack(v + 4 * j);
}

// Stores columns `at`, at + 1, ... of a lane's rows from `row0` on to [rows / batch_rows, columns, batch_rows], in
// stores of RUN bytes. RUN divides batch_rows, so the bytes of a store belong to one batch and are aligned. With
// ALIGNED all TC columns exist or none does, with WHOLE all rows and columns exist. With STREAMING, stores of 8 bytes
// and more have a hint that they are not read again soon.
template <int RUN, bool ALIGNED, bool WHOLE = false, bool STREAMING = false, int TR, int TC>
__device__ __forceinline__ void store_turned(u8* out, const Turned<TR, TC>& turned, i64 row0, i64 rows, i64 batch_rows,
                                             int columns, int at) {
    if (!WHOLE && at >= columns) return;
#pragma unroll
    for (int r = 0; r < TR; r += RUN) {
        const i64 row = row0 + r;
        if (!WHOLE && row >= rows) return;
        i64 batch = 0, inside = row;
        if (batch_rows != rows) batch = row / batch_rows, inside = row % batch_rows;
        u8* const first = out + (batch * columns + at) * batch_rows + inside;
#pragma unroll
        for (int c = 0; c < TC; ++c) {
            u8* const to = first + c * batch_rows;
            if (ALIGNED || at + c < columns) {
                if constexpr (STREAMING && RUN >= 8) {
                    store_words_streaming<RUN / 4>(to, turned.word[c] + r / 4);
                } else if constexpr (RUN >= 4) {
                    store_words<RUN / 4>(to, turned.word[c] + r / 4);
                } else {
                    *to = u8(turned.word[c][r / 4] >> (8 * (r % 4)));
                }
            }
        }
    }
}
