// SPDX-License-Identifier: Apache-2.0
// Detects calls that differ between ranks: in op, algorithm, shape, dtype or options, or in their order.
//
// Words. Each call has a hash and a number. The hash, `Call::hash`, is of everything that must be equal on all ranks;
// its lowest 16 bits are 0. A hash of 0 switches the comparison off, for ranks of one process, whose host compares the
// calls. Each rank counts its calls on the device, so graphs replay unchanged. The word of a call is its hash plus the
// low 16 bits of its number. If two words have equal numbers and are not equal, the calls differ. Words with different
// numbers are not compared.
// Each rank's workspace has the following, which the host zeroes at first and at a reset of all ranks:
//   number_word(p)   the number of the last call whose word was sent to rank p, with the highest bit set. Only thread p
//                    of block 0 reads and writes it. Between calls all numbers of a rank are equal.
//   call_word(g, p)  the word that rank p has sent for its last call of generation g, which is the number modulo 2.
//                    Only p writes it.
//
// Steps. They are the same in every kernel whose blocks wait for peers, and in the kernel that only compares calls
// (check_call.cu), for all grids, clusters and types. Thread p < ranks of block 0 takes these steps for rank p.
//   start   After the wait for the producer the thread loads the number, and adds one.
//   tell    The thread stores the number, and sends the word to rank p, before any wait for a peer. This step is taken
//           also if the abort word is set, since ranks would number their calls differently otherwise.
//   listen  In each poll of a wait for data or flags the thread also loads rank p's word. The first wait of a push call
//           (push.cuh), and each barrier after the start barrier (barrier.cuh), end only when rank p's word is the
//           expected word: the word that this rank has sent.
//   differs Once in 32 polls the thread tests whether rank p's word has the expected number and is not the expected
//           word. If so, the thread writes a report of kind CALL, with its own word and the peer's, and aborts all
//           ranks.
//
// Why no difference is missed. A kernel with a hash has a wait for the words in its block 0: in push calls every thread
// of block 0 receives for the block's first unit or row, and in pull calls at least one barrier follows the start
// barrier. So a call that is not aborted ends on a rank only after each thread p has read the expected word. The thread
// that waits for a word detects that the word differs. Threads that hang because calls differ cannot keep it from this:
// in a push call block 0 waits for nothing before the wait in which it listens. In a pull call thread p may hang in the
// start barrier, if rank p makes a push call; but the thread listens in that barrier too. If only other blocks of a
// kernel hang, block 0 reaches its barriers. A rank that makes no call with this number is missing, and the time-out
// reports it.
//
// Why equal calls are never reported as different. A word is one access of 64 bits, so its number and its hash belong
// to one call. A thread compares two words only if the low 16 bits of their numbers are equal, which holds for one call
// in 65536, and only words of one generation. By the argument below the word that the thread reads is at most two calls
// old, or was never written. A word that was never written is 0, which has the number of call 65536.
//
// Why two generations suffice. Let rank A be in its call n. Rank B overwrites its word of call n by that of n + 2 when
// its call n + 1 has ended, so after it has read A's word of n + 1. A stores that word after its call n has ended, with
// all of its loads of B's word of n. So A reads in B's slot the word of n, or that of n - 2 if B has not reached n. The
// argument uses only these words. It does not depend on the protocol of the data, and so holds for any sequence of push
// and pull calls, of calls that do not change the epoch or have several rounds, and of calls without data.
// In an aborted group ranks wait for nothing, and may be any number of calls apart. As all ranks number their calls in
// the same way, words with equal numbers still belong to the same call, unless a rank makes 65536 calls more than
// another one before its host reads a report. Then the reported reason may be wrong, but the group is aborted in any
// case. A reset zeroes words and numbers of all ranks while no kernel of the group runs on any of them.
//
// Memory ordering. A word carries its own readiness and guards nothing else, so all accesses are relaxed: those to
// words at system scope, those to numbers at GPU scope. The only order that is needed is the one in the argument for
// two generations, from A's loads of a word to B's store that overwrites it: A's load; the end of A's kernel n; A's
// store of the word of n + 1; B's load of that word; the end of B's kernel n + 1; B's store. The end of a kernel
// releases and acquires at system scope, also for a dependent launch, whose accesses follow griddepcontrol.wait. Stream
// order or events order a rank's calls.
//
// Progress. A rank sends its words before it waits for any peer, by the block that is placed first.
//
// Cost. Kernels of groups that never compare calls on the device, since all ranks are in one process, are compiled
// without this code. In other kernels a call without a hash executes one more test at its start, and in each poll a
// load whose predicate is false in all threads. With a hash, block 0 has one more load of its own memory in flight in
// each poll. In a push call the words are sent before the data, so they arrive first. In a pull call the words are sent
// after the flags of the start barrier: the release of these flags would otherwise wait for the words.
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"
#include "sync/workspace.cuh"

