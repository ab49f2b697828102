// SPDX-License-Identifier: Apache-2.0
// The native part of the emulated driver: the scheduler that runs GPU threads on one CPU thread, and the checks behind every
// memory access. Plain functions over raw pointers: NVRTC compiles this to runtime.ptx, the translator turns that into native
// code (raw mode: no checks, no suspends), so no C compiler is needed where drvfuse runs. Nothing here allocates.
//
// Layout: the engine (engine.py) gives every launch an array of slots, one a resident block:
//
//     slot = Block | Warp[warps] | frames[threads]
//
// and, apart from them because few threads need it, a Poll for each thread of each slot.
//
// A frame is a Thread and the kernel's saved registers. The kernel's function runs one thread until it suspends and says
// why. A block's turn runs each warp's runnable lanes in order, completes warp operations and barriers, and ends when all
// lanes wait. A pass gives every resident block a turn and starts blocks in empty slots.
//
// Spins. A thread suspends before each strong load and atomic. If it comes back to an access (address and instruction) that
// it made before, and no word that it polled has changed since, it is left alone: nothing it can see has changed. That is a
// guess about the kernel, so before the engine calls itself idle it lets every such thread poll once more, and if anything
// but another fruitless poll comes of it, the run goes on. Progress, while probing, is: memory that changed, an exit, a new
// address polled, a block started. Barriers and warp operations alone are not.
//
// Order depends on the seed and on the calls alone; the time budget is only looked at between passes.

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

const u32 POLL_KNOWN = 0x100;   // suspended at an access that it made before
const u32 POLL_COUNT = 0xFF;
const u32 POLL_CREDIT = 16;     // shift: polls that it may still make freely
const u32 POLL_WORDS = 32;
const u32 CREDIT = 64;          // more than the polls between two looks at a rarely polled word

struct Polled {
    u64 addr, low, high;
    u32 site, size;
};

struct Poll {
    Polled word[POLL_WORDS];
};

struct Warp {
    u32 lanes, live, ready, yielded, warpop, barrier, gdc, sleeping, cluster, asking;
    // While all lanes in `warpop` came with one operation and one mask: these, and alike = 1.
    u32 alike, alike_mask, alike_kind;
    u32 pad[3];
};

struct Barrier {
    u32 arrived, expected, count;
    u32 every;  // RED_AND so far; PLAIN while all came to wait and nobody reduces
};

struct Block {
    u64 shared_base;
    u32 ctaid[3], index, cluster_rank, smid;
    u64 cluster_shared_base, cluster_shared_stride;  // rank r's shared memory is at base + r * stride
    u32 reserved[4];
    u32 active, live, woken, triggered;  // 64
    Warp* warps;
    u8* frames;
    Poll* polls;
    Block* leader;  // of the cluster; it holds the cluster barrier
    u32 cluster_arrived, cluster_live, cluster_phase, slot;
    Barrier barrier[16];
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
    u32 sm_count, envreg1, envreg2, reserved[13];
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
    u64 barriers, resumes, warp_ops, reserved2;
    Fault fault;
    u32 reported, pad;
    u8 owner_class[256];
};

struct Write {
    u64 addr, low, high;
    u32 size, pad;
};

const u32 WRITES = 64;

struct Engine {
    u64 seed, pass, clock, clock_reads;
    u64 progress, quiet, step, resumes;
    u32 probing, writes, fuel, pad;
    void* clock_thread;
    u64 clock_run, clock_read;
    u64 printed_limit, printed, print_lost;
    u8* print_buffer;
    Write write[WRITES];
};

const u32 PLAIN = 2, MIXED = 3;

enum { RUNNING, DONE, FAULTED };
enum { EXIT, YIELD, BARRIER, WARPOP, GDC_WAIT, FAULT, TRAP, SLEEP, CLUSTER_BARRIER };
enum { B_SYNC, B_ARRIVE, B_POPC, B_AND, B_OR };
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX, VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT, MATCH_ANY, MATCH_ALL, REDUX_ADD,
       REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, REDUX_XOR, WARP_SYNC, ELECT, ACTIVEMASK };
enum { F_NONE, F_OUT_OF_BOUNDS, F_FREED, F_MISALIGNED, F_NO_ACCESS, F_READ_ONLY, F_UNINITIALISED, F_FOREIGN_SHARED,
       F_FOREIGN_LOCAL, F_TRAP, F_ASSERT, F_WARP_LANES, F_WARP_MISMATCH, F_BARRIER_COUNT, F_UNSUPPORTED, F_ENDLESS };
enum { R_EVENT, R_IDLE, R_BUDGET };
enum { K_SHARED = 5, K_LOCAL = 6, K_PARAM = 7, K_FREED = 8, K_INITIALISED = 0x40, K_FULL = 0x80 };

const u64 SHADOW_OFFSET = 0x010000000000ull;
const u32 A_WRITE = 1, A_ATOMIC = 2, A_STRONG = 4;
const u32 FUEL = 1 << 28;  // accesses of one thread without a suspend: no kernel means that
const u64 PROBE_LIMIT = 8 << 20;  // resumes, in the last attempt before a deadlock is declared
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
static_assert(sizeof(Thread) == 128 && sizeof(Warp) == 64 && sizeof(Block) == 384 && sizeof(Site) == 96, "");
static_assert(sizeof(Poll) == 1024 && sizeof(Launch) == 640 && sizeof(Engine) == 2184, "");

