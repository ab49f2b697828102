// SPDX-License-Identifier: Apache-2.0
// The race detector's check of an access against the entries of the same bytes, and the record of the access.
#pragma once

#include "race_quick.cuh"

// Whether the current access conflicts with every later access with which the entry's access conflicts, as far as their
// strength and kind of address decide that.
FN u32 covers_strength(Access* access, Entry* e) {
    if (!(access->kind & N_WRITE) && via_multicast(access->site) != via_multicast(e->site)) return 0;
    if (!(access->kind & N_STRONG)) return 1;
    return (e->kind & N_STRONG) && e->variant == access->variant &&
           (e->kind >> ENTRY_SCOPE_SHIFT & 3) >= (access->kind >> ENTRY_SCOPE_SHIFT & 3);
}

// Whether a read by the read-only path may miss the write of an entry: that path may return what memory held when the
// launch began.
FN u32 stale(Access* access, Entry* e, u32 lanes) {
    if (!(access->flags & A_NC) || !(e->kind & N_WRITE)) return 0;
    if (knows(access->race, access->launch->start, e->op, e->block, e->warp, lanes, e->time)) return 0;
    return !knows(access->race, access->launch->primary, e->op, e->block, e->warp, lanes, e->time);
}

// Whether a bulk copy reads what its block has written by the generic proxy, without a fence.proxy.async in between.
FN u32 unfenced(Access* access, Entry* e, u32 lanes) {
    if (!(access->flags & A_BULK) || !same_block(access, e->op, e->block)) return 0;
    return !knows(access->race, access->block_state->proxy_fence_clock, e->op, e->block, e->warp, lanes, e->time);
}

// Whether the access of an entry used the other kind of address (race.cuh), without a fence.proxy.alias in between.
FN u32 unaliased(Access* access, Entry* e, u32 lanes) {
    if (via_multicast(access->site) == via_multicast(e->site) || morally_strong(access, e)) return 0;
    if (e->block & AGENT_PENDING) return 0;  // clocks have no TAG_ALIASED items for copies
    u32 own = access->thread_state && same_block(access, e->op, e->block) && e->warp == access->warp &&
              e->time < access->thread_state->alias_fence_time;
    if (own) lanes &= ~access->lane_bit;
    return lanes && !knows(access->race, access->clock, e->op, e->block | TAG_ALIASED, e->warp, lanes, e->time);
}

// If the current access is by a bulk copy, sets the members of its entry as AGENT_BULK in race.cuh says.
FN void set_bulk_agent(Access* access, Entry* e) {
    if ((access->agent & AGENT_BULK) != AGENT_BULK) return;
    e->warp = access->copy_number % BULK_LANES / 32;
    e->lanes = 1u << access->copy_number % 32;
    e->time = 1 + access->copy_number / BULK_LANES;
    e->serial = access->thread;
}

// Whether two accesses are plain stores of one block, which are a race only if the second changes the bytes.
FN u32 doubtful(Access* access, Entry* e) {
    if (access->race->strict || !access->is_plain || !(access->kind & N_WRITE) || e->kind != N_WRITE || e->variant)
        return 0;
    return same_block(access, e->op, e->block) && via_multicast(access->site) == via_multicast(e->site);
}

// Whether the entry of an atomic need not be kept, as the current atomic continues the chain of `v` (counters in
// race.cuh). *other is set when the last atomic of another block has been found, which is kept.
FN u32 superseded(Access* access, Location* v, Entry* e, u32* other) {
    if (!(e->kind & N_ATOMIC) || e->op != access->op || e->site != access->site || e->kind != access->kind) return 0;
    if (e->bytes != v->bytes || e->serial - v->chain_begin > v->serial - v->chain_begin) return 0;
    if (e->block == access->block) return 1;
    u32 met = *other;
    *other = 1;
    return met;
}

