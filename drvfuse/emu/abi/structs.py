# SPDX-License-Identifier: Apache-2.0
"""The structures that the native runtime, translated code and Python share, as C++ declarations of their members.

`@layout` makes each of them a ctypes structure with the same offsets, and `header` copies the declarations to the
native runtime. In Python, a pointer is an integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import Structure, c_uint8, c_uint32, c_uint64, sizeof
from typing import Any, TypeVar

from . import BARRIERS, CLASSES, DOUBTS, FOUND_RACES, KNOWN_OPS, MISSED_FLAGS, NOTICES, POLL_WORDS, RECENT_JOINS, WRITES

DECLARATIONS: dict[str, tuple[str, ...]] = {}
"""The declarations of members by the name of a structure, as "type name, name[count], ...", in order of definition."""

_S = TypeVar("_S", bound=type[Structure])
_TYPES: dict[str, Any] = {"u8": c_uint8, "u32": c_uint32, "u64": c_uint64, "Ref": c_uint32}
_MEMBER = re.compile(r"(\w+)(?:\[(\d+)\])?")


def layout(*declarations: str) -> Callable[[_S], _S]:
    """Give a structure its members, and register the declarations under its name."""

    def laid_out(structure: _S) -> _S:
        fields = []
        for declaration in declarations:
            type_, _, members = declaration.partition(" ")
            element = c_uint64 if type_.endswith("*") else _TYPES[type_]
            for name, count in _MEMBER.findall(members):
                fields.append((name, element * int(count) if count else element))
        structure._fields_ = fields
        DECLARATIONS[structure.__name__] = declarations
        _TYPES[structure.__name__] = structure
        return structure

    return laid_out


def offset(structure: type[Structure], member: str, index: int = 0) -> int:
    """The offset of a member of a structure, or of one element of a member that is an array."""
    field = getattr(structure, member)
    element: Any = dict(structure._fields_)[member]  # type: ignore[arg-type]
    return int(field.offset) + (index * sizeof(element._type_) if index else 0)


@layout(
    "u32 resume, status, tid[3], lane, warp, linear",
    "u64 op_addr, op_seen",
    "u32 op_mask, op_a, op_b, op_c, op_result, op_pred, op_kind, site",
    "u64 local_base",
    "Block* block",
    "Launch* launch",
    "u64 op_value",
    "u32 op_size",
    "u32 polls",  # how many words of its Poll are in use, and the flag POLL_KNOWN
    "u64 wake",  # virtual time at which a sleep ends
)
class Thread(Structure):
    """The header of a thread's frame."""


@layout(
    "u64 addr, low, high",
    "u32 site, size",
    "u32 change_count, thread_time",  # Race::change_count and RaceThread::time at the last poll
)
class Polled(Structure):
    """A word that a thread polls."""


@layout(f"Polled word[{POLL_WORDS}]")
class Poll(Structure):
    """The words that one thread polls."""


@layout(
    "u32 lanes, live, ready, yielded, warpop, barrier, gdc, sleeping, asking",
    "u32 alike, alike_mask, alike_kind",  # alike: all lanes in `warpop` wait at this operation with this mask
    "u32 gathered",  # the lanes at a barrier that wait for the rest of the warp to arrive
    "u32 syncs",  # the number of bar.warp.sync that the warp has completed
    # For the barrier of the cluster: lanes that wait there, lanes that have arrived in this phase, and lanes that have
    # arrived in the last phase and not yet waited for it.
    "u32 cluster, joined, passed",
    "u32 pad[3]",
)
class Warp(Structure):
    """One warp of a resident block. Its members are masks of lanes."""


@layout(
    "u32 arrived, expected",  # numbers of threads; each warp counts as 32, even an incomplete one
    "u32 threads",  # the real number of threads of the warps that have arrived
    "u32 kind, count, every",  # the kind of reduction (or B_SYNC), and the values of the reduction so far
    "u32 plain",  # 1 if no thread arrived without waiting
    "u32 site",  # the site of the last arrival
    "Thread* last",
)
class Barrier(Structure):
    """One barrier of a block."""


