// SPDX-License-Identifier: Apache-2.0
// What strong writes publish at a location, and what strong reads of the location learn (release and acquire).
//
// For each scope, a location has one Published per block (scope CTA), per cluster, or per device (GPU and SYS) that has
// published there. A reader learns what a Published holds if the scopes of both sides suffice:
//
//     published for    by                     is learnt by a read of at least
//     CTA              a block                CTA scope in that block
//     CLUSTER          a cluster              CLUSTER scope in that cluster
//     GPU              a device               GPU scope on that device
//     SYS              a device               GPU scope on that device, SYS scope on others
//
// A read of CTA scope learns from the wider scopes only what its own block has published (Published::block_clock).
//
// A release for a scope wider than the cluster is also published for the cluster. Without that, a reader in the cluster
// would have to learn what the whole device has published, which may come from blocks of other clusters.
#pragma once

#include "race_report.cuh"

// Removes everything that is published at a location.
FAR void drop_published(Race* r, Location* v) {
    LOOP while (v->published) {
        Published* p = (Published*)arena_at(r, v->published);
        Ref next = p->next;
        release(r, p->clock);
        release(r, p->block_clock);
        give_piece(r, v->published, 0);
        v->published = next;
    }
}

// Whether the current thread publishes in `p`: whether it belongs to the block, cluster or device of `p`.
FN u32 publishes_there(Access* access, Published* p) {
    if (p->scope == SCOPE_CTA) return same_block(access, p->op, p->block);
    if (p->scope == SCOPE_CLUSTER) return same_cluster(access, p->op, p->block);
    return p->device == access->device;
}

// Adds a clock to what is published at a location for a scope.
FAR void publish(Access* access, Location* v, u32 scope, Ref clock) {
    Race* r = access->race;
    Published* p = 0;
    LOOP for (Ref ref = v->published; ref; ref = p->next) {
        p = (Published*)arena_at(r, ref);
        if (p->scope == scope && publishes_there(access, p)) {
            learn(r, &p->clock, clock);
            if (same_block(access, p->op, p->block)) learn(r, &p->block_clock, clock);
            else assign(r, &p->block_clock, retain(r, clock));
            p->op = access->op;
            p->block = access->block;
            p->start_only = clock == access->launch->start;
            return;
        }
    }
    u32 size_class;
    Ref ref = take_piece(r, sizeof(Published), &size_class);
    p = (Published*)arena_at(r, ref);
    p->device = access->device;
    p->scope = scope;
    p->clock = retain(r, clock);
    p->block_clock = retain(r, clock);
    p->op = access->op;
    p->block = access->block;
    p->start_only = clock == access->launch->start;
    p->next = v->published;
    v->published = ref;
}

// Publishes the clock of a release at a location for `scope` and, if that is wider than a cluster, also for the
// cluster.
FN void publish_release(Access* access, Location* v, u32 scope, Ref clock) {
    publish(access, v, scope, clock);
    if (scope > SCOPE_CLUSTER && access->launch->cluster_size > 1) publish(access, v, SCOPE_CLUSTER, clock);
}

// Parts of a clock ----------------------------------------------------------------------------------------------------

// Returns the clock of what the thread of the current access knows, joined with the thread's own accesses so far. The
// caller owns the reference.
FN Ref all_known(Access* access) {
    Ref all = with_items(access->race, access->thread_state->clock, access->op, access->block, access->block_state->barrier_time, access->warp, access->lane_bit, access->thread_state->time + 1);
    if (access->thread_state->alias_fence_time)
        assign(access->race, &all, with_items(access->race, all, access->op, access->block | TAG_ALIASED, 0, access->warp, access->lane_bit, access->thread_state->alias_fence_time));
    return all;
}

// Returns a new clock with some items of `known`, all of blocks of launch `op`. With `tagged` 0, the untagged items are
// copied; the copies get the tag TAG_READS, so they cover only reads. With `tagged` 1, the items of copies and those
// with a tag other than TAG_INIT are copied unchanged.
FAR Ref select_items(Race* r, Ref known, u32 op, u32 tagged) {
    Clock* all = (Clock*)arena_at(r, known);
    u32 size_class, n = 0;
    Ref ref = take_piece(r, bytes_of(0u, all->item_count), &size_class);
    Clock* c = (Clock*)arena_at(r, ref);
    Item *from = items_of(all), *to = (Item*)(c + 1);
    LOOP for (u32 i = 0; i < all->item_count; i++) {
        u32 tag = (u32)(from[i].key >> 6) & (AGENT_BULK | TAG_READS);
        if (from[i].key >> 32 != op || !tag == tagged || tag == TAG_INIT) continue;
        to[n] = from[i];
        if (!tag) to[n].key |= (u64)TAG_READS << 6;
        n++;
    }
    c->references = 1;
    c->size_class = size_class;
    c->chain_count = 0;
    c->item_count = n;
    return ref;
}

