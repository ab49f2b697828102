// SPDX-License-Identifier: Apache-2.0
// Faults, which stop a launch, and notices, which do not. Python makes reports of both (findings/faults.py,
// notices.py).
#pragma once

#include "common.cuh"

// Records a fault, unless the launch has one already. findings/faults.py says what the arguments mean for each kind.
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

// Records a notice, once for each site and kind until Python takes it. `lane` is the lane that a shuffle reads.
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

// Asks the engine's Python code whether an interrupt is pending. If so, ends the launch with a fault and returns 1.
FAR u32 interrupted(Thread* t, u32 site) {
    if (!rt_call(t->launch->engine->print, 0)) return 0;
    fault(t->launch, t, F_INTERRUPTED, site, 0, 0, 0, 0);
    return 1;
}

// Called when the running thread has made as many accesses as Engine::fuel allowed: allows up to FUEL more, and returns
// 0. Returns 1, after recording a fault, if the thread has made loop_limit accesses since its resume or an interrupt is
// pending.
FAR u32 refuel(Thread* t, u64 addr, u32 size, u32 flags, u32 site) {
    Engine* e = t->launch->engine;
    u64 rest = e->loop_limit - e->fuel_given;
    if (!rest) {
        fault(t->launch, t, F_ENDLESS, site, addr, size, flags, e->loop_limit);
        return 1;
    }
    e->fuel = rest < FUEL ? rest : FUEL;
    e->fuel_given += e->fuel;
    return interrupted(t, site);
}
