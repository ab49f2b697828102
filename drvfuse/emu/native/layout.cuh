// SPDX-License-Identifier: Apache-2.0
// What the native runtime, generated code (abi.py) and the engine (structs.py) agree on: structures, statuses, fault kinds.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;

#ifdef __CUDACC_RTC__
#define API extern "C" __device__
#define FN static __device__
#define FAR static __device__ __noinline__  // a function of its own: keeps the module small
#define POPC(x) __popc(x)
#define FFS(x) __ffs(x)
#else
#define API extern "C"
#define FN static inline
#define FAR static
#define POPC(x) __builtin_popcount(x)
#define FFS(x) __builtin_ffs(x)
#endif
#define LOOP _Pragma("unroll 1")

struct Block;
struct Launch;
struct Engine;

struct Thread {
    u32 resume, status, tid[3], lane, warp, linear;
    u64 op_addr, op_seen;
    u32 op_mask, op_a, op_b, op_c, op_result, op_pred, op_kind, site;
    u64 local_base;
    Block* block;
    Launch* launch;
    u64 op_value;
    u32 op_size;
    u32 polls;  // Poll entries in use | POLL_KNOWN
    u64 wake;   // virtual time at which a sleep ends; the cluster barrier phase that was arrived at
};

const u32 EVENTS = 1 << 14;
const u32 POLL_KNOWN = 0x100;   // suspended at an access that it made before
const u32 POLL_COUNT = 0xFF;
const u32 POLL_CREDIT = 16;     // shift: polls that it may still make freely
const u32 POLL_WORDS = 32;
const u32 CREDIT = 64;          // more than the polls between two looks at a rarely polled word

struct Polled {
    u64 addr, low, high;
    u32 site, size;
    u32 stamp, time;  // of the race detector, when it was last polled
};

struct Poll {
    Polled word[POLL_WORDS];
};

struct Warp {
    u32 lanes, live, ready, yielded, warpop, barrier, gdc, sleeping, cluster, asking;
    // While all lanes in `warpop` came with one operation and one mask: these, and alike = 1.
    u32 alike, alike_mask, alike_kind;
    u32 gathered;  // of `barrier`: those that wait for the rest of the warp to come there
    u32 syncs;     // bar.warp.sync that it has completed
    u32 pad;
};

struct Barrier {
    u32 arrived, expected;  // 32 for each warp, whole or not
    u32 threads;            // of the warps that have arrived
    u32 kind, count, every;  // the reduction (or B_SYNC), and what it is so far
    u32 plain;              // nobody arrived without waiting
    u32 site;               // of the last that came
    Thread* last;
};

struct List {
    u32 first, last;
};

struct Block {
    u64 shared_base;
    u32 ctaid[3], index, cluster_rank, smid;
    u64 cluster_shared_base, cluster_shared_stride;  // rank r's shared memory is at base + r * stride
    struct RaceBlock* race;
    u32 reserved[2];
    u32 active, live, woken, triggered;  // 64
    Warp* warps;
    u8* frames;
    Poll* polls;
    Block* leader;  // of the cluster; it holds the cluster barrier
    u32 cluster_arrived, cluster_live, cluster_phase, slot;
    Barrier barrier[16];
    u64 owner;     // of delayed stores: a number that no other block has had
    List pending;  // those that are seen by this block alone
    u32 epoch;     // barriers that it has completed
    u32 bulks;     // the first bulk copy to shared memory that is pending
    u32 stores, store_turns;  // pieces of bulk copies to global memory that are not written; turns since it last wrote all
};

struct Site {
    u64 size;  // of each access
    u64 reads[4], writes[4];  // of memory of this device, of another device, of the host; shared memory
    u64 pad[3];
};

struct Fault {
    u32 kind, flags, size, site, block, thread;
    u64 addr, value;
};

