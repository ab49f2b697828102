// SPDX-License-Identifier: Apache-2.0
// Loads and stores of packs of 16 bytes at any address. The last pack of an array may have fewer bytes.
//
// A warp loads or stores one pack per lane. A whole pack at a multiple of 16 bytes takes one access of 16 bytes. All
// other packs are accessed in runs. A run is a sequence of packs that are consecutive in memory and belong to
// consecutive lanes. Memory is divided into slices of 16 bytes at multiples of 16. A run of n packs lies in up to
// n + 1 slices:
//   - Each lane accesses one slice by one instruction, if all bytes of the slice belong to the run. Only the first
//     and the last slice may have other bytes.
//   - The bytes of the run in such a first or last slice are accessed one by one, by one more instruction of the
//     warp: the low 16 lanes access bytes of the first slice, the other lanes bytes of the last slice.
//   - Shuffles and shifts move the bytes between slices and packs.
// Both instructions are issued before any lane waits for one of them. A run of 32 packs that begins in the middle of
// a slice takes 31 accesses of 16 bytes and 16 accesses of one byte.
// No warp accesses a byte that does not belong to its packs: another thread may write that byte at the same time.
#pragma once
#include "common/pack16.cuh"

// Where a pack lies.
struct Spot {
    char* address;
    i64 remaining;  // bytes from the address to the end of the array; 0 or less if there is no pack
};

__device__ __forceinline__ u32 misalignment(const char* at) { return u32(reinterpret_cast<u64>(at)) % 16; }

// The number of bytes of the pack, 0 to 16.
__device__ __forceinline__ int bytes_of(const Spot& spot) { return int(max(i64(0), min(i64(16), spot.remaining))); }

// Whether the pack can be read or written by a single access.
__device__ __forceinline__ bool is_whole(const Spot& spot) {
    return spot.remaining >= 16 && misalignment(spot.address) == 0;
}

// Returns the index of this lane in its warp. The compiler is kept from knowing that each call returns the same number.
// Otherwise it would compute all values that depend on the lane alone at the start of the kernel, and keep them in
// registers that are needed for other values.
__device__ __forceinline__ u32 fresh_lane() {
    u32 lane = threadIdx.x % 32;
    ptx::forget(lane);
    return lane;
}

// A run of packs, and this lane's share of it.
struct Run {
    char* start;  // the address of the first slice
    u32 lane;     // the index of this lane in its warp
    u32 first;    // the lane that has the first pack and the first slice
    u32 skipped;  // how many bytes of the first slice lie before the run, 0 to 15
    u32 bytes;    // the number of bytes of the run, 1 to 512

    // The index of this lane's slice in the run. For lanes before lane `first` it exceeds the index of every slice.
    __device__ __forceinline__ u32 index() const { return lane - first; }
    __device__ __forceinline__ char* slice() const { return start + index() * 16; }
    // The index of the slice in which the run ends. If the run ends at the end of a slice, this is the index of the
    // next slice.
    __device__ __forceinline__ u32 last() const { return (skipped + bytes) / 16; }
    // The lane that has the slice in which the run ends. With 33 slices it is the lane that also has the first slice.
    __device__ __forceinline__ u32 last_lane() const { return (first + last()) % 32; }
    // Whether this lane has a pack of the run.
    __device__ __forceinline__ bool has_pack() const { return index() < (bytes + 15) / 16; }
    // Whether this lane has a slice all of whose bytes belong to the run.
    __device__ __forceinline__ bool has_slice() const { return index() < last() && (index() != 0 || skipped == 0); }
    // Whether some bytes of the run are accessed one by one.
    __device__ __forceinline__ bool has_bytes() const { return skipped != 0 || bytes % 16 != 0; }
    // The address of the byte that this lane accesses on its own, outside the whole slices of 16 bytes (has_byte()).
    __device__ __forceinline__ char* byte() const { return start + (lane < 16 ? lane : last() * 16 + lane - 16); }
    // Whether this lane accesses its single byte.
    __device__ __forceinline__ bool has_byte() const {
        if (lane >= 16) return last() != 0 && lane - 16 < (skipped + bytes) % 16;
        return lane >= skipped && lane < skipped + bytes && (skipped != 0 || last() == 0);
    }
};

