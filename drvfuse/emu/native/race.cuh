// SPDX-License-Identifier: Apache-2.0
// The race detector: the rules by which it decides whether two accesses race, and the access that is being checked.
//
// A race is a pair of accesses to the same byte, at least one of them a write, that happens-before does not order and
// that are not morally strong. Two accesses are morally strong if both are strong (volatile, relaxed, acquire, release,
// atomic), have the same size, and have scopes that include each other's thread. The detector derives happens-before
// from the PTX memory model, and not from the order in which the schedule made the accesses. So it finds a race in
// every schedule that makes both accesses.
//
// Terms
//
//     clock       What a thread knows: the set of accesses that happen before its next access (clock.cuh). Thus "a
//                 thread knows an access" means that the access happens before whatever the thread does next.
//     to learn    To join another clock to one's own: a thread that learns a clock knows the accesses of both.
//     agent       Who makes accesses: a thread, or an asynchronous copy that counts as a thread of its own.
//     line        16 aligned bytes of memory.
//     entry       The record of one past access, or of similar accesses by lanes of a warp (race_entry.cuh). Each line
//                 has a list of entries. An access is checked against the entries of its bytes, and then recorded.
//     location    The record of bytes that a strong write has written: the last strong write of them, and the clocks
//                 that are published for them. It is in the list of its line, between the entries.
//     to publish  To leave a clock at a location, from which strong reads learn it.
//     fence       fence.acq_rel, fence.sc or membar, of a scope. What a thread knew at its last fence of a scope,
//                 or of a wider one, is fenced at that scope: the thread's later strong writes publish it.
//
// In FastTrack's terms, an entry holds an epoch, a line's list holds the last writes and reads, a location is a
// synchronisation variable, and publishing and learning are release and acquire. As in race detectors for C++ fences, a
// thread has, in addition to its clock, two clocks for each scope: that of its last fence, and that of its relaxed
// reads.
//
// Example of an ordered pair (the litmus test signal-release-gpu). Thread A stores data, then flag with st.release.gpu.
// Thread B of another block loads flag with ld.acquire.gpu, then loads data.
//
//     A  st data            entry of data: write by A at time 1
//     A  st.release flag    A publishes at the location of flag, for scope GPU, the clock { A before time 2 };
//                           A's time becomes 2
//     B  ld.acquire flag    B learns that clock
//     B  ld data            B's clock includes "A before 2", and the entry has time 1: ordered
//
// Example of a race (the litmus test wait-relaxed-gpu). The same program with ld.relaxed in place of ld.acquire:
//
//     B  ld.relaxed flag    the published clock goes into B's fence_acquire[GPU], and not into B's clock
//     B  ld data            B's clock does not include A's access at time 1: a race. The report says that the flag was
//                           read without an acquire. With a fence.acq_rel.gpu between the two loads, B would have
//                           learnt fence_acquire[GPU] there, and the pair would be ordered.
//
// What orders accesses
//
//     Release and acquire. A strong write publishes clocks at its location, each for a scope. A release publishes for
//     its scope what its thread knows, the thread's own accesses included. Every strong write also publishes, for each
//     scope up to its own, what its thread knew at its last fence of at least that scope (RaceThread::fence_release).
//     If the write is an atomic that read from a morally strong write, what was published at the location before stays
//     there. Otherwise it is removed, except what a release by the same thread has published. A strong read learns what
//     is published, if the scopes of both sides include each other: an acquire learns it at once, a relaxed read at its
//     thread's next fence of sufficient scope (RaceThread::fence_acquire). The read of a reduction (red) learns
//     nothing. A compare-and-swap that fails is only a read.
//
//     Observation. A strong read observes the last strong write of its location. If that write is an atomic, the read
//     also observes the write that the atomic read from, and so on along the chain of atomics. The observed writes
//     happen before everything that the read happens before. That holds for these writes alone, and for no other access
//     of their threads (race_observe.cuh).
//
//     Barriers. bar.sync and bar.red order the accesses of all participating threads before the barrier before their
//     accesses after it. bar.warp.sync orders the accesses of lanes of a warp in this way, and barrier.cluster those of
//     the threads of a cluster (race_cluster.cuh). A thread at bar.arrive publishes what it knows, but learns nothing.
//     Shuffles and votes order nothing.
//
//     Operations. From its start, a launch knows what the operations for which it waited know, and what the host knew
//     when it queued the launch. A programmatic dependent learns its primary only at griddepcontrol.wait. What a
//     launch knows from its start counts as fenced at system scope. The end of a launch is a release, and a fence, by
//     all its threads.
//
// What the profile "hardware" accepts. The profile "strict" (Race::strict) follows the model alone. Without it, five
// kinds of order count that the model does not give, because hardware gives them and kernels rely on them:
//
//     - A volatile read is an acquire.
//     - What a thread has fenced before a barrier of the block counts as fenced by each thread that passes the barrier.
//       What a thread has read by relaxed loads before the barrier counts as read by each of them.
//     - Operations on mbarriers have at least cluster scope.
//     - A relaxed store of a flag, at system scope, also orders reads: those that its thread made before the store, or
//       knows by barriers, happen before the end of each kernel that has read the flag. All-reduces rely on that: their
//       last barrier keeps the next kernel from writing inputs that peers still read.
//     - Plain stores of one block to the same word do not race with one another if the later store does not change the
//       word. Only the value decides, so such a pair is a doubt until the store has been made (race_report.cuh). Loads,
//       and accesses of other blocks, still race with each of the two stores.
//
// Where order is not enough
//
//     Async proxy. Bulk copies access memory through the async proxy. If a bulk copy to global memory reads bytes that
//     its block has written through the generic proxy, a thread of the block that knew the write must have executed
//     fence.proxy.async. Any such thread is accepted, even if its fence does not happen before the copy. So some
//     missing fences are not found, and no fence that was executed is reported as missing.
//
//     Multicast. Memory that is bound to a multicast object has a unicast address and a multicast address. If one of
//     two conflicting accesses uses the unicast address and the other one the multicast address, and they are not
//     morally strong, a thread must have executed fence.proxy.alias after the first access and before the second, in
//     happens-before. That fence adds to the clock of its thread a copy of each item with the tag TAG_ALIASED; tagged
//     items are published and learnt in the same way as untagged ones. Accesses of an operation that is known as a
//     whole need no such fence.
//
// The files. race_entry.cuh has the entries, and race_list.cuh their lists. race_check.cuh has the check of an access
// against the entries, and race_quick.cuh the quick way for simple accesses. race_publish.cuh and race_observe.cuh have
// the locations. race_access.cuh has accesses and fences of threads. race_alias.cuh, race_barriers.cuh,
// race_blocks.cuh, race_cluster.cuh and race_copies.cuh have the parts that their names say. race_range.cuh and
// race_values.cuh have the operations of the host, and race_report.cuh the records of races. In all of them, `r` is the
// detector, `l` a launch, `b` a block, `t` a thread, `e` an entry, and `v` a location.
#pragma once

