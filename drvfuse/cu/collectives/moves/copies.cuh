// SPDX-License-Identifier: Apache-2.0
// Functions that copy packs between arrays. All threads of a grid, or the threads of some of its blocks, share a copy.
#pragma once
#include "collectives/moves/tables.cuh"
#include "collectives/shared/order.cuh"

// Threads that share copies: pack j belongs to thread j mod `count` of the team.
struct Team {
    i64 number;  // the index of this thread in the team; -1 if it belongs to another team
    i64 count;   // the number of threads of the team
};

__device__ __forceinline__ Team whole_grid() {
    return {i64(blockIdx.x) * blockDim.x + threadIdx.x, i64(gridDim.x) * blockDim.x};
}

// Copies up to RUNS packs per lane. The packs of a lane are `stride` packs apart; the first is copied from `source` to
// `target`, and `count` is the number of packs from that pack to the end of the copy. The function stops before the
// first pack index at which the warp's packs are not a run (common/bytes.cuh) in both arrays. All loads are issued
// before the first store. Returns the number of packs per lane that were copied. Called by whole warps.
template <int RUNS>
__device__ __forceinline__ int copy_runs(const Spot& source, const Spot& target, i64 count, i64 stride) {
    if (!all_in_a_run(source) || !all_in_a_run(target) || source.address == target.address) return 0;
    i64 bytes = min(min(source.remaining, target.remaining), count * 16);
    bytes = __shfl_sync(0xffffffffu, bytes, 31);  // the value of the last lane, whose packs are nearest to the end
    Loaded loaded[RUNS];
    int copied = 0;
#pragma unroll
    for (int b = 0; b < RUNS; ++b) {
        if (bytes < 16 + b * stride * 16) break;
        load_run(loaded[b], run_of_all(source.address + b * stride * 16));
        ++copied;
    }
#pragma unroll
    for (int b = 0; b < RUNS; ++b) {
        if (b >= copied) break;
        u32 word[4];
        packs_of_run(word, loaded[b], run_of_all(source.address + b * stride * 16));
        store_run(run_of_all(target.address + b * stride * 16), word);
    }
    return copied;
}

// Copies the team's packs j of [0, count) from from(j) to to(j). Packs without bytes, and packs whose source is their
// target, are left out. B packs per thread are in flight if all of them are whole and aligned, otherwise RUNS packs.
// Called by whole warps.
template <int B, int RUNS, typename From, typename To>
__device__ __forceinline__ void copy_packs(const Team& team, i64 count, Trace& trace, const From& from, const To& to) {
    if (team.number < 0) return;
    const i64 stride = team.count, lane = threadIdx.x % 32;
#pragma unroll 1
    for (i64 j = team.number; j - lane < count; j += B * stride) {
        u32 words[B][4];
        bool exists[B], whole = true;
#pragma unroll
        for (int b = 0; b < B; ++b) {
            const Spot source = from(j + b * stride);
            const auto target = to(j + b * stride);
            exists[b] = j + b * stride < count && source.remaining > 0 && source.address != target.address;
            whole &= !exists[b] || (is_whole(source) && is_whole(target));
        }
        if (!__all_sync(0xffffffffu, whole)) {
            const i64 end = j + B * stride;
#pragma unroll 1
            for (i64 k = j; k - lane < count && k < end;) {
                Spot source = from(k);
                auto target = to(k);
                if constexpr (RUNS > 1) {
                    const int copied = copy_runs<RUNS>(source, target, min(count, end) - k, stride);
                    k += copied * stride;
                    if (copied > 0) continue;
                }
                if (k >= count || source.remaining <= 0 || source.address == target.address)
                    source.remaining = target.remaining = 0;
                load_bytes(words[0], source);
                store_bytes(target, words[0]);
                k += stride;
            }
            trace.lap(TraceRole::load);
            trace.lap(TraceRole::store);
            continue;
        }
#pragma unroll
        for (int b = 0; b < B; ++b) {
            if (exists[b]) ptx::load_v4(words[b], from(j + b * stride).address);
        }
        trace.need(words);
        trace.lap(TraceRole::load);
#pragma unroll
        for (int b = 0; b < B; ++b) {
            if (exists[b]) ptx::store_v4(to(j + b * stride).address, words[b]);
        }
        trace.lap(TraceRole::store);
    }
}

// Returns the number of packs that stay on this rank and must be copied; 0 if they lie at their target already.
__device__ __forceinline__ i64 own_packs(const MoveParams& p) {
    const Moved &rows = p.rows, &scales = p.scales;
    const auto away = [](const Moved& of) { return of.input + of.sent[0].source != of.output + of.received[0].target; };
    const bool moves = away(rows) || (scales.sent[0].nbytes > 0 && (ARRANGED || away(scales)));
    return moves ? packs_of(rows.sent[0].nbytes) + packs_of(scales.sent[0].nbytes) : 0;
}

// Clears the padding of arranged scales. Each rank does so in its own output, and no other rank writes that padding.
__device__ __forceinline__ void clear_padding(const MoveParams& p) {
    const Team team = whole_grid();
    if constexpr (ARRANGED) clear_rows_behind(p.scales.output, p.arrangement, u32(team.number), u32(team.count));
}

// Copies the packs that stay on this rank, from pack `first` on.
template <int B, int RUNS>
__device__ __forceinline__ void copy_own(const MoveParams& p, const Team& team, Trace& trace, i64 first = 0) {
    copy_packs<B, RUNS>(
        team, own_packs(p) - first, trace, [&](i64 j) { return source_of(p, 0, first + j); },
        [&](i64 j) { return target_of(p, 0, first + j); });
}
