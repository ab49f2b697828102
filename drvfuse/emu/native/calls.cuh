// SPDX-License-Identifier: Apache-2.0
// The functions that translated code calls for other purposes than accesses: loops, fences, clocks, output, the heap.
#pragma once

#include "access.cuh"

// Counts LOOP_SLICE more iterations of a thread's loops without accesses. Returns 0 if the thread may continue. Returns
// 1, after recording a fault, if the count has reached loop_limit or an interrupt is pending.
API u32 rt_loop(Thread* t, u32 site) {
    Engine* e = t->launch->engine;
    e->rounds += LOOP_SLICE;
    if (e->rounds < e->loop_limit) return e->rounds % FUEL ? 0 : interrupted(t, site);
    fault(t->launch, t, F_ENDLESS, site, ENDLESS_ROUNDS, 0, 0, e->loop_limit);
    return 1;
}

// Records the fault of an access that the translator has found to be outside of a parameter of `bytes` bytes, or not
// aligned. Returns 1. The offset stands in place of the address; `value` is the parameter's size plus one.
API u32 rt_parameter(Thread* t, u64 offset, u32 size, u32 flags, u32 bytes, u32 site) {
    u32 inside = offset < bytes && bytes - offset >= size;
    fault(t->launch, t, inside ? F_MISALIGNED : F_OUT_OF_BOUNDS, site, offset, size, flags, (u64)bytes + 1);
    return 1;
}

// Executes a fence. `flags` are FENCE_ flags with a Scope and an Order. A fence.proxy is not recorded as an event. In
// the race detector, a fence.proxy orders accesses by different proxies, and nothing else.
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

// Executes griddepcontrol.launch_dependents. A block has triggered when any of its threads has.
API void rt_trigger(Thread* t) {
    Block* b = t->block;
    if (!b->triggered) {
        b->triggered = 1;
        t->launch->triggered++;
        note(t->launch, b, t->linear, V_TRIGGER, t->site, 0, 0, 0);
    }
}

// Returns the virtual time in nanoseconds; a cycle of %clock takes one nanosecond. The time advances with each resume
// of a thread and with each read of the clock. A read advances it by 32 ns or, if the same thread made the last read
// and the time is still the one that it returned, by twice the last step, up to 2^20 ns.
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

// Returns 1, after recording a fault, if the thread has used STACK_LIMIT bytes of the host's stack, else 0. Called at
// the start of each recursive function.
API u32 rt_depth(Thread* t, u32 site) {
    u32 mark;
    u64 used = t->launch->engine->stack - (u64)&mark;
    if (used < STACK_LIMIT) return 0;
    fault(t->launch, t, F_STACK_OVERFLOW, site, 0, 0, 0, STACK_LIMIT >> 20);
    return 1;
}

// Executes malloc. The engine's Python code keeps the heap.
API u64 rt_malloc(Thread* t, u64 size) {
    Heap call = {t, 0, size, HEAP_MALLOC, 0};
    if (t->launch->heap) rt_call(t->launch->heap, &call);
    return call.address;
}

// Executes free. Returns 0, or 1 after recording a fault. To the race detector, free is a write of all bytes of the
// memory. With the flag A_LATER, the write does not count as a plain store: a conflict with a store of the same block
// is a race at once, and never a doubt (race_report.cuh).
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