FN Thread* thread_at(Launch* l, Block* b, u32 i) { return (Thread*)(b->frames + (u64)i * l->frame_stride); }

// Faults ---------------------------------------------------------------------------------------------------------------

FAR void fault(Launch* l, Thread* t, u32 kind, u32 site, u64 addr, u32 size, u32 flags, u64 value) {
    if (l->fault.kind) return;
    l->fault.kind = kind;
    l->fault.flags = flags;
    l->fault.size = size;
    l->fault.site = site;
    l->fault.block = t->block->index;
    l->fault.thread = t->linear;
    l->fault.addr = addr;
    l->fault.value = value;
    l->state = FAULTED;
}

// Memory accesses --------------------------------------------------------------------------------------------------------

// The word (up to 16 bytes) at an address.
FAR u64 low_of(u64 addr, u32 size) {
    if (size == 4) return *(u32*)addr;
    if (size >= 8) return *(u64*)addr;
    if (size == 2) return *(unsigned short*)addr;
    return *(u8*)addr;
}

FN u64 high_of(u64 addr, u32 size) { return size >= 16 ? *(u64*)(addr + 8) : 0; }

FN u32 in_window(Launch* l, u64 addr, u32 size) {
    return addr - l->window_base < l->window_bytes && (addr & (size - 1)) == 0;
}

// A write while probing: remembered until the thread suspends, then compared.
FAR void note_write(Engine* e, u64 addr, u32 size) {
    if (e->writes == WRITES) {
        e->progress++;
        return;
    }
    Write* w = &e->write[e->writes++];
    w->addr = addr;
    w->size = size;
    w->low = low_of(addr, size);
    w->high = high_of(addr, size);
}

FN u32 own_range(Thread* t, u32 type, u64 addr, u32 size) {
    Launch* l = t->launch;
    if (type == K_SHARED) {
        Block* b = t->block;
        u64 off = addr - b->shared_base;
        if (off < l->shared_bytes && off + size <= l->shared_bytes) return 1;
        if (l->cluster_size < 2) return 0;
        off = addr - b->cluster_shared_base;
        if (off >= l->shared_stride * l->cluster_size) return 0;
        return off % l->shared_stride + size <= l->shared_bytes;
    }
    u64 base = type == K_LOCAL ? t->local_base : l->params;
    u32 bytes = type == K_LOCAL ? l->local_bytes : l->param_bytes;
    return addr - base < bytes && addr - base + size <= bytes;
}

FAR u32 bad_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u64 off = addr - l->window_base;
    u32 kind = F_OUT_OF_BOUNDS;
    u64 where = addr;
    if (off < l->window_bytes) {
        u32 word = *(u32*)(l->access_base + (off >> 16) * 4);
        u32 bits = flags & A_ATOMIC ? 0x101 : flags & A_WRITE ? 0x100 : 1;
        u32 type = word >> 24 & 0x3F;
        u32 whole = word >> 24 & K_FULL;
        u32 start = (u32)(addr & 0xFFFF);
        if (type == K_FREED) kind = F_FREED;
        else if (type && start + size <= 0x10000) {
            u32 inside = 1, written = 1;
            u64 outside = addr, unwritten = addr;
            LOOP for (u32 i = 0; i < size; i++) {
                u8 s = *(u8*)(addr + i + SHADOW_OFFSET);
                if (!whole && type < K_SHARED && !(s & 1)) {
                    if (inside) outside = addr + i;
                    inside = 0;
                } else if (!(s & 2)) {
                    if (written) unwritten = addr + i;
                    written = 0;
                }
            }
            if (!inside) kind = F_OUT_OF_BOUNDS;
            else if (addr & (size - 1)) kind = F_MISALIGNED;
            else if (type == K_SHARED) kind = own_range(t, type, addr, size) ? F_UNINITIALISED : F_FOREIGN_SHARED;
            else if (type == K_LOCAL) kind = F_FOREIGN_LOCAL;
            else if (type == K_PARAM) kind = flags & A_WRITE ? F_READ_ONLY : F_OUT_OF_BOUNDS;
            else if (((word >> l->device) & bits) != bits)
                kind = (flags & (A_WRITE | A_ATOMIC)) && (word >> l->device & 1) ? F_READ_ONLY : F_NO_ACCESS;
            else kind = F_UNINITIALISED;
            where = kind == F_OUT_OF_BOUNDS ? outside : kind == F_UNINITIALISED ? unwritten : addr;
        }
    }
    fault(l, t, kind, site, where, size, flags, 0);
    return 1;
}

// What the shadow must hold: addressable unless the granule is whole, initialised for what is read. Marks what is written.
template <class Word> FN u32 shadow_refuses(u64 addr, u32 kind, u32 read, u32 write) {
    Word* s = (Word*)addr;
    Word every = (Word)0x0101010101010101ull;
    Word need = kind & K_FULL ? 0 : every;
    if (read && !(kind & K_INITIALISED)) need |= every * 2;
    if ((*s & need) != need) return 1;
    if (write) *s = every * 3;
    return 0;
}