// Whether the packs of all lanes are one run of 512 bytes.
__device__ __forceinline__ bool all_in_a_run(const Spot& spot) {
    const u64 at = reinterpret_cast<u64>(spot.address), first = __shfl_sync(0xffffffffu, at, 0);
    return __all_sync(0xffffffffu, spot.remaining >= 16 && at == first + threadIdx.x % 32 * 16);
}

// The run of 512 bytes that consists of the packs of all lanes. The pack of this lane is at `at`.
__device__ __forceinline__ Run run_of_all(char* at) {
    const u32 lane = fresh_lane(), skipped = misalignment(at);
    return {at - skipped - lane * 16, lane, 0, skipped, 512};
}

// Divides the packs of the warp into runs, and calls f(run) for each run. Called by whole warps.
template <typename F>
__device__ __forceinline__ void for_each_run(const Spot& spot, const F& f) {
    const u32 own = bytes_of(spot);
    u32 pending = __ballot_sync(0xffffffffu, own != 0);
#pragma unroll 1
    while (pending != 0) {
        const u32 lane = fresh_lane(), first = __ffs(pending) - 1;
        const u64 at = reinterpret_cast<u64>(spot.address), start = __shfl_sync(0xffffffffu, at, first);
        const bool in_run = own != 0 && at == start + (lane - first) * 16;
        const u32 packs = __clz(__brev(~(__ballot_sync(0xffffffffu, in_run) >> first)));
        const u32 bytes = 16 * (packs - 1) + __shfl_sync(0xffffffffu, own, first + packs - 1),
                  skipped = u32(start) % 16;
        f(Run{reinterpret_cast<char*>(start - skipped), lane, first, skipped, bytes});
        pending &= ~(~0u >> (32 - packs) << first);
    }
}