constexpr bool COMPARES = DRVFUSE_COMPARES;
constexpr u32 WAIT_CALL = 3;  // the kind of a report by a thread that waited for the word of a peer's call
constexpr u32 STARTED = u32(1) << 31;

__device__ __forceinline__ u32 generation(u32 number) { return FAULT("calls-of-one-generation") ? 0 : number % 2; }

// The wait of one thread for the word of its peer, in the same loop as its wait for data or flags. A listener exists
// only during the wait, so that it takes no registers at other times.
class Listener {
public:
    // `number` is the number of the call, or 0 for a thread that waits for no word.
    __device__ __forceinline__ Listener(const Call& call, u32 number)
        : slot_(call_word(call.workspaces[call.rank], generation(number), threadIdx.x)), word_(call.hash | u16(number)),
          seen_(number == 0 ? word_ : 0) {}

    // Reads the peer's word. Returns true until the expected word has arrived, so also if a different word arrives.
    // Called in each poll.
    __device__ __forceinline__ bool listen() {
        if constexpr (!COMPARES) return false;
        ptx::load_relaxed_sys_if(seen_ != word_, seen_, slot_);
        return seen_ != word_ && !FAULT("call-not-awaited");
    }

    // Whether the expected word is still missing: returns the result of the last listen().
    __device__ __forceinline__ bool listens() const { return COMPARES && seen_ != word_; }

    // Whether the peer's word has the expected number but another hash: the ranks make different calls.
    __device__ __forceinline__ bool differs() const { return listens() && u16(seen_) == u16(word_); }

    // Fills the report of a thread that waits for its peer's word. `number` is the number of the call.
    __device__ __forceinline__ void describe(Report* report, u32 number) const {
        report->peer = threadIdx.x;
        report->phase = number & ~STARTED;
        report->expected = word_;
        report->seen = seen_;
        report->kind = WAIT_CALL;
        report->word = 0;
    }

private:
    const u64* slot_;
    u64 word_, seen_;
};

template <int Ranks>
class Calls {
public:
    __device__ __forceinline__ explicit Calls(const Call& call) : call_(call), tells_(false), awaited_(0) {}

    // Reads and advances the number of the call. Called by every thread of the grid, after wait_for_producer().
    __device__ __forceinline__ void start() {
        if constexpr (!COMPARES) return;
        tells_ = call_.hash != 0 && threadIdx.x < Ranks && (blockIdx.x == 0 || FAULT("calls-told-by-every-block"));
        if (tells_) awaited_ = (ptx::load_relaxed_gpu(number()) + 1) | STARTED;
    }

    // Sends this call's word to the peers. Called by every thread, after start() and before it waits for a peer.
    __device__ __forceinline__ void tell() {
        if (!COMPARES || !tells_) return;
        if (!FAULT("call-not-numbered")) ptx::store_relaxed_gpu(number(), awaited_);
        if (FAULT("call-not-told") && threadIdx.x == (call_.rank + 1) % Ranks) return;
        u64* const to = call_word(call_.workspaces[threadIdx.x], generation(awaited_), call_.rank);
        const u64 word = call_.hash | u16(awaited_);
        if constexpr (FAULT("call-told-in-halves")) {
            ptx::store_relaxed_sys(reinterpret_cast<u32*>(to), u32(word));
            ptx::store_relaxed_sys(reinterpret_cast<u32*>(to) + 1, u32(word >> 32));
        } else if constexpr (FAULT("call-told-weakly")) {
            *to = word;
        } else {
            ptx::store_relaxed_sys(to, word);
        }
    }

    __device__ __forceinline__ Listener listener() const { return Listener(call_, awaited_); }

    // Ends the wait for the peer's word. Called when the word has arrived, or when this thread gives up.
    __device__ __forceinline__ void heard() { awaited_ = 0; }

    __device__ __forceinline__ void describe(Report* report, const Listener& listener) const {
        listener.describe(report, awaited_);
    }

private:
    __device__ __forceinline__ u32* number() const { return number_word(call_.workspaces[call_.rank], threadIdx.x); }

    const Call& call_;
    bool tells_;
    u32 awaited_;  // the call's number, with the highest bit set, until the peer's word has arrived; then 0
};
