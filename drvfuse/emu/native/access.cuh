// SPDX-License-Identifier: Apache-2.0
// The checks and counters of every memory access of translated code.
//
// Each granule of 64 KiB has an access word, and each byte a shadow byte (abi/__init__.py, space/window.py). The
// function `refused` checks all bytes of an access together. If this check fails, bad_access looks at each byte to find
// out why.
#pragma once

#include "delay.cuh"
#include "fault.cuh"
#include "race_alias.cuh"
#include "race_cluster.cuh"

// Ranges --------------------------------------------------------------------------------------------------------------

// Whether an aligned access lies in the window.
FN u32 in_window(Launch* l, u64 addr, u32 size) {
    return addr - l->window_base < l->window_bytes && (addr & (size - 1)) == 0;
}

// The block, in a thread's cluster, whose shared memory contains a range; null if there is none.
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

// Whether the shared memory of a block of the cluster exists: from the first resume of a thread of the block to the
// exit of its last thread.
FN u32 present(Block* b) { return b->active && b->has_run && b->live; }

// Fault::value for F_CLUSTER_ABSENT: the index of the block, and why the block is absent (the enum Absent).
FN u64 absence(Block* b) { return (u64)b->index << 32 | (b->has_run ? ABSENT_EXITED : ABSENT_NOT_YET); }

// Whether a thread may access a range of memory of kind `type`: shared memory, local memory or parameters. Local memory
// must be the thread's own, and parameters those of its launch. Shared memory must be that of its block or, unless the
// instruction is on .shared::cta, that of another block of its cluster, if it exists (`present`).
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

// Refused accesses ----------------------------------------------------------------------------------------------------

// What the shadow bytes say of an access.
struct ShadowState {
    u64 outside, unwritten;     // the first byte that is not addressable, or was never written
    u32 is_inside, is_written;  // 1 if `outside`, or `unwritten`, does not exist
};

// Reads the shadow bytes of an access. Bytes that are loaded only into unused registers (UNREAD) need not be written.
FN ShadowState shadow_state(u64 addr, u32 size, u32 flags, u32 all_addressable) {
    ShadowState s = {addr, addr, 1, 1};
    u32 each = size >> (flags >> ELEMENTS_SHIFT & 3);
    LOOP for (u32 i = 0; i < size; i++) {
        u8 shadow = *(u8*)(addr + i + SHADOW_OFFSET);
        if (!all_addressable && !(shadow & SHADOW_ADDRESSABLE)) {
            if (s.is_inside) s.outside = addr + i;
            s.is_inside = 0;
        } else if (!(shadow & SHADOW_INITIALISED) && !(flags >> UNREAD_SHIFT >> i / each & 1)) {
            if (s.is_written) s.unwritten = addr + i;
            s.is_written = 0;
        }
    }
    return s;
}

// Returns the kind of fault that an access to memory of kind `type` makes, or F_NONE if the access is allowed. The
// access lies inside one granule, whose access word is `word`. For F_CLUSTER_ABSENT, stores Fault::value in *value.
FN u32 fault_kind(Thread* t, u64 addr, u32 size, u32 flags, u32 word, u32 type, ShadowState* s, u64* value) {
    Launch* l = t->launch;
    u32 bits = flags & A_ATOMIC ? 0x101 : flags & A_WRITE ? 0x100 : 1;
    u32 if_allowed = s->is_written ? F_NONE : F_UNINITIALISED;
    if (!s->is_inside) return F_OUT_OF_BOUNDS;
    if (addr & (size - 1)) return F_MISALIGNED;
    if (type == K_SHARED) {
        if (own_range(t, type, addr, size, flags)) return if_allowed;
        Block* b = shared_of(t, addr, size);
        if (b) *value = absence(b);
        return b && (flags >> SPACE_SHIFT & 15) != SPACE_SHARED ? F_CLUSTER_ABSENT : F_FOREIGN_SHARED;
    }
    if (type == K_LOCAL) return F_FOREIGN_LOCAL;
    if (type == K_PARAM) return flags & A_WRITE ? F_READ_ONLY : F_OUT_OF_BOUNDS;
    if (((word >> l->device) & bits) == bits) return if_allowed;
    return (flags & (A_WRITE | A_ATOMIC)) && (word >> l->device & 1) ? F_READ_ONLY : F_NO_ACCESS;
}

