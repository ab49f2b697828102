// SPDX-License-Identifier: Apache-2.0
// The matrix instructions mma, wmma, ldmatrix, stmatrix and movmatrix, which the lanes of a warp execute together. This
// is a library of its own, which is loaded with modules that have a matrix instruction.
//
// Each lane stores its operands in its exchange area (op_a is the area's offset in the frame) and suspends with a warp
// operation of kind MATRIX. When all 32 lanes are suspended, the runtime calls the function of this file whose address
// is in op_value, with the thread of the first lane. The function stores the results in the exchange areas, and the
// lanes continue. It returns 0, or 1 if an access was refused, which has stopped the launch.
//
// The products are bit-equal to those of an H200. The translator makes a structure Product and the tables that follow
// it in memory (ptx/fragments.py). The tables say which element of a matrix each register of each lane holds.
#include "tensor.cuh"

const u32 LANES = 32;

API u32 rt_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site);

// The thread of lane `lane` of a warp. `first` is the thread of lane 0 of this warp.
FN Thread* lane_of(Thread* first, u32 lane) { return (Thread*)((u8*)first + (u64)lane * first->launch->frame_stride); }

// The exchange area of a lane.
FN u32* exchange(Thread* t) { return (u32*)((u8*)t + t->op_a); }

// Products ------------------------------------------------------------------------------------------------------------

// Adds two fp32 numbers or, with `half`, fp16 numbers. Takes and returns their bits.
FN u32 add(u32 x, u32 y, u32 half) {
    if (half) return to_half(of_half(x) + of_half(y));
    return bits_of(__fadd_rn(__uint_as_float(x), __uint_as_float(y)));
}

// Computes a matrix product by `steps` steps of the tensor cores. Each step adds k / steps products to each sum. The
// sums begin with C; for FP8 they begin with zero, and C is added at the end by an ordinary addition.
FAR void tensor(const Product* p, const u32* a_bits, const u32* b_bits, const u32* c, u32* d) {
    Side a, b;
    u32 k = p->k, step = k / p->steps, late = p->method == MX_FP8, kind = late ? MX_F16 : p->kind[0];
    u32 widens = p->kind[2] == MX_F16 && p->kind[3] == MX_F32, narrows = p->kind[2] == MX_F32 && p->kind[3] == MX_F16;
    u32 half = p->kind[2] == MX_F16 && p->kind[3] == MX_F16;
    take_apart(a_bits, p->m, k, kind, &a);
    take_apart(b_bits, p->n, k, kind, &b);
    LOOP for (u32 i = 0; i < p->m; i++)
        LOOP for (u32 j = 0; j < p->n; j++) {
            u32 start = c[i * p->n + j];
            if (widens) start = bits_of(of_half(start));
            u32 sum = late ? 0 : start;
            LOOP for (u32 at = 0; at < k; at += step) {
                u32 any = 0;
                if (a.any[i] | b.any[j]) {
                    LOOP for (u32 e = at; e < at + step; e++) any |= a.class_[i * k + e] | b.class_[j * k + e];
                }
                sum = fused(&a, i * k + at, &b, j * k + at, step, any, sum, half);
            }
            if (late) sum = add(start, sum, half);
            d[i * p->n + j] = narrows ? to_half(__uint_as_float(sum)) : sum;
        }
}

// Computes the matrix product m8n8k4, which an H200 computes by ordinary fp32 operations, not by tensor cores.
FAR void chain(const Product* p, const u32* a_bits, const u32* b_bits, const u32* c, u32* d) {
    LOOP for (u32 i = 0; i < 8; i++)
        LOOP for (u32 j = 0; j < 8; j++) {
            float a[4], b[4];
            LOOP for (u32 e = 0; e < 4; e++) {
                a[e] = of_half(a_bits[i * 4 + e]);
                b[e] = of_half(b_bits[j * 4 + e]);
            }
            u32 x = c[i * 8 + j];
            float start = p->kind[2] == MX_F16 ? of_half(x) : __uint_as_float(x);
            if (p->kind[3] == MX_F16) {
                float low = __fmaf_rn(a[1], b[1], __fmul_rn(a[0], b[0])), high = __fmaf_rn(a[3], b[3], __fmul_rn(a[2], b[2]));
                d[i * 8 + j] = to_half(__fadd_rn(__fadd_rn(start, low), high));
            } else {
                float sum = __fmaf_rn(a[1], b[1], __fmaf_rn(a[0], b[0], 0.0f));
                sum = __fmaf_rn(a[3], b[3], __fmaf_rn(a[2], b[2], sum));
                d[i * 8 + j] = bits_of(__fadd_rn(start, sum));
            }
        }
}

