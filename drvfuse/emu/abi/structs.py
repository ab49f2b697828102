# SPDX-License-Identifier: Apache-2.0
"""The structures that the native runtime, translated code and Python share, as C++ declarations of their members.

`@layout` makes each of them a ctypes structure with the same offsets; `header` gives the declarations to the native
runtime as they stand here. To Python, a pointer is an integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import Structure, c_uint8, c_uint32, c_uint64, sizeof
from typing import Any, TypeVar

from . import BARRIERS, CERTAIN, CLASSES, DOUBTS, FOUND, JOINED, MISSES, NOTICES, POLL_WORDS, WRITES

DECLARATIONS: dict[str, tuple[str, ...]] = {}
"""By the name of a structure, in the order of definition: declarations of members, "type name, name[count], ..."."""

_S = TypeVar("_S", bound=type[Structure])
_TYPES: dict[str, Any] = {"u8": c_uint8, "u32": c_uint32, "u64": c_uint64, "Ref": c_uint32}
_MEMBER = re.compile(r"(\w+)(?:\[(\d+)\])?")


def layout(*declarations: str) -> Callable[[_S], _S]:
    """Gives a structure its members, and registers its declarations under its name."""

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
    """Where a member of a structure lies, or one element of a member that is an array."""
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
    "u32 polls",  # words of its Poll in use, and POLL_KNOWN
    "u64 wake",  # virtual time at which a sleep ends
)
class Thread(Structure):
    """The header of a thread's frame."""


@layout(
    "u64 addr, low, high",
    "u32 site, size",
    "u32 stamp, time",  # of the race detector, when it was last polled
)
class Polled(Structure):
    """A word that a thread polls."""


@layout(f"Polled word[{POLL_WORDS}]")
class Poll(Structure):
    """Those of one thread."""


@layout(
    "u32 lanes, live, ready, yielded, warpop, barrier, gdc, sleeping, asking",
    "u32 alike, alike_mask, alike_kind",  # alike: all lanes in `warpop` came with one operation and one mask: these
    "u32 gathered",  # of `barrier`: those that wait for the rest of the warp to come there
    "u32 syncs",  # bar.warp.sync that it has completed
    # Of the cluster's barrier: lanes at it, those that have arrived in this phase, those that the last one let pass.
    "u32 cluster, joined, passed",
    "u32 pad[3]",
)
class Warp(Structure):
    """One warp of a resident block: masks of lanes."""


@layout(
    "u32 arrived, expected",  # 32 for each warp, whole or not
    "u32 threads",  # of the warps that have arrived
    "u32 kind, count, every",  # the reduction (or B_SYNC), and what it is so far
    "u32 plain",  # nobody arrived without waiting
    "u32 site",  # of the last that came
    "Thread* last",
)
class Barrier(Structure):
    """One barrier of a block."""


@layout(
    "u32 m, n, k",
    "u32 count",  # of products that the instruction computes
    "u32 method, steps",  # of the tensor cores, each for so many parts of k
    "u32 kind[4], registers[4]",  # of A, B, C and D: MatrixKind; registers of a lane
)
class Product(Structure):
    """A matrix product. Behind it, for A, B, C and D: for each element of each register of each lane a 16-bit place in
    the matrix. That of A is by rows, of B by columns, of C and D by rows.
    """


@layout("u32 first, last")
class List(Structure):
    """Delayed stores, oldest first."""


@layout(
    "u64 shared_base",
    "u32 ctaid[3], index, cluster_rank, smid",
    "u64 cluster_shared_base",  # of rank 0; the others' follow
    "RaceBlock* race",
    "u32 reserved[2]",
    "u32 active, live, woken, triggered",
    "Warp* warps",
    "u8* frames",
    "Poll* polls",
    "u32 slot, pad",
    f"Barrier barrier[{BARRIERS}]",
    "u64 owner",  # of delayed stores: a number that no other block has had
    "List pending",  # those that are seen by this block alone
    "u32 epoch",  # barriers that it has completed
    "u32 bulks",  # the first bulk copy to shared memory that is pending
    "u32 stores, store_turns",  # pieces of bulk copies to global memory to be written; turns since it last wrote all
    "u32 begun",  # one of its threads has run
    # Of the cluster, in its block of rank 0: phases of its barrier that are complete, threads that have arrived in this
    # one, and those that have neither arrived nor exited.
    "u32 cluster_phase, cluster_arrived, cluster_missing",
)
class Block(Structure):
    """A resident block, at the start of its slot."""


