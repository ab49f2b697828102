// SPDX-License-Identifier: Apache-2.0
// The push protocol: a rank stores words into its peers' slots, and every word carries its own readiness.
//
// Slots. Each rank has two halves of slots in its workspace. Rounds use the halves alternately. A call has one round,
// or several if its tensor is larger than a half. Between calls every 4-byte word of both halves is ABSENT. A sender
// stores words that are not ABSENT. The receiver polls until none of the words that it wants is ABSENT, takes these
// words, and stores ABSENT in their slots again. An input word that is equal to ABSENT consists of NaNs in every type.
// It is sent as a word of other NaNs: the results are the same, since NaN results are canonical. Rounded results, FP8
// codes and scales are never ABSENT, since their NaNs are canonical. Slots are numbered by distance: words from rank r
// lie at distance d in the slots of rank (r + d) mod ranks. So every offset is the same on every rank, and polls need
// no rank numbers.
//
// Halves. The parity of the epoch selects the half of the first round. A call advances the epoch by one if the number
// of its rounds is odd. If that number is even, the call leaves the epoch unchanged, since the next call then begins
// with the same half. Every warp of the grid reads the epoch at its start. Later the warp, or its block after a
// barrier, adds its share of EPOCH_UNIT, so the epoch cannot advance before the last warp has read it. (If one thread
// added all of EPOCH_UNIT, a late warp could read the next epoch.)
//
// Memory ordering. Words are stored and polled by relaxed accesses at system scope; each word guards only itself. One
// order is needed: a slot may be stored again, two rounds later, only after its receiver has stored ABSENT in it.
//   Between calls. Every call receives a word from every peer, also from a peer that owns nothing (`greet`). When rank
//   A begins call k + 2, it has completed call k + 1, and so has received a word of rank B's call k + 1. B began that
//   call after it had completed its call k, with all of its clears. The end of a kernel releases and acquires at system
//   scope. If calls of pull algorithms lie between two push calls, their barriers give the same order.
//   A call's second round uses the same half as the last round of the previous call. In the second round a thread sends
//   words to a peer only after it has received words of that peer's first round. The peer began that round after it had
//   completed the previous call.
//   Between rounds. In every round a thread exchanges words only with the threads of the same index in the peers'
//   blocks of the same index, and clears the slots of the words that it has received. In round r + 1 the thread of rank
//   A receives words that the thread of rank B has sent after B's thread had cleared its slots of round r. Between
//   these clears and these words B's thread executes the fence of `next_round`: with the relaxed words this is a
//   release and an acquire pattern. The last of several rounds sends as many words as the other rounds, even if little
//   of the tensor is left. Otherwise no word would be sent after some of the clears of the last round but one, and the
//   first round of the next call uses those slots.
//   After several rounds. In the next call any thread of any rank may use the slots of the last round but one. So in
//   that round the clears of all threads of all peers must happen before the end of rank A's call. In push_one_shot
//   they do: in the last round A's thread receives words of the thread of the same index of every peer. In
//   push_two_shot A's thread may receive words of one peer only. If rank C owns all work of block b, A's thread of that
//   block receives words of C alone. B clears, executes a fence and sends a word to C; then C sends its result to A.
//   C's result depends on B's word, but in PTX a data dependence orders nothing, and C's fence of the round precedes
//   both. So B's clear could overwrite a word that A sends in the next call. With `Relays` a thread therefore executes
//   another fence in the last round (`relay`). The thread executes it after it has received its first pieces as owner,
//   one from each peer, and before it sends its first result. C's poll and this fence acquire, this fence and C's
//   result release, and A's poll and the end of A's kernel acquire. With two ranks no fence is needed, as there is no
//   third rank. After a call of one round no fence is needed either, as only the call after the next uses the round's
//   slots again.
//
// The protocol also detects calls that differ between ranks: the first wait of block 0 also waits for the words of
// calls.cuh.
//
// Progress. Blocks take their work in the same order on all ranks and send before they poll, so the polls of the blocks
// with the lowest indices end first. Devices place blocks in index order.
//
// Failure. A poll ends early when the rank's abort word is set, and gives up after `timeout_ns` of %globaltimer, read
// once in 1024 polls. The first thread of a rank to give up writes the report and sets every rank's abort word. In
// a wait of kind GATHER a thread waits an eighth longer, from the moment at which it has noticed that the bound has
// passed: the owner of the results may itself wait for inputs, and then the owner's wait must end first, as its report
// names the missing rank. Even if the clock jumps, the owner's wait ends first. A thread that gives up continues with
// the words that it has read, through all later steps, but polls no more. So no block waits for it in vain, and the
// blocks of a cluster still send one another their words. The host then empties all slots.
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
// Bytes at the start of each half of the slots, for the words of greet(): one word for each distance, 16 bytes apart.
constexpr u32 GREETINGS_BYTES = 128;