// Returns a new clock: what `known` includes of the reads of launch `op`. An st.async and a relaxed flag publish it.
FAR Ref reads_of(Race* r, Ref known, u32 op) {
    Ref untagged = select_items(r, known, op, 0), tagged = select_items(r, known, op, 1);
    Ref reads = merge(r, (Clock*)arena_at(r, untagged), (Clock*)arena_at(r, tagged));
    release(r, untagged);
    release(r, tagged);
    return reads;
}

// Reads ---------------------------------------------------------------------------------------------------------------

// Lets the current access, a strong read, learn the clock of `p` if the scopes of both sides suffice. Otherwise records
// the reason, for reports.
FN void learn_from(Access* access, Location* v, Published* p) {
    Race* r = access->race;
    u32 need = scope_needed(access, p->op, p->block), in_block = need == SCOPE_CTA;
    // A release for a scope wider than the cluster is also published for the cluster. A read of cluster scope by
    // another block of the cluster learns from that record, so it skips the wider one.
    u32 in_cluster_too = need == SCOPE_CLUSTER && p->scope > SCOPE_CLUSTER;
    if (in_cluster_too && access->scope == SCOPE_CLUSTER) return;
    if (need < SCOPE_GPU) {
        if (p->scope == SCOPE_CLUSTER) need = SCOPE_CLUSTER;
        else need = p->device == access->device ? SCOPE_GPU : SCOPE_SYS;
    }
    Ref what = p->scope >= need && access->scope >= need ? p->clock : in_block ? p->block_clock : 0;
    if (!what) {
        record_missed_flag(access, p->op, p->block, p->scope < need ? X_STORE_SCOPE : X_LOAD_SCOPE, v->site, p->clock);
    } else if (access->acquires) {
        learn(r, &access->thread_state->clock, what);
    } else {
        if (!in_block) record_missed_flag(access, p->op, p->block, X_RELAXED_LOAD, v->site, p->clock);
        if (in_block) learn(r, &access->thread_state->fence_acquire[SCOPE_CTA], p->block_clock);
        if (what == p->clock) learn(r, &access->thread_state->fence_acquire[need], what);
    }
}

// Lets a strong read of a location learn what is published there.
FAR void learn_published(Access* access, Location* v) {
    Race* r = access->race;
    // 0 if the last write was made by another block that has published nothing of its own here, as by a relaxed store
    // without a fence. This is recorded as the reason of a later race.
    u32 has_release = same_block(access, v->op, v->block);
    LOOP for (Ref ref = v->published; ref;) {
        Published* p = (Published*)arena_at(r, ref);
        ref = p->next;
        if (p->op == v->op && p->block == v->block && !p->start_only) has_release = 1;
        learn_from(access, v, p);
    }
    if (v->published_reads && morally_strong(access, v))
        learn(r, &access->thread_state->flag_reads, v->published_reads);
    if (!has_release) record_missed_flag(access, v->op, v->block, X_RELAXED_STORE, v->site, 0);
    access->clock = access->thread_state->clock;
}

// Writes --------------------------------------------------------------------------------------------------------------

// For a strong write of system scope, unless `strict`: adds the reads that its thread knows to
// Location::published_reads, from which strong reads of the location learn them (race.cuh, profile "hardware").
// `continues_chain`: the write is an atomic that continues the chain of the location; any other write empties
// published_reads first.
FN void publish_reads(Access* access, Location* v, u32 continues_chain) {
    Race* r = access->race;
    if (!continues_chain) assign(r, &v->published_reads, 0);
    if (r->strict || access->scope < SCOPE_SYS || (continues_chain && access->block_state->barrier_time < 2)) return;
    u32 barriers = access->block_state->barrier_time, op = access->op, block = access->block;
    // An atomic that continues the chain leaves out its thread's reads since the block's last barrier: all threads of a
    // launch may increment one counter, and published_reads would get an item for each of them.
    Ref all = continues_chain ? with_items(r, access->thread_state->clock, op, block, barriers, 0, 0, 0) : all_known(access), reads = reads_of(r, all, op);
    release(r, all);
    learn(r, &v->published_reads, reads);
    release(r, reads);
}

// Publishes two things for a strong write: for each scope up to its own, what its thread knew at its last fence of at
// least that scope; and, if the write is a release, what the thread knows now.
FN void publish_write(Access* access, Location* v) {
    RaceThread* t = access->thread_state;
    u32 scope = access->scope;
    LOOP for (u32 k = 0; k <= scope; k++)
        if (t->fence_release[k] && (k != SCOPE_CLUSTER || access->launch->cluster_size > 1))
            publish(access, v, k, t->fence_release[k]);
    if (!access->releases) return;
    Ref all = all_known(access);
    publish_release(access, v, scope, all);
    assign(access->race, &v->last_release, all);
    v->last_release_scope = scope;
}