@layout(
    "u64 size",  # of each access
    "u64 reads[5], writes[5]",  # by MemoryOf
    "u64 pad",
)
class Site(Structure):
    """What was counted for one place in the code."""


@layout("u32 kind, flags, size, site, block, thread", "u64 addr, value")
class Fault(Structure):
    """What has stopped a launch."""


@layout(
    "u64 params, globals",
    "u32 nctaid[3], ntid[3], device, smem_dynamic, shared_static",
    "u32 cluster",  # its shape, x | y << 8 | z << 16; 0: no clusters
    "u64 clock",
    "u32 sm_count",
    "u32 envreg1, envreg2",  # the address of the workspace that cooperative grid barriers use: its high and low half
    "u32 op, start, primary, end",  # its number; clocks: from the start, from griddepcontrol.wait on, when it has ended
    "u32 pad0",
    "CopyQueue* copies",  # a queue for each thread of each slot; null where the kernel has no asynchronous copies
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
    "u32 part, turn, turn_warp",  # part: in the middle of its turn, at this slot, at this warp (plus one) of its block
    "u8 owner_class[256]",  # MemoryOf, by the owner in an access word
    "u32 pending, pad",  # delayed stores of its blocks, resident or ended
    "void* heap",  # what serves malloc and free of its context, or null
)
class Launch(Structure):
    """A launch."""


@layout("u64 addr, low, high", "u32 size, pad")
class Write(Structure):
    """A word that a thread has written while the runtime probes, as it was before."""


@layout("Thread* thread", "u64 format, args")
class Print(Structure):
    """A call of printf."""


@layout("Thread* thread", "u64 address, nbytes", "u32 kind, pad")
class Heap(Structure):
    """A call of malloc or free."""


@layout("u64 clock, address, value", "u32 op, block, thread, site, kind, flags")
class Event(Structure):
    """Something that happened: an entry of the engine's ring of the last EVENTS."""


@layout(
    "u32 op, kind, site, block, thread",
    "u32 mask",  # of the instruction
    "u32 lanes, live",  # those that the warp was started with, and those that have not exited
    "u32 lane",  # that a shuffle reads
)
class Notice(Structure):
    """Something that is wrong at a place and has not ended the launch."""


@layout("u64 base, nbytes", "u64* members", "u64 devices")
class Team(Structure):
    """Addresses of a multicast object. `members` has MEMBERS addresses for each piece, by device; 0 where nothing is
    bound. `devices` are bits.
    """


@layout("Team* first", "u64 count")
class Teams(Structure):
    """All multicast addresses of a machine."""


@layout(
    "u64 seed, pass, clock, clock_reads",
    "u64 progress, quiet, step, resumes",
    "u32 probing, writes",
    "u64 loop_limit, fuel, rounds",  # what a thread may do between two suspends; what is left of its accesses; it did
    "u64 work",  # done in this call
    "u64 tank",  # accesses that a thread was given since it was resumed, `fuel` included
    # A pass and a probe that the last call may have left unfinished.
    "u32 pass_open, pass_at, pass_ran, pass_held, probe_force, probe_streak, advancing, slept",
    "u32 counted, timed",  # budgets are numbers of resumes; no sleeper is woken before its time
    "u64 pass_random, pass_before, probe_rounds, probe_before, reads_before",
    # The last attempt before a deadlock is declared: a sum over all threads' saved states, the one that it is compared
    # to (renewed after 1, 2, 4, ... rounds, so that every cycle is found), and whether the limit ended that.
    "u64 state, state_kept, state_reads, state_rounds, state_period",
    "u64 strain",  # resumes since a thread ended or a block started, weighted
    "u32 watching, undecided",
    "void* clock_thread",
    "u64 clock_run, clock_read",
    "void* print",
    "Race* race",  # null without the detector
    "Event* events",  # the last EVENTS
    "u64 event_count",
    # The access that a thread is resumed for is a poll that sees what the last one saw; and the race detector has heard
    # of nothing since then that could change what it makes of it.
    "u32 fruitless, idle",
    "Delay* delay",  # null where stores are not delayed
    "Teams* teams",
    "u64 stack",  # where the stack of the thread that runs begins
    f"Write write[{WRITES}]",
    "u32 notices",
    f"Notice notice[{NOTICES}]",
)
class Engine(Structure):
    """What the launches of one machine have in common."""