@layout(
    "u32 m, n, k",
    "u32 count",  # the number of products that the instruction computes
    "u32 method, steps",  # the MatrixMethod; steps of the tensor cores, each of which uses an equal part of k
    "u32 kind[4], registers[4]",  # for A, B, C and D: the MatrixKind, and the registers per lane
)
class Product(Structure):
    """A matrix product. Tables for A, B, C and D follow it. For each element of each register of each lane, they have
    the index of the element in the matrix, in 16 bits. Indices in A, C and D count by rows, those in B by columns.
    """


@layout("u32 first, last")
class List(Structure):
    """A list of delayed stores, oldest first."""


@layout(
    "u64 shared_base",
    "u32 ctaid[3], index, cluster_rank, smid",
    "u64 cluster_shared_base",  # the address of the shared memory of rank 0, behind which that of the other ranks lies
    "RaceBlock* race",
    "u32 reserved[2]",
    "u32 active, live, woken, triggered",
    "Warp* warps",
    "u8* frames",
    "Poll* polls",
    "u32 slot, pad",
    f"Barrier barrier[{BARRIERS}]",
    "u64 owner",  # a unique number of the block, which its delayed stores have
    "List pending",  # delayed stores that only this block sees
    "u32 epoch",  # the number of barriers that the block has completed
    "u32 bulks",  # the first pending bulk copy to its shared memory
    "u32 stores, store_turns",  # pending pieces of bulk copies to global memory; turns since a piece was written
    "u32 begun",  # 1 once one of its threads has run
    # For the barrier of the cluster, in the block of rank 0: completed phases, threads that have arrived in this phase,
    # and threads that have neither arrived nor exited.
    "u32 cluster_phase, cluster_arrived, cluster_missing",
)
class Block(Structure):
    """A resident block, at the start of its slot."""


@layout(
    "u64 size",  # bytes of each access
    "u64 reads[5], writes[5]",  # indexed by MemoryOf
    "u64 pad",
)
class Site(Structure):
    """The counts of accesses at one site."""


@layout("u32 kind, flags, size, site, block, thread", "u64 addr, value")
class Fault(Structure):
    """The fault that has stopped a launch. `findings/faults.py` says what the fields mean for each kind."""


@layout(
    "u64 params, globals",
    "u32 nctaid[3], ntid[3], device, smem_dynamic, shared_static",
    "u32 cluster",  # the shape of a cluster, x | y << 8 | z << 16; 0: no clusters
    "u64 clock",
    "u32 sm_count",
    "u32 envreg1, envreg2",  # the upper and lower half of the address of the workspace for cooperative grid barriers
    "u32 op, start, primary, end",  # its number; its clocks at the start, after griddepcontrol.wait, and at the end
    "u32 pad0",
    "CopyQueue* copies",  # two queues for each thread of each slot; null if the kernel has no asynchronous copies
    "Copies* copy_pool",
    "u32 reserved[4]",
    "Engine* engine",
    "void* function",
    "u8* slots",
    "u64 slot_stride",
    "u32 slot_count, threads, warps, frame_stride",
    "u32 blocks, next, finished, triggered",
    "u64 shared_base, shared_stride, local_base, local_stride",
    "u32 local_bytes, param_bytes, shared_bytes, cluster_size",
    "u32 cluster_window",  # bytes of the shared memory of a cluster, with the gaps between the blocks
    "u32 gdc_open, state, free_count, high",
    "u32* free_groups",
    "Site* sites",
    "Poll* polls",
    "u64 window_base, window_bytes, access_base",
    "u64 barriers, resumes, warp_ops",
    "u8* races",  # a RaceBlock and its threads for each slot
    "Fault fault",
    "u32 reported",
    "u32 part, turn, turn_warp",  # part: its turn is unfinished, at slot `turn` and warp `turn_warp` - 1 of that block
    "u8 owner_class[256]",  # the MemoryOf of each owner in an access word
    "u32 pending, pad",  # the number of delayed stores of its blocks, ended blocks included
    "void* heap",  # the function for malloc and free in its context, or null
)
class Launch(Structure):
    """A launch of a kernel."""


