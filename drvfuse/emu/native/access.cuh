// SPDX-License-Identifier: Apache-2.0
// The checks and counters of every memory access of translated code, and the other functions that translated code
// calls.
#pragma once

#include "delay.cuh"
#include "race_alias.cuh"
#include "race_cluster.cuh"

// Records a fault, which stops the launch, unless one is recorded already.
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

// Records a notice, which is a finding that does not stop the launch: once for each site of a launch until Python takes
// it.
FAR void notice(Launch* l, Thread* t, u32 kind, u32 lane) {
    Engine* e = l->engine;
    LOOP for (u32 i = 0; i < e->notices; i++)
        if (e->notice[i].op == l->op && e->notice[i].site == t->site && e->notice[i].kind == kind) return;
    if (e->notices == NOTICES) return;
    Warp* warp = &t->block->warps[t->warp];
    Notice* n = &e->notice[e->notices++];
    n->op = l->op;
    n->kind = kind;
    n->site = t->site;
    n->block = t->block->index;
    n->thread = t->linear;
    n->mask = t->op_mask;
    n->lanes = warp->lanes;
    n->live = warp->live;
    n->lane = lane;
}

FN u32 in_window(Launch* l, u64 addr, u32 size) {
    return addr - l->window_base < l->window_bytes && (addr & (size - 1)) == 0;
}

// Called before a write in a probe: keeps the old value, which settle_writes compares when the thread has suspended.
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

// The block of a thread's cluster in whose shared memory a range lies, or null.
FN Block* shared_of(Thread* t, u64 addr, u32 size) {
    Launch* l = t->launch;
    Block* b = t->block;
    u64 off = addr - b->shared_base;
    if (off < l->shared_bytes && off + size <= l->shared_bytes) return b;
    off = addr - b->cluster_shared_base;
    if (l->cluster_size < 2 || off >= l->cluster_window) return 0;
    if ((off & (1 << CLUSTER_SHIFT) - 1) + size > l->shared_bytes) return 0;
    return block_of_rank(l, b, (u32)(off >> CLUSTER_SHIFT));
}

// Whether another block of the cluster has shared memory: from the first resume of its threads to the exit of the last
// one.
FN u32 present(Block* b) { return b->active && b->begun && b->live; }

FN u64 absence(Block* b) { return (u64)b->index << 32 | (b->begun ? ABSENT_EXITED : ABSENT_NOT_YET); }

// Whether a thread may access this range of memory that the engine lends (shared, local, parameters).
FN u32 own_range(Thread* t, u32 type, u64 addr, u32 size, u32 flags) {
    Launch* l = t->launch;
    if (type == K_SHARED) {
        Block* b = shared_of(t, addr, size);
        if (b == t->block) return 1;
        return b && (flags >> SPACE_SHIFT & 15) != SPACE_SHARED && present(b);
    }
    u64 base = type == K_LOCAL ? t->local_base : l->params;
    u32 bytes = type == K_LOCAL ? l->local_bytes : l->param_bytes;
    return addr - base < bytes && addr - base + size <= bytes;
}

FAR u32 copying_to(Launch* l, u64 addr);

// Finds out why an access is refused and records the fault. Returns 0 if the access is allowed after all.
FAR u32 bad_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u64 off = addr - l->window_base;
    u32 kind = F_OUT_OF_BOUNDS;
    u64 where = addr, value = 0;
    if (off < l->window_bytes) {
        u32 word = *(u32*)(l->access_base + (off >> GRANULE_SHIFT) * 4);
        u32 bits = flags & A_ATOMIC ? 0x101 : flags & A_WRITE ? 0x100 : 1;
        u32 type = word >> 24 & 0x3F;
        u32 whole = word >> 24 & KIND_FULL;
        u32 start = (u32)(addr & (1 << GRANULE_SHIFT) - 1);
        if (type == K_FREED) kind = F_USE_AFTER_FREE;
        else if (type == K_MULTICAST) kind = F_MULTICAST_PLAIN;
        else if (type && start + size <= 1 << GRANULE_SHIFT) {
            u32 inside = 1, written = 1, each = size >> (flags >> ELEMENTS_SHIFT & 3);
            u64 outside = addr, unwritten = addr;
    LOOP for (u32 i = 0; i < size; i++) {
                u8 s = *(u8*)(addr + i + SHADOW_OFFSET);
                if (!whole && type < K_SHARED && !(s & SHADOW_ADDRESSABLE)) {
                    if (inside) outside = addr + i;
                    inside = 0;
                } else if (!(s & SHADOW_INITIALISED) && !(flags >> UNREAD_SHIFT >> i / each & 1)) {
                    if (written) unwritten = addr + i;
                    written = 0;
                }
            }
            if (!inside) kind = F_OUT_OF_BOUNDS;
            else if (addr & (size - 1)) kind = F_MISALIGNED;
            else if (type == K_SHARED && own_range(t, type, addr, size, flags)) kind = written ? F_NONE : F_UNINITIALISED;
            else if (type == K_SHARED) {
                Block* b = shared_of(t, addr, size);
                kind = b && (flags >> SPACE_SHIFT & 15) != SPACE_SHARED ? F_CLUSTER_ABSENT : F_FOREIGN_SHARED;
                if (b) value = absence(b);
            }
            else if (type == K_LOCAL) kind = F_FOREIGN_LOCAL;
            else if (type == K_PARAM) kind = flags & A_WRITE ? F_READ_ONLY : F_OUT_OF_BOUNDS;
            else if (((word >> l->device) & bits) != bits)
                kind = (flags & (A_WRITE | A_ATOMIC)) && (word >> l->device & 1) ? F_READ_ONLY : F_NO_ACCESS;
            else kind = written ? F_NONE : F_UNINITIALISED;
            where = kind == F_OUT_OF_BOUNDS ? outside : kind == F_UNINITIALISED ? unwritten : addr;
        }
    }
    if (kind == F_NONE) return 0;  // all uninitialised elements are never read: compilers load more than they use
    if (kind == F_UNINITIALISED) value = copying_to(l, where);
    fault(l, t, kind, site, where, size, flags, value);
    return 1;
}

