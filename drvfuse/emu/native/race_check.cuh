// SPDX-License-Identifier: Apache-2.0
// The check of an access against the entries of its bytes, and the record of the access.
//
// check_line does both for the bytes of one line, in this order:
//
//     1. A strong read learns what is published at its location, and its observation is recorded.
//
//     2. The access is compared with each entry of the same bytes, if one of the two is a write. The pair is a race, or
//     a doubt (race_report.cuh), if the two are neither ordered nor morally strong, and no observation orders them.
//
//     3. Entries that the access makes superfluous are dropped. If the access can share an entry, its lane is added to
//     the entry.
//
//     4. If there is no entry to share, the access gets a new one.
//
//     5. A strong write becomes the last write of its location, and publishes there.
#pragma once

#include "race_quick.cuh"

// Where order is not enough -------------------------------------------------------------------------------------------

// Whether a read by the read-only path may miss the write of an entry: that path may return what memory held when the
// launch began.
FN u32 stale(Access* access, Entry* e, u32 lanes) {
    if (!(access->flags & A_NC) || !(e->kind & N_WRITE)) return 0;
    if (knows(access->race, access->launch->start, e->op, e->block, e->warp, lanes, e->time)) return 0;
    return !knows(access->race, access->launch->primary, e->op, e->block, e->warp, lanes, e->time);
}

// Whether a bulk copy reads what its block has written through the generic proxy, without a fence.proxy.async between
// the two.
FN u32 unfenced(Access* access, Entry* e, u32 lanes) {
    if (!(access->flags & A_BULK) || !same_block(access, e->op, e->block)) return 0;
    return !knows(access->race, access->block_state->proxy_fence_clock, e->op, e->block, e->warp, lanes, e->time);
}

// Whether one of the two accesses, that of an entry and the current one, used a multicast address and the other one a
// unicast address, without a fence.proxy.alias between the two.
FN u32 unaliased(Access* access, Entry* e, u32 lanes) {
    if (via_multicast(access->site) == via_multicast(e->site) || morally_strong(access, e)) return 0;
    // Accesses of asynchronous copies are not checked, as no clock has TAG_ALIASED items for them.
    if (e->block & AGENT_PENDING) return 0;
    u32 own_warp = access->thread_state && same_block(access, e->op, e->block) && e->warp == access->warp &&
                   e->time < access->thread_state->alias_fence_time;
    if (own_warp) lanes &= ~access->lane_bit;
    return lanes && !knows(access->race, access->clock, e->op, e->block | TAG_ALIASED, e->warp, lanes, e->time);
}

// Reports a race with an entry that is ordered before the current access, if that order is not enough.
FN void check_ordered(Access* access, Entry* e, u32 lanes, u64 addr) {
    if (stale(access, e, lanes)) report_race(access, e, lanes, addr, X_READ_ONLY_PATH);
    else if (unfenced(access, e, lanes)) report_race(access, e, lanes, addr, X_PROXY);
    else if (unaliased(access, e, lanes)) report_race(access, e, lanes, addr, X_ALIAS);
}

// Conflicts -----------------------------------------------------------------------------------------------------------

// Whether an entry and the current access are plain stores of one block, which race only if the second store changes
// the bytes.
FN u32 doubtful(Access* access, Entry* e) {
    if (access->race->strict || !access->is_plain || !(access->kind & N_WRITE) || e->kind != N_WRITE || e->variant)
        return 0;
    return same_block(access, e->op, e->block) && via_multicast(access->site) == via_multicast(e->site);
}

// Whether `e` is the entry of an atomic that can be dropped, because it belongs to the chain of `v`, which the current
// atomic continues ("Chains of atomics" in race_entry.cuh). Of such entries by other blocks, the first one in the list
// is kept, since it is the newest; *other_block_kept is set when it is found.
FN u32 superseded(Access* access, Location* v, Entry* e, u32* other_block_kept) {
    if (!(e->kind & N_ATOMIC) || e->op != access->op || e->site != access->site || e->kind != access->kind) return 0;
    if (e->bytes != v->bytes || e->serial - v->chain_begin > v->serial - v->chain_begin) return 0;
    if (e->block == access->block) return 1;
    u32 found_before = *other_block_kept;
    *other_block_kept = 1;
    return found_before;
}

// Compares the current access with a conflicting entry, and records a race or a doubt (race_report.cuh). `overlap` are
// the bytes of both, `lanes` the entry's lanes that touched them, and `others` these lanes without the lane of the
// current access, if that is of the same warp. `chain` is the location whose chain the access continues, or null.
// Returns 1 if the entry can be dropped, since its access is ordered, superseded or reported. *may_merge is cleared if
// the two must not share an entry.
FN u32 check_conflict(Access* access, Ref* cell, Entry* e, u32 overlap, u32 lanes, u32 others, u64 line,
                      Location* chain, u32* other_block_kept, u32* may_merge) {
    u64 addr = line + FFS(overlap) - 1;
    if (!others || ordered(access, e, others)) {
        check_ordered(access, e, lanes, addr);
        return 1;
    }
    if (morally_strong(access, e)) return chain && superseded(access, chain, e, other_block_kept);
    if (doubtful(access, e)) {
        report_doubt(access, e, others, addr, overlap);
        return 0;
    }
    if (!observed(access, cell, e)) report_race(access, e, others, addr, 0);
    *may_merge = 0;
    return 1;
}