@layout("u64 addr, low, high", "u32 size, pad")
class Write(Structure):
    """A word that a thread has written in a probe, with its value before the write."""


@layout("Thread* thread", "u64 format, args")
class Print(Structure):
    """A call of printf."""


@layout("Thread* thread", "u64 address, nbytes", "u32 kind, pad")
class Heap(Structure):
    """A call of malloc or free."""


@layout("u64 clock, address, value", "u32 op, block, thread, site, kind, flags")
class Event(Structure):
    """An entry of the engine's ring buffer of the last EVENTS events."""


@layout(
    "u32 op, kind, site, block, thread",
    "u32 mask",  # the member mask of the instruction
    "u32 lanes, live",  # the lanes with which the warp was started, and the lanes that have not exited
    "u32 lane",  # the lane that a shuffle reads
)
class Notice(Structure):
    """A finding at a site that does not stop the launch."""


@layout("u64 base, nbytes", "u64* members", "u64 devices")
class Team(Structure):
    """A range of addresses of a multicast object. For each piece, `members` has MEMBERS addresses of bound memory, by
    device; 0 means that the device has bound nothing. `devices` has a bit for each device of the team.
    """


@layout("Team* first", "u64 count")
class Teams(Structure):
    """All multicast addresses of a machine."""


@layout(
    "u64 seed, pass, clock, clock_reads",
    "u64 progress, quiet, step, resumes",
    "u32 probing, writes",
    # The most accesses, or rounds of loops without accesses, between two suspends; the accesses left until `refuel`;
    # the rounds so far.
    "u64 loop_limit, fuel, rounds",
    "u64 work",  # the cost of this call so far
    "u64 tank",  # the accesses that `refuel` has given to the thread since its resume, `fuel` included
    # The state of a pass and of a probe that the last call may have left unfinished.
    "u32 pass_open, pass_at, pass_ran, pass_held, probe_force, probe_streak, advancing, slept",
    "u32 counted, timed",  # counted: budgets are numbers of resumes; timed: threads sleep until their time
    "u64 pass_random, pass_before, probe_rounds, probe_before, reads_before",
    # For the last check before a deadlock is reported: a hash of the saved states of all threads, and the hash with
    # which it is compared, which is renewed after 1, 2, 4, ... rounds, so that every cycle is found.
    "u64 state, state_kept, state_reads, state_rounds, state_period",
    # The number of resumes since a thread last exited or a block last started, where a resume at a strong access
    # counts STRAIN times. Above a limit the launch fails as endless.
    "u64 strain",
    "u32 watching, undecided",  # watching: the last check is under way; undecided: a limit has ended it
    "void* clock_thread",
    "u64 clock_run, clock_read",
    "void* print",
    "Race* race",  # null without the race detector
    "Event* events",  # the ring buffer of the last EVENTS events
    "u64 event_count",
    # fruitless: the thread is resumed for a poll that sees the same value as the last poll. idle: nothing has happened
    # since the last poll that could change the race detector's result for it.
    "u32 fruitless, idle",
    "Delay* delay",  # null if stores are not delayed
    "Teams* teams",
    "u64 stack",  # the beginning of the host stack of the running thread
    f"Write write[{WRITES}]",
    "u32 notices",
    f"Notice notice[{NOTICES}]",
)
class Engine(Structure):
    """The state that all launches of one machine share."""


@layout(
    "u32 first, last, commits, issued",
    "u32 unread",  # the first piece of a bulk copy for whose read no wait has waited
)
class CopyQueue(Structure):
    """A queue of a thread's asynchronous copies, oldest first. Each thread has two (`queue_of` in native/copy.cuh)."""


