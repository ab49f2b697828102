// SPDX-License-Identifier: Apache-2.0
// Recognises calls that differ between ranks: in op, algorithm, shape, dtype or options, or in their order.
//
// Words. A call has a hash of all that must be equal on all ranks (`Call::hash`, its lowest 16 bits 0; 0: the ranks are
// of one process, whose host compares, and nothing here does anything), and a number: each rank counts its calls on the
// device, so graphs replay. The word of a call is its hash with the number's low 16 bits. Two words of equal numbers that
// are not equal are of calls that differ. Words of different numbers say nothing about each other.
// Each rank has in its workspace, zeroed by the host at first and by a reset of all ranks:
//   number_word(p)   the number of the last call that rank p was told of, with the highest bit set. Thread p of block 0
//                    is the only one to read and write it. Between calls all numbers of a rank are equal.
//   call_word(g, p)  the word of the last call whose number is g modulo 2 that rank p has told of. Only p writes it.
//
// Steps. They are the same in every kernel whose blocks wait for peers, and in the one that only compares (check_call.cu),
// whatever their grids, clusters and types are. They are those of threads p < ranks of block 0, each for rank p.
//   start   after the wait for the producer: loads the number, and adds one.
//   tell    stores the number, and the word to rank p. Before anything waits for a peer, and also where the abort word is
//           set already, as ranks would number their calls differently otherwise.
//   listen  beside each poll of a wait for data or flags: loads rank p's word. A push call's first wait (push.cuh) and a
//           barrier that follows the start barrier (barrier.cuh) are not over before the word is the expected one.
//   differs once in 32 polls: whether the word has the expected number and is another one. Then the thread reports that as
//           leg CALL, with its own word and the peer's, and aborts all ranks.
//
// Why no difference is missed. A kernel with a hash has such a wait in its block 0: in push calls every thread of block
// 0 receives for the block's first unit or row, in pull calls at least one barrier follows the start barrier. So unless
// it is aborted, no call ends on a rank before each thread p has seen the expected word. A word that differs is found by
// the thread that waits for it. That thread is not stopped by threads that hang, as it is in the same wait or comes to it:
// block 0 waits for nothing before its first wait in a push call. In a pull call thread p may hang in the start barrier,
// if rank p makes a push call, and it listens there. A kernel of which only other blocks hang has a block 0 that comes
// to its barriers. A rank that makes no call of that number is missing, not different: the bound in time is for that.
//
// Why equal calls are never taken for others. A word is one access of 64 bits, so its number and its hash are of one call.
// A thread compares words of one number and one generation, and of these there is one call in 65536. By the argument
// below what it finds is at most two calls old, or never written: then it is 0, which has the number of call 65536.
//
// Why two generations suffice. Let rank A be in its call n. Rank B stores the word of n + 2 over that of n when its call
// n + 1 has ended, hence after it has seen A's word of n + 1, which A stores after its call n has ended, with all its loads
// of B's word of n. So A finds in B's slot the word of n, or that of n - 2 as B has not come to n yet. This argument is of
// the words alone. It takes nothing from the protocol of the data, and so holds for any sequence of push and pull calls,
// of calls that leave the epoch as it is or have several rounds, and of calls without data.
// In an aborted group ranks wait for nothing and may be any number of calls apart. As they number their calls alike, words
// of equal numbers still are of the same call, unless a rank makes 65536 calls more than another one before its host
// reads a report. Then the reason that is reported could be wrong, of a group that is aborted in any case. A reset zeroes
// words and numbers of all ranks, while no kernel of the group runs on any of them.
//
// Memory ordering. Words carry their own readiness and guard nothing else, so all accesses are relaxed: those to words at
// system scope, those to numbers at the scope of the GPU. The only order that is needed is that of the argument above,
// from A's loads of a word to B's store over it: A's load; the end of A's kernel n; A's store of the word of n + 1; B's
// load of that; the end of B's kernel n + 1; B's store. The end of a kernel releases and acquires at system scope, also for
// a dependent launch, which is behind griddepcontrol.wait. Calls of a rank follow one another by stream order or events.
//
// Progress. A rank tells its peers before it waits for any of them, by the block that is placed first.
//
// Cost. Kernels of groups that never compare, as all their ranks are in one process, are compiled without all of this. In
// others a call without a hash has a test at the start, and a load by no thread in each poll. With a hash block 0 has one
// load more in flight at a time, of its own memory. Its words are sent before the data of a push call, so they are there
// first; in a pull call behind the flags of the start barrier, whose release would wait for them.
#pragma once
#include "common/faults.cuh"
#include "ptx/ordered.cuh"
#include "sync/workspace.cuh"

constexpr bool COMPARES = DRVFUSE_COMPARES;
constexpr u32 LEG_CALL = 3;  // the leg in a report
constexpr u32 STARTED = u32(1) << 31;

__device__ __forceinline__ u32 generation(u32 number) { return FAULT("calls-of-one-generation") ? 0 : number % 2; }

// One thread's wait for the word of its peer, in the same loop as its wait for data or flags. Its registers are needed
// only during the wait.
class Listener {
public:
    // Of a thread that has no word to wait for `number` is 0.
    __device__ __forceinline__ Listener(const Call& call, u32 number)
        : slot_(call_word(call.workspaces[call.rank], generation(number), threadIdx.x)), word_(call.hash | u16(number)),
          seen_(number == 0 ? word_ : 0) {}

    // Called beside each poll: whether the peer's word has not come yet, or is that of another call.
    __device__ __forceinline__ bool listen() {
        if constexpr (!COMPARES) return false;
        ptx::load_relaxed_sys_if(seen_ != word_, seen_, slot_);
        return seen_ != word_ && !FAULT("call-not-awaited");
    }

    // The last result of listen().
    __device__ __forceinline__ bool listens() const { return COMPARES && seen_ != word_; }

    // Whether it is that of another call.
    __device__ __forceinline__ bool differs() const { return listens() && u16(seen_) == u16(word_); }

    // Fills the report of a thread that listens. `number` is that of the call.
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
    __device__ __forceinline__ explicit Calls(const Call& call) : call_(call), tells_(false), awaited_(0) {}

    // Every thread of the grid, after wait_for_producer().
    __device__ __forceinline__ void start() {
        if constexpr (!COMPARES) return;
        tells_ = call_.hash != 0 && threadIdx.x < Ranks && (blockIdx.x == 0 || FAULT("calls-told-by-every-block"));
        if (tells_) awaited_ = (ptx::load_relaxed_gpu(number()) + 1) | STARTED;
    }

    // Every thread, after start() and before it waits.
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

    // Called when the peer's word has come, or this thread no longer waits.
    __device__ __forceinline__ void heard() { awaited_ = 0; }

    __device__ __forceinline__ void describe(Report* report, const Listener& listener) const {
        listener.describe(report, awaited_);
    }

private:
    __device__ __forceinline__ u32* number() const { return number_word(call_.workspaces[call_.rank], threadIdx.x); }

    const Call& call_;
    bool tells_;
    u32 awaited_;  // the call's number, with the highest bit set, where the peer's word has not come yet; else 0
};
