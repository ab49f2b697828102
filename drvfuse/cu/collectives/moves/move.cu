// SPDX-License-Identifier: Apache-2.0
// All-gather, broadcast and all-to-all with barriers: each rank's bytes are copied to other ranks, in one kernel per
// rank.
//
// Layout. As moves/tables.cuh says. Pack j of the bytes that one rank sends to another belongs to thread j mod (blocks *
// threads) of the grid, on both ranks.
//   move_pull  every rank copies from its peers' inputs to its output.
//   move_put   every rank copies from its input to its peers' outputs.
//   DRVFUSE_STAGED: chunk by chunk the bytes go through a payload: that of the sender in move_pull, that of the
//   receiver in move_put. A call of several ranks is staged if peers cannot access its inputs (pull) or outputs (put),
//   if their accesses across the link would not be aligned to 16 bytes, or if it is in place and a peer would overwrite
//   bytes that are still to be read. A put of arranged scales is always staged, as only their receiver can arrange
//   them.
//   DRVFUSE_SAME: a rank's bytes are the same for all peers, so in move_pull one staged copy serves all peers.
// Payload, staged: two halves, used alternately. A half has slots of `chunk_packs` packs: one slot in move_pull with
// DRVFUSE_SAME, otherwise one for each distance from 1 on.
// A rank begins with the peer at distance 1, so that not all ranks access the same rank at a time.
//
// Grid. One dimension, at most DRVFUSE_MAX_BLOCKS blocks; the grid, the table of moves and the chunk are the same on
// every rank.
//
// Memory ordering. Thread t of block b accesses only those bytes of a peer's memory that the peer's thread t of block b
// accesses, or that no kernel writes between the barriers. So the barrier between blocks of equal index (barrier.cuh)
// orders all these accesses.
//   Without DRVFUSE_STAGED: at the start barrier all peers have completed the earlier work of their streams, so inputs
//   are written and outputs are free. At the end barrier a rank's peers have read all of its input (pull) or written
//   all of its output (put): each block has acquired what the peers' blocks of its index have released, and the end of
//   the kernel makes these accesses visible to later work in the stream. Inputs and outputs of one call overlap only in
//   bytes that stay where they are.
//   Staged: a block writes to a half again two chunks later. Before that it passes the barrier of the chunk in between.
//   The peers' blocks arrive at that barrier after they have read the half. Payloads are free after the start barrier
//   of a call. No other rank reads an input or writes an output. In place, a thread has staged a pack before it stores
//   a received pack in its place.
//
// Failure. If a barrier gives up, the block skips the rest of the kernel, and outputs are undefined (barrier.cuh).
#include "collectives/moves/copies.cuh"
#include "sync/barrier.cuh"

constexpr bool PUT = DRVFUSE_PUT;
constexpr bool STAGED = DRVFUSE_STAGED;
constexpr bool ONE_COPY = DRVFUSE_SAME && !PUT;  // one staged copy serves all peers
constexpr int PACKS = DRVFUSE_PACKS;             // packs in flight per thread
constexpr int RUNS = STAGED ? 1 : 4;             // packs in flight per thread if packs are not aligned
static_assert(STAGED || !PUT || !ARRANGED, "a direct put cannot arrange scales");

#if !DRVFUSE_STAGED

// Divides the threads: some copy bytes between ranks, others copy bytes that stay on their rank. Every eighth block
// copies bytes that stay, while the other blocks use the links. With fewer than eight blocks, or if no bytes stay, all
// threads do both, one after the other.
struct Teams {
    Team moving, staying;
};

__device__ __forceinline__ Teams teams_of(i64 packs_that_stay) {
    const Team whole = whole_grid();
    if (RANKS == 1 || gridDim.x < 8 || packs_that_stay == 0) return {whole, whole};
    const u32 blocks = gridDim.x / 8, before = blockIdx.x / 8;
    const bool stays = blockIdx.x % 8 == 7;
    const Team moving = {i64(blockIdx.x - before) * blockDim.x + threadIdx.x, i64(gridDim.x - blocks) * blockDim.x};
    const Team staying = {i64(before) * blockDim.x + threadIdx.x, i64(blocks) * blockDim.x};
    return {{stays ? -1 : moving.number, moving.count}, {stays ? staying.number : -1, staying.count}};
}