// The parameters of a push call in addition to `Call`. drvfuse/ops/collectives/shared/params.py reads this definition.
struct PushCall {
    char* slots[DRVFUSE_MAX_RANKS];  // the slots of each rank, by the rank's distance; entry 0: this rank's own slots
    u64 first_share;  // the part of EPOCH_UNIT that the first warp or block of the grid adds to the epoch
    u64 share;        // the part of EPOCH_UNIT that each of the other warps or blocks adds to the epoch
    u32 half_bytes;   // bytes of a half of the slots
    int rounds;       // rounds of the call
};

enum WaitKind : u32 { PUSH = 1, GATHER = 2 };

// The steps of a push call. With `Together` all 32 lanes of a warp poll, and leave the loop together. Each warp adds
// its share of EPOCH_UNIT to the epoch or, with `ByBlock`, each block does, because thousands of additions to one word
// would take longer than a barrier in each block.
// With `Relays` a call of several rounds executes the fence of relay(). `Relays` is a template parameter, so that other
// calls do not even have a test for the fence.
template <int Ranks, bool Together, bool ByBlock, bool Relays>
class Push {
public:
    __device__ __forceinline__ Push(const Call& call, const PushCall& push)
        : call_(call), push_(push), calls_(call), round_(0), joined_(false), relays_(false) {
        if (FAULT("epoch-before-pdl-wait")) read_state();
        if (FAULT("call-number-before-pdl-wait")) calls_.start();
    }

    // Begins the call: reads the epoch and the abort word, and sends the word of this call to the peers (calls.cuh).
    // Called by every thread of the grid, right after wait_for_producer().
    __device__ __forceinline__ void start() {
        fall_behind();
        if (!FAULT("epoch-before-pdl-wait")) read_state();
        if (!FAULT("call-number-before-pdl-wait")) calls_.start();
        calls_.tell();
    }

    // Adds the share of this warp or block to the epoch. Called once by all threads of the block, after they have sent
    // their first words, because the addition would delay these words.
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

    // Executes, once, the fence that a call of several rounds needs in its last round ("After several rounds" above).
    // Called by every thread after it has received pieces as owner, before it sends results.
    __device__ __forceinline__ void relay() {
        if (!Relays || !relays_) return;
        relays_ = false;
        ptx::fence_sys();
    }

    // The distance of rank `of` from this rank. In the slots of rank `of`, this rank's words lie at this distance.
    __device__ __forceinline__ int distance(int of) const {
        const int ahead = of - call_.rank;
        return ahead < 0 ? ahead + Ranks : ahead;
    }

    template <int N>
    __device__ __forceinline__ void send(int distance, u32 offset, const u32 (&word)[N]) const {
        ptx::store_relaxed_sys_words(push_.slots[distance] + half_ + offset, word);
    }

