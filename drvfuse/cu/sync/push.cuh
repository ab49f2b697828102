// SPDX-License-Identifier: Apache-2.0
// The push protocol: a rank stores words into its peers' slots, and every word carries its own readiness.
//
// Slots. Each rank has two halves of slots in its workspace, which rounds use in turn; a call has one round, or several
// where its tensor is larger than a half. Between calls every 4-byte word of both halves is ABSENT. A sender stores any
// other word; the receiver polls until no word of what it wants is ABSENT, takes it, and stores ABSENT again. A word of
// an input that is ABSENT itself, NaNs in every type, is sent as other NaNs: no result can tell, as NaN results are
// canonical. Rounded results, FP8 codes and scales are never ABSENT, since theirs are canonical. Slots are named by
// distance: what comes from rank r lies at distance d in the slots of rank (r + d) mod ranks, so every offset is the
// same on every rank, and nobody asks who it is while it polls.
//
// Which half. The first round uses the half of the epoch's parity. A call advances the epoch by one if the number of
// its rounds is odd, and leaves it if that is even, as the next call then begins with the same half. Every warp of the
// grid reads the epoch first. Later it adds its share of EPOCH_UNIT to it, or its block does after a barrier, so the
// epoch cannot advance before the last warp has read it: one addition by one thread would let a late warp read the next
// epoch.
//
// Memory ordering. Words are stored and polled relaxed at system scope; each guards nothing but itself. What needs
// order is that a slot is stored again only after its receiver has made it ABSENT: two rounds later.
//   Between calls. Every call receives a word from every peer, also from one that owns nothing (`greet`). So when rank
//   A begins call k + 2 it has completed call k + 1, has heard of rank B's call k + 1 in it, and B began that after it
//   had completed its call k, with all that B cleared. Completion of a kernel releases and acquires at system scope.
//   Calls of pull algorithms between two push calls may leave the parity as it was: their barriers say the same.
//   A call's second round uses the half of the last round of the call before. A thread sends to a peer in it only after
//   it has heard from that peer in the first round, which the peer began after it had completed the call before.
//   Between rounds. Thread t of block b sends to, receives from and clears for the thread of the same numbers, in every
//   round. In round r + 1 A's thread hears from B's thread what that sent after it had cleared its slot of round r.
//   `next_round` puts a fence between: with the relaxed words they are release and acquire patterns.
//   Of several rounds the last one sends as many words as the others, whatever is left of the tensor. Else nobody would
//   hear of the clears in the round before it, whose slots the first round of the next call uses.
//   After several rounds. The next call may give those slots to any thread of any rank, so when rank A's call ends it must
//   have heard of the clears of every thread of every peer in the last round but one. By push_one_shot A's thread has: in
//   the last round it hears from the thread of the same numbers of every peer. By push_two_shot it need not: if all that
//   block b does is owned by rank C, then A's thread of that block hears from C alone, and B's word, which follows B's
//   fence, went to C. C's result depends on B's word, but data dependence orders nothing in PTX, and C's fence of the
//   round is before both. B's clear could then come behind A's word of the next call and take it away. So with `Relays` a
//   thread executes a fence in the last round between the first pieces that it has received as owner, one from each peer,
//   and its first result (`relay`): C's poll and that fence acquire, that fence and C's result release, and A's poll and
//   the end of its kernel acquire. Of two ranks none is a third, and slots of a call's only round are used again by the
//   call after the next.
//
// Calls that differ between ranks are found here too: the first wait of block 0 is also one for the words of calls.cuh.
//
// Progress. Blocks take their work in the same order on all ranks and send before they poll, so the polls of the blocks
// with the lowest indices end first. Devices place blocks in index order.
//
// Failure. A poll ends early when the rank's abort word is set, and gives up after `timeout_ns` of %globaltimer, read
// once in 1024 polls; the first thread of a rank to give up writes the report and sets every rank's abort word. In leg
// GATHER it waits an eighth longer, from when the bound has passed: the owner of what is gathered may itself wait for
// inputs, and who waits for these names the rank that is missing, also where time has leapt for all at once. A thread
// that gives up goes on with what it has read, through all that follows, but polls no more: no block waits for it in
// vain, and the blocks of a cluster still send one another what they wait for. The host then empties all slots.
#pragma once
#include "common/faults.cuh"
#include "common/pack16.cuh"
#include "ptx/ordered.cuh"
#include "ptx/special.cuh"
#include "ptx/threads.cuh"
#include "sync/calls.cuh"
#include "sync/workspace.cuh"