// Checks the current access to bytes of one line against the entries of the line, and records it.
FAR void check_line(Access* access, u64 addr, u32 mask) {
    Race* r = access->race;
    Ref* cell = list_at(r, addr, &mask);
    if (!mask) return;
    Ref* pool = pool_at(r, addr);
    u32 write = access->kind & N_WRITE,
        own = access->agent == access->block;  // own: not asynchronous, so it can publish clocks
    u32 spread = access->is_plain ? spread_of(FFS(access->lane_bit) - 1, mask) : 0;
    r->change_count += write;
    if (write && access->is_plain)
        access->variant =
            read_by(r, *cell, access->op, access->block, access->warp, access->lane_bit, access->time, mask)
                ? VARIANT_AFTER_READ
                : 0;
    Location *location = 0, *chain = 0;
    if (access->kind & N_STRONG && own) {
        u32 read = !write || (access->kind & N_ATOMIC);
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)arena_at(r, ref))->next) {
            Entry* e = (Entry*)arena_at(r, ref);
            if (!(e->kind & N_LOCATION) || !(e->bytes & mask)) continue;
            if (e->bytes == mask) location = (Location*)e;
            else if (read) record_missed_flag(access, e->op, e->block, X_FLAG_SIZES, e->site, 0);
        }
        if (location && read) {
            if (!(access->flags & A_REDUCTION)) learn_published(access, location);
            record_observation(access, location);
            if (write && morally_strong(access, location)) chain = location;
        }
    }
    Ref *link = cell, *behind = cell;  // behind: the link after all writes, where a read is inserted
    u32 merged = 0, locations = 0, oldest = r->write_serial + 1, other = 0;
    // A read checks all other reads of the list in three cases: when a read of another operation can be dropped, as
    // when a kernel is launched again; rarely and at random, since a fixed interval could miss some lists for ever; and
    // when it is a poll that sees the same value again, which then finds the entry of its warp. Otherwise polls would
    // make the list grow without bound.
    r->random = r->random * 1664525 + 1013904223;
    u32 readers = 0, looks_at_all = write || access->repeats_poll || r->random >> 26 == 0;
    LOOP while (*link) {
        Entry* e = (Entry*)arena_at(r, *link);
        u32 kind = e->kind, both = e->bytes & mask;
        if (kind & N_LOCATION) {
            locations |= both;
            link = behind = &e->next;
            continue;
        }
        if (!(kind & N_WRITE)) {
            if (!write && !looks_at_all && ++readers > CHECKED_READS) break;
        }
        u32 same_warp = same_block(access, e->op, e->block) && e->warp == access->warp;
        u32 lanes = both ? lanes_at(e, both) : e->lanes, others = same_warp ? lanes & ~access->lane_bit : lanes;
        u32 known = !others;
        u32 alike = same_warp && access->is_plain && e->time == access->time && kind == access->kind && e->site == access->site && e->variant == access->variant;
        if (both && (write || kind & N_WRITE)) {
            if (!known) known = ordered(access, e, others);
            u64 at_addr = (addr & ~15ull) + FFS(both) - 1;
            if (!known) {
                if (morally_strong(access, e)) {
                    known = chain && superseded(access, chain, e, &other);
                } else if (!doubtful(access, e)) {
                    if (!observed(access, cell, e)) report_race(access, e, others, at_addr, 0);
                    known = 1;
                    alike = 0;
                } else {
                    report_doubt(access, e, others, at_addr, both);
                }
            } else if (stale(access, e, lanes)) {
                report_race(access, e, lanes, at_addr, X_READ_ONLY_PATH);
            } else if (unfenced(access, e, lanes)) {
                report_race(access, e, lanes, at_addr, X_PROXY);
            } else if (unaliased(access, e, lanes)) {
                report_race(access, e, lanes, at_addr, X_ALIAS);
            }
        }
        if (alike && !(kind & N_COMMON) && !merged && merge_lane(e, access->lane_bit, mask, spread)) {
            merged = 1;
            link = &e->next;
            if (kind & N_WRITE) behind = link;
            continue;
        }
        if (both) {
            if (!write && !(kind & N_WRITE)) {
                if (same_warp) {
                    if (e->time == access->time && kind == access->kind && e->bytes == mask && e->site == access->site && !merged && !access->is_plain) {
                        e->lanes |= access->lane_bit;
                        merged = 1;
                        link = &e->next;
                        continue;
                    }
                    if (!known && (e->lanes & access->lane_bit) && both == e->bytes && covers_strength(access, e)) e->lanes &= ~access->lane_bit;
                } else if (e->op != access->op && covers_strength(access, e)) {
                    known = ordered(access, e, others);
                    looks_at_all |= known;
                }
            }
            if (write && access->is_plain && !access->variant && irreplaceable(r, e, access->op, access->block, access->block_state->barrier_time)) known = 0;
            if (known && (write || !(kind & N_WRITE)) && covers_strength(access, e)) {
                if (both == e->bytes) {
                    drop_entry(r, pool, link);
                    continue;
                }
                if (kind & N_COMMON) e = unshare(r, pool, link);
                e->lanes = lanes_at(e, e->bytes & ~both);
                e->bytes &= ~both;
            }
        }
        if (e->kind & N_COMMON) e = unshare(r, pool, link);
        link = &e->next;
        if (e->kind & N_WRITE) {
            behind = link;
            if ((e->kind & N_STRONG) && (s32)(e->serial - oldest) < 0) oldest = e->serial;
        }
    }
    if (write && locations) {  // other locations with these bytes have an older last write: drop them
        LOOP for (link = cell; *link;) {
            Entry* e = (Entry*)arena_at(r, *link);
            if ((e->kind & N_LOCATION) && e->bytes & mask && e != location) drop_entry(r, pool, link);
            else link = &e->next;
        }
    }
    if (write && (access->kind & N_STRONG)) r->write_serial++;
    if (!merged) {
        if (!*cell && access->shared_entry && mask == 0xFFFF) {
            *cell = access->shared_entry;
        } else {
            Ref ref = take_entry(r, pool);
            Entry* e = (Entry*)arena_at(r, ref);
            Ref* to = write ? cell : behind;
            e->op = access->op;
            e->block = access->agent;
            e->time = access->time;
            e->lanes = access->lane_bit;
            e->bytes = (unsigned short)mask;
            e->warp = access->warp;
            e->kind = (u8)access->kind;
            e->site = access->site;
            e->next = *to;
            e->variant = access->variant;
            if (access->kind & N_STRONG) e->serial = r->write_serial;
            else e->spread = spread;
            *to = ref;
            if (access->agent != access->block) set_bulk_agent(access, e);
        }
    }
    if (write && (access->kind & N_STRONG) && own) write_location(access, cell, location, mask, oldest);
}