FN u32 access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u64 off = addr - l->window_base;
    if (off >= l->window_bytes || (addr & (size - 1))) return bad_access(t, addr, size, flags, site);
    u32 word = *(u32*)(l->access_base + (off >> 16) * 4);
    u32 write = flags & (A_WRITE | A_ATOMIC), read = !write || (flags & A_ATOMIC);
    u32 bits = flags & A_ATOMIC ? 0x101 : write ? 0x100 : 1;
    if (((word >> l->device) & bits) != bits) return bad_access(t, addr, size, flags, site);
    u32 kind = word >> 24;
    u32 type = kind & 0x3F;
    if (type >= K_SHARED) {
        if (!own_range(t, type, addr, size)) return bad_access(t, addr, size, flags, site);
        if (type != K_SHARED) return 0;
        kind |= K_FULL;
    }
    u64 shadow = addr + SHADOW_OFFSET;
    u32 refused = 0;
    if (size == 4) refused = shadow_refuses<u32>(shadow, kind, read, write);
    else if (size == 8) refused = shadow_refuses<u64>(shadow, kind, read, write);
    else if (size == 2) refused = shadow_refuses<unsigned short>(shadow, kind, read, write);
    else if (size == 1) refused = shadow_refuses<u8>(shadow, kind, read, write);
    else {
        LOOP for (u32 i = 0; i < size; i += 8) refused |= shadow_refuses<u64>(shadow + i, kind, read, write);
    }
    if (refused) return bad_access(t, addr, size, flags, site);
    Engine* e = l->engine;
    if (!--e->fuel) {
        fault(l, t, F_ENDLESS, site, addr, size, flags, 0);
        return 1;
    }
    Site* c = &l->sites[site];
    u32 owner = l->owner_class[word >> 16 & 0xFF];
    c->size = size;
    if (read) c->reads[owner]++;
    if (write) {
        c->writes[owner]++;
        if (!(flags & A_ATOMIC)) {
            if (!(flags & A_STRONG) && type != K_SHARED) t->polls = 0;
            e->quiet = 0;
            if (e->probing) note_write(e, addr, size);
        }
    }
    return 0;
}

// Checks and counts one access of `size` bytes (a power of two up to 32); 0 if it may be made.
API u32 rt_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) { return access(t, addr, size, flags, site); }

// The same for the commonest plain loads and stores.
API u32 rt_read4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, 0, site); }
API u32 rt_read8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, 0, site); }
API u32 rt_read16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, 0, site); }
API u32 rt_write4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, A_WRITE, site); }
API u32 rt_write8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, A_WRITE, site); }
API u32 rt_write16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, A_WRITE, site); }

API void rt_fence(Thread* t, u32 flags, u32 site) {}

// griddepcontrol.launch_dependents: a block has triggered when any of its threads did.
API void rt_trigger(Thread* t) {
    Block* b = t->block;
    if (!b->triggered) {
        b->triggered = 1;
        t->launch->triggered++;
    }
}

// Virtual time, in nanoseconds (%globaltimer) or as many cycles. It advances by itself only as threads are resumed, so a
// thread that reads nothing but the clock makes it run, ever faster.
API u64 rt_clock(Thread* t, u32 kind) {
    Engine* e = t->launch->engine;
    e->clock_reads++;
    if (e->clock_thread == t && e->clock == e->clock_read) {
        if (e->clock_run < (1 << 20)) e->clock_run *= 2;
    } else {
        e->clock_thread = t;
        e->clock_run = 32;
    }
    e->clock += e->clock_run;
    e->clock_read = e->clock;
    return e->clock;
}

// printf: keeps where the format is, who printed and the argument block; engine.py formats it.
// Every argument takes 8 bytes at most; how many there are follows from the format.
API u32 rt_vprintf(Thread* t, u64 format, u64 args) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    u32 count = 0;
    if (format - l->window_base >= l->window_bytes) return (u32)-1;
    LOOP for (u64 p = format; *(u8*)p; p++)
        if (*(u8*)p == '%') count++;
    u32 bytes = count * 8;
    if (e->printed + 32 + bytes > e->printed_limit) {
        e->print_lost++;
        return (u32)-1;
    }
    u64* out = (u64*)(e->print_buffer + e->printed);
    out[0] = format;
    out[1] = (u64)l->device << 32 | bytes;
    out[2] = t->block->index;
    out[3] = t->linear;
    u64 end = t->local_base + l->local_bytes;
    u32 i = 0;
    LOOP for (; i < bytes; i += 4) ((u32*)out)[8 + i / 4] = args + i + 4 <= end ? *(u32*)(args + i) : 0;
    e->printed += 32 + bytes;
    return count;
}

// Spins ------------------------------------------------------------------------------------------------------------------

FN Poll* poll_of(Block* b, Thread* t) { return b->polls + t->linear; }

// A thread suspended in front of an access: has it been here before?
FAR void look_up(Block* b, Thread* t) {
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    t->polls &= ~POLL_KNOWN;
    LOOP for (u32 i = 0; i < n; i++)
        if (p->word[i].addr == t->op_addr && p->word[i].site == t->site) {
            t->polls |= POLL_KNOWN;
            return;
        }
}