#include "race_entry.cuh"

// The access that is being checked, which comments call the current access. A thread, a copy or fill, or a block at its
// end makes it.
struct Access {
    Race* race;
    Launch* launch;            // null for a copy or fill
    RaceBlock* block_state;    // null for a copy or fill
    RaceThread* thread_state;  // null for a copy or fill, and for a block at its end
    u32 op, block, warp;       // the operation, block and warp that make the access
    u32 lane_bit;              // the lane, as a mask with one bit
    u32 time;                  // the time (clock.cuh) of the thread
    u32 site;                  // the instruction; VIA_MULTICAST is set if it uses a multicast address
    u32 flags;                 // the flags A_ of the access
    u32 kind;                  // Entry::kind for the access; its scope is the one in which the access is morally strong
    u32 device;                // the device of the operation
    u32 acquires, releases;    // 1 if the access is an acquire, or a release
    u32 scope;                 // the scope in which it acquires, releases and publishes
    u32 agent;                 // Entry::block for the access: `block`, with AGENT_PENDING or AGENT_BULK for a copy
    u32 copy_number;           // with AGENT_BULK: the number of the bulk copy in its block
    u32 repeats_poll;          // 1 for a poll that reads the same value as the last poll of the thread
    u32 is_plain;              // 1 for a thread's access with none of the flags NOT_PLAIN (race_quick.cuh)
    Ref clock;                 // the clock of the thread, operation or block, which owns the reference
    Ref shared_entry;          // for a copy or fill: the entry that its fully accessed lines share; else 0
    u64 addr;                  // the first byte, for reports
    u64 event_count;           // the number of events so far, for reports
    u32 size;                  // bytes of the whole access, for reports
    u32 thread;                // the index of the thread in its block, for reports
    u32 variant;               // Entry::variant for the access
};