constexpr u32 ABSENT = 0xffffffffu;
constexpr u32 FOR_ABSENT = 0x7fff7fffu;
constexpr u32 GREETINGS_BYTES = 128;  // at the start of a half: a 4-byte word every 16 bytes by distance

// What a push call needs beside `Call`. drvfuse/ops/collectives/kernels.py has the same layout.
struct PushCall {
    char* slots[DRVFUSE_MAX_RANKS];  // by distance; entry 0 is this rank's own
    u64 first_share;                 // of EPOCH_UNIT, what the first warp or block of the grid adds to the epoch,
    u64 share;                       // and every other one
    u32 half_bytes;
    int rounds;
};

enum Leg : u32 { PUSH = 1, GATHER = 2 };

// With `Together` the lanes of a warp leave a poll together; then all 32 come to it. Shares of the epoch are added by
// warp or, with `ByBlock`, by block: thousands of additions to one word would take longer than a barrier in each block.
// `Relays` is a constant, so that the fence of several rounds costs calls of one round nothing, not even a test.
template <int Ranks, bool Together, bool ByBlock, bool Relays>
class Push {
public:
    __device__ __forceinline__ Push(const Call& call, const PushCall& push)
        : call_(call), push_(push), calls_(call), round_(0), joined_(false), relays_(false) {
        if (FAULT("epoch-before-pdl-wait")) read_state();
        if (FAULT("call-number-before-pdl-wait")) calls_.start();
    }

    // After wait_for_producer(), every thread of the grid, before anything else.
    __device__ __forceinline__ void start() {
        fall_behind();
        if (!FAULT("epoch-before-pdl-wait")) read_state();
        if (!FAULT("call-number-before-pdl-wait")) calls_.start();
        calls_.tell();
    }

