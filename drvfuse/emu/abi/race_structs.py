# SPDX-License-Identifier: Apache-2.0
"""The structures of the race detector (`native/race.cuh`) that Python allocates or reads.

A `Ref` is the offset of a piece of the detector's arena, in units of 32 bytes; 0 means no piece. The structures that
only the native runtime uses, such as clocks and entries, are declared in the headers of `native`.
"""

from __future__ import annotations

from ctypes import Structure

from . import BARRIERS, CLASSES, DOUBTS, FOUND_RACES, KNOWN_OPS, MISSED_FLAGS, RECENT_JOINS
from .layout import layout


@layout(
    "u32 chain, place",  # its chain (a stream, or a branch of a graph), and its place there, from 1
    "u32 device",
    "u32 primary",  # the number of the kernel of which it is a programmatic dependent, or 0
)
class Op(Structure):
    """An operation: a launch, copy or fill. Python writes it when the operation is queued; the native runtime reads it.
    The table has an entry for each operation of the machine, by its number, until the machine is closed.
    """


@layout("Ref a, b, result")
class RecentJoin(Structure):
    """An entry of a cache: the clocks `a` and `b` and their join. Only the native runtime uses it. It owns references
    to all three.
    """


@layout("Ref clock", "u32 op")
class KnownOp(Structure):
    """An entry of a cache: `clock` knows all accesses of operation `op`. Only the native runtime uses it. The entry
    owns no reference to the clock, and is cleared when the clock is freed.
    """


@layout(
    "u64 addr",  # the first byte of the race
    "u64 events",  # the number of events before the later access
    "u32 size",  # bytes of the later access
    "u32 edge",  # the `Edge` that is missing
    "u32 op, block, thread, site, flags",  # the later access; `flags` are those of `Entry`
    # The earlier access. Each of the lanes in the mask other_lanes has made it.
    "u32 other_op, other_block, other_warp, other_lanes, other_site, other_flags",
    "u32 store_site, load_site",  # sites of a flag's store and load that do not order the accesses, or NO_SITE
    "u32 store_op",  # the operation of that store
)
class Found(Structure):
    """A race of two accesses. The native runtime writes it at the later access; Python makes a report of it when the
    run pauses, and empties the list (`Detector.drain`).
    """


@layout(
    "u64 line",  # the address of the line
    "u64 low, high",  # the contents of the line before the later store
    "u32 bytes, pad",  # mask of the bytes that both stores write
    "Found found",  # what is added to Race::found_races if the pair is a race
)
class Doubt(Structure):
    """Two stores of one block that are a race if the later one changes any of `bytes`. The native runtime alone uses
    it, from the check of the later store until its thread next enters the runtime or suspends.
    """


@layout(
    # The arena, which Python reserves: its address, its size in bytes, and the bytes in use.
    "u64 arena, arena_bytes, arena_top",
    "u64 cells",  # the address of the cell of the window's first line
    "u64 window_base",  # the address of the window
    "Op* ops",  # the table of operations, by number
    "Ref* pools",  # for each 1 << POOL_SHIFT bytes of the window: slabs with free entries (native/race_list.cuh)
    "u32 strict",  # 1 for the profile "strict"
    "u32 exhausted",  # 1 once the arena is used up: no access is checked any more
    "u32 whole_items",  # the number of clock items made so far that name a whole operation (WHOLE)
    "u32 found_count",  # the number of records in found_races
    "u32 random",  # state of the generator that decides which reads check the whole list of their line
    "u32 write_serial",  # the number of strong writes so far
    "u32 change_count",  # counts writes and other events after which the check of a repeated poll may find a race
    "u32 doubt_count",  # the number of entries of `doubts` in use
    f"Ref free_pieces[{CLASSES}]",  # free lists of the arena, by size class
    f"KnownOp known_ops[{KNOWN_OPS}]",  # a cache, by operation
    f"RecentJoin recent_joins[{RECENT_JOINS}]",  # a cache, by a hash of both clocks
    f"Found found_races[{FOUND_RACES}]",
    f"Doubt doubts[{DOUBTS}]",
)
class Race(Structure):
    """The state of the race detector of a machine. Python allocates it with the machine and sets the members up to
    `strict`; the native runtime changes `arena_top` and the members after `strict`. Python reads `found_races` and
    `exhausted`.
    """


@layout(
    "Ref clock",  # what the thread knows of others; its own accesses since barrier_time are not in it
    "u32 time",  # its time (native/clock.cuh): begins at 1, and grows with each release and each barrier
    # By scope (block, cluster, GPU, system). fence_release: what the thread knew at its last fence of at least that
    # scope, which its later strong writes publish. fence_acquire: what its relaxed reads have found published, which it
    # learns at its next fence of at least that scope.
    "Ref fence_release[4], fence_acquire[4]",
    # Reads by other threads, published by relaxed flags that this thread has read. RaceBlock::end_clock learns them.
    "Ref flag_reads",
    "u32 alias_fence_time",  # its accesses before this time precede a fence.proxy.alias of its own; 0: no such fence
)
class RaceThread(Structure):
    """The race detector's state for a thread, from the start of its block until the thread exits. The native runtime
    alone uses it, and owns the references.
    """


@layout(
    "u32 op, block",  # the block that stored the flag
    "u32 edge",  # the `Edge` that is missing between the store and the load
    "u32 store_site, load_site",
    "Ref clock",  # the clock that the load would have learnt
)
class MissedFlag(Structure):
    """A flag of another block that a block has read without synchronising with the store of the flag. The native
    runtime names the flag in the report of a later race. The record is valid if `op` is not 0, until a newer one
    replaces it or the block ends.
    """


@layout(
    "u32 barrier_time",  # each thread of the block knows all accesses of the block before this time
    "Ref end_clock",  # the joined clocks of its threads that have exited
    "Ref proxy_fence_clock",  # the joined clocks of its threads at their fence.proxy.async
    # The last fence.proxy.alias of the block: the clock of its thread before and after the fence, and barrier_time at
    # the fence. If another thread executes the fence with the same clock and the same barrier_time, it gets the same
    # clock after the fence, without computing it again.
    "Ref alias_clock_before, alias_clock_after",
    "u32 alias_barrier_time",
    f"Ref arrivals[{BARRIERS}]",  # for each barrier: what the arrivals of this phase have published
    # For the barrier of the cluster, in the block of rank 0 alone: what arrivals have published, in this phase
    # (cluster_arrivals) and in the previous phase (cluster_phase_clock).
    "Ref cluster_arrivals, cluster_phase_clock",
    "u32 relaxed_arrival_time",  # the latest RaceThread::time of a thread at its barrier.cluster.arrive.relaxed
    "u32 missed_flag_count",  # the number of missed flags so far; the last MISSED_FLAGS are kept
    "u32 bulk_count",  # the number of bulk copies so far; the next copy gets it as its number
    f"MissedFlag missed_flags[{MISSED_FLAGS}]",
)
class RaceBlock(Structure):
    """The race detector's state for a resident block. The RaceThreads of its threads follow it in memory. The native
    runtime alone uses it, from the start of the block to the end of its cluster, and owns the references.
    """
