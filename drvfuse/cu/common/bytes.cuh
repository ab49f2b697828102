// SPDX-License-Identifier: Apache-2.0
// Loads and stores of packs of 16 bytes at any address. The last pack of an array may have fewer bytes.
//
// A warp loads or stores one pack per lane. A pack that is whole and at a multiple of 16 bytes takes one access of 16 bytes.
// All other packs are accessed in runs: the packs of adjacent lanes that lie one behind the other in memory. A run of n packs
// lies in n or n + 1 slices, which are 16 bytes at multiples of 16:
//   - Each lane accesses one slice, unless bytes of the slice are outside the run. This can be so for the slice in which the
//     run begins and for the slice in which it ends.
//   - The bytes of the run in these two slices are accessed one by one, all at the same time: lane l accesses byte l % 16, of
//     the first slice if l < 16, otherwise of the last.
//   - Shuffles and shifts move the bytes between slices and packs.
// So each run takes two instructions, with no branch between them, and their accesses are in flight together. A run of 32
// packs that begins in the middle of a slice takes 31 accesses of 16 bytes and 16 of one byte.
// No warp touches a byte that does not belong to its packs.
#pragma once
#include "common/pack16.cuh"

// The address of a pack, and the number of bytes from there to the end of its array: 0 or less if there is no pack.
struct Spot {
    char* at;
    i64 left;
};

__device__ __forceinline__ u32 misalignment(const char* at) { return u32(reinterpret_cast<u64>(at)) % 16; }

// The number of bytes of the pack, 0 to 16.
__device__ __forceinline__ int bytes_of(const Spot& spot) { return int(max(i64(0), min(i64(16), spot.left))); }

// Whether one access reads or writes the pack.
__device__ __forceinline__ bool is_whole(const Spot& spot) { return spot.left >= 16 && misalignment(spot.at) == 0; }

// The lane's number. The compiler does not know that it is always the same, so it does not keep values in registers that
// depend on nothing else: the kernels have few registers left when they find a run.
__device__ __forceinline__ u32 fresh_lane() {
    u32 lane = threadIdx.x % 32;
    ptx::forget(lane);
    return lane;
}

// A run of packs, seen from one lane.
struct Run {
    char* start;  // the address of the first slice
    u32 lane;     // this lane
    u32 first;    // the lane of the run's first pack, which also has the run's first slice
    u32 skipped;  // bytes between the start of the first slice and the start of the run, 0 to 15
    u32 bytes;    // bytes of the run, 1 to 512

    // The number of this lane's slice, from 0; beyond that of the last slice for lanes before the first.
    __device__ __forceinline__ u32 index() const { return lane - first; }
    __device__ __forceinline__ char* slice() const { return start + index() * 16; }
    // The number of the slice in which the run ends. If the run ends with the slice before, this slice has no byte of it.
    __device__ __forceinline__ u32 last() const { return (skipped + bytes) / 16; }
    // The lane that has the last slice. With 33 slices this is also the lane that has the first.
    __device__ __forceinline__ u32 last_lane() const { return (first + last()) % 32; }
    // Whether the lane's pack belongs to the run.
    __device__ __forceinline__ bool has_pack() const { return index() < (bytes + 15) / 16; }
    // Whether all bytes of the lane's slice belong to the run.
    __device__ __forceinline__ bool has_slice() const { return index() < last() && (index() != 0 || skipped == 0); }
    // Whether bytes of the run are accessed one by one.
    __device__ __forceinline__ bool has_bytes() const { return skipped != 0 || bytes % 16 != 0; }
    // The single byte that this lane accesses, and whether it belongs to the run.
    __device__ __forceinline__ char* byte() const { return start + (lane < 16 ? lane : last() * 16 + lane - 16); }
    __device__ __forceinline__ bool has_byte() const {
        if (lane >= 16) return last() != 0 && lane - 16 < (skipped + bytes) % 16;
        return lane >= skipped && lane < skipped + bytes && (skipped != 0 || last() == 0);
    }
};

// Whether the packs of all lanes are one run of 512 bytes.
__device__ __forceinline__ bool all_in_a_run(const Spot& spot) {
    const u64 at = reinterpret_cast<u64>(spot.at), first = __shfl_sync(0xffffffffu, at, 0);
    return __all_sync(0xffffffffu, spot.left >= 16 && at == first + threadIdx.x % 32 * 16);
}

// The run of the packs of all lanes; this lane's pack is at `at`.
__device__ __forceinline__ Run run_of_all(char* at) {
    const u32 lane = fresh_lane(), skipped = misalignment(at);
    return {at - skipped - lane * 16, lane, 0, skipped, 512};
}