__device__ __forceinline__ void move(const MoveParams& p, Trace& trace) {
    Barrier<RANKS> barrier(p.call, trace);
    if (!FAULT("moves-no-start-barrier") && !barrier.arrive_and_wait(false)) return;
    const i64 own = own_packs(p);
    const Teams teams = teams_of(own);
#pragma unroll 1
    for (int step = 1; step <= RANKS; ++step) {
        const int distance = step % RANKS;  // distance 0, the bytes that stay, comes last
        const Team team = {distance > 0 ? teams.moving.number : teams.staying.number,
                           distance > 0 ? teams.moving.count : teams.staying.count};
        const i64 count = distance > 0 ? p.most : own;
        if constexpr (PUT) {
            copy_packs<PACKS, RUNS>(
                team, count, trace, [&](i64 j) { return source_of(p, distance, j); },
                [&](i64 j) { return far_target_of(p, distance, j); });
        } else {
            copy_packs<PACKS, RUNS>(
                team, count, trace, [&](i64 j) { return far_source_of(p, distance, j); },
                [&](i64 j) { return target_of(p, distance, j); });
        }
    }
    if (!FAULT("moves-no-end-barrier") && !barrier.arrive_and_wait(true)) return;
    barrier.finish();
}

#else

// Returns where pack j of a chunk lies in the payload of `workspace`. The pack belongs to the bytes that a rank sends
// to the rank at `distance` from it.
__device__ __forceinline__ Spot staged(const MoveParams& p, char* workspace, i64 half, int distance, i64 j) {
    const i64 slot = ONE_COPY ? 0 : distance - 1;
    return {payload(workspace) + half + (slot * p.chunk_packs + j) * 16, (p.chunk_packs - j) * 16};
}

__device__ __forceinline__ void move(const MoveParams& p, Trace& trace) {
    char* const own = p.call.workspaces[p.call.rank];
    i64 half = 0;
    Barrier<RANKS> barrier(p.call, trace);
    if (!barrier.arrive_and_wait(false)) return;
    copy_own<PACKS, RUNS>(p, whole_grid(), trace);
#pragma unroll 1
    for (i64 begin = 0; begin < p.most || begin == 0; begin += p.chunk_packs) {
        const i64 left = p.most - begin, count = left < p.chunk_packs ? left : p.chunk_packs;
#pragma unroll 1
        for (int distance = 1; distance < (ONE_COPY && RANKS > 1 ? 2 : RANKS); ++distance) {
            char* const to = PUT ? p.call.workspaces[(p.call.rank + distance) % RANKS] : own;
            copy_packs<PACKS, RUNS>(
                whole_grid(), count, trace, [&](i64 j) { return source_of(p, distance, begin + j); },
                [&](i64 j) { return staged(p, to, half, distance, j); });
        }
        if (!barrier.arrive_and_wait(true)) return;
#pragma unroll 1
        for (int distance = 1; distance < RANKS; ++distance) {
            char* const from = PUT ? own : p.call.workspaces[(p.call.rank + RANKS - distance) % RANKS];
            copy_packs<PACKS, RUNS>(
                whole_grid(), count, trace,
                [&](i64 j) {
                    Spot at = staged(p, from, half, distance, j);
                    if (target_of(p, distance, begin + j).remaining <= 0) at.remaining = 0;
                    return at;
                },
                [&](i64 j) { return target_of(p, distance, begin + j); });
        }
        if (!FAULT("moves-payload-not-doubled")) half = (ONE_COPY ? 1 : PEERS) * p.chunk_packs * 16 - half;
    }
    barrier.finish();
}

#endif

extern "C" __global__ void __launch_bounds__(512, 1)
    DRVFUSE_KERNEL(const __grid_constant__ MoveParams p DRVFUSE_TRACE_PARAMETER) {
    Trace trace{DRVFUSE_TRACE_ARGUMENT};
    begin(p.call);
    follow_producer(trace);
    clear_padding(p);
    move(p, trace);
    end(p.call, trace);
}