struct Launch {
    u64 params, globals;
    u32 nctaid[3], ntid[3], device, smem_dynamic, shared_static, cluster;
    u64 clock;
    u32 sm_count, envreg1, envreg2;
    // Its number; what it knows from the start, and from griddepcontrol.wait on; what is known when it has ended.
    u32 op, start, primary, end, pad0;
    struct CopyQueue* copies;  // a queue for each thread of each slot; null where the kernel has no asynchronous copies
    struct Copies* copy_pool;
    u32 reserved[4];
    Engine* engine;  // 128
    void* function;
    u8* slots;
    u64 slot_stride;
    u32 slot_count, threads, warps, frame_stride;
    u32 blocks, next, finished, triggered;
    u64 shared_base, shared_stride, local_base, local_stride;
    u32 local_bytes, param_bytes, shared_bytes, cluster_size;
    u32 gdc_open, state, free_count, high;
    u32* free_groups;
    Site* sites;
    Poll* polls;
    u64 window_base, window_bytes, access_base;
    u64 barriers, resumes, warp_ops;
    u8* races;  // a RaceBlock and its threads for each slot
    Fault fault;
    u32 reported;
    u32 part, turn, turn_warp;  // part: in the middle of its turn, at this slot, at this warp (plus one) of its block
    u8 owner_class[256];
    u32 pending, pad;  // delayed stores of its blocks, resident or ended
};

struct Write {
    u64 addr, low, high;
    u32 size, pad;
};

const u32 WRITES = 64;

struct Print {
    Thread* thread;
    u64 format, args;
};

struct Event {
    u64 clock, address, value;
    u32 op, block, thread, site, kind, flags;
};

struct Engine {
    u64 seed, pass, clock, clock_reads;
    u64 progress, quiet, step, resumes;
    u32 probing, writes;
    u64 loop_limit, fuel, rounds;  // what a thread may do between two suspends; what is left of its accesses; what it did
    u64 work;                      // done in this call
    u64 tank;                      // accesses that a thread was given since it was resumed, `fuel` included
    // A pass and a probe that the last call may have left unfinished.
    u32 pass_open, pass_at, pass_ran, pass_held, probe_force, probe_streak, advancing, slept;
    u64 pass_random, pass_before, probe_rounds, probe_before, reads_before;
    // The last attempt before a deadlock is declared: a sum over all threads' saved states, the one that it is compared to
    // (renewed after 1, 2, 4, ... rounds, so that every cycle is found), and whether the limit ended that.
    u64 state, state_kept, state_reads, state_rounds, state_period;
    u64 strain;  // resumes since a thread ended or a block started, weighted
    u32 watching, undecided;
    void* clock_thread;
    u64 clock_run, clock_read;
    void* print;
    struct Race* race;  // null without the detector
    Event* events;      // the last EVENTS
    u64 event_count;
    // The access that a thread is resumed for is a poll that sees what the last one saw; and the race detector has heard of
    // nothing since then that could change what it makes of it.
    u32 fruitless, idle;
    struct Delay* delay;  // null where stores are not delayed
    Write write[WRITES];
};

enum { RUNNING, DONE, FAULTED };
enum { EXIT, YIELD, BARRIER, WARPOP, GDC_WAIT, FAULT, TRAP, SLEEP, CLUSTER_BARRIER };
enum { B_SYNC, B_ARRIVE, B_POPC, B_AND, B_OR, B_UNALIGNED = 8 };
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX, VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT, MATCH_ANY, MATCH_ALL, REDUX_ADD,
       REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR, WARP_SYNC, ELECT, ACTIVEMASK };
enum { F_NONE, F_OUT_OF_BOUNDS, F_FREED, F_MISALIGNED, F_NO_ACCESS, F_READ_ONLY, F_UNINITIALISED, F_FOREIGN_SHARED,
       F_FOREIGN_LOCAL, F_TRAP, F_ASSERT, F_WARP_LANES, F_WARP_MISMATCH, F_BARRIER_COUNT,
       F_BARRIER_DIVERGENCE, F_BARRIER_KINDS, F_BARRIER_LEFT, F_UNSUPPORTED, F_ENDLESS, F_INTERRUPTED,
       F_COPY_SIZE, F_MBARRIER };
