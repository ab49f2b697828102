// SPDX-License-Identifier: Apache-2.0
// Accesses by multicast addresses: multimem.ld_reduce, .st and .red.
//
// A multicast address has no memory behind it but a member for each device of its team (space/members.py). The access is
// checked at the multicast address, for alignment and the device's access rights, and then made at each member, in an order
// that the seed draws for each access (0: that of the devices). A store or reduction is of the same bits everywhere. A load
// combines the members in that order, in the precision that the instruction names, or else in that of the type, rounding
// each time; a sum in a wider precision is rounded once, at its end. NaN results are the type's canonical NaN, min and max
// take the number where one is a NaN, and -0 is below +0.
//
// To the race detector, and to delayed stores, these are accesses of the thread to each member by an address of its own.
#pragma once

#include "access.cuh"

FN Team* team_of(Engine* e, u64 addr) {
    Teams* teams = e->teams;
    LOOP for (u64 i = 0; i < teams->count; i++)
        if (addr - teams->first[i].base < teams->first[i].nbytes) return &teams->first[i];
    return 0;
}

FN u64 member_of(Team* team, u64 addr, u32 device) {
    u64 off = addr - team->base;
    u64 base = team->members[(off >> PIECE_SHIFT) * MEMBERS + device];
    return base ? base + (off & (1ull << PIECE_SHIFT) - 1) : 0;
}

// What a poll compares: the word itself, or a hash of all members of a multicast address.
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

// Elements -----------------------------------------------------------------------------------------------------------------

FN float of_half(u32 x) {
    float r;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x));
    return r;
}

FN u32 to_half(float x) {
    u32 r;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r;
}

FN u32 to_bfloat(float x) {
    u32 r;
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r;
}

FN float of_fp8(u32 x, u32 is_e4m3) {
    u32 pair;
    if (is_e4m3) asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(pair) : "r"(x));
    else asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e5m2x2 %0, h;}" : "=r"(pair) : "r"(x));
    return of_half(pair & 0xFFFF);
}

FN u32 to_fp8(float x, u32 is_e4m3) {
    u32 r;
    if (is_e4m3) asm("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    else asm("{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, %1, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
    return r & 0xFF;
}

FN u32 width_of(u32 element) {
    if (element == ELEMENT_F16 || element == ELEMENT_BF16) return 16;
    if (element >= ELEMENT_E4M3) return 8;
    return element == ELEMENT_B64 || element == ELEMENT_U64 || element == ELEMENT_S64 || element == ELEMENT_F64 ? 64 : 32;
}

FN float real_of(u64 bits, u32 element) {
    if (element == ELEMENT_F32) return __uint_as_float((u32)bits);
    if (element == ELEMENT_F16) return of_half((u32)bits);
    if (element == ELEMENT_BF16) return __uint_as_float((u32)bits << 16);
    return of_fp8((u32)bits, element == ELEMENT_E4M3);
}

FN u64 bits_of_real(float x, u32 element) {
    if (element == ELEMENT_F32) return x != x ? 0x7FFFFFFFu : __float_as_uint(x);
    if (element == ELEMENT_F16) return to_half(x);
    if (element == ELEMENT_BF16) return to_bfloat(x);
    return to_fp8(x, element == ELEMENT_E4M3);
}

FN float min_of(float x, float y) {
    float r;
    asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

FN float max_of(float x, float y) {
    float r;
    asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

FN u64 combine_integers(u64 x, u64 y, u32 reduce, u32 element) {
    if (reduce == REDUCE_AND) return x & y;
    if (reduce == REDUCE_OR) return x | y;
    if (reduce == REDUCE_XOR) return x ^ y;
    if (reduce == REDUCE_ADD) return element == ELEMENT_U64 ? x + y : (u32)(x + y);
    u32 less = element == ELEMENT_S32   ? (s32)x < (s32)y
               : element == ELEMENT_S64 ? (long long)x<(long long)y : x < y;
    return less == (reduce == REDUCE_MIN) ? x : y;
}

// A sum, or the least or greatest, on its way: of an element below 64 bits as an fp32 number, that has been rounded to what
// the accumulation keeps.
FN float combine_reals(float x, float y, u32 reduce, u32 element, u32 accumulate) {
    float r = reduce == REDUCE_ADD ? x + y : reduce == REDUCE_MIN ? min_of(x, y) : max_of(x, y);
    if (accumulate == ACCUMULATE_F32) return r;
    if (accumulate == ACCUMULATE_F16) return of_half(to_half(r));
    return real_of(bits_of_real(r, element), element);
}

FAR u64 combine_doubles(u64 x, u64 y) {
    double r = __longlong_as_double((long long)x) + __longlong_as_double((long long)y);
    return r != r ? 0x7FFFFFFFFFFFFFFFull : (u64)__double_as_longlong(r);
}

// The elements of `count` words of 64 bits, of which each is x's with y's, in the precision of the type: what a reduction
// leaves at one member.
FN u64 combine_word(u64 x, u64 y, u32 how, u32 bits) {
    u32 reduce = how & 15, element = how >> ELEMENT_SHIFT & 15, width = width_of(element);
    if (element == ELEMENT_F64) return combine_doubles(x, y);
    if (width == 64) return combine_integers(x, y, reduce, element);
    u64 out = 0, mask = (1ull << width) - 1;
    LOOP for (u32 at = 0; at < bits; at += width) {
        u64 a = x >> at & mask, b = y >> at & mask, r;
        if (element < ELEMENT_F32) r = combine_integers(a, b, reduce, element) & mask;
        else r = bits_of_real(combine_reals(real_of(a, element), real_of(b, element), reduce, element, 0), element);
        out |= r << at;
    }
    return out;
}

// The same of all members' words, accumulated.
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

// The access ---------------------------------------------------------------------------------------------------------------

// Returns 0 and the team of the address in *found where the thread may access it by multimem, else 1 after recording a
// fault.
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

// Returns 0 where a member's memory is at the address, and has been written if it is to be read, else 1 after recording a
// fault. Counts the access and publishes it to the race detector.
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
    if (e->race && (!e->idle || write)) race_access(t, addr, size, flags, site);
    return 0;
}

// The members of an address in the order in which they are to be accessed; how many.
FAR u32 draw_members(Thread* t, Team* team, u64 addr, u64* member) {
    Engine* e = t->launch->engine;
    u32 count = 0;
    LOOP for (u32 device = 0; device < MEMBERS; device++)
        if (team->devices >> device & 1) member[count++] = member_of(team, addr, device);
    u64 random = hash(hash(e->seed + e->clock * 0x9E3779B97F4A7C15ull) + addr + t->launch->device);
    LOOP for (u32 i = count; e->seed && i > 1; i--) {
        u32 j = (u32)(random % i);
        random = hash(random + i);
        u64 other = member[j];
        member[j] = member[i - 1];
        member[i - 1] = other;
    }
    return count;
}

// multimem.ld_reduce, .st (A_WRITE) or .red (A_ATOMIC too) of 4, 8 or 16 bytes; 0, or 1 and a fault.
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
    u32 told = flags & A_STRONG && !e->fruitless;
    if (flags & A_STRONG) e->fruitless = e->idle = 0;
    if (told && write) {
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
    if (told && !write) note(l, t->block, t->linear, V_LOAD, site, addr, t->op_value, flags);
    return 0;
}