FN void check_range(Access* access, u64 addr, u64 end) {
    LOOP while (addr < end) {
        check_line(access, addr, line_mask(addr, end));
        addr = (addr & ~15ull) + 16;
    }
}

// Describes an access by a block as a whole, at its end.
FN void begin_block_access(Access* access, Launch* l, Block* b) {
    access->race = l->engine->race;
    access->launch = l;
    access->block_state = b->race;
    access->thread_state = 0;
    access->op = l->op;
    access->block = access->agent = b->index;
    access->warp = access->thread = access->lane_bit = access->time = access->scope = access->variant = access->acquires = access->releases = access->flags = access->repeats_poll = access->is_plain = 0;
    access->kind = N_WRITE;
    access->site = NO_SITE;
    access->device = l->device;
    access->clock = b->race->end_clock;
    access->shared_entry = 0;
    access->event_count = l->engine->event_count;
}

// Describes an access by a thread. The caller adds what the access is.
FN void begin_access(Access* access, Thread* t) {
    Launch* l = t->launch;
    Block* b = t->block;
    access->race = l->engine->race;
    if (access->race->doubt_count) settle_doubts(access->race);
    access->launch = l;
    access->block_state = b->race;
    access->thread_state = race_thread(b, t->linear);
    access->op = l->op;
    access->block = access->agent = b->index;
    access->warp = t->warp;
    access->lane_bit = 1u << t->lane;
    access->time = access->thread_state->time;
    access->device = l->device;
    access->clock = access->thread_state->clock;
    access->shared_entry = 0;
    access->event_count = l->engine->event_count;
    access->thread = t->linear;
    access->repeats_poll = l->engine->fruitless;
    access->is_plain = 0;
}