enum { V_START, V_END, V_LOAD, V_STORE, V_ATOMIC, V_FENCE, V_BARRIER, V_GDC_WAIT, V_TRIGGER, V_COPY, V_COPY_WAIT };
enum { R_EVENT, R_IDLE, R_BUDGET, R_MORE };
enum { K_SHARED = 5, K_LOCAL = 6, K_PARAM = 7, K_FREED = 8, K_INITIALISED = 0x40, K_FULL = 0x80 };

const u64 SHADOW_OFFSET = 0x010000000000ull;
const u32 A_WRITE = 1, A_ATOMIC = 2, A_STRONG = 4, A_NC = 1 << 8, A_VOLATILE = 1 << 9;
const u32 A_REDUCTION = 1 << 16;  // an atomic without a result
const u32 A_SWAP = 1 << 17;       // a compare-and-swap: what it compares with is in op_value, the upper half in op_seen
const u32 A_LATER = 1 << 20;      // a write that is made, and marks what it has initialised, at a later time
const u32 A_BULK = 1 << 21;       // the read of shared memory by a bulk copy
const u32 A_SCOPE = 4, A_ORDER = 6, A_ELEMENTS = 18;  // shifts of two bits each; ELEMENTS: of strong accesses, log2
const u32 FENCE_SC = 1 << 10, FENCE_PROXY = 1 << 11, FENCE_ASYNC = 1 << 12;
enum { SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS };
enum { ORDER_RELAXED, ORDER_ACQUIRE, ORDER_RELEASE, ORDER_ACQ_REL };
const u32 LOOP_SLICE = 4096;  // rounds after which generated code calls rt_loop
const u64 FUEL = 1 << 24;      // accesses, or rounds, of one thread after which it asks whether it was interrupted
const u64 RESUME_WORK = 32;   // what a resume costs, in accesses; and a look at a thread that spins
const u64 LOOK_WORK = 8;
const u64 WORK_LIMIT = 32 << 20;  // of one call; it takes a tenth of a second
const u64 STRAIN = 16;  // of a resume at a strong access; others, which wait for threads and not for words, count 1
const u64 LAST_STEP = 86400000000000ull;  // a virtual day
const u32 STREAK = 64;  // passes that run on after a fruitless poll: more than a barrier in a spin loop takes, so it is work
const u64 QUIET_LIMIT = 1 << 21;  // polls without a write after which endless polling of ever new words counts as idle

extern "C" {
#ifdef __CUDACC_RTC__
__device__
#endif
u32 rt_call(void* function, void* thread);
#ifdef __CUDACC_RTC__
__device__
#endif
u64 rt_now();
}

// abi.py and structs.py
static_assert(sizeof(Thread) == 128 && sizeof(Warp) == 64 && sizeof(Block) == 800 && sizeof(Site) == 96, "");
static_assert(sizeof(Poll) == 1280 && sizeof(Launch) == 656 && sizeof(Engine) == 2360 && sizeof(Event) == 48, "");

// Adds to the ring of what happened last.
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

FN Thread* thread_at(Launch* l, Block* b, u32 i) { return (Thread*)(b->frames + (u64)i * l->frame_stride); }

FN u64 hash(u64 x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// The word (up to 16 bytes) at an address.
FAR u64 low_of(u64 addr, u32 size) {
    if (size == 4) return *(u32*)addr;
    if (size >= 8) return *(u64*)addr;
    if (size == 2) return *(unsigned short*)addr;
    return *(u8*)addr;
}

FN u64 high_of(u64 addr, u32 size) { return size >= 16 ? *(u64*)(addr + 8) : 0; }
