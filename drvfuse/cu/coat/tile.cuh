// SPDX-License-Identifier: Apache-2.0
// Transposes a warp's tile of FP8 values in registers, and stores the transpose.
//
// Division. A tile has ROW_LANES * TR rows by 32 / ROW_LANES * TC columns. Each lane holds TR rows by TC columns of it.
// Lanes are numbered along the rows: lane l holds the part at row l / (32 / ROW_LANES) * TR of the tile and column
// l % (32 / ROW_LANES) * TC.
//
// Registers. The kernel quantises four rows (a quad) at a time, stores these four rows itself, and passes them to
// `Turned::take`, which transposes them. After the last quad a lane has TR consecutive bytes of each of its columns,
// which `store_turned` stores. Sectors of 32 bytes are written whole if ROW_LANES * TR is at least 32; this number is
// smaller only for tensors with fewer than 32 rows. Threads exchange nothing.
#pragma once
#include "common/fp8_rows.cuh"

// The transpose of a lane's part of a tile.
template <int TR, int TC>
struct Turned {
    u32 word[TC][TR / 4];  // the TR bytes of each column, four bytes per word

    // Transposes rows 4 * quad to 4 * quad + 3, of TC bytes each, into `word`.
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

// The value rounded to bf16, as a float: the upper half of a pair of bf16 whose lower half is 0.
__device__ __forceinline__ float rounded_to_bf16(float value) { return __uint_as_float(ptx::bf16x2(value, 0.0f)); }

// Quantises TC values: out = FP8(v * inverse), where `inverse` is the reciprocal of the scale. Overwrites `v`.
template <typename X, int TC>
__device__ __forceinline__ void quantise(u32 (&out)[TC / 4], float (&v)[TC], float inverse) {
#pragma unroll
    for (int i = 0; i < TC; ++i) v[i] = __fmul_rn(v[i], inverse);
#pragma unroll
    for (int j = 0; j < TC / 4; ++j) out[j] = Word<X>::pack(v + 4 * j);
}

// Stores the transpose of a lane's part of a tile in `out`, an array [rows / batch_rows, columns, batch_rows]. The part
// begins at row `row0` and column `column` of the tensor.
//   RUN        Bytes of one store. RUN divides batch_rows, so a store is aligned and its bytes belong to one batch.
//   ALIGNED    Either all TC columns exist or none does.
//   WHOLE      All TR rows and all TC columns exist.
//   STREAMING  Stores of 8 or 16 bytes have the hint st.global.cs, for bytes that are not read again soon.
template <int RUN, bool ALIGNED, bool WHOLE = false, bool STREAMING = false, int TR, int TC>
__device__ __forceinline__ void store_turned(u8* out, const Turned<TR, TC>& turned, i64 row0, i64 rows, i64 batch_rows,
                                             int columns, int column) {
    if (!WHOLE && column >= columns) return;
#pragma unroll
    for (int r = 0; r < TR; r += RUN) {
        const i64 row = row0 + r;
        if (!WHOLE && row >= rows) return;
        i64 batch = 0, row_in_batch = row;
        if (batch_rows != rows) batch = row / batch_rows, row_in_batch = row % batch_rows;
        u8* const first = out + (batch * columns + column) * batch_rows + row_in_batch;
#pragma unroll
        for (int c = 0; c < TC; ++c) {
            u8* const to = first + c * batch_rows;
            if (ALIGNED || column + c < columns) {
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