FN s32 integer_of(u32 bits, u32 kind) { return kind == MX_S8 ? (s32)(signed char)bits : (s32)bits; }

// Computes a matrix product with integer elements.
FAR void integers(const Product* p, const u32* a, const u32* b, const u32* c, u32* d) {
    u32 k = p->k;
    LOOP for (u32 i = 0; i < p->m; i++)
        LOOP for (u32 j = 0; j < p->n; j++) {
            s64 sum = (s32)c[i * p->n + j];
            LOOP for (u32 e = 0; e < k; e++)
                sum += integer_of(a[i * k + e], p->kind[0]) * integer_of(b[j * k + e], p->kind[1]);
            if (p->method == MX_SATURATED) {
                if (sum > 0x7FFFFFFF) sum = 0x7FFFFFFF;
                if (sum < -0x7FFFFFFFll - 1) sum = -0x7FFFFFFFll - 1;
            }
            d[i * p->n + j] = (u32)sum;
        }
}

// Fragments -----------------------------------------------------------------------------------------------------------

FN u32 width_of(u32 kind) { return kind >= MX_F32 ? 32 : kind >= MX_F16 ? 16 : 8; }

// Moves the elements of one operand (0 to 3: A, B, C, D) from the lanes' registers, which begin at word `at` of the
// exchange areas, to `elements`. `places` has the index in `elements` for each element of each lane's registers.
// Returns the end of that table.
FN const u16* gather(Thread* first, const Product* p, u32 operand, u32 at, const u16* places, u32* elements) {
    u32 width = width_of(p->kind[operand]), mask = width < 32 ? (1u << width) - 1 : ~0u;
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        const u32* words = exchange(lane_of(first, lane)) + at;
        LOOP for (u32 r = 0; r < p->registers[operand]; r++)
            LOOP for (u32 shift = 0; shift < 32; shift += width) elements[*places++] = words[r] >> shift & mask;
    }
    return places;
}

// Moves the elements of D to the lanes' registers.
FN void scatter(Thread* first, const Product* p, const u16* places, const u32* elements) {
    u32 width = width_of(p->kind[3]);
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        u32* words = exchange(lane_of(first, lane));
        LOOP for (u32 r = 0; r < p->registers[3]; r++) {
            u32 word = 0;
            LOOP for (u32 shift = 0; shift < 32; shift += width) word |= elements[*places++] << shift;
            words[r] = word;
        }
    }
}

// mma and wmma.mma: op_addr is the address of the Product. The exchange areas hold A, B and C before the call, and D
// after it.
API u32 mx_multiply(Thread* first) {
    const Product* p = (const Product*)first->op_addr;
    u32 a[MOST], b[MOST], c[MOST], d[MOST];
    const u16* places = (const u16*)(p + 1);
    places = gather(first, p, 0, 0, places, a);
    places = gather(first, p, 1, p->registers[0], places, b);
    places = gather(first, p, 2, p->registers[0] + p->registers[1], places, c);
    if (p->method == MX_FP8) {
        LOOP for (u32 i = 0; i < p->m * p->k; i++) a[i] = half_of_fp8(a[i], p->kind[0] == MX_E4M3);
        LOOP for (u32 i = 0; i < p->n * p->k; i++) b[i] = half_of_fp8(b[i], p->kind[1] == MX_E4M3);
    }
    LOOP for (u32 i = 0; i < p->count; i++) {
        const u32 *x = a + i * p->m * p->k, *y = b + i * p->n * p->k, *z = c + i * p->m * p->n;
        u32* out = d + i * p->m * p->n;
        if (p->method == MX_CHAIN) chain(p, x, y, z, out);
        else if (p->method == MX_TENSOR || p->method == MX_FP8) tensor(p, x, y, z, out);
        else integers(p, x, y, z, out);
    }
    scatter(first, p, places, d);
    return 0;
}

