// SPDX-License-Identifier: Apache-2.0
// Accesses by multicast addresses: multimem.ld_reduce, .st and .red.
//
// A multicast address means one address in the memory of each device of its team; these addresses are its members
// (space/members.py). An access is checked at the multicast address, for alignment and the device's access rights, and
// then made at each member, in an order that the seed draws for each access (seed 0: the order of the devices). A store
// or reduction has the same operand at each member. A load combines the words of the members in that order. Each step
// is rounded to the precision that the instruction gives for sums (.acc), or else to the type. A sum in a wider
// precision is rounded to the type at its end. A NaN result is the type's canonical NaN, min and max return the number
// if one operand is a NaN, and -0 is less than +0.
//
// To the race detector and to the code of delayed stores (delay.cuh), the thread makes one access to each member, at
// the unicast address of the member.
#pragma once

#include "access.cuh"
#include "reduce.cuh"

// The range of multicast addresses in which an address lies, or null.
FN Team* team_of(Engine* e, u64 addr) {
    Teams* teams = e->teams;
    LOOP for (u64 i = 0; i < teams->count; i++)
        if (addr - teams->first[i].base < teams->first[i].nbytes) return &teams->first[i];
    return 0;
}

// The address of the memory that a device has bound at a multicast address; 0 if it has bound none.
FN u64 member_of(Team* team, u64 addr, u32 device) {
    u64 off = addr - team->base;
    u64 base = team->members[(off >> PIECE_SHIFT) * MEMBERS + device];
    return base ? base + (off & (1ull << PIECE_SHIFT) - 1) : 0;
}

// Returns the low 8 bytes of the value by which a poll finds out whether a word has changed: those of the word itself
// or, at a multicast address, a hash of the words of all members.
FAR u64 polled_low(Engine* e, u64 addr, u32 size) {
    Team* team = e->teams->count ? team_of(e, addr) : 0;
    if (!team) return low_of(addr, size);
    u64 all = 0;
    LOOP for (u32 device = 0; device < MEMBERS; device++) {
        u64 member = member_of(team, addr, device);
        if (member) all = hash(all + device + 1) ^ hash(low_of(member, size) + device) ^ hash(high_of(member, size) * 3);
    }
    return all;
}

// Combines `count` words of `bits` bits, one from each member, for multimem.ld_reduce. `how` has a Reduce, an Element
// and an Accumulate.
FN u64 reduce_word(u64* word, u32 count, u32 how, u32 bits) {
    u32 reduce = how & 15, element = how >> ELEMENT_SHIFT & 15, accumulate = how >> ACCUMULATE_SHIFT;
    u32 width = width_of(element);
    u64 out = word[0];
    if (width == 64 || element < ELEMENT_F32) {
        LOOP for (u32 i = 1; i < count; i++) out = combine_word(out, word[i], how, bits);
        return out;
    }
    out = 0;
    u64 mask = (1ull << width) - 1;
    LOOP for (u32 at = 0; at < bits; at += width) {
        float sum = real_of(word[0] >> at & mask, element);
        LOOP for (u32 i = 1; i < count; i++)
            sum = combine_reals(sum, real_of(word[i] >> at & mask, element), reduce, element, accumulate);
        out |= bits_of_real(sum, element) << at;
    }
    return out;
}

// The access ----------------------------------------------------------------------------------------------------------

// Returns 0, with the team of the address in *found, if the thread may access the address by multimem; else 1 after
// recording a fault.
FAR u32 multimem_refused(Thread* t, u64 addr, u32 size, u32 flags, u32 site, Team** found) {
    Launch* l = t->launch;
    Team* team = *found = team_of(l->engine, addr);
    u32 kind = 0;
    u64 value = 0;
    if (!team) {
        kind = F_NO_MULTICAST;
    } else if (addr & (size - 1)) {
        kind = F_MISALIGNED;
    } else {
        u32 rights = *(u32*)(l->access_base + (addr - l->window_base >> GRANULE_SHIFT) * 4) >> l->device;
        u32 bits = flags & A_ATOMIC ? 0x101 : flags & A_WRITE ? 0x100 : 1;
        if ((rights & bits) != bits) kind = flags & A_WRITE && rights & 1 ? F_READ_ONLY : F_NO_ACCESS;
        LOOP for (u32 device = 0; device < MEMBERS && !kind; device++)
            if (team->devices >> device & 1 && !member_of(team, addr, device)) value |= 1ull << device;
        if (!kind && value) kind = F_MULTICAST_UNBOUND;
    }
    if (kind) fault(l, t, kind, site, addr, size, flags, value);
    return kind != 0;
}