// True if a thread at a known access has no reason to make it again. If a word that it polls elsewhere has changed, it may
// poll freely until it has come round to that.
FAR u32 spinning(Launch* l, Block* b, Thread* t) {
    u32 state = t->polls;
    if (!(state & POLL_KNOWN)) return 0;
    if (state >> POLL_CREDIT) {
        t->polls = state - (1u << POLL_CREDIT);
        return 0;
    }
    Poll* p = poll_of(b, t);
    u32 n = state & POLL_COUNT;
    u32 changed = 0;
    LOOP for (u32 i = 0; i < n; i++) {
        Polled* w = &p->word[i];
        u64 low = low_of(w->addr, w->size), high = high_of(w->addr, w->size);
        if (low != w->low || high != w->high) {
            if (w->addr == t->op_addr && w->site == t->site) return 0;
            w->low = low;
            w->high = high;
            changed = 1;
        }
    }
    if (changed) t->polls |= CREDIT << POLL_CREDIT;
    return !changed;
}

// The access is about to be made: keep what it will see.
FAR void remember(Launch* l, Block* b, Thread* t, u64 low, u64 high) {
    Engine* e = l->engine;
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    u32 i = 0;
    if (t->polls & POLL_KNOWN) {
        LOOP while (p->word[i].addr != t->op_addr || p->word[i].site != t->site) i++;
        if (p->word[i].low != low || p->word[i].high != high) e->progress++;
    } else {
        if (n == POLL_WORDS) {
            // Too many words to watch: it is run in every pass, and the limit on quiet resumes ends a deadlock.
            n = 0;
        } else if (e->quiet < QUIET_LIMIT) {
            e->progress++;
        }
        i = n;
        t->polls = n + 1;
        p->word[i].addr = t->op_addr;
        p->word[i].site = t->site;
        p->word[i].size = t->op_size;
    }
    p->word[i].low = low;
    p->word[i].high = high;
}

// Barriers ---------------------------------------------------------------------------------------------------------------

FAR void complete_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    l->barriers++;
    u32 all = r->every == PLAIN && r->arrived == b->live;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        Warp* warp = &b->warps[w];
        u32 lanes = warp->barrier;
        if (all) {
            warp->ready |= lanes;
            warp->barrier = 0;
            continue;
        }
        LOOP while (lanes) {
            u32 lane = FFS(lanes) - 1;
            lanes &= lanes - 1;
            Thread* t = thread_at(l, b, w * 32 + lane);
            if (t->op_a != id) continue;
            t->op_result = t->op_kind == B_POPC ? r->count : t->op_kind == B_AND ? r->every : r->count != 0;
            warp->barrier &= ~(1u << lane);
            warp->ready |= 1u << lane;
        }
    }
    r->arrived = 0;
    b->woken = 1;
}

FAR void try_barrier(Launch* l, Block* b, u32 id) {
    Barrier* r = &b->barrier[id];
    if (r->arrived && r->arrived >= (r->expected ? r->expected : b->live)) complete_barrier(l, b, id);
}

FAR void arrive(Launch* l, Block* b, Thread* t) {
    u32 id = t->op_a;
    if (id > 15) {
        fault(l, t, F_BARRIER_COUNT, t->site, 0, 0, 0, id);
        return;
    }
    Barrier* r = &b->barrier[id];
    if (!r->arrived) {
        r->expected = t->op_b;
        r->count = 0;
        r->every = PLAIN;
    } else if (r->expected != t->op_b) {
        fault(l, t, F_BARRIER_COUNT, t->site, 0, 0, r->expected, t->op_b);
        return;
    }
    r->arrived++;
    if (t->op_kind == B_ARRIVE && r->every == PLAIN) r->every = MIXED;
    if (t->op_kind >= B_POPC) {
        r->count += t->op_c != 0;
        r->every = (r->every != 0) & (t->op_c != 0);
    }
    try_barrier(l, b, id);
}

FN void try_cluster(Launch* l, Block* leader) {
    if (!leader->cluster_arrived || leader->cluster_arrived < leader->cluster_live) return;
    leader->cluster_arrived = 0;
    leader->cluster_phase++;
    l->barriers++;
}

// Warp operations ----------------------------------------------------------------------------------------------------------

FN void shuffle(Launch* l, Block* b, u32 w, u32 mask, u32 lane, Thread* t) {
    u32 delta = t->op_b & 31, clamp = t->op_c & 31, segment = t->op_c >> 8 & 31;
    u32 last = (lane & segment) | (clamp & ~segment);
    u32 first = lane & segment;
    s32 j;
    u32 ok;
    if (t->op_kind == SHFL_UP) {
        j = (s32)lane - (s32)delta;
        ok = j >= (s32)last;
    } else {
        j = t->op_kind == SHFL_DOWN ? lane + delta : t->op_kind == SHFL_BFLY ? lane ^ delta : first | (delta & ~segment);
        ok = j <= (s32)last;
    }
    if (!ok) j = lane;
    // The value of a lane that takes no part is undefined: make that visible.
    t->op_result = mask >> j & 1 ? thread_at(l, b, w * 32 + j)->op_a : 0xDEADBEEFu;
    t->op_pred = ok;
}