// Rows of shared memory -----------------------------------------------------------------------------------------------
//
// ldmatrix and stmatrix, for matrices of 8 x 8 elements of 16 bits. Lane 4 r + c has the elements 2 c and 2 c + 1 of
// row r or, transposed, of column r. Lane 8 i + r has the address of row r of matrix i in op_addr. op_b is the number
// of matrices, and op_c is 1 if they are transposed. The access to a row counts as an access of the lane that has the
// address of the row.

// The row of a matrix whose address is in op_addr of lane `lane`.
FN u16* row_of(Thread* first, u32 lane) { return (u16*)lane_of(first, lane)->op_addr; }

// Checks and counts the access of a lane to its row. Returns 1 after recording a fault.
FN u32 row_refused(Thread* first, u32 lane, u32 flags) {
    Thread* t = lane_of(first, lane);
    return rt_access(t, t->op_addr, 16, flags | SPACE_SHARED << SPACE_SHIFT, t->site);
}

// A lane's register holds two elements of a matrix, 0 and 1. These functions return the row and the column of one of
// them.
FN u32 row_in(u32 lane, u32 element, u32 transposed) { return transposed ? lane % 4 * 2 + element : lane / 4; }

FN u32 column_in(u32 lane, u32 element, u32 transposed) { return transposed ? lane / 4 : lane % 4 * 2 + element; }

// ldmatrix: reads matrices of shared memory into registers.
API u32 mx_load_rows(Thread* first) {
    LOOP for (u32 i = 0; i < 8 * first->op_b; i++)
        if (row_refused(first, i, 0)) return 1;
    u32 transposed = first->op_c;
    LOOP for (u32 lane = 0; lane < LANES; lane++)
        LOOP for (u32 i = 0; i < first->op_b; i++) {
            u32 word = 0;
            LOOP for (u32 e = 0; e < 2; e++)
                word |= (u32)row_of(first, 8 * i + row_in(lane, e, transposed))[column_in(lane, e, transposed)] << 16 * e;
            exchange(lane_of(first, lane))[i] = word;
        }
    return 0;
}

// stmatrix. Each row is written before the access to the next row is checked: that check settles the doubts
// (race_report.cuh) of the store of this row, for which its bytes must be in memory.
API u32 mx_store_rows(Thread* first) {
    LOOP for (u32 i = 0; i < 8 * first->op_b; i++) {
        if (row_refused(first, i, A_WRITE)) return 1;
        u32 row = i % 8;
        LOOP for (u32 column = 0; column < 8; column++) {
            u32 lane = first->op_c ? column * 4 + row / 2 : row * 4 + column / 2, element = (first->op_c ? row : column) % 2;
            row_of(first, i)[column] = (u16)(exchange(lane_of(first, lane))[i / 8] >> 16 * element);
        }
    }
    return 0;
}

// movmatrix: transposes one matrix in registers.
API u32 mx_transpose(Thread* first) {
    u32 words[LANES];
    LOOP for (u32 lane = 0; lane < LANES; lane++) words[lane] = exchange(lane_of(first, lane))[0];
    LOOP for (u32 lane = 0; lane < LANES; lane++) {
        u32 word = 0;
        LOOP for (u32 e = 0; e < 2; e++) {
            u32 row = lane % 4 * 2 + e, column = lane / 4;
            word |= (words[row * 4 + column / 2] >> 16 * (column % 2) & 0xFFFF) << 16 * e;
        }
        exchange(lane_of(first, lane))[0] = word;
    }
    return 0;
}