// Whether the current access can replace the entry, judged by their strength and by the kind of address (unicast or
// multicast): every later access that conflicts with the entry's access must also conflict with the current one.
FN u32 covers_strength(Access* access, Entry* e) {
    if (!(access->kind & N_WRITE) && via_multicast(access->site) != via_multicast(e->site)) return 0;
    if (!(access->kind & N_STRONG)) return 1;
    return (e->kind & N_STRONG) && e->variant == access->variant && scope_of(e->kind) >= scope_of(access->kind);
}

// Locations -----------------------------------------------------------------------------------------------------------

// Returns the location with exactly these bytes, or null. If `reads`, also records, for reports, each other location
// that overlaps these bytes, since the read learns nothing there.
FN Location* find_location(Access* access, Ref* cell, u32 mask, u32 reads) {
    Race* r = access->race;
    Location* found = 0;
    LOOP for (Ref ref = *cell; ref; ref = ((Entry*)arena_at(r, ref))->next) {
        Entry* e = (Entry*)arena_at(r, ref);
        if (!(e->kind & N_LOCATION) || !(e->bytes & mask)) continue;
        if (e->bytes == mask) found = (Location*)e;
        else if (reads) record_missed_flag(access, e->op, e->block, X_FLAG_SIZES, e->site, 0);
    }
    return found;
}

// Drops the locations other than `kept` that have any of these bytes. The write that they record is no longer the last
// one.
FN void drop_other_locations(Race* r, Ref* cell, Ref* pool, u32 mask, Location* kept) {
    LOOP for (Ref* link = cell; *link;) {
        Entry* e = (Entry*)arena_at(r, *link);
        if ((e->kind & N_LOCATION) && e->bytes & mask && e != kept) drop_entry(r, pool, link);
        else link = &e->next;
    }
}

// The record of the access --------------------------------------------------------------------------------------------

// If a bulk copy makes the current access, stores the number of the copy in the entry, as the comment of AGENT_BULK
// (race_entry.cuh) says.
FN void set_bulk_agent(Access* access, Entry* e) {
    if ((access->agent & AGENT_BULK) != AGENT_BULK) return;
    e->warp = access->copy_number % BULK_LANES / 32;
    e->lanes = 1u << access->copy_number % 32;
    e->time = 1 + access->copy_number / BULK_LANES;
    e->serial = access->thread;
}

// Inserts a new entry for the current access at a link.
FN void add_entry(Access* access, Ref* pool, Ref* link, u32 mask, u32 spread) {
    Race* r = access->race;
    Ref ref = take_entry(r, pool);
    Entry* e = (Entry*)arena_at(r, ref);
    e->op = access->op;
    e->block = access->agent;
    e->time = access->time;
    e->lanes = access->lane_bit;
    e->bytes = (unsigned short)mask;
    e->warp = access->warp;
    e->kind = (u8)access->kind;
    e->site = access->site;
    e->next = *link;
    e->variant = access->variant;
    if (access->kind & N_STRONG) e->serial = r->write_serial;
    else e->spread = spread;
    *link = ref;
    if (access->agent != access->block) set_bulk_agent(access, e);
}

// Adds the lane of a strong read to an entry of its warp, if the entry records a read of the same time, kind, bytes and
// site. Returns 1 if it did.
FN u32 merge_strong_read(Access* access, Entry* e, u32 mask) {
    if (access->is_plain || e->time != access->time || e->kind != access->kind) return 0;
    if (e->bytes != mask || e->site != access->site) return 0;
    e->lanes |= access->lane_bit;
    return 1;
}