FAR void warp_operation(Launch* l, Block* b, u32 w, u32 mask, u32 kind) {
    u32 rest = mask;
    l->warp_ops++;
    if (kind <= SHFL_IDX) {
        LOOP while (rest) {
            u32 lane = FFS(rest) - 1;
            rest &= rest - 1;
            shuffle(l, b, w, mask, lane, thread_at(l, b, w * 32 + lane));
        }
        return;
    }
    u32 ballot = 0, sum = 0, low = 0xFFFFFFFFu, high = 0, each = 0xFFFFFFFFu, any = 0, odd = 0;
    s32 slow = 0x7FFFFFFF, shigh = -0x7FFFFFFF - 1;
    u32 equal = 1;
    u32 leader = FFS(mask) - 1;
    u64 first = thread_at(l, b, w * 32 + leader)->op_value;
    rest = mask;
    LOOP while (rest) {
        u32 lane = FFS(rest) - 1;
        rest &= rest - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 a = t->op_a;
        if (kind >= VOTE_ALL && kind <= VOTE_BALLOT) ballot |= (u32)(a != 0) << lane;
        sum += a;
        low = a < low ? a : low;
        high = a > high ? a : high;
        slow = (s32)a < slow ? (s32)a : slow;
        shigh = (s32)a > shigh ? (s32)a : shigh;
        each &= a;
        any |= a;
        odd ^= a;
        if (t->op_value != first) equal = 0;
    }
    rest = mask;
    LOOP while (rest) {
        u32 lane = FFS(rest) - 1;
        rest &= rest - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 r = 0;
        if (kind == VOTE_ALL) r = ballot == mask;
        else if (kind == VOTE_ANY) r = ballot != 0;
        else if (kind == VOTE_UNI) r = ballot == mask || ballot == 0;
        else if (kind == VOTE_BALLOT) r = ballot;
        else if (kind == MATCH_ANY) {
            u32 others = mask;
            LOOP while (others) {
                u32 other = FFS(others) - 1;
                others &= others - 1;
                if (thread_at(l, b, w * 32 + other)->op_value == t->op_value) r |= 1u << other;
            }
        } else if (kind == MATCH_ALL) {
            r = equal ? mask : 0;
            t->op_pred = equal;
        } else if (kind == REDUX_ADD) r = sum;
        else if (kind == REDUX_MIN_S) r = (u32)slow;
        else if (kind == REDUX_MAX_S) r = (u32)shigh;
        else if (kind == REDUX_MIN_U) r = low;
        else if (kind == REDUX_MAX_U) r = high;
        else if (kind == REDUX_AND) r = each;
        else if (kind == REDUX_OR) r = any;
        else if (kind == REDUX_XOR) r = odd;
        else if (kind == ELECT) {
            r = leader;
            t->op_pred = lane == leader;
        }
        t->op_result = r;
    }
}

// activemask takes the lanes that have come to the same place when none of the warp can run: the most converged answer.
FAR u32 resolve_activemask(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 lanes = warp->asking;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 mask = 1u << lane, rest = lanes;
        LOOP while (rest) {
            u32 other = FFS(rest) - 1;
            rest &= rest - 1;
            Thread* o = thread_at(l, b, w * 32 + other);
            if (o->site == t->site) mask |= 1u << other;
        }
        lanes &= ~mask;
        rest = mask;
        LOOP while (rest) {
            thread_at(l, b, w * 32 + FFS(rest) - 1)->op_result = mask;
            rest &= rest - 1;
        }
    }
    u32 all = warp->asking;
    warp->asking = 0;
    return all;
}

// Completes what can be; the lanes that may go on.
FAR u32 resolve(Launch* l, Block* b, u32 w) {
    Warp* warp = &b->warps[w];
    u32 todo = warp->warpop, freed = 0;
    if (warp->alike && todo == warp->alike_mask) {
        warp->warpop = 0;
        warp_operation(l, b, w, todo, warp->alike_kind);
        return todo;
    }
    LOOP while (todo) {
        u32 lane = FFS(todo) - 1;
        Thread* t = thread_at(l, b, w * 32 + lane);
        u32 mask = t->op_mask;
        if (!(mask >> lane & 1) || (mask & ~warp->live)) {
            fault(l, t, F_WARP_LANES, t->site, 0, 0, warp->live, mask);
            return 0;
        }
        u32 present = mask & warp->warpop, same = 0;
        LOOP while (present) {
            u32 other = FFS(present) - 1;
            present &= present - 1;
            Thread* o = thread_at(l, b, w * 32 + other);
            if (o->op_mask == mask && o->op_kind == t->op_kind) {
                same |= 1u << other;
            } else if (o->op_mask >> lane & 1) {  // they wait for each other at different operations
                fault(l, o, F_WARP_MISMATCH, o->site, 0, 0, t->site, o->op_mask);
                return 0;
            }
        }
        todo &= ~(same | 1u << lane);
        if (same == mask) {
            warp_operation(l, b, w, mask, t->op_kind);
            freed |= mask;
            warp->warpop &= ~mask;
        }
    }
    return freed;
}

// Running ----------------------------------------------------------------------------------------------------------------

FAR void settle_writes(Engine* e) {
    LOOP for (u32 i = 0; i < e->writes; i++) {
        Write* w = &e->write[i];
        if (low_of(w->addr, w->size) != w->low || high_of(w->addr, w->size) != w->high) e->progress++;
    }
    e->writes = 0;
}