@layout(
    "u32 first, last, commits, issued",
    "u32 unread",  # the first piece of a bulk copy that no wait has made sure was read
)
class CopyQueue(Structure):
    """Asynchronous copies of a thread, oldest first; it has two of these, as `copy.cuh` says."""


@layout("u32 chain, place, device, primary")  # primary: what it follows programmatically, if anything
class Op(Structure):
    """An operation's place in the order of operations."""


@layout("Ref a, b, result")
class Joined(Structure):
    """Two clocks, and the one that knows what both know."""


@layout("Ref clock", "u32 op")
class Certain(Structure):
    """A clock knows an operation wholly."""


@layout(
    "u64 addr, events",  # events: how many had happened
    "u32 size, edge",
    "u32 op, block, thread, site, flags",
    "u32 other_op, other_block, other_warp, other_lanes, other_site, other_flags",
    "u32 store_site, load_site, store_op",  # of a flag that was seen but does not order them
)
class Found(Structure):
    """Two accesses that nothing orders. `other` is the earlier one, by each of these lanes."""


@layout("u64 line, low, high", "u32 bytes, pad", "Found found")  # what the line's 16 bytes were before the store
class Doubt(Structure):
    """Stores of one block that are a race if the later one changes these bytes of a line."""


@layout(
    "u64 arena, bytes, top",
    "u64 cells",  # of the window's first byte
    "u64 window_base",
    "Op* ops",
    "Ref* pools",  # free entries, a list for each 1 << POOL_SHIFT bytes of the window
    "u32 strict, off",  # off: the arena is used up
    "u32 wholes",  # items of block WHOLE that were ever made
    "u32 found_count",
    "u32 random",
    "u32 serial",  # strong writes so far
    "u32 stamp",  # changes with whatever could make a poll another one than the last: a write, or what it publishes
    "u32 doubts",
    f"Ref free[{CLASSES}]",
    f"Certain certain[{CERTAIN}]",  # by operation: what was found last
    f"Joined joined[{JOINED}]",
    f"Found found[{FOUND}]",
    f"Doubt doubt[{DOUBTS}]",
)
class Race(Structure):
    """The race detector's state."""


@layout(
    "Ref clock",
    "u32 time",
    # By scope (block, cluster, GPU, system): known at the last fence of at least that scope; read, and learnt at the
    # next fence of at least that scope.
    "Ref fenced[4], held[4]",
    "Ref late",  # known at its end: reads that precede a relaxed flag
    "u32 aliased",  # a fence.proxy.alias is behind its accesses before this time, which its clock does not tell
)
class RaceThread(Structure):
    """What the race detector knows of a thread."""


@layout("u32 op, block, edge, store_site, load_site", "Ref clock")
class Miss(Structure):
    """A flag of another block that was seen without acquiring from it, and what an acquire would have made known."""


@layout(
    "u32 sync",  # all its accesses before this time are known to all its threads
    "Ref end",  # known to its threads that have exited
    "Ref proxied",  # known to any of its threads at a fence.proxy.async
    # The last fence.proxy.alias: what its thread knew before and behind it, and `sync` then. Others often know that.
    "Ref alias_before, alias_after",
    "u32 alias_sync",
    f"Ref arrived[{BARRIERS}]",
    # Of the cluster's barrier, in the block of rank 0: what arrivals of this phase tell, and those of the last one.
    "Ref cluster_arrived, cluster_known",
    "u32 relaxed",  # the latest time of a thread that arrived there without a release
    "u32 misses, bulks",
    f"Miss miss[{MISSES}]",
)
class RaceBlock(Structure):
    """What the race detector knows of a block; its threads follow."""