@layout("u32 chain, place, device, primary")  # primary: the kernel of which it is a programmatic dependent, or 0
class Op(Structure):
    """An operation's place in the order of operations."""


@layout("Ref a, b, result")
class RecentJoin(Structure):
    """An entry of a cache: two clocks and their join."""


@layout("Ref clock", "u32 op")
class KnownOp(Structure):
    """An entry of a cache: the clock includes all accesses of the operation."""


@layout(
    "u64 addr, events",  # events: the number of events by then
    "u32 size, edge",
    "u32 op, block, thread, site, flags",
    "u32 other_op, other_block, other_warp, other_lanes, other_site, other_flags",
    "u32 store_site, load_site, store_op",  # the store and the load of a flag that does not order the accesses
)
class Found(Structure):
    """A race of two accesses. The members `other_` describe the earlier one, which each of `other_lanes` has made."""


@layout("u64 line, low, high", "u32 bytes, pad", "Found found")  # low, high: the contents of the line before the store
class Doubt(Structure):
    """Two stores of one block that are a race if the later one changes any of `bytes` of a line."""


@layout(
    "u64 arena, arena_bytes, arena_top",
    "u64 cells",  # the address of the cell of the window's first line
    "u64 window_base",
    "Op* ops",
    "Ref* pools",  # lists of chunks with free entries, one per 1 << POOL_SHIFT bytes of the window
    "u32 strict, exhausted",  # exhausted: the arena is used up, and no access is checked any more
    "u32 whole_items",  # the number of clock items for block WHOLE made so far
    "u32 found_count",
    "u32 random",
    "u32 write_serial",  # the number of strong writes so far
    "u32 change_count",  # changes with every event that may change the result for a poll: writes, and what they publish
    "u32 doubt_count",
    f"Ref free_pieces[{CLASSES}]",
    f"KnownOp known_ops[{KNOWN_OPS}]",  # a cache, by operation
    f"RecentJoin recent_joins[{RECENT_JOINS}]",
    f"Found found_races[{FOUND_RACES}]",
    f"Doubt doubts[{DOUBTS}]",
)
class Race(Structure):
    """The state of the race detector."""


@layout(
    "Ref clock",
    "u32 time",
    # By scope (block, cluster, GPU, system). fenced: the clock at the last fence of at least that scope. held: the
    # clock that relaxed reads have seen, which the thread learns at its next fence of at least that scope.
    "Ref fence_release[4], fence_acquire[4]",
    # The reads that other threads have published by relaxed flags which this thread has seen. They count as known when
    # its block ends.
    "Ref flag_reads",
    "u32 alias_fence_time",  # a fence.proxy.alias has followed its accesses before this time, which is not in its clock
)
class RaceThread(Structure):
    """The race detector's state for a thread."""


@layout("u32 op, block, edge, store_site, load_site", "Ref clock")
class MissedFlag(Structure):
    """A flag of another block that was seen without an acquire, and the clock that an acquire would have learnt."""


@layout(
    "u32 barrier_time",  # all accesses of the block before this time are known to all its threads
    "Ref end_clock",  # the joined clocks of its threads that have exited
    "Ref proxy_fence_clock",  # the joined clocks of its threads at their fence.proxy.async
    # For the last fence.proxy.alias: the clocks of its thread before and after it, and `sync` at that time. Other
    # threads often have the same clocks.
    "Ref alias_clock_before, alias_clock_after",
    "u32 alias_barrier_time",
    f"Ref arrivals[{BARRIERS}]",
    # For the barrier of the cluster, in the block of rank 0: the clocks that the arrivals of this phase and of the last
    # phase have published.
    "Ref cluster_arrivals, cluster_phase_clock",
    "u32 relaxed_arrival_time",  # the latest time of a thread that arrived at that barrier with .relaxed
    "u32 missed_flag_count, bulk_count",
    f"MissedFlag missed_flags[{MISSED_FLAGS}]",
)
class RaceBlock(Structure):
    """The race detector's state for a block. The RaceThread of each of its threads follow it in memory."""
