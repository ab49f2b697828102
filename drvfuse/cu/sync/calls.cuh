// SPDX-License-Identifier: Apache-2.0
// Recognises calls that differ between ranks: another op, algorithm, shape, dtype or option, or another order.
//
// Words. Every call of a group has a hash of all that must be equal on the ranks (`Call::hash`; 0: all ranks are calls of
// one host, and nothing here happens) and a number, by which a rank counts its calls on the device, so that graphs
// replay. The word of a call has the hash in its upper 48 bits, and the number in the lower 16. Of two words with equal
// numbers that differ, the calls differ. Words of different numbers say nothing about each other.
// Each rank has in its workspace, zeroed by the host before the first call and by a reset of all ranks:
//   number_word(p)   what rank p was told last: the number, with the highest bit set. Read and written by one thread of
//                    a call alone: thread p of block 0. All of a rank are equal between calls.
//   call_word(g, p)  the word of rank p's last call whose number is g modulo 2. Written by rank p alone; its own entry
//                    too, by which every thread knows this rank's word.
//
// Steps, the same in every kernel of a collective and in the kernel that only compares (check_call.cu), whatever the
// grid, the cluster, the types and the algorithm are. They are those of threads 0 .. ranks-1 of block 0; thread p has
// to do with rank p alone, so no barrier is between them.
//   start   after the wait for the producer: advances the number, and stores the word to rank p. Before anything that
//           waits for a peer, and also in a call that finds the abort word set: else ranks would number calls differently.
//   listen  beside each poll of data or flags: loads rank p's word, until it is this call's. It comes before the data,
//           so nothing is left to do at the end, and the load is under way together with those of the data.
//   settle  before the kernel ends: if the word has not come yet, waits for it, for a bounded time.
//   differ  at the slow places of every wait, by any thread: compares this rank's word with its peers', of either
//           generation.
// A mismatch is reported once per rank as leg CALL, with the own word and the peer's, and aborts all ranks.
//
// Why no mismatch is missed. Before a call ends on a rank, its block 0 has heard of every peer a word of that number, or
// the rank is aborted. If that word is another one, `listen` does not take it and `settle` reports it. A call that
// hangs, because the peers' calls want something else, comes to `differ` once in 1024 polls; all words of its number
// are on their way since every peer's start. If block 0 does not hang, but others of the grid do, block 0 comes to
// `settle`. A rank that makes no call with that number is one that is missing: that is the time-out's.
//
// Why calls that match are never taken for others. A word is one access of 64 bits, so number and hash are of one call,
// and words of equal number (of 16 bits) in one generation are of one call: those 65536 calls apart never meet, see below.
//
// Why two generations suffice. Let A be in its call n. Peer B stores the word n + 2, over that of n, after its call n + 1
// has ended, hence after it has heard A's word n + 1, which A sends after its call n has ended, with all its loads of B's
// word n. So what A finds in a slot is the word n, or it is n - 2 or older and B's word is still to come; in the other
// generation it is n - 1 or n + 1. This argument is of these words alone. It needs nothing of the data's protocol and
// holds for calls of any kinds in any order, with epochs that advance or not, several rounds, and no data at all.
// The abort ends waits early, and ranks may then be any number of calls apart. Words of equal number are of one call even
// then, unless a rank makes 65536 calls ahead of another one before its host reads that the group is aborted; a report
// would then name the wrong reason of a group that is aborted anyway.
// A reset zeroes words and numbers of all ranks while no kernel of the group runs on any. Number 0, of an entry that was
// never written, meets only words of the 65536th call, by which time it was written.
//
// Memory ordering. Words and numbers are accessed relaxed, and order nothing else; a word carries its own readiness. The
// only order that is needed is the one above, from A's loads of a word to B's store over it: A's load, the end of A's
// kernel, A's store of the word n + 1 in the next one, B's load of that, the end of B's kernel, B's store. The end of a
// kernel releases and acquires at system scope, and programmatic dependents begin here after griddepcontrol.wait, which
// says the same. A call of one rank is in the order of its stream, or of an event, after the call before.
//
// Progress. Nobody waits for a word before it has sent its own, and the words are sent by the block that is placed first.
//
// Cost. A call without hash tests that in its first block; awaited_ is then 0 in all threads, so that no load is made.
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"
#include "sync/workspace.cuh"

constexpr u32 LEG_CALL = 3;  // of a report
constexpr u32 STARTED = u32(1) << 31;

// One thread's wait for the word of its peer, beside its wait for data or flags. What it keeps in registers is needed in
// the wait alone.
class Listener {
public:
    // Of a thread that has no word to wait for `number` is 0.
    __device__ __forceinline__ Listener(const Call& call, u32 number)
        : slot_(call_word(call.workspaces[call.rank], number % 2, threadIdx.x)),
          word_(call.hash | u16(number)),
          seen_(number == 0 ? word_ : 0) {}

    // Beside a poll: whether the peer's word is still to come, or is that of another call.
    __device__ __forceinline__ bool listen() {
        ptx::load_relaxed_sys_if(seen_ != word_, seen_, slot_);
        return seen_ != word_;
    }

    // What listen() has said last.
    __device__ __forceinline__ bool listens() const { return seen_ != word_; }

    // Whether it is that of another call.
    __device__ __forceinline__ bool differs() const {
        return seen_ != word_ && u16(seen_) == u16(word_) && !FAULT("calls-not-compared");
    }

    // What a report says of a thread that listens. `number` is that of the call.
    __device__ __forceinline__ void describe(Report* report, u32 number) const {
        report->peer = threadIdx.x;
        report->phase = number & ~STARTED;
        report->expected = word_;
        report->seen = seen_;
        report->leg = LEG_CALL;
        report->word = 0;
    }

private:
    const u64* slot_;
    u64 word_, seen_;
};

template <int Ranks>
class Calls {
public:
    __device__ __forceinline__ explicit Calls(const Call& call) : call_(call), awaited_(0) {}

    // Every thread of the grid, after wait_for_producer().
    __device__ __forceinline__ void start() {
        if (call_.hash == 0 || blockIdx.x != 0 || threadIdx.x >= Ranks) return;
        awaited_ = (ptx::load_relaxed_gpu(number()) + 1) | STARTED;
    }

    // Every thread, after start() and before it waits.
    __device__ __forceinline__ void tell() {
        if (awaited_ == 0) return;
        ptx::store_relaxed_gpu(number(), awaited_);
        char* const peer = call_.workspaces[threadIdx.x];
        ptx::store_relaxed_sys(call_word(peer, awaited_ % 2, call_.rank), call_.hash | u16(awaited_));
    }

    __device__ __forceinline__ Listener listener() const { return Listener(call_, awaited_); }

    // The peer's word has come, or this thread waits no more.
    __device__ __forceinline__ void heard() { awaited_ = 0; }

    __device__ __forceinline__ void describe(Report* report, const Listener& listener) const {
        listener.describe(report, awaited_);
    }

private:
    __device__ __forceinline__ u32* number() const {
        return number_word(call_.workspaces[call_.rank], threadIdx.x);
    }

    const Call& call_;
    u32 awaited_;  // the call's number, with the highest bit set, where the peer's word has not come yet; else 0
};