FAR void exit_thread(Launch* l, Block* b, Warp* warp, u32 bit) {
    Engine* e = l->engine;
    warp->live &= ~bit;
    b->live--;
    b->leader->cluster_live--;
    e->progress++;
    e->quiet = 0;
    LOOP for (u32 i = 0; i < 16; i++)
        if (b->barrier[i].arrived) try_barrier(l, b, i);
    if (l->cluster_size > 1) try_cluster(l, b->leader);
}

// Runs one thread until it suspends; 1 if it may be run again at once.
FN u32 run_thread(Launch* l, Block* b, Warp* warp, Thread* t) {
    Engine* e = l->engine;
    u32 bit = 1u << t->lane;
    u32 watched = 0;
    u64 addr = 0, low = 0, high = 0;
    u32 size = 0;
    if (t->status == YIELD && in_window(l, t->op_addr, t->op_size)) {
        watched = 1;
        addr = t->op_addr;
        size = t->op_size;
        low = low_of(addr, size);
        high = high_of(addr, size);
        remember(l, b, t, low, high);
    }
    e->clock++;
    e->quiet += watched;
    e->fuel = FUEL;
    e->resumes++;
    l->resumes++;
    u32 status = rt_call(l->function, t);
    t->status = status;
    if (watched) {
        if (low != low_of(addr, size) || high != high_of(addr, size)) {
            e->progress++;
            e->quiet = 0;
        }
    }
    if (e->writes) settle_writes(e);
    if (status == YIELD) {
        look_up(b, t);
        warp->yielded |= bit;
    } else if (status == WARPOP) {
        if (t->op_kind == ACTIVEMASK) {
            warp->asking |= bit;
        } else {
            if (!warp->warpop) {
                warp->alike = 1;
                warp->alike_mask = t->op_mask;
                warp->alike_kind = t->op_kind;
            } else if (warp->alike_mask != t->op_mask || warp->alike_kind != t->op_kind) {
                warp->alike = 0;
            }
            warp->warpop |= bit;
        }
    } else if (status == BARRIER) {
        if (t->op_kind == B_ARRIVE) {
            arrive(l, b, t);
            return l->state == RUNNING;
        }
        warp->barrier |= bit;
        arrive(l, b, t);
    } else if (status == EXIT) {
        exit_thread(l, b, warp, bit);
    } else if (status == GDC_WAIT) {
        if (l->gdc_open) return 1;
        warp->gdc |= bit;
        e->progress++;
    } else if (status == SLEEP) {
        t->wake = e->clock + t->op_a;
        warp->sleeping |= bit;
        if (!(t->polls & POLL_COUNT)) e->progress++;
    } else if (status == CLUSTER_BARRIER) {
        if (t->op_kind == 0) {  // arrive
            t->wake = b->leader->cluster_phase;
            b->leader->cluster_arrived++;
            try_cluster(l, b->leader);
            return 1;
        }
        warp->cluster |= bit;
    } else if (status == TRAP) {
        fault(l, t, t->op_kind == 1 ? F_ASSERT : F_TRAP, t->site, 0, 0, t->op_kind, (u64)t);
    } else if (status != FAULT || !l->fault.kind) {
        fault(l, t, F_UNSUPPORTED, t->site, 0, 0, status, 0);
    }
    return 0;
}

const u32 TURN = 8192;  // resumes after which a warp or block lets others on, even if it could go on for ever

// One turn of a warp: all that its lanes can do now. `force` lets lanes poll that have no reason to.
FAR u32 run_warp(Launch* l, Block* b, u32 w, u32 force) {
    Warp* warp = &b->warps[w];
    u32 ready = warp->ready, ran = 0;
    warp->ready = 0;
    if (warp->gdc && l->gdc_open) {
        ready |= warp->gdc;
        warp->gdc = 0;
    }
    u32 lanes = warp->yielded;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        if (!spinning(l, b, thread_at(l, b, w * 32 + lane)) || force) ready |= 1u << lane;
    }
    warp->yielded &= ~ready;
    lanes = warp->sleeping;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        if (thread_at(l, b, w * 32 + lane)->wake <= l->engine->clock) ready |= 1u << lane;
    }
    warp->sleeping &= ~ready;
    lanes = warp->cluster;
    LOOP while (lanes) {
        u32 lane = FFS(lanes) - 1;
        lanes &= lanes - 1;
        if ((u32)thread_at(l, b, w * 32 + lane)->wake != b->leader->cluster_phase) ready |= 1u << lane;
    }
    warp->cluster &= ~ready;
    LOOP while (1) {
        LOOP while (ready) {
            u32 lane = FFS(ready) - 1;
            ready &= ready - 1;
            ran++;
            if (run_thread(l, b, warp, thread_at(l, b, w * 32 + lane))) ready |= 1u << lane;
            if (l->state != RUNNING) return ran;
        }
        if (warp->warpop) {
            ready |= resolve(l, b, w);
            if (l->state != RUNNING) return ran;
        }
        if (warp->asking) ready |= resolve_activemask(l, b, w);
        ready |= warp->ready;
        warp->ready = 0;
        if (!ready) break;
        if (ran > TURN) {
            warp->ready = ready;
            break;
        }
    }
    return ran;
}

