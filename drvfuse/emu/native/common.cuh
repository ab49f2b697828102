// SPDX-License-Identifier: Apache-2.0
// Helpers of all files of the native runtime. The structures and numbers that the runtime shares with translated code
// and with Python are in abi.cuh, a header that Python generates (drvfuse/emu/abi).
#pragma once

#include "abi.cuh"

#define API extern "C" __device__
#define FN static __device__
#define FAR static __device__ __noinline__  // functions that are not inlined, which keeps the code small
#define POPC(x) __popc(x)
#define FFS(x) __ffs(x)
#define LOOP _Pragma("unroll 1")

const u32 POLL_KNOWN = 0x100;  // flag of Thread::polls: the thread is suspended at an access that it has made before
const u32 POLL_CREDIT = 16;    // shift of a count in Thread::polls: the polls still allowed although no word changes
const u32 CREDIT = 64;         // the polls allowed once a polled word has changed: enough for one iteration of a loop
const u64 FUEL = 1 << 24;      // accesses, or iterations of loops, of a thread between two checks for an interrupt
// Costs for Engine::work, in accesses.
const u64 RESUME_WORK = 32;       // resuming a thread
const u64 LOOK_WORK = 8;          // checking whether a polled word has changed
const u64 MATRIX_WORK = 2048;     // executing a matrix instruction
const u64 WORK_LIMIT = 32 << 20;  // a call of rt_run, rt_advance or rt_pass_time ends after this work: about 0.1 s
const u64 STRAIN = 16;            // what a resume at a strong access adds to Engine::strain; any other resume adds 1
const u64 LAST_STEP = 86400000000000ull;  // the largest step of the virtual clock: a day, in nanoseconds
// A probe counts as progress if threads run in more successive passes than this. A spin loop waits again after fewer.
const u32 STREAK = 64;
const u64 STACK_LIMIT = 2 << 20;  // bytes of host stack that a thread may use; a thread of Python has 8 MiB
// If this many polls are made without a write, the run counts as idle, even if threads poll words that are new to them.
const u64 QUIET_LIMIT = 1 << 21;

API u32 rt_call(void* function, void* thread);  // function(thread); loader.py defines it in LLVM IR
API u64 rt_now();                               // the time of the host, in nanoseconds

// Records an event in the ring buffer of the last events.
FN void note(Launch* l, Block* b, u32 thread, u32 kind, u32 site, u64 address, u64 value, u32 flags) {
    Engine* e = l->engine;
    Event* v = &e->events[e->event_count++ & (EVENTS - 1)];
    v->clock = e->clock;
    v->address = address;
    v->value = value;
    v->op = l->op;
    v->block = b->index;
    v->thread = thread;
    v->site = site;
    v->kind = kind;
    v->flags = flags;
}

// The thread with index `i` in a block.
FN Thread* thread_at(Launch* l, Block* b, u32 i) { return (Thread*)(b->frames + (u64)i * l->frame_stride); }

// The block of rank `rank` in the cluster of a block.
FN Block* block_of_rank(Launch* l, Block* b, u32 rank) {
    return (Block*)(l->slots + (b->slot - b->cluster_rank + rank) * l->slot_stride);
}

// A hash of a number, used as a pseudo-random number.
FN u64 hash(u64 x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// low_of returns the low 8 bytes of a word of up to 16 bytes; high_of returns the high 8 bytes, or 0 if the word has at
// most 8 bytes.
FAR u64 low_of(u64 addr, u32 size) {
    if (size == 4) return *(u32*)addr;
    if (size >= 8) return *(u64*)addr;
    if (size == 2) return *(unsigned short*)addr;
    return *(u8*)addr;
}

FN u64 high_of(u64 addr, u32 size) { return size >= 16 ? *(u64*)(addr + 8) : 0; }