    // Waits for K pieces of N words, and clears their slots. The pieces lie `stride` bytes apart, from `offset` on.
    // Piece k comes from the rank k + 1 ranks before this one if `kind` is PUSH, and from rank `source` if `kind` is
    // GATHER. If the pieces are not `wanted`, this thread does nothing.
    template <int K, int N>
    __device__ __forceinline__ void receive(u32 (&words)[K][N], WaitKind kind, u32 offset, u32 stride, bool wanted,
                                            int source = 0) {
        char* const at = own(offset);
        constexpr bool CLEAR_FIRST = FAULT("slot-cleared-before-use");
        if (FAULT("poll-beside-shuffle") && !wanted) return;
        if (CLEAR_FIRST && wanted) clear_all<K, N>(at, stride);
        wait(
            kind,
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
                report(to, kind, kind == GATHER ? source : (call_.rank + Ranks - 1 - first) % Ranks,
                       offset + first * stride);
            });
        fall_behind();
        if (wanted && !CLEAR_FIRST && !FAULT("slot-not-cleared")) clear_all<K, N>(at, stride);
    }

    // Waits for a piece (`words`) if `wanted`, and for one more word (`word`) if `word_wanted`, both from rank
    // `source`, in one loop. Clears the slots of both.
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

    // Makes sure that every rank receives a word from every peer in this call: a rank that owns none of the `units`
    // pieces of work sends a word to every peer, which waits for it. Rank k owns pieces k, k + ranks, ... Called by the
    // first warp of one block, once in the call.
    //
    // Only a call of one round may have fewer units than ranks; the host checks it (PushShape of plans/push.py). A call
    // of several rounds has as many as ranks in each, so it sends no greeting. Otherwise two consecutive calls of two
    // rounds would send their greetings to the same slots, since both leave the epoch unchanged: with three ranks, of
    // which rank 0 owns everything, no word orders rank 1's clear of rank 2's first greeting before rank 2's second
    // one, so that one could be lost and rank 1 would wait for ever.
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

    // For the planted fault "warps-that-fall-behind", which must not change results: delays this warp by a
    // pseudo-random time of a few microseconds.
    static __device__ __forceinline__ void fall_behind() {
        if (!FAULT("warps-that-fall-behind")) return;
        const u64 begin = ptx::cycles();
        const u32 mixed = (u32(begin) ^ (blockIdx.x * 64 + threadIdx.x / 32) * 0x9e3779b9u) * 0x85ebca6bu;
        const u32 cycles = __shfl_sync(__activemask(), mixed, __ffs(__activemask()) - 1) >> 19;
        while (ptx::cycles() - begin < cycles) __nanosleep(100);
    }

    // For the planted fault "epoch-of-each-block": the address of a word that push calls do not use otherwise.
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

    // Polls until no wanted word is absent, or gives up. poll() loads the wanted words and returns whether one is
    // absent. tell(report) writes the offset and the sender of the absent word to a report.
    template <typename Poll, typename Tell>
    __device__ __forceinline__ void wait(WaitKind kind, const Poll& poll, const Tell& tell) {
        u64 deadline = 0;
        bool patient = kind == GATHER;
        Listener listener = calls_.listener();
        for (u32 polls = 1;; ++polls) {
            bool late = poll();
            late |= listener.listen();
            if (Together ? !__any_sync(0xffffffffu, late) : !late) break;
            // The tests of `polls` below are separate: nested in one another, they would make the compiled loop 0.1 us
            // slower.
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

    __device__ __forceinline__ void report(Report* to, WaitKind kind, int peer, u32 offset) const {
        const u32 phase = round_ + 1;
        // `began` is the whole epoch at the start of the call: during the call the epoch advances by less than 2^32.
        const u64 now = ptx::load_relaxed_sys(epoch_word(call_.workspaces[call_.rank])) >> DRVFUSE_EPOCH_BITS;
        const u64 began = now - u32(u32(now) - epoch_);
        to->peer = peer;
        to->phase = phase;
        to->expected = began + phase;
        to->seen = ABSENT;
        to->kind = kind;
        to->word = offset / 16;
    }

    const Call& call_;
    const PushCall& push_;
    Calls<Ranks> calls_;
    u32 epoch_;     // the low 32 bits of the epoch that the rank had when this call began
    u32 half_;      // the offset of the current half in bytes
    int round_;     // the number of the current round, from 0
    bool joined_;   // join() has been called
    bool relays_;   // the last of several rounds has begun, and relay() has not yet executed its fence
    bool aborted_;  // a wait has given up or the abort word was set: this thread waits no more
};

// Replaces words of an input that equal ABSENT, so that they can be sent.
template <int N>
__device__ __forceinline__ void make_sendable(u32 (&word)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) word[i] = word[i] == ABSENT ? FOR_ABSENT : word[i];
}
