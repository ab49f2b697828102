// SPDX-License-Identifier: Apache-2.0
// Copies results or normed rows from the memory of the ranks that own the rows to this rank's tensor, with elements of
// type T.
//
// A call copies one row of each owner. `row(owner)` is the index of that row in the tensor, or negative if the owner
// has none. `from(owner)` is the address from which the row is copied, a multiple of 16. The copies begin with the rank
// `First` ranks after this rank, so that not all ranks read from the same rank at a time. `tensor` is passed by
// reference, so that the compiler loads it inside the loop and no register keeps it.
#pragma once
#include "collectives/rows/steps.cuh"

// Copies one row of each owner. In each iteration a thread copies B bytes from each of up to three owners.
template <int First, int B, typename From, typename Row>
__device__ __forceinline__ void gather_aligned(const RowsParams& p, void* const& tensor, u32 bytes, const From& from,
                                               const Row& row) {
    constexpr int COUNT = RANKS - First;
    constexpr int OWNERS = COUNT < 2 ? 1 : COUNT < 3 ? 2 : 3;
#pragma unroll 1
    for (int first = First; first < RANKS; first += OWNERS) {
        const char* source[OWNERS];
        char* to[OWNERS];
        bool exists[OWNERS];
#pragma unroll
        for (int i = 0; i < OWNERS; ++i) {
            const int owner = (p.call.rank + first + i) % RANKS;
            const int into = row(owner);
            exists[i] = first + i < RANKS && into >= 0;
            source[i] = from(owner);
            to[i] = static_cast<char*>(tensor) + i64(into) * bytes;
        }
#pragma unroll 1
        for (u32 at = threadIdx.x * B; at < bytes; at += blockDim.x * B) {
            u32 words[OWNERS][B / 4];
#pragma unroll
            for (int i = 0; i < OWNERS; ++i) {
                if (exists[i]) load_words<B / 4>(words[i], source[i] + at);
            }
#pragma unroll
            for (int i = 0; i < OWNERS; ++i) {
                if (exists[i]) store_words<B / 4>(to[i] + at, words[i]);
            }
        }
    }
}

// Copies one row of each owner, pack by pack: for rows that are not aligned in the tensor, or whose packs have fewer
// bytes in the tensor than in the owner's memory.
template <typename T, int First, typename From, typename Row>
__device__ __forceinline__ void gather_ragged(const RowsParams& p, void* const& tensor, const From& from,
                                              const Row& row) {
#pragma unroll 1
    for (int step = First; step < RANKS; ++step) {
        const int owner = (p.call.rank + step) % RANKS;
        if (row(owner) < 0) continue;
#pragma unroll 1
        for (int at = threadIdx.x; at < packs_of_row(p); at += blockDim.x) {
            Pack<T, W> pack;
            load_pack(pack, from(owner) + at * sizeof(pack));
            store_of_row(tensor, row(owner), at, p, pack);
        }
    }
}

template <typename T, int First, typename From, typename Row>
__device__ __forceinline__ void gather_rows(const RowsParams& p, void* const& tensor, const From& from,
                                            const Row& row) {
    const u32 bytes = Bytes<T>::of(2) == 1 ? p.columns / 2u : p.columns * u32(sizeof(T));
    if constexpr (RAGGED ||
                  Bytes<T>::of(W) < i64(sizeof(Pack<T, W>))) {  // a pack of FP4 in the tensor may be half a word
        gather_ragged<T, First>(p, tensor, from, row);
    } else if (bytes % 16 == 0) {
        gather_aligned<First, 16>(p, tensor, bytes, from, row);
    } else {
        gather_aligned<First, sizeof(Pack<T, W>)>(p, tensor, bytes, from, row);
    }
}

// Copies the scales of one row of each owner to this rank's scales. An owner has stored the scales of a row `stride`
// bytes apart.
template <int First, typename From, typename Row>
__device__ __forceinline__ void gather_groups(const RowsParams& p, u32 stride, const From& from, const Row& row) {
#pragma unroll 1
    for (int step = First; step < RANKS; ++step) {
        const int owner = (p.call.rank + step) % RANKS;
        if (row(owner) < 0) continue;
#pragma unroll 1
        for (int group = threadIdx.x; group < groups_of_row(p); group += blockDim.x)
            copy_scalar(scale_at(p, 0, row(owner), group),
                        reinterpret_cast<const Scale*>(from(owner) + group * stride));
    }
}
