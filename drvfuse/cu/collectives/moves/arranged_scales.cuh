// SPDX-License-Identifier: Apache-2.0
// Gathers scales in a layout in which the scales of a row are not contiguous: by column or in tiles
// (common/quantise.cuh).
//
// A sending rank holds the scales of its own rows in this layout, as a tensor of those rows alone would have, and sends
// them unchanged. The receiving rank stores each scale to its place among the scales of all rows, by words of 4 bytes.
// In tiles a word holds the one-byte scales of 4 groups of one row. In columns a word holds scales of one group: one
// float, or the one-byte scales of four rows. Four words that are adjacent and aligned in the result are stored at
// once. This is the usual case if the sending rank's rows begin at a whole tile, or at a multiple of 16 bytes of a
// column. The last word of a column may end in padding, which is not stored, as the scales of another rank may belong
// in its place. In tiles the padding after the last group is stored as 0.
#pragma once
#include "common/bytes.cuh"
#include "common/faults.cuh"
#include "common/quantise.cuh"

struct Arrangement {
    int rows;      // the number of rows of all ranks
    int groups;    // the number of scales of a row
    int itemsize;  // bytes of a scale: 4 or 1
    int tiles;     // 1: the scales are in tiles, 0: by column

    // Entry d describes rank (rank - d) mod ranks, from which this rank receives:
    int first[DRVFUSE_MAX_RANKS];  // the index of that rank's first row among all rows
    int count[DRVFUSE_MAX_RANKS];  // the number of that rank's rows
};

// Four words of a rank's scales: where each is stored in the result, which has the scales of all ranks' rows, and how
// much of it is stored.
struct Places {
    i64 at[4];     // the offset of each word in the result, in bytes
    int bytes[4];  // bytes of each word that are stored; 0 or less: none
    u32 mask;      // the bits of a word that are kept; the other bits, of groups that do not exist, are stored as 0
};

__device__ __forceinline__ int padded4(int rows) { return (rows + 3) / 4 * 4; }

__device__ __forceinline__ Places places_in_tiles(const Arrangement& a, int distance, u32 pack) {
    const u32 across = (a.groups + 3) / 4, tile = pack / 32, down = tile / across, quad = tile - down * across;
    const int missing = max(0, int(quad * 4 + 4) - a.groups);
    Places places;
    places.mask = ~0u >> (8 * missing);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int row = down * 128 + k * 32 + pack % 32, to = a.first[distance] + row;
        places.at[k] = (i64(to / 128) * across + quad) * 512 + to % 32 * 16 + to % 128 / 32 * 4;
        places.bytes[k] = row < a.count[distance] ? 4 : 0;
    }
    return places;
}

__device__ __forceinline__ Places places_in_columns(const Arrangement& a, int distance, u32 pack) {
    const u32 words = padded4(a.count[distance]) * a.itemsize / 4;
    Places places;
    places.mask = ~0u;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32 index = pack * 4 + k, group = index / words;
        const int row = (index - group * words) * 4 / a.itemsize;
        places.at[k] = (i64(group) * padded4(a.rows) + a.first[distance] + row) * a.itemsize;
        const int left = FAULT("scales-stored-with-padding") ? 4 : (a.count[distance] - row) * a.itemsize;
        places.bytes[k] = group < a.groups ? left : 0;
    }
    return places;
}

__device__ __forceinline__ void store_scales(char* scales, const Arrangement& a, int distance, u32 pack,
                                             const u32 (&word)[4]) {
    const Places places = a.tiles ? places_in_tiles(a, distance, pack) : places_in_columns(a, distance, pack);
    char* const first = scales + places.at[0];
    u32 kept[4];
    bool whole = misalignment(first) == 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        kept[k] = word[k] & places.mask;
        whole &= places.bytes[k] >= 4 && places.at[k] == places.at[0] + 4 * k;
    }
    if (whole) {
        ptx::store_v4(first, kept);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        char* const to = scales + places.at[k];
        if (places.bytes[k] >= 4 && misalignment(to) % 4 == 0) {
            ptx::store_u32(to, kept[k]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < places.bytes[k]) ptx::store_u8(to + i, kept[k] >> (8 * i) & 0xff);
        }
    }
}

// Clears the padding that follows the scales of the last rank's last row. `first` is the index of this thread among the
// `count` threads that share the work.
__device__ __forceinline__ void clear_rows_behind(char* scales, const Arrangement& a, u32 first, u32 count) {
    if (a.tiles) {
        clear_row_padding<u8, ScaleLayout::tiles>(scales, a.rows, a.groups, first, count);
    } else if (a.itemsize == 4) {
        clear_row_padding<float, ScaleLayout::column>(scales, a.rows, a.groups, first, count);
    } else {
        clear_row_padding<u8, ScaleLayout::column>(scales, a.rows, a.groups, first, count);
    }
}