// Sets `word` to bytes `skip` to `skip` + 15 of the 32 bytes `low`, `high`; `skip` is at most 15.
__device__ __forceinline__ void shift_bytes(u32 (&word)[4], const u32 (&low)[4], const u32 (&high)[4], u32 skip) {
    u32 all[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = i < 4 ? low[i] : high[i - 4];
#pragma unroll
    for (int i = 0; i < 6; ++i) all[i] = skip & 8 ? all[i + 2] : all[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) all[i] = skip & 4 ? all[i + 1] : all[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __funnelshift_r(all[i], all[i + 1], skip % 4 * 8);
}

// Sets `word` to the words `own` of lane `lane` modulo 32.
__device__ __forceinline__ void of_lane(u32 (&word)[4], const u32 (&own)[4], u32 lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __shfl_sync(0xffffffffu, own[i], lane);
}

// The bytes of a run that one lane has loaded.
struct Loaded {
    u32 slice[4];  // undefined unless the lane has a slice
    u32 byte;      // 0 unless the lane has a single byte
};

// Issues the loads of a run, and does not wait for them. Called by whole warps.
__device__ __forceinline__ void load_run(Loaded& loaded, const Run& run) {
    if (run.has_slice()) ptx::load_v4(loaded.slice, run.slice());
    loaded.byte = 0;
    if (run.has_byte()) loaded.byte = ptx::load_u8(run.byte());
}

// Sets `word` to the lane's pack of a loaded run, if the lane has one; bytes after the end of the run are undefined.
// Called by whole warps.
__device__ __forceinline__ void packs_of_run(u32 (&word)[4], const Loaded& loaded, const Run& run) {
    u32 slice[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) slice[i] = loaded.slice[i];
    if (run.has_bytes()) {
        // Lanes 0, 4, 8 and 12 assemble the words of the first slice, and lanes 16, 20, 24 and 28 those of the last
        // slice.
        u32 part = loaded.byte << (8 * (run.lane % 4));
        part |= __shfl_xor_sync(0xffffffffu, part, 1);
        part |= __shfl_xor_sync(0xffffffffu, part, 2);
        const u32 other = __shfl_xor_sync(0xffffffffu, part, 16);
        // With 33 slices one lane has the first and the last slice. It combines the bytes of both, whose offsets
        // differ: the first slice has bytes at offsets from `skipped` on, the last one at lower offsets.
        if (run.last() == 32) part |= other;
        const u32 from = run.index() == 0 ? 0 : 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 found = __shfl_sync(0xffffffffu, part, from + 4 * i);
            if (!run.has_slice()) slice[i] = found;
        }
    }
    if (run.skipped != 0) {
        u32 next[4];
        of_lane(next, slice, run.lane + 1);
        shift_bytes(slice, slice, next, run.skipped);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = run.has_pack() ? slice[i] : word[i];
}

// Stores the packs of a run. Called by whole warps.
__device__ __forceinline__ void store_run(const Run& run, const u32 (&word)[4]) {
    u32 slice[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) slice[i] = word[i];
    if (run.skipped != 0) {
        u32 before[4];
        of_lane(before, word, run.lane + 31);
        shift_bytes(slice, before, word, 16 - run.skipped);
    }
    if (run.has_slice()) ptx::store_v4(run.slice(), slice);
    if (!run.has_bytes()) return;
    const u32 from = run.lane < 16 ? run.first : run.last_lane();
    u32 part = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 found = __shfl_sync(0xffffffffu, slice[i], from);
        if (run.lane % 16 / 4 == i) part = found;
    }
    if (run.has_byte()) ptx::store_u8(run.byte(), part >> (8 * (run.lane % 4)) & 0xff);
}

// Loads the pack of each lane that has one; bytes after the end of the array are undefined. Called by whole warps.
__device__ __forceinline__ void load_bytes(u32 (&word)[4], const Spot& from) {
    for_each_run(from, [&](const Run& run) {
        Loaded loaded;
        load_run(loaded, run);
        packs_of_run(word, loaded, run);
    });
}

// Stores the pack of each lane that has one. Called by whole warps.
__device__ __forceinline__ void store_bytes(const Spot& to, const u32 (&word)[4]) {
    for_each_run(to, [&](const Run& run) { store_run(run, word); });
}

// Whether one of the packs of the warp, K per lane, is not whole or not aligned; at(k) returns the place of pack k.
template <int K, typename At>
__device__ __forceinline__ bool some_are_not_whole(const At& at) {
    bool some = false;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        some |= spot.remaining > 0 && !is_whole(spot);
    }
    return __any_sync(0xffffffffu, some);
}

// Loads K packs of each lane; at(k) returns the place of pack k. Words of a pack that does not exist are undefined.
// First the loads of all packs that are whole and aligned are issued. Then the warp votes on whether it has other
// packs, and loads these in runs. With `all_whole` the caller says that all packs that exist are whole and aligned, and
// the warp does not vote. Called by whole warps.
template <int K, typename At>
__device__ __forceinline__ void load_packs(u32 (&words)[K][4], bool all_whole, const At& at) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::load_v4(words[k], spot.address);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        if (is_whole(spot)) spot.remaining = 0;
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) word[i % 4] = i / 4 == k ? words[i / 4][i % 4] : word[i % 4];
        load_bytes(word, spot);
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) words[i / 4][i % 4] = i / 4 == k ? word[i % 4] : words[i / 4][i % 4];
    }
}

// Stores K packs of each lane, as load_packs() loads them. Called by whole warps.
template <int K, typename At>
__device__ __forceinline__ void store_packs(bool all_whole, const At& at, const u32 (&words)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::store_v4(spot.address, words[k]);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        if (is_whole(spot)) spot.remaining = 0;
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) word[i % 4] = i / 4 == k ? words[i / 4][i % 4] : word[i % 4];
        store_bytes(spot, word);
    }
}