// Calls f(run) for every run of the warp's packs. Called by whole warps.
template <typename F>
__device__ __forceinline__ void for_each_run(const Spot& spot, const F& f) {
    const u32 own = bytes_of(spot);
    u32 pending = __ballot_sync(0xffffffffu, own != 0);
#pragma unroll 1
    while (pending != 0) {
        const u32 lane = fresh_lane(), first = __ffs(pending) - 1;
        const u64 at = reinterpret_cast<u64>(spot.at), start = __shfl_sync(0xffffffffu, at, first);
        const bool behind = own != 0 && at == start + (lane - first) * 16;
        const u32 packs = __clz(__brev(~(__ballot_sync(0xffffffffu, behind) >> first)));
        const u32 bytes = 16 * (packs - 1) + __shfl_sync(0xffffffffu, own, first + packs - 1),
                  skipped = u32(start) % 16;
        f(Run{reinterpret_cast<char*>(start - skipped), lane, first, skipped, bytes});
        pending &= ~(~0u >> (32 - packs) << first);
    }
}

// The 16 bytes from byte `skip`, 0 to 15, on of the 32 bytes `low`, `high`.
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

// The words of lane `lane` modulo 32.
__device__ __forceinline__ void of_lane(u32 (&word)[4], const u32 (&own)[4], u32 lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __shfl_sync(0xffffffffu, own[i], lane);
}

// What a lane has loaded of a run: its slice and its single byte, as far as they exist.
struct Loaded {
    u32 slice[4];
    u32 byte;
};

// Issues the loads of a run. Called by whole warps.
__device__ __forceinline__ void load_run(Loaded& loaded, const Run& run) {
    if (run.has_slice()) ptx::load_v4(loaded.slice, run.slice());
    loaded.byte = 0;
    if (run.has_byte()) loaded.byte = ptx::load_u8(run.byte());
}

// The packs of a run that was loaded, for the lanes that have them. Bytes behind the end of the run are undefined. Called by
// whole warps.
__device__ __forceinline__ void packs_of_run(u32 (&word)[4], const Loaded& loaded, const Run& run) {
    u32 slice[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) slice[i] = loaded.slice[i];
    if (run.has_bytes()) {
        // The words of the first slice are put together in lanes 0, 4, 8 and 12, those of the last in lanes 16 to 28.
        u32 part = loaded.byte << (8 * (run.lane % 4));
        part |= __shfl_xor_sync(0xffffffffu, part, 1);
        part |= __shfl_xor_sync(0xffffffffu, part, 2);
        const u32 other = __shfl_xor_sync(0xffffffffu, part, 16);
        if (run.last() == 32)
            part |= other;  // one lane has both slices, with all bytes of the last before those of the first
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

// Loads the pack of each lane that has one. Called by whole warps. Bytes behind the end of the array are undefined.
__device__ __forceinline__ void load_bytes(u32 (&word)[4], const Spot& from) {
    for_each_run(from, [&](const Run& run) {
        Loaded loaded;
        load_run(loaded, run);
        packs_of_run(word, loaded, run);
    });
}

__device__ __forceinline__ void store_bytes(const Spot& to, const u32 (&word)[4]) {
    for_each_run(to, [&](const Run& run) { store_run(run, word); });
}

// Whether a lane of the warp has a pack, at one of at(0) to at(K - 1), that is not whole and aligned.
template <int K, typename At>
__device__ __forceinline__ bool some_are_not_whole(const At& at) {
    bool some = false;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        some |= spot.left > 0 && !is_whole(spot);
    }
    return __any_sync(0xffffffffu, some);
}

// Loads K packs of each lane; pack k lies at at(k). Called by whole warps. Words of a pack that does not exist are
// undefined. The loads of all packs that are whole and aligned are in flight at once, before the lanes find out whether there
// are other packs; the warp loads each of these together. With `all_whole` the kernel has no other packs,
// and its lanes do not look for any.
template <int K, typename At>
__device__ __forceinline__ void load_packs(u32 (&words)[K][4], bool all_whole, const At& at) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::load_v4(words[k], spot.at);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        if (is_whole(spot)) spot.left = 0;
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) word[i % 4] = i / 4 == k ? words[i / 4][i % 4] : word[i % 4];
        load_bytes(word, spot);
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) words[i / 4][i % 4] = i / 4 == k ? word[i % 4] : words[i / 4][i % 4];
    }
}

template <int K, typename At>
__device__ __forceinline__ void store_packs(bool all_whole, const At& at, const u32 (&words)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto spot = at(k);
        if (is_whole(spot)) ptx::store_v4(spot.at, words[k]);
    }
    if (all_whole || !some_are_not_whole<K>(at)) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        auto spot = at(k);
        if (is_whole(spot)) spot.left = 0;
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) word[i % 4] = i / 4 == k ? words[i / 4][i % 4] : word[i % 4];
        store_bytes(spot, word);
    }
}