// Finds out why an access is refused, records the fault and returns 1. Returns 0 if the access is allowed after all: a
// load may include elements that the thread never uses, and memory of these may be uninitialised.
FAR u32 bad_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u64 off = addr - l->window_base;
    u32 kind = F_OUT_OF_BOUNDS;
    u64 where = addr, value = 0;
    if (off < l->window_bytes) {
        u32 word = *(u32*)(l->access_base + (off >> GRANULE_SHIFT) * 4);
        u32 type = word >> 24 & 0x3F, start = (u32)(addr & (1 << GRANULE_SHIFT) - 1);
        if (type == K_FREED) {
            kind = F_USE_AFTER_FREE;
        } else if (type == K_MULTICAST) {
            kind = F_MULTICAST_PLAIN;
        } else if (type && start + size <= 1 << GRANULE_SHIFT) {
            ShadowState s = shadow_state(addr, size, flags, word >> 24 & KIND_FULL || type >= K_SHARED);
            kind = fault_kind(t, addr, size, flags, word, type, &s, &value);
            where = kind == F_OUT_OF_BOUNDS ? s.outside : kind == F_UNINITIALISED ? s.unwritten : addr;
        }
    }
    if (kind == F_NONE) return 0;
    if (kind == F_UNINITIALISED) value = copying_to(l, where);
    fault(l, t, kind, site, where, size, flags, value);
    return 1;
}

// Checks --------------------------------------------------------------------------------------------------------------

// Checks the shadow bytes of an access; `kind` is the kind field of the granule's access word. The bytes must be
// addressable (not checked if `kind` has KIND_FULL). With `read`, they must also be initialised (not checked if `kind`
// has KIND_INITIALISED). Returns 1 if the access is refused. Otherwise returns 0 and, with `marks`, marks the bytes as
// initialised.
template <class Word> FN u32 shadow_refuses(u64 addr, u32 kind, u32 read, u32 marks) {
    Word* s = (Word*)addr;
    Word every = (Word)0x0101010101010101ull;
    Word need = kind & KIND_FULL ? 0 : every;
    if (read && !(kind & KIND_INITIALISED)) need |= every * 2;
    if ((*s & need) != need) return 1;
    if (marks) *s = every * 3;
    return 0;
}

// Returns 1, after recording a fault, if the thread must not make this access, else 0. Stores the access word of the
// granule in *found. For local memory and parameters, no shadow bytes are checked.
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

// Keeps the old value of a word that a thread is about to write in a probe. When the thread has suspended,
// settle_writes compares this value with memory.
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

// Checks and counts an access of a thread, and passes it to delay_access (delay.cuh) and to the race detector. Returns
// 0 if the access is allowed, or 1 after recording a fault.
FN u32 access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    u32 word;
    if (refused(t, addr, size, flags, site, &word)) return 1;
    u32 type = word >> 24 & 0x3F, write = flags & (A_WRITE | A_ATOMIC), read = !write || (flags & A_ATOMIC);
    Engine* e = l->engine;
    if (!--e->fuel && refuel(t, addr, size, flags, site)) return 1;
    if (type > K_SHARED) return 0;
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
        if (!e->repeats_poll) note(l, t->block, t->linear, kind, site, addr, kind == V_STORE ? 0 : low_of(addr, size), flags);
    }
    if (e->race && (!e->skips_check || write)) race_access(t, addr, size, flags, site);
    if (flags & A_STRONG) e->repeats_poll = e->skips_check = 0;
    return 0;
}

// Checks and counts one access of `size` bytes (a power of two up to 32). Returns 0 if the access is allowed, or 1
// after recording a fault.
API u32 rt_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) { return access(t, addr, size, flags, site); }

// rt_access for the most frequent plain loads and stores.
API u32 rt_read4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, 0, site); }
API u32 rt_read8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, 0, site); }
API u32 rt_read16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, 0, site); }
API u32 rt_write4(Thread* t, u64 addr, u32 site) { return access(t, addr, 4, A_WRITE, site); }
API u32 rt_write8(Thread* t, u64 addr, u32 site) { return access(t, addr, 8, A_WRITE, site); }
API u32 rt_write16(Thread* t, u64 addr, u32 site) { return access(t, addr, 16, A_WRITE, site); }