// Checks the current access to the bytes `mask` of the line of `addr` against the entries of the line, and records it.
FAR void check_line(Access* access, u64 addr, u32 mask) {
    Race* r = access->race;
    Ref* cell = list_at(r, addr, &mask);
    if (!mask) return;
    Ref* pool = pool_at(r, addr);
    u32 write = access->kind & N_WRITE, strong = access->kind & N_STRONG;
    // 0 if an asynchronous copy makes the access. Such an access neither learns nor publishes a clock at a location.
    u32 synchronous = access->agent == access->block;
    u32 spread = access->is_plain ? spread_of(FFS(access->lane_bit) - 1, mask) : 0;
    r->change_count += write;
    if (write && access->is_plain) {
        u32 after_read = read_by(r, *cell, access->op, access->block, access->warp, access->lane_bit, access->time, mask);
        access->variant = after_read ? VARIANT_AFTER_READ : 0;
    }

    // location: the location of the bytes of a strong access, or null. chain: the same location if the access is an
    // atomic that continues the location's chain of atomics, else null.
    Location *location = 0, *chain = 0;
    if (strong && synchronous) {
        u32 reads = !write || (access->kind & N_ATOMIC);
        location = find_location(access, cell, mask, reads);
        if (location && reads) {
            if (!(access->flags & A_REDUCTION)) learn_published(access, location);
            record_observation(access, location);
            if (write && morally_strong(access, location)) chain = location;
        }
    }

    Ref *link = cell, *after_writes = cell;  // after_writes: the link after the last write, where reads are inserted
    u32 merged = 0, location_bytes = 0, oldest_serial = r->write_serial + 1, other_block_kept = 0, read_count = 0;
    // A read is usually compared with CHECKED_READS other reads, but in three cases with all of them. First, once it has
    // replaced a read of another operation, as happens when a kernel is launched again. Second, rarely, at random. Both
    // remove old reads, so that the list does not grow without bound. Third, if it repeats a poll: then it finds and
    // shares the entry of its warp.
    u32 draw = draws_whole_list(r), checks_all_reads = write || access->repeats_poll || draw;
    LOOP while (*link) {
        Entry* e = (Entry*)arena_at(r, *link);
        u32 kind = e->kind, overlap = e->bytes & mask;
        if (kind & N_LOCATION) {
            location_bytes |= overlap;
            link = after_writes = &e->next;
            continue;
        }
        u32 both_read = !write && !(kind & N_WRITE);
        if (both_read && !checks_all_reads && ++read_count > CHECKED_READS) break;
        u32 same_warp = same_block(access, e->op, e->block) && e->warp == access->warp;
        u32 lanes = overlap ? lanes_at(e, overlap) : e->lanes, others = same_warp ? lanes & ~access->lane_bit : lanes;
        // 1 if the current access can replace the entry, since whoever knows the current access also knows the entry's
        // accesses. That is so if its lane has made all of them. The code below decides the other cases.
        u32 replaceable = !others;
        u32 may_merge = same_warp && access->is_plain && e->time == access->time && kind == access->kind &&
                        e->site == access->site && e->variant == access->variant;
        if (overlap && !both_read)
            replaceable = check_conflict(access, cell, e, overlap, lanes, others, addr & ~15ull, chain, &other_block_kept,
                                         &may_merge);
        if (may_merge && !(kind & N_COMMON) && !merged && merge_lane(e, access->lane_bit, mask, spread)) {
            merged = 1;
            link = &e->next;
            if (kind & N_WRITE) after_writes = link;
            continue;
        }
        if (overlap && both_read && same_warp) {
            if (!merged && merge_strong_read(access, e, mask)) {
                merged = 1;
                link = &e->next;
                continue;
            }
            if (!replaceable && (e->lanes & access->lane_bit) && overlap == e->bytes && covers_strength(access, e))
                e->lanes &= ~access->lane_bit;
        } else if (overlap && both_read && e->op != access->op && covers_strength(access, e)) {
            replaceable = ordered(access, e, others);
            checks_all_reads |= replaceable;
        }
        if (overlap && write && access->is_plain && !access->variant &&
            irreplaceable(r, e, access->op, access->block, access->block_state->barrier_time))
            replaceable = 0;
        if (overlap && replaceable && (write || both_read) && covers_strength(access, e)) {
            if (overlap == e->bytes) {
                drop_entry(r, pool, link);
                continue;
            }
            if (kind & N_COMMON) e = unshare(r, pool, link);
            e->lanes = lanes_at(e, e->bytes & ~overlap);
            e->bytes &= ~overlap;
        }
        if (e->kind & N_COMMON) e = unshare(r, pool, link);
        link = &e->next;
        if (e->kind & N_WRITE) {
            after_writes = link;
            if ((e->kind & N_STRONG) && (s32)(e->serial - oldest_serial) < 0) oldest_serial = e->serial;
        }
    }

    if (write && location_bytes) drop_other_locations(r, cell, pool, mask, location);
    if (write && strong) r->write_serial++;
    if (!merged && !*cell && access->shared_entry && mask == 0xFFFF) *cell = access->shared_entry;
    else if (!merged) add_entry(access, pool, write ? cell : after_writes, mask, spread);
    if (write && strong && synchronous) write_location(access, cell, location, mask, oldest_serial);
}

// Runs check_line for each line of a range.
FN void check_range(Access* access, u64 addr, u64 end) {
    LOOP while (addr < end) {
        check_line(access, addr, line_mask(addr, end));
        addr = (addr & ~15ull) + 16;
    }
}