// Each block slot of a launch has a RaceBlock. The RaceThreads of its threads follow it in memory (Launch::races).
FN u32 size_of_races(Launch* l) { return sizeof(RaceBlock) + l->threads * sizeof(RaceThread); }
FN RaceThread* race_thread(Block* b, u32 i) { return (RaceThread*)(b->race + 1) + i; }

// Relations between the current access and an entry -------------------------------------------------------------------

FN u32 same_block(Access* access, u32 op, u32 block) { return op == access->op && block == access->block; }

// The index of the cluster of a block.
FAR u32 cluster_of(Launch* l, u32 block) {
    u32 cx = l->cluster & 0xFF, cy = l->cluster >> 8 & 0xFF, cz = l->cluster >> 16 & 0xFF;
    u32 x = block % l->nctaid[0], y = block / l->nctaid[0] % l->nctaid[1], z = block / l->nctaid[0] / l->nctaid[1];
    return x / cx + l->nctaid[0] / cx * (y / cy + l->nctaid[1] / cy * (z / cz));
}

// Whether a block is in the cluster of the current access. Without clusters, each block is a cluster of its own.
FN u32 same_cluster(Access* access, u32 op, u32 block) {
    if (op != access->op || !access->launch || access->launch->cluster_size < 2) return same_block(access, op, block);
    return cluster_of(access->launch, block) == cluster_of(access->launch, access->block);
}

// The narrowest scope that includes the thread of the current access and the threads of another block.
FN u32 scope_needed(Access* access, u32 op, u32 block) {
    if (same_block(access, op, block)) return SCOPE_CTA;
    if (same_cluster(access, op, block)) return SCOPE_CLUSTER;
    return access->race->ops[op].device == access->device ? SCOPE_GPU : SCOPE_SYS;
}

FN u32 scope_of(u32 kind) { return kind >> ENTRY_SCOPE_SHIFT & 3; }

// Whether the current access and that of an entry are morally strong. If so, they do not race, even without an order.
FN u32 morally_strong(Access* access, Entry* e) {
    if (!(e->kind & access->kind & N_STRONG) || e->variant != access->variant) return 0;
    u32 needed = scope_needed(access, e->op, e->block & ~AGENT_BULK);
    return scope_of(e->kind) >= needed && scope_of(access->kind) >= needed;
}

// Whether the accesses that an entry records for these lanes happen before the current access.
FN u32 ordered(Access* access, Entry* e, u32 lanes) {
    if (same_block(access, e->op, e->block)) {
        if (!access->thread_state || e->time < access->block_state->barrier_time) return 1;
    }
    if (knows(access->race, access->clock, e->op, e->block, e->warp, lanes, e->time)) return 1;
    u32 tag = !(e->kind & N_WRITE)                                                         ? TAG_READS
              : e->variant == VARIANT_MBARRIER_INIT && access->variant == VARIANT_MBARRIER ? TAG_INIT
                                                                                           : 0;
    return tag && !(e->block & AGENT_BULK) &&
           knows(access->race, access->clock, e->op, e->block | tag, e->warp, lanes, e->time);
}
