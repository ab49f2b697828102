# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults, notices, events and races, and how many of each the native runtime keeps."""

from __future__ import annotations

from enum import IntEnum

from .layout import in_cxx


@in_cxx("F_")
class FaultKind(IntEnum):
    """Why a launch was stopped. `findings/faults.py` says for each kind what the fields of its record mean."""

    NONE, OUT_OF_BOUNDS, USE_AFTER_FREE, MISALIGNED, NO_ACCESS, READ_ONLY, UNINITIALISED = range(7)
    FOREIGN_SHARED, FOREIGN_LOCAL, TRAP, ASSERT, WARP_LANES, WARP_MISMATCH = range(7, 13)
    BARRIER_COUNT, BARRIER_DIVERGENCE, BARRIER_KINDS, BARRIER_LEFT = range(13, 17)
    UNSUPPORTED, ENDLESS, INTERRUPTED, COPY_SIZE, MBARRIER = range(17, 22)
    CLUSTER_ABSENT, CLUSTER_BARRIER, MULTICAST_PLAIN, NO_MULTICAST, MULTICAST_UNBOUND = range(22, 27)
    NO_CLUSTER, NO_FUNCTION, BAD_FREE, MATRIX_LANES, STACK_OVERFLOW = range(27, 32)


@in_cxx("COUNT_")
class BarrierCount(IntEnum):
    """Errors in the operands of a barrier."""

    OTHERS_DIFFER, NUMBER, THREADS = range(3)


@in_cxx("ENDLESS_")
class Endless(IntEnum):
    """Why a thread was stopped as endless although its accesses were within their limit: too many iterations of
    loops without accesses, or too many resumes of all threads.
    """

    ROUNDS, RESUMES = range(2)


@in_cxx("E_")
class MbarrierError(IntEnum):
    """Errors of operations on an mbarrier. `findings/faults.py` has a sentence for each."""

    NONE, NO_BARRIER, COUNT, ARRIVALS, BYTES, PENDING, ELSEWHERE, COMPLETES, MOST = range(9)


@in_cxx("E_")
class ClusterError(IntEnum):
    """Errors at the barrier of a cluster: two arrivals without a wait, a wait without an arrival."""

    TWICE, NOT_ARRIVED = range(2)


@in_cxx("ABSENT_")
class Absent(IntEnum):
    """Why a block of the cluster has no shared memory: it has not started, its threads have exited, or they exited
    before an asynchronous write arrived (LATE).
    """

    NOT_YET, EXITED, LATE = range(3)


@in_cxx("NOTICE_")
class NoticeKind(IntEnum):
    """Kinds of findings that do not end a launch. SHUFFLE and VOTE: an operand of a warp operation names lanes that are
    absent. BARRIER: a warp has arrived at a barrier after some of its lanes have exited.
    """

    SHUFFLE, VOTE, BARRIER = range(3)


NOTICES = 16  # the most notices that are kept until Python takes them


@in_cxx("V_")
class EventKind(IntEnum):
    """Kinds of events in the engine's ring buffer."""

    START, END = range(2)
    LOAD, STORE, ATOMIC = range(2, 5)
    FENCE, BARRIER, GDC_WAIT, TRIGGER = range(5, 9)
    COPY, COPY_WAIT = range(9, 11)
    CLUSTER = 11


FOUND_RACES = 64  # the most races that are kept until Python takes them
DOUBTS = 16  # entries of Race::doubts: the most doubts that are kept about one store (native/race_report.cuh)
KNOWN_OPS = 32  # entries of the cache Race::known_ops
RECENT_JOINS = 1 << 8  # entries of the cache Race::recent_joins; `join` (native/clock_join.cuh) uses 8 bits of a hash
CLASSES = 40  # the number of size classes of the race detector's arena; pieces of class k have 32 << k bytes
MISSED_FLAGS = 8  # the most records (MissedFlag) that are kept for a block; newer ones replace older ones


@in_cxx("RANGE_")
class Range(IntEnum):
    """How an operation accesses a range, for rt_race_range. FREE conflicts with every access to the range."""

    READ, WRITE, FREE = range(3)


@in_cxx("N_")
class Entry(IntEnum):
    """Flags of the race detector's entries (native/race_entry.cuh). With LOCATION, the entry is no access but the
    state of a location.
    """

    WRITE = 1 << 0
    STRONG = 1 << 1
    ATOMIC = 1 << 2
    LOCATION = 1 << 3
    COPIED = 1 << 4  # the access of a cp.async for which its thread has waited
    COMMON = 1 << 6  # an entry at the end of the lists of many lines, which share it; it is never changed
    ASYNC = 1 << 7  # the access of an asynchronous copy


@in_cxx("X_")
class Edge(IntEnum):
    """What is missing between two accesses that are not ordered. `findings/race_report.py` has a sentence for each."""

    NONE, BARRIER, WARP, RELEASED_EARLIER, RELAXED_STORE = range(5)
    RELAXED_LOAD, STORE_SCOPE, LOAD_SCOPE, GDC_WAIT = range(5, 9)
    ORDER, READ_ONLY_PATH, STRONG_SCOPES, STRONG_SIZES, FLAG_SIZES = range(9, 14)
    COPY_OWN, COPY, COPIED, BULK, COPY_EARLY, PROXY = range(14, 20)
    CLUSTER, CLUSTER_RELAXED, CLUSTER_START, CLUSTER_END, ALIAS = range(20, 25)