    // Adds the share of this warp or block to the epoch, once, by all threads of the block. After its first words are
    // sent, so that it takes no time from them.
    __device__ __forceinline__ void join() {
        if (joined_) return;
        joined_ = true;
        fall_behind();
        const bool first = threadIdx.x == 0 && blockIdx.x == 0;
        u64* const epoch = epoch_word(call_.workspaces[call_.rank]);
        if (FAULT("epoch-by-one-thread")) {
            if (first) ptx::add_relaxed_gpu(epoch, EPOCH_UNIT);
        } else if (FAULT("epoch-of-each-block")) {
            __syncwarp();
            if (threadIdx.x % 32 == 0 && push_.share != 0)
                ptx::add_relaxed_gpu(epoch_of_block(), EPOCH_UNIT / (blockDim.x / 32));
        } else if (!ByBlock) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::add_relaxed_gpu(epoch, first ? push_.first_share : push_.share);
        } else if (threadIdx.x >= 32) {
            ptx::bar_arrive(1, blockDim.x);
        } else {
            ptx::bar_sync(1, blockDim.x);
            if (threadIdx.x == 0) ptx::add_relaxed_gpu(epoch, first ? push_.first_share : push_.share);
        }
    }

    __device__ __forceinline__ void next_round() {
        if (!FAULT("no-fence-between-rounds")) ptx::fence_sys();
        half_ = push_.half_bytes - half_;
        ++round_;
        relays_ = Relays && round_ + 1 == push_.rounds && !FAULT("no-fence-before-last-results");
    }

    // Every thread, between what it receives as owner and the results that it sends.
    __device__ __forceinline__ void relay() {
        if (!Relays || !relays_) return;
        relays_ = false;
        ptx::fence_sys();
    }

    // The distance of rank `of` from this one, which is the distance at which it receives.
    __device__ __forceinline__ int distance(int of) const {
        const int ahead = of - call_.rank;
        return ahead < 0 ? ahead + Ranks : ahead;
    }

    template <int N>
    __device__ __forceinline__ void send(int distance, u32 offset, const u32 (&word)[N]) const {
        ptx::store_relaxed_sys_words(push_.slots[distance] + half_ + offset, word);
    }

    // K pieces of N words that peers have sent, `stride` bytes apart: piece k, of distance k + 1 in leg PUSH and
    // `source` in leg GATHER. They are cleared. Nothing happens where they are not `wanted`.
    template <int K, int N>
    __device__ __forceinline__ void receive(u32 (&words)[K][N], Leg leg, u32 offset, u32 stride, bool wanted,
                                            int source = 0) {
        char* const at = own(offset);
        constexpr bool CLEAR_FIRST = FAULT("slot-cleared-before-use");
        if (FAULT("poll-beside-shuffle") && !wanted) return;
        if (CLEAR_FIRST && wanted) clear_all<K, N>(at, stride);
        wait(
            leg,
            [&] {
                if (!wanted) return false;
                bool late = false;
#pragma unroll
                for (int k = 0; k < K; ++k) ptx::load_relaxed_sys_words(words[k], at + k * stride);
#pragma unroll
                for (int k = 0; k < K; ++k) late |= absent(words[k]);
                return late;
            },
            [&](Report* to) {
                int first = 0;
#pragma unroll
                for (int k = K - 1; k >= 0; --k) first = absent(words[k]) ? k : first;
                report(to, leg, leg == GATHER ? source : (call_.rank + Ranks - 1 - first) % Ranks,
                       offset + first * stride);
            });
        fall_behind();
        if (wanted && !CLEAR_FIRST && !FAULT("slot-not-cleared")) clear_all<K, N>(at, stride);
    }

    // The same in leg GATHER of one piece and, where it is wanted, of one word elsewhere: in one wait.
    template <int N>
    __device__ __forceinline__ void receive_with(u32 (&words)[N], u32 offset, bool wanted, u32 (&word)[1],
                                                 u32 word_offset, bool word_wanted, int source) {
        wait(
            GATHER,
            [&] {
                if (wanted) ptx::load_relaxed_sys_words(words, own(offset));
                if (word_wanted) ptx::load_relaxed_sys_words(word, own(word_offset));
                return (wanted && absent(words)) || (word_wanted && absent(word));
            },
            [&](Report* to) { report(to, GATHER, source, wanted && absent(words) ? offset : word_offset); });
        if (wanted && !FAULT("slot-not-cleared")) clear<N>(own(offset));
        if (word_wanted && !FAULT("scale-not-cleared")) clear<1>(own(word_offset));
    }

    // By the first warp of one block, once in a call of `units` pieces of work of which rank k owns k, k + ranks, ...:
    // a rank that owns none sends every peer a word, and every peer takes it.
    __device__ __forceinline__ void greet(i64 units) {
        if (units >= Ranks || FAULT("no-greeting")) return;
        const int distance = threadIdx.x + 1;
        const bool takes_part = distance < Ranks;
        if (takes_part && call_.rank >= units) {
            const u32 word[1] = {0};
            send(distance, (distance - 1) * 16, word);
        }
        const int source = (call_.rank + Ranks - distance) % Ranks;
        u32 word[1][1];
        receive(word, GATHER, (distance - 1) * 16, 0, takes_part && source >= units, source);
    }