// Checks and counts the access at one member, and passes it to delay_access (delay.cuh) and to the race detector.
// Returns 1, after recording a fault, if the memory was freed or is read before it was written.
FAR u32 at_member(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    u32 word = *(u32*)(l->access_base + (addr - l->window_base >> GRANULE_SHIFT) * 4), kind = word >> 24, bad;
    u32 write = flags & A_WRITE, read = !write || flags & A_ATOMIC;
    if ((kind & 0x3F) == K_FREED) {
        fault(l, t, F_USE_AFTER_FREE, site, addr, size, flags, 0);
        return 1;
    }
    u64 shadow = addr + SHADOW_OFFSET;
    if (size == 4) bad = shadow_refuses<u32>(shadow, kind, read, write);
    else bad = shadow_refuses<u64>(shadow, kind, read, write);
    if (size == 16) bad |= shadow_refuses<u64>(shadow + 8, kind, read, write);
    if (bad) {
        fault(l, t, F_UNINITIALISED, site, addr, size, flags, 0);
        return 1;
    }
    if (!--e->fuel && refuel(t, addr, size, flags, site)) return 1;
    u32 owner = l->owner_class[word >> 16 & 0xFF];
    if (read) l->sites[site].reads[owner]++;
    if (write) {
        l->sites[site].writes[owner]++;
        if (!(flags & A_ATOMIC) && e->probing) note_write(e, addr, size);
    }
    if (e->delay && (write || flags & A_STRONG)) delay_access(t, addr, size, flags, 0);
    if (e->race && (!e->skips_check || write)) race_access(t, addr, size, flags, site);
    return 0;
}

// Stores the members' addresses in the order in which the access visits them, and returns their number.
FAR u32 draw_members(Thread* t, Team* team, u64 addr, u64* member) {
    Engine* e = t->launch->engine;
    u32 count = 0;
    LOOP for (u32 device = 0; device < MEMBERS; device++)
        if (team->devices >> device & 1) member[count++] = member_of(team, addr, device);
    u64 place = addr - t->launch->window_base + t->launch->device;
    u64 random = hash(hash(e->seed + e->clock * 0x9E3779B97F4A7C15ull) + place);
    LOOP for (u32 i = count; e->seed && i > 1; i--) {
        u32 j = (u32)(random % i);
        random = hash(random + i);
        u64 other = member[j];
        member[j] = member[i - 1];
        member[i - 1] = other;
    }
    return count;
}

// multimem.ld_reduce, .st (A_WRITE) or .red (A_WRITE and A_ATOMIC) of 4, 8 or 16 bytes. Returns 0, or 1 after recording
// a fault.
API u32 rt_multimem(Thread* t, u64 addr, u32 size, u32 flags, u32 how, u64 low, u64 high, u32 site) {
    Launch* l = t->launch;
    Engine* e = l->engine;
    Team* team;
    u64 member[MEMBERS], word[MEMBERS];
    u32 bits = size < 8 ? 32 : 64, write = flags & A_WRITE;
    if (multimem_refused(t, addr, size, flags, site, &team)) return 1;
    u32 count = draw_members(t, team, addr, member);
    l->sites[site].size = size;
    if (write) {
        l->sites[site].writes[OF_MULTICAST]++;
        e->quiet = 0;
        if (!(flags & A_STRONG)) t->polls = 0;
    } else {
        l->sites[site].reads[OF_MULTICAST]++;
    }
    LOOP for (u32 i = 0; i < count; i++)
        if (at_member(t, member[i], size, flags, site)) return 1;
    u32 is_event = flags & A_STRONG && !e->repeats_poll;
    if (flags & A_STRONG) e->repeats_poll = e->skips_check = 0;
    if (is_event && write) {
        u32 atomic = flags & A_ATOMIC;
        note(l, t->block, t->linear, atomic ? V_ATOMIC : V_STORE, site, addr, atomic ? low_of(member[0], size) : 0, flags);
    }
    LOOP for (u32 half = 0; half < (size == 16 ? 2 : 1); half++) {
        u64 value = half ? high : low;
        LOOP for (u32 i = 0; i < count; i++) {
            u64 at = member[i] + half * 8;
            word[i] = low_of(at, bits / 8);
            if (!write) continue;
            u64 now = flags & A_ATOMIC ? combine_word(word[i], value, how, bits) : value;
            if (bits == 32) *(u32*)at = (u32)now;
            else *(u64*)at = now;
        }
        if (write) continue;
        u64 result = reduce_word(word, count, how, bits);
        if (half) t->op_seen = result;
        else t->op_value = result;
    }
    if (is_event && !write) note(l, t->block, t->linear, V_LOAD, site, addr, t->op_value, flags);
    return 0;
}
