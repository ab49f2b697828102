// SPDX-License-Identifier: Apache-2.0
// Words that threads poll. A thread that polls a word in a loop is not resumed while the word has not changed.
//
// A thread suspends before each strong load and atomic. It polls if it comes back to an access that it has made before,
// which means the same address and the same instruction. For each thread, a Poll holds the words of these accesses
// since the thread's last store, with their values. runtime.cu says how the run goes on when all threads poll unchanged
// words.
#pragma once

#include "cluster.cuh"
#include "multimem.cuh"

FN Poll* poll_of(Block* b, Thread* t) { return b->polls + t->linear; }

// Sets POLL_KNOWN in Thread::polls if the thread has made this access before. Called when the thread is suspended
// before the access.
FAR void look_up(Block* b, Thread* t) {
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    t->polls &= ~POLL_KNOWN;
    LOOP for (u32 i = 0; i < n; i++)
        if (p->word[i].addr == t->op_addr && p->word[i].site == t->site) {
            t->polls |= POLL_KNOWN;
            return;
        }
}

// Whether a suspended thread polls a word that has not changed, so that it need not be resumed. If another word that
// the thread polls has changed, the thread may make CREDIT more polls, so that its loop reaches the access to the
// changed word.
FAR u32 spinning(Launch* l, Block* b, Thread* t) {
    u32 state = t->polls;
    if (!(state & POLL_KNOWN)) return 0;
    if (state >> POLL_CREDIT) {
        t->polls = state - (1u << POLL_CREDIT);
        return 0;
    }
    Poll* p = poll_of(b, t);
    u32 n = state & POLL_COUNT, changed = 0;
    LOOP for (u32 i = 0; i < n; i++) {
        Polled* w = &p->word[i];
        if (l->engine->delay) delay_look(l->engine->delay, b, w->addr);
        u64 low = polled_low(l->engine, w->addr, w->size), high = high_of(w->addr, w->size);
        if (low != w->low || high != w->high) {
            if (w->addr == t->op_addr && w->site == t->site) return 0;
            w->low = low;
            w->high = high;
            changed = 1;
        }
    }
    if (changed) t->polls |= CREDIT << POLL_CREDIT;
    return !changed;
}

// Remembers the value that a poll will read. Called before the access of the poll.
FAR void remember(Launch* l, Block* b, Thread* t, u64 low, u64 high) {
    Engine* e = l->engine;
    Poll* p = poll_of(b, t);
    u32 n = t->polls & POLL_COUNT;
    u32 i = 0;
    if (t->polls & POLL_KNOWN) {
        LOOP while (p->word[i].addr != t->op_addr || p->word[i].site != t->site) i++;
        Polled* w = &p->word[i];
        if (w->low != low || w->high != high) {
            e->progress++;
        } else {
            e->repeats_poll = 1;
            e->skips_check = e->race && w->change_count == e->race->change_count && w->thread_time == race_thread(b, t->linear)->time;
        }
    } else {
        if (n == POLL_WORDS) {
            // The Poll is full, so it is filled again from the start. A thread that polls more words than fit in a Poll
            // runs in every pass, so only QUIET_LIMIT shows that it waits for ever.
            n = 0;
        } else if (e->quiet < QUIET_LIMIT) {
            e->progress++;
        }
        i = n;
        t->polls = n + 1;
        p->word[i].addr = t->op_addr;
        p->word[i].site = t->site;
        p->word[i].size = t->op_size;
    }
    p->word[i].low = low;
    p->word[i].high = high;
    if (e->race) {
        p->word[i].change_count = e->race->change_count;
        p->word[i].thread_time = race_thread(b, t->linear)->time;
    }
}