protected:
    __device__ __forceinline__ void read_state() {
        u64 epoch, abort;
        ptx::load_relaxed_sys_v2(epoch, abort, epoch_word(call_.workspaces[call_.rank]));
        if (FAULT("epoch-of-each-block")) epoch = ptx::load_relaxed_sys(epoch_of_block());
        epoch_ = u32(epoch >> DRVFUSE_EPOCH_BITS);
        aborted_ = abort != 0;
        half_ = epoch_ % 2 != 0 ? push_.half_bytes : 0;
    }

    // Only with the fault of that name, which must not change results: this warp waits for up to 4 us, or twice that.
    static __device__ __forceinline__ void fall_behind() {
        if (!FAULT("warps-that-fall-behind")) return;
        const u64 begin = ptx::cycles();
        const u32 mixed = (u32(begin) ^ (blockIdx.x * 64 + threadIdx.x / 32) * 0x9e3779b9u) * 0x85ebca6bu;
        const u32 cycles = __shfl_sync(__activemask(), mixed, __ffs(__activemask()) - 1) >> 19;
        while (ptx::cycles() - begin < cycles) __nanosleep(100);
    }

    // Of the fault of that name: a word that push calls do not use.
    __device__ __forceinline__ u64* epoch_of_block() const {
        return flag_word(call_.workspaces[call_.rank], blockIdx.x, call_.rank);
    }

    template <int N>
    static __device__ __forceinline__ bool absent(const u32 (&word)[N]) {
        bool found = false;
#pragma unroll
        for (int i = 0; i < N; ++i) found |= word[i] == ABSENT;
        return found;
    }

    template <int N>
    static __device__ __forceinline__ void clear(char* at) {
        u32 none[N];
#pragma unroll
        for (int i = 0; i < N; ++i) none[i] = ABSENT;
        if constexpr (FAULT("clear-of-half") && N == 4) {
            store_words<2>(at, reinterpret_cast<const u32(&)[2]>(none));
            return;
        }
        store_words<N>(at, none);
    }

    template <int K, int N>
    static __device__ __forceinline__ void clear_all(char* at, u32 stride) {
#pragma unroll
        for (int k = 0; k < K; ++k) clear<N>(at + k * stride);
    }

    __device__ __forceinline__ char* own(u32 offset) const { return push_.slots[0] + half_ + offset; }

    // poll() loads what is wanted and says whether some of it is absent; tell(report) then writes that.
    template <typename Poll, typename Tell>
    __device__ __forceinline__ void wait(Leg leg, const Poll& poll, const Tell& tell) {
        u64 deadline = 0;
        bool patient = leg == GATHER;
        Listener listener = calls_.listener();
        for (u32 polls = 1;; ++polls) {
            bool late = poll();
            late |= listener.listen();
            if (Together ? !__any_sync(0xffffffffu, late) : !late) break;
            // The tests follow one another: if they are nested, the compiled loop takes 0.1 us longer.
            bool ends = aborted_;
            if (polls % 32 == 0 && ptx::load_relaxed_sys(abort_word(call_.workspaces[call_.rank])) != 0) ends = true;
            const bool differs = polls % 32 == 0 && listener.differs();
            if (polls % 1024 == 0 || differs) {
                const u64 now = ptx::nanoseconds();
                const u64 timeout = call_.timeout_ns;
                if (deadline == 0) deadline = now + timeout;
                if ((now > deadline || differs) && late && !ends) {
                    if (patient && !differs) {
                        patient = false;
                        deadline = now + timeout / 8;
                    } else {
                        give_up<Ranks>(call_, [&](Report* report) {
                            if (listener.listens()) return calls_.describe(report, listener);
                            tell(report);
                        });
                        ends = true;
                    }
                }
            }
            if (Together ? __any_sync(0xffffffffu, ends) : ends) {
                aborted_ = true;
                if (FAULT("exit-after-abort")) ptx::exit_thread();
                break;
            }
        }
        calls_.heard();
    }

    __device__ __forceinline__ void report(Report* to, Leg leg, int peer, u32 offset) const {
        const u32 phase = round_ + 1;
        // The epoch with which the call began, in full: since then it has advanced by less than 2^32.
        const u64 now = ptx::load_relaxed_sys(epoch_word(call_.workspaces[call_.rank])) >> DRVFUSE_EPOCH_BITS;
        const u64 began = now - u32(u32(now) - epoch_);
        to->peer = peer;
        to->phase = phase;
        to->expected = began + phase;
        to->seen = ABSENT;
        to->leg = leg;
        to->word = offset / 16;
    }

    const Call& call_;
    const PushCall& push_;
    Calls<Ranks> calls_;
    u32 epoch_;  // its low bits
    u32 half_;
    int round_;
    bool joined_;
    bool relays_;  // the next results are the first ones of the last round of several
    bool aborted_;
};

// What is sent for words of an input.
template <int N>
__device__ __forceinline__ void make_sendable(u32 (&word)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) word[i] = word[i] == ABSENT ? FOR_ABSENT : word[i];
}