// Checks the shadow bytes of an access: its bytes must be addressable, unless the whole granule is, and initialised if
// the access reads. With `marks`, marks the bytes as initialised. Returns 1 if the access is refused.
template <class Word> FN u32 shadow_refuses(u64 addr, u32 kind, u32 read, u32 marks) {
    Word* s = (Word*)addr;
    Word every = (Word)0x0101010101010101ull;
    Word need = kind & KIND_FULL ? 0 : every;
    if (read && !(kind & KIND_INITIALISED)) need |= every * 2;
    if ((*s & need) != need) return 1;
    if (marks) *s = every * 3;
    return 0;
}

// Asks the engine's Python code whether an interrupt is pending; if so, the launch ends.
FAR u32 interrupted(Thread* t, u32 site) {
    if (!rt_call(t->launch->engine->print, 0)) return 0;
    fault(t->launch, t, F_INTERRUPTED, site, 0, 0, 0, 0);
    return 1;
}

// Called when a thread has used up its budget of accesses. Returns 0 and a new budget, or 1 if the launch has to end.
FAR u32 refuel(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Engine* e = t->launch->engine;
    u64 rest = e->loop_limit - e->tank;
    if (!rest) {
        fault(t->launch, t, F_ENDLESS, site, addr, size, flags, e->loop_limit);
        return 1;
    }
    e->fuel = rest < FUEL ? rest : FUEL;
    e->tank += e->fuel;
    return interrupted(t, site);
}

// Returns 1, after recording a fault, if the thread must not make this access. *found is the access word of its
// granule. For local memory and parameters only the bounds are checked.
FN u32 refused(Thread* t, u64 addr, u32 size, u32 flags, u32 site, u32* found) {
    Launch* l = t->launch;
    u64 off = addr - l->window_base;
    if (off >= l->window_bytes || (addr & (size - 1))) return bad_access(t, addr, size, flags, site);
    u32 word = *found = *(u32*)(l->access_base + (off >> GRANULE_SHIFT) * 4);
    u32 write = flags & (A_WRITE | A_ATOMIC), read = !write || (flags & A_ATOMIC);
    u32 bits = flags & A_ATOMIC ? 0x101 : write ? 0x100 : 1;
    if (((word >> l->device) & bits) != bits) return bad_access(t, addr, size, flags, site);
    u32 kind = word >> 24;
    u32 type = kind & 0x3F;
    if (type >= K_SHARED) {
        if (!own_range(t, type, addr, size, flags)) return bad_access(t, addr, size, flags, site);
        if (type != K_SHARED) return 0;
        kind |= KIND_FULL;
    }
    u64 shadow = addr + SHADOW_OFFSET;
    u32 bad = 0, marks = write && !(flags & A_LATER);
    if (size == 4) bad = shadow_refuses<u32>(shadow, kind, read, marks);
    else if (size == 8) bad = shadow_refuses<u64>(shadow, kind, read, marks);
    else if (size == 2) bad = shadow_refuses<unsigned short>(shadow, kind, read, marks);
    else if (size == 1) bad = shadow_refuses<u8>(shadow, kind, read, marks);
    else {
        LOOP for (u32 i = 0; i < size; i += 8) bad |= shadow_refuses<u64>(shadow + i, kind, read, marks);
    }
    return bad ? bad_access(t, addr, size, flags, site) : 0;
}