FAR u32 run_block(Launch* l, Block* b, u32 force) {
    u32 ran = 0;
    LOOP do {
        b->woken = 0;
        LOOP for (u32 w = 0; w < l->warps; w++) {
            Warp* p = &b->warps[w];
            if (!(p->ready | p->yielded | p->sleeping | p->cluster | p->gdc)) continue;
            ran += run_warp(l, b, w, force);
            if (l->state != RUNNING) return ran;
        }
        force = 0;
    } while (b->woken && ran < TURN);
    return ran;
}

FAR void start_block(Launch* l, u32 slot, u32 group, u32 rank) {
    Block* b = (Block*)(l->slots + slot * l->slot_stride);
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    if (!l->cluster) cx = cy = cz = 1;
    u32 gx = l->nctaid[0] / cx, gy = l->nctaid[1] / cy;
    b->ctaid[0] = group % gx * cx + rank % cx;
    b->ctaid[1] = group / gx % gy * cy + rank / cx % cy;
    b->ctaid[2] = group / gx / gy * cz + rank / cx / cy;
    b->index = b->ctaid[0] + l->nctaid[0] * (b->ctaid[1] + l->nctaid[1] * b->ctaid[2]);
    b->cluster_rank = rank;
    b->smid = slot % (l->sm_count ? l->sm_count : 1);
    b->slot = slot;
    b->shared_base = l->shared_base + slot * l->shared_stride;
    b->cluster_shared_base = l->shared_base + (slot - rank) * l->shared_stride;
    b->cluster_shared_stride = l->shared_stride;
    b->leader = (Block*)(l->slots + (slot - rank) * l->slot_stride);
    b->active = 1;
    b->live = l->threads;
    b->woken = b->triggered = 0;
    if (rank == 0) {
        b->cluster_arrived = b->cluster_phase = 0;
        b->cluster_live = l->threads * l->cluster_size;
    }
    LOOP for (u32 i = 0; i < 16; i++) b->barrier[i].arrived = 0;
    u64* shadow = (u64*)(b->shared_base + SHADOW_OFFSET);
    LOOP for (u32 i = 0; i < (l->shared_bytes + 7) / 8; i++) shadow[i] = 0x0101010101010101ull;
    b->warps = (Warp*)(b + 1);
    b->frames = (u8*)(b->warps + l->warps);
    b->polls = l->polls + (u64)slot * l->threads;
    u32 x = 0, y = 0, z = 0;
    LOOP for (u32 w = 0; w < l->warps; w++) {
        Warp* p = &b->warps[w];
        u32 left = l->threads - w * 32;
        p->lanes = p->live = p->ready = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1;
        p->yielded = p->warpop = p->barrier = p->gdc = p->sleeping = p->cluster = p->asking = 0;
    }
    LOOP for (u32 i = 0; i < l->threads; i++) {
        Thread* t = thread_at(l, b, i);
        t->resume = t->status = 0;
        t->tid[0] = x;
        t->tid[1] = y;
        t->tid[2] = z;
        t->lane = i & 31;
        t->warp = i >> 5;
        t->linear = i;
        t->local_base = l->local_base + ((u64)slot * l->threads + i) * l->local_stride;
        t->block = b;
        t->launch = l;
        t->polls = 0;
        t->wake = 0;
        if (++x == l->ntid[0]) {
            x = 0;
            if (++y == l->ntid[1]) {
                y = 0;
                z++;
            }
        }
    }
}

FAR void finish_block(Launch* l, Block* b) {
    b->active = 0;
    l->finished++;
    if (!b->triggered) l->triggered++;
    u32 size = l->cluster_size, first = b->slot / size * size;
    LOOP for (u32 i = 0; i < size; i++)
        if (((Block*)(l->slots + (first + i) * l->slot_stride))->active) return;
    l->free_groups[l->free_count++] = first / size;
    if (l->finished == l->blocks) l->state = DONE;
}