// For an access to the shared memory of another block of the cluster: checks that the start of that block is ordered
// before the access, by a barrier of the cluster for example.
FAR void race_other_block(Access* access, Thread* t, u64 addr) {
    u64 off = addr - t->block->cluster_shared_base;
    if (off >= access->launch->cluster_window) return;
    Block* b = block_of_rank(access->launch, t->block, (u32)(off >> CLUSTER_SHIFT));
    if (b == t->block || knowledge(access->race, access->clock, access->op, b->index, 31, 1, 0) != KNOWS_NONE) return;
    Entry e;
    e.op = access->op;
    e.block = b->index;
    e.time = e.warp = e.variant = 0;
    e.lanes = 1;
    e.kind = N_WRITE;
    e.site = NO_SITE;
    report_race(access, &e, 1, addr, X_CLUSTER_START);
}

// Whether a compare-and-swap finds the value that it compares with. If not, it is only a read.
FN u32 swap_succeeds(Thread* t, u64 addr, u32 size) {
    return low_of(addr, size) == t->op_value && (size < 16 || high_of(addr, size) == t->op_seen);
}

// Checks and records an access of a thread, which is about to be made.
FAR void race_access(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    u32 quick = race_quick(t, addr, size, flags, site);
    if (quick == 1) return;
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return;
    access.repeats_poll |= quick == CHECK_ALL_READS;
    u32 order = flags >> ORDER_SHIFT & 3, strong = flags & A_STRONG, elements = flags >> ELEMENTS_SHIFT & 3;
    u32 unread = flags >> UNREAD_SHIFT;
    u32 writes = flags & (A_WRITE | A_ATOMIC);
    if (flags & A_SWAP && !swap_succeeds(t, addr, size)) writes = 0;
    access.site = flags & A_MULTIMEM ? site | VIA_MULTICAST : site;
    access.flags = flags;
    access.addr = addr;
    access.size = size;
    access.scope = strong ? flags >> SCOPE_SHIFT & 3 : 0;
    access.variant = strong ? FFS(size >> elements) - 1 : 0;
    access.is_plain = !(flags & NOT_PLAIN);
    u32 atomic_in = access.scope;
    if (flags & A_MBARRIER) {
        access.variant = strong ? VARIANT_MBARRIER : VARIANT_MBARRIER_INIT;
        if (strong && access.scope < SCOPE_CLUSTER) atomic_in = SCOPE_CLUSTER;
        if (!access.race->strict) access.scope = atomic_in;
    }
    access.kind = (writes ? N_WRITE : 0) | (flags & A_ATOMIC ? N_ATOMIC : 0) | (strong ? N_STRONG : 0) | atomic_in << ENTRY_SCOPE_SHIFT;
    access.acquires = order & ORDER_ACQUIRE;
    access.releases = order & ORDER_RELEASE;
    if ((flags & A_VOLATILE) && !access.race->strict) access.acquires = 1;
    u32 each = size >> elements;
    if (access.launch->cluster_size > 1) race_other_block(&access, t, addr);
    LOOP for (u64 a = addr; a < addr + size; a += each, unread >>= 1)
        if (!(unread & 1)) check_range(&access, a, a + each);
    if (access.releases && (access.kind & N_WRITE)) access.thread_state->time++;
}

// A fence of `scope` by a thread. `acquires`: it orders later accesses; `releases`: it orders earlier accesses.
FAR void race_fence(Thread* t, u32 scope, u32 acquires, u32 releases) {
    Access access;
    begin_access(&access, t);
    Race* r = access.race;
    if (r->exhausted) return;
    LOOP for (u32 k = 0; acquires && k <= scope; k++) {
        if (!access.thread_state->fence_acquire[k]) continue;
        learn(r, &access.thread_state->clock, access.thread_state->fence_acquire[k]);
        assign(r, &access.thread_state->fence_acquire[k], 0);
    }
    if (!releases) return;
    Ref all = all_known(&access);
    LOOP for (u32 k = 0; k <= scope; k++) assign(r, &access.thread_state->fence_release[k], retain(r, all));
    release(r, all);
    access.thread_state->time++;
}

// fence.proxy.async by a thread.
FAR void race_proxy_fence(Thread* t) {
    Access access;
    begin_access(&access, t);
    if (access.race->exhausted) return;
    Ref all = all_known(&access);
    learn(access.race, &access.block_state->proxy_fence_clock, all);
    release(access.race, all);
    access.thread_state->time++;
}