// Checks and counts an access of a thread, and passes it to delayed stores and the race detector. Returns 1 after
// recording a fault.
FN u32 access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u32 word;
    if (refused(t, addr, size, flags, site, &word)) return 1;
    u32 type = word >> 24 & 0x3F, write = flags & (A_WRITE | A_ATOMIC), read = !write || (flags & A_ATOMIC);
    if (type > K_SHARED) return 0;
    Engine* e = l->engine;
    if (!--e->fuel && refuel(t, addr, size, flags, site)) return 1;
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
    if (e->delay && (flags & A_STRONG || (write && type != K_SHARED))) delay_access(t, addr, size, flags, type == K_SHARED);
    if (flags & A_STRONG) {
        u32 only_reads = !write || (flags & A_SWAP && !swap_succeeds(t, addr, size));
        u32 kind = only_reads ? V_LOAD : flags & A_ATOMIC ? V_ATOMIC : V_STORE;
        if (!e->fruitless) note(l, t->block, t->linear, kind, site, addr, kind == V_STORE ? 0 : low_of(addr, size), flags);
    }
    if (e->race && (!e->idle || write)) race_access(t, addr, size, flags, site);
    if (flags & A_STRONG) e->fruitless = e->idle = 0;
    return 0;
}

// Checks and counts one access of `size` bytes (a power of two up to 32). Returns 0 if the access is allowed.
API u32 rt_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) { return access(t, addr, size, flags, site); }

// rt_access for the most frequent plain loads and stores.
API u32 rt_read4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, 0, site); }
API u32 rt_read8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, 0, site); }
API u32 rt_read16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, 0, site); }
API u32 rt_write4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, A_WRITE, site); }
API u32 rt_write8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, A_WRITE, site); }
API u32 rt_write16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, A_WRITE, site); }

// Called after each LOOP_SLICE rounds of loops without accesses. Returns 0 if the thread may continue.
API u32 rt_loop(Thread* t, u32 site) {
    Engine* e = t->launch->engine;
    e->rounds += LOOP_SLICE;
    if (e->rounds < e->loop_limit) return e->rounds % FUEL ? 0 : interrupted(t, site);
    fault(t->launch, t, F_ENDLESS, site, ENDLESS_ROUNDS, 0, 0, e->loop_limit);
    return 1;
}

API void rt_fence(Thread* t, u32 flags, u32 site) {
    Launch* l = t->launch;
    if (l->engine->delay) delay_fence(t, flags);
    if (flags & FENCE_ASYNC && l->engine->race) race_proxy_fence(t);
    if (flags & FENCE_ALIAS && l->engine->race && l->engine->teams->count) race_alias_fence(t);
    if (flags & FENCE_PROXY) return;
    note(l, t->block, t->linear, V_FENCE, site, 0, 0, flags);
    u32 order = flags & FENCE_SC ? ORDER_ACQ_REL : flags >> ORDER_SHIFT & 3;
    if (!l->engine->race) return;
    if (flags & FENCE_INIT) race_init_fence(t);
    else race_fence(t, flags >> SCOPE_SHIFT & 3, order & ORDER_ACQUIRE, order & ORDER_RELEASE);
}

// griddepcontrol.launch_dependents: a block has triggered when any of its threads did.
API void rt_trigger(Thread* t) {
    Block* b = t->block;
    if (!b->triggered) {
        b->triggered = 1;
        t->launch->triggered++;
        note(t->launch, b, t->linear, V_TRIGGER, t->site, 0, 0, 0);
    }
}

// Virtual time, in nanoseconds (%globaltimer) or cycles of the same length. It advances with each resume of a thread
// and with each read of the clock. If one thread reads the clock again and again, the step of a read doubles each time.
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

// printf: the engine's Python code formats it.
API u32 rt_vprintf(Thread* t, u64 format, u64 args) {
    Print call = {t, format, args};
    return rt_call(t->launch->engine->print, &call);
}

// Called at the start of a recursive function. Returns 1, after recording a fault, if more calls could overflow the
// stack of the host.
API u32 rt_depth(Thread* t, u32 site) {
    u32 mark;
    u64 used = t->launch->engine->stack - (u64)&mark;
    if (used < STACK_LIMIT) return 0;
    fault(t->launch, t, F_STACK_OVERFLOW, site, 0, 0, 0, STACK_LIMIT >> 20);
    return 1;
}

// malloc and free, whose heap the engine's Python code keeps. To the race detector, free is a write of all bytes of the
// memory. It is no plain store (A_LATER), since plain stores of the same value may be accepted without an order.
API u64 rt_malloc(Thread* t, u64 size) {
    Heap call = {t, 0, size, HEAP_MALLOC, 0};
    if (t->launch->heap) rt_call(t->launch->heap, &call);
    return call.address;
}

API u32 rt_free(Thread* t, u64 addr, u32 site) {
    Launch* l = t->launch;
    Heap call = {t, addr, 0, HEAP_SIZE, 0};
    if (!addr) return 0;
    if (l->heap) rt_call(l->heap, &call);
    if (!call.nbytes) {
        fault(l, t, F_BAD_FREE, site, addr, 1, 0, 0);
        return 1;
    }
    if (l->engine->race) race_access(t, addr, (u32)call.nbytes, A_WRITE | A_LATER, site);
    call.kind = HEAP_FREE;
    rt_call(l->heap, &call);
    return 0;
}