FN u64 hash(u64 x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// A turn for each resident block of a launch, then new blocks in free slots; threads resumed (and blocks started).
FAR u32 run_launch(Launch* l, u32 force, u64 random) {
    u32 ran = 0, high = l->high;
    u32 start = high && random ? (u32)(random % high) : 0;
    LOOP for (u32 i = 0; i < high; i++) {
        u32 slot = start + i < high ? start + i : start + i - high;
        Block* b = (Block*)(l->slots + slot * l->slot_stride);
        if (!b->active) continue;
        ran += run_block(l, b, force);
        if (l->state != RUNNING) return ran + 1;
        if (!b->live) finish_block(l, b);
    }
    u32 size = l->cluster_size, begun = ran;
    LOOP while (l->next < l->blocks && l->free_count && ran - begun < TURN) {
        u32 first = l->free_groups[--l->free_count] * size;
        u32 group = l->next / size;
        l->next += size;
        // borrowed memory remembers its last user
        LOOP for (; l->high < first + size; l->high++) ((Block*)(l->slots + l->high * l->slot_stride))->active = 0;
        l->engine->progress++;
        l->engine->quiet = 0;
        ran++;
        LOOP for (u32 i = 0; i < size; i++) start_block(l, first + i, group, i);
        LOOP for (u32 i = 0; i < size; i++) {
            Block* b = (Block*)(l->slots + (first + i) * l->slot_stride);
            ran += run_block(l, b, 0);
            if (l->state != RUNNING) return ran;
            if (!b->live) finish_block(l, b);
        }
    }
    return ran;
}

FAR u32 run_pass(Engine* e, Launch** launches, u32 n, u32 force) {
    u64 random = e->seed ? hash(e->seed * 0x9E3779B97F4A7C15ull + ++e->pass) : 0;
    u32 ran = 0, held = 0;
    u32 start = (u32)(random >> 32) % n;
    LOOP for (u32 i = 0; i < n; i++) {
        u32 k = start + i < n ? start + i : start + i - n;
        Launch* l = launches[k];
        if (l->state != RUNNING) continue;
        // A seed other than 0 now and then holds a launch back for a while.
        if (e->seed && !force && (hash(e->seed + (e->pass >> 5) * 0x2545F491ull + k) & 7) == 0) {
            held = 1;
            continue;
        }
        ran += run_launch(l, force, random);
    }
    if (!ran && held) {
        LOOP for (u32 k = 0; k < n; k++)
            if (launches[k]->state == RUNNING) ran += run_launch(launches[k], 0, random);
    }
    return ran;
}

// Wakes the threads that sleep the shortest by moving the clock; 0 if none sleeps.
FAR u32 wake_sleepers(Engine* e, Launch** launches, u32 n) {
    u64 first = ~0ull;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        if (l->state != RUNNING) continue;
        LOOP for (u32 slot = 0; slot < l->high; slot++) {
            Block* b = (Block*)(l->slots + slot * l->slot_stride);
            if (!b->active) continue;
            LOOP for (u32 w = 0; w < l->warps; w++) {
                u32 lanes = b->warps[w].sleeping;
                LOOP while (lanes) {
                    u64 wake = thread_at(l, b, w * 32 + FFS(lanes) - 1)->wake;
                    lanes &= lanes - 1;
                    if (wake < first) first = wake;
                }
            }
        }
    }
    if (first == ~0ull) return 0;
    if (e->clock < first) e->clock = first;
    return 1;
}

FAR u32 has_event(Launch** launches, u32 n) {
    u32 event = 0;
    LOOP for (u32 k = 0; k < n; k++) {
        Launch* l = launches[k];
        u32 now = l->state != RUNNING ? 2 : l->triggered == l->blocks ? 1 : 0;
        if (now > l->reported) {
            l->reported = now;
            event = 1;
        }
    }
    return event;
}

// Lets everything poll up to `rounds` times (fewer if that takes more than `limit` resumes); 1 as soon as anything came
// of it. Between polls all that they set free runs until it waits again: a barrier inside a spin loop belongs to a round.
FAR u32 probe(Engine* e, Launch** launches, u32 n, u32 rounds, u64 limit) {
    u64 before = e->resumes;
    u32 force = 1, streak = 0;
    e->progress = 0;
    e->probing = 1;
    LOOP while (rounds && !e->progress && e->resumes - before < limit) {
        u32 ran = run_pass(e, launches, n, force);
        if (has_event(launches, n)) e->progress++;
        force = !ran || e->quiet > QUIET_LIMIT;
        streak = force ? 0 : streak + 1;
        if (streak > STREAK) e->progress++;
        rounds -= force;
        if (force) wake_sleepers(e, launches, n);
    }
    e->probing = 0;
    e->writes = 0;
    return e->progress != 0;
}

// Runs the launches together until one ends, faults or has triggered everywhere (R_EVENT), nothing can move (R_IDLE), or
// the time is up (R_BUDGET).
API u32 rt_run(Engine* e, Launch** launches, u32 n, u64 budget_ns) {
    u64 deadline = rt_now() + budget_ns;
    u32 slept = 0;
    LOOP while (1) {
        u64 before = e->progress;
        u32 ran = run_pass(e, launches, n, 0);
        if (e->progress != before) slept = 0;
        if (has_event(launches, n)) {
            e->step = 0;
            return R_EVENT;
        }
        if (!ran || e->quiet > QUIET_LIMIT) {
            if (slept < 64 && e->quiet <= QUIET_LIMIT && wake_sleepers(e, launches, n)) {
                slept++;
                continue;
            }
            u32 moved = probe(e, launches, n, 1, ~0ull);
            if (!moved) return R_IDLE;
            if (has_event(launches, n)) return R_EVENT;
            slept = 0;
        }
        if (rt_now() > deadline) return R_BUDGET;
    }
}

// Everything is idle: moves the clock (by ever more while nothing comes of it) and lets everything poll. 1 if that led
// anywhere or somebody reads the clock; 0 if not, or if the clock has moved by a virtual day in vain.
API u32 rt_advance(Engine* e, Launch** launches, u32 n) {
    u64 reads = e->clock_reads;
    e->step = e->step ? e->step * 4 : 1000000;
    e->clock += e->step;
    if (probe(e, launches, n, 2200, ~0ull)) {
        e->step = 0;
        return 1;
    }
    if (e->clock_reads == reads && probe(e, launches, n, 60000, PROBE_LIMIT)) {
        e->step = 0;
        return 1;
    }
    return e->clock_reads != reads && e->step < 86400000000000ull;
}
