// SPDX-License-Identifier: Apache-2.0
// Ranges of memory in the race detector: the accesses of copies and fills, memory that is freed or new, and memory that
// is not checked. Python calls the functions with the prefix rt_.
#pragma once

#include "race_access.cuh"

// New memory ----------------------------------------------------------------------------------------------------------

// Makes the detector check all bytes of a line from now on. `cell` is the line's cell, which has the bit UNCHECKED.
FAR void check_again(Race* r, Ref* cell) {
    Ref line = *cell & ~UNCHECKED;
    *cell = 0;
    if (!line) return;
    *cell = ((UncheckedLine*)arena_at(r, line))->list;
    give_piece(r, line, 0);
}

// Drops all entries of the lines that a range touches.
FAR void race_clear(Race* r, u64 addr, u64 nbytes) {
    r->change_count++;
    LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16) {
        Ref* cell = cell_at(r, a);
        if (!*cell) continue;
        if (*cell & UNCHECKED) check_again(r, cell);
        LOOP while (*cell) drop_entry(r, pool_at(r, a), cell);
    }
}

// Drops all entries of a range, which is new memory from now on.
API void rt_race_clear(Race* r, u64 addr, u64 nbytes) { race_clear(r, addr, nbytes); }

// Memory that is not checked ------------------------------------------------------------------------------------------

// Drops `bytes` from the entries of a line, and every location that has any of them.
FN void drop_bytes(Race* r, u64 addr, Ref* list, u32 bytes) {
    Ref* pool = pool_at(r, addr);
    LOOP for (Ref* link = list; *link;) {
        Entry* e = (Entry*)arena_at(r, *link);
        u32 rest = e->bytes & ~bytes;
        if (rest == e->bytes) {
            link = &e->next;
        } else if (e->kind & N_LOCATION || !rest) {
            drop_entry(r, pool, link);
        } else {
            if (e->kind & N_COMMON) e = unshare(r, pool, link);
            e->lanes = lanes_at(e, rest);
            e->bytes &= ~bytes;
            link = &e->next;
        }
    }
}

// Stops the checks of these bytes of a line.
FAR void uncheck_line(Race* r, u64 addr, u32 bytes) {
    Ref* cell = cell_at(r, addr);
    u32 checked = 0xFFFF;
    list_at(r, addr, &checked);
    checked &= ~bytes;
    if (!(*cell & UNCHECKED)) {
        u32 size_class;
        Ref ref = take_piece(r, sizeof(UncheckedLine), &size_class);
        ((UncheckedLine*)arena_at(r, ref))->list = *cell;
        *cell = ref | UNCHECKED;
    }
    if (*cell == UNCHECKED) return;
    UncheckedLine* line = (UncheckedLine*)arena_at(r, *cell & ~UNCHECKED);
    line->bytes = 0xFFFF & ~checked;
    drop_bytes(r, addr, &line->list, line->bytes);
    if (checked) return;
    give_piece(r, *cell & ~UNCHECKED, 0);
    *cell = UNCHECKED;
}

// Stops the checks of a range, because a protocol accesses it without an order, on purpose.
API void rt_race_polled(Race* r, u64 addr, u64 nbytes) {
    r->change_count++;
    LOOP for (u64 a = addr; a < addr + nbytes; a = (a & ~15ull) + 16) uncheck_line(r, a, line_mask(a, addr + nbytes));
}

// Copies and fills ----------------------------------------------------------------------------------------------------

// Fills in an Access for a copy or fill. `clock` is what the operation knows.
FN void begin_range_access(Access* access, Race* r, u32 op, u32 clock, u32 write, u64 now) {
    access->race = r;
    access->launch = 0;
    access->block_state = 0;
    access->thread_state = 0;
    access->op = op;
    access->block = access->agent = access->warp = access->thread = 0;
    access->flags = access->scope = access->acquires = access->releases = 0;
    access->variant = access->repeats_poll = access->is_plain = 0;
    access->lane_bit = access->time = 1;
    access->site = NO_SITE;
    access->kind = write ? N_WRITE : 0;
    access->device = r->ops[op].device;
    access->clock = clock;
    access->event_count = now;
    access->shared_entry = 0;
}

// Makes the entry that the fully accessed lines of a copy or fill share. It is never freed, since nothing counts the
// lines that still have it.
FN Ref new_shared_entry(Access* access) {
    u32 size_class;
    Ref ref = take_piece(access->race, sizeof(Entry), &size_class);
    Entry* e = (Entry*)arena_at(access->race, ref);
    e->op = access->op;
    e->block = 0;
    e->time = e->lanes = 1;
    e->bytes = 0xFFFF;
    e->warp = 0;
    e->kind = (u8)(access->kind | N_COMMON);
    e->site = NO_SITE;
    e->next = e->serial = e->variant = 0;
    return ref;
}

// Checks and records the access of a copy or fill to a range of the window. `clock` is what the operation knows.
// `write` is a Range; with RANGE_FREE, lines without entries are skipped. `now` is the number of events so far.
API void rt_race_range(Race* r, u32 op, u32 clock, u64 addr, u64 nbytes, u32 write, u64 now) {
    if (r->exhausted) return;
    Access access;
    begin_range_access(&access, r, op, clock, write, now);
    access.addr = addr;
    access.size = nbytes > 0xFFFFFFFFull ? 0xFFFFFFFFu : (u32)nbytes;
    if (write == RANGE_FREE) {
        LOOP for (u64 a = addr & ~15ull; a < addr + nbytes; a += 16)
            if (*cell_at(r, a)) check_line(&access, a, 0xFFFF);
        return;
    }
    access.shared_entry = new_shared_entry(&access);
    check_range(&access, addr, addr + nbytes);
}
