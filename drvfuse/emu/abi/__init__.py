# SPDX-License-Identifier: Apache-2.0
"""The only copy of the numbers and structures that translated code, the native runtime and Python share.

This module has the numbers, `structs` has the structures, and `header` makes a C++ header of both for the native
runtime.

A device pointer is a host pointer. Every byte of the window has a shadow byte at `address + SHADOW_OFFSET`, and every
granule of 64 KiB has an access word. A GPU thread has a frame: the structure Thread, then the registers that it keeps
across suspends. The translated function of a kernel is `i32 symbol(ptr frame)`. It runs one GPU thread until the thread
suspends, and returns a `Status`.
"""

from __future__ import annotations

from enum import IntEnum

# Address window -----------------------------------------------------------------------------------------------------
WINDOW_BASE = 0x2000_0000_0000
WINDOW_GIB = 64
SHADOW_OFFSET = 0x0100_0000_0000
SHADOW_ADDRESSABLE = 1
SHADOW_INITIALISED = 2
ACCESS_BASE = 0x2200_0000_0000
GRANULE_SHIFT = 16
CELL_BASE = 0x2300_0000_0000  # one u32 per line of the window, for the race detector
LINE_SHIFT = 4
PIECE_SHIFT = 21  # the granularity of multicast objects: each piece has its own members
MEMBERS = 8  # entries in the table of a piece, one per device
POOL_SHIFT = 10  # log2 of the number of bytes of the window whose race entries lie together

# Owners in an access word, besides the numbers of devices.
OWNER_HOST = 0xFF
OWNER_SHARED = 0xFE
OWNER_LOCAL = 0xFD
KIND_INITIALISED = 0x40  # every byte of the granule counts as initialised
KIND_FULL = 0x80  # every byte of the granule is addressable, so the shadow only says which are initialised


class Kind(IntEnum):
    """The kind of memory in a granule of the window: the low bits of the kind field of the granule's access word."""

    NONE = 0
    DEVICE = 1  # allocated by `Window.alloc`
    MAPPED = 2  # physical memory, mapped by `Mappings.map`
    HOST = 3
    GLOBALS = 4  # module variables of one device
    SHARED = 5  # shared memory of blocks; as LOCAL and PARAM, memory that the engine hands out in pieces
    LOCAL = 6
    PARAM = 7
    FREED = 8
    MULTICAST = 9  # addresses of a multicast object, with no memory behind them


class MemoryOf(IntEnum):
    """Where the memory of an access is, as seen from the device that makes the access. Accesses are counted by it.

    SHARED is shared memory. MULTICAST counts the bytes that the instruction names, once for all devices of the team.
    """

    DEVICE, PEER, HOST, SHARED, MULTICAST = range(5)


# Running ------------------------------------------------------------------------------------------------------------
LOOP_SLICE = 4096  # rounds of loops without accesses after which a thread calls rt_loop
EVENTS = 1 << 14  # entries of the engine's ring of events
WRITES = 64  # writes of a thread that are kept while the runtime probes
BARRIERS = 16  # barriers of a block
CLUSTER_SHIFT = 18  # position of the rank in a 32-bit shared-memory address; a block's shared memory is smaller
POLL_WORDS = 32  # words that a thread may be recorded as polling
POLL_COUNT = 0xFF  # mask of Thread::polls: the number of words that are recorded
NO_SITE = 0xFFFFFFFF


class LaunchState(IntEnum):
    RUNNING, DONE, FAULTED = range(3)


class RunEnd(IntEnum):
    """Why rt_run returned. rt_advance returns MORE, too."""

    EVENT = 0
    IDLE = 1
    BUDGET = 2
    MORE = 3  # call the function again, with `more`


class Status(IntEnum):
    """The result of a translated function: why the thread is suspended, or that it has ended."""

    EXIT = 0
    YIELD = 1  # before a strong load or an atomic; the thread has set op_addr, op_size, site
    BARRIER = 2  # op_a id, op_b thread count (0 = all), op_kind = Barrier, op_c predicate -> op_result
    WARPOP = 3  # op_kind = WarpOp, op_mask, op_a.. -> op_result, op_pred
    GDC_WAIT = 4
    FAULT = 5  # a fault, which rt_access has recorded
    TRAP = 6  # op_kind = Trap
    SLEEP = 7  # op_a nanoseconds
    CLUSTER = 8  # at barrier.cluster: op_kind = ClusterBarrier, op_a = BARRIERS, which is no number of another barrier


class Barrier(IntEnum):
    """op_kind of the status BARRIER: the operation at a barrier of the block. ARRIVE suspends too, until all lanes of
    the warp have arrived.
    """

    SYNC = 0
    ARRIVE = 1
    POPC = 2
    AND = 3
    OR = 4
    UNALIGNED = 8  # or-ed to the other values: lanes of one warp may arrive by different instructions


class ClusterBarrier(IntEnum):
    """op_kind of the status CLUSTER: the operation at the barrier of the cluster."""

    ARRIVE = 0
    WAIT = 1
    RELAXED = 2  # or-ed to ARRIVE: the arrival is relaxed and releases nothing
    UNALIGNED = 8  # or-ed to the other values: a lane does not wait for the rest of its warp


class Trap(IntEnum):
    """op_kind of the status TRAP: why the thread traps."""

    TRAP = 0
    ASSERT = 1  # a failed assertion: message op_value, file op_addr, line op_a, function op_seen
    BREAKPOINT = 2
    NO_FUNCTION = 3  # a call by the address op_addr
    TABLE = 4  # a brx with an index outside of its table


class WarpOp(IntEnum):
    """op_kind of the status WARPOP: the operation of the warp. op_mask is the member mask of the instruction
    (0xffffffff if it has none).

    SHFL: op_a value (32 bits), op_b lane or delta, op_c clamp/segment word -> op_result value, op_pred in range.
    VOTE: op_a predicate (0/1) -> op_result (0/1, or the mask for BALLOT).
    MATCH: op_value the value (64 bits) -> op_result mask, op_pred (ALL only) 1 if all equal.
    REDUX: op_a value -> op_result. WARP_SYNC: orders memory. ELECT: op_result leader lane, op_pred 1 on the leader.
    MATRIX: op_value a function of the library `matrix`, op_a the offset of the lane's exchange area in its frame.
    """

    SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX = range(4)
    VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT = range(4, 8)
    MATCH_ANY, MATCH_ALL = range(8, 10)
    REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U = range(10, 15)
    REDUX_AND, REDUX_OR, REDUX_XOR = range(15, 18)
    WARP_SYNC, ELECT = range(18, 20)
    ACTIVEMASK = 20  # no mask; op_result is the mask of lanes at the same instruction once the warp cannot continue
    MATRIX = 21


class MatrixKind(IntEnum):
    """The type of a matrix's elements."""

    U8, S8, E4M3, E5M2, F16, BF16, F32, TF32, S32 = range(9)


class MatrixMethod(IntEnum):
    """The methods by which an H200 computes matrix products."""

    TENSOR = 0  # computed by steps of the tensor cores
    FP8 = 1  # the same on fp16 values, with C added at the end
    CHAIN = 2  # computed by fp32 operations of the ordinary cores
    INTEGER, SATURATED = 3, 4


EXCHANGE_WORDS = 20  # words in a lane's frame for the registers of a matrix instruction


class Clock(IntEnum):
    """`kind` of rt_clock."""

    GLOBALTIMER, CLOCK = range(2)


# Accesses: flags of rt_access(thread, addr, size, flags, site) and rt_fence(thread, flags, site) --------------------
class Access(IntEnum):
    """Flags of an access. A Scope, an Order, a Space and a number of elements are or-ed to them, at the shifts
    below.
    """

    WRITE = 1 << 0
    ATOMIC = 1 << 1  # reads and writes
    STRONG = 1 << 2
    NC = 1 << 8
    VOLATILE = 1 << 9
    REDUCTION = 1 << 16  # an atomic whose result is not returned
    SWAP = 1 << 17  # a compare-and-swap: the value to compare with is in op_value, its upper half in op_seen
    LATER = 1 << 20  # a write that takes effect, and marks its bytes as initialised, at a later time
    BULK = 1 << 21  # the read of shared memory by a bulk copy
    MULTIMEM = 1 << 23  # an access to the members behind a multicast address
    MBARRIER = 1 << 22  # an operation on an mbarrier; a plain one is mbarrier.init or .inval


SCOPE_SHIFT = 4
ORDER_SHIFT = 6
SPACE_SHIFT = 12
ELEMENTS_SHIFT = 18  # for strong accesses, and with UNREAD: log2 of the number of elements, in two bits
UNREAD_SHIFT = 24  # for plain loads: a bit for each element whose register is never read


class Fence(IntEnum):
    """Flags of a fence. A Scope and an Order are or-ed to them, as for an access."""

    SC = 1 << 10  # fence.sc or membar; without it, fence.acq_rel
    PROXY = 1 << 11  # any fence.proxy
    ALIAS = 1 << 14  # with PROXY: fence.proxy.alias
    ASYNC = 1 << 12  # with PROXY: fence.proxy.async that includes shared memory
    INIT = 1 << 13  # fence.mbarrier_init


class Scope(IntEnum):
    CTA, CLUSTER, GPU, SYS = range(4)


class Order(IntEnum):
    RELAXED, ACQUIRE, RELEASE, ACQ_REL = range(4)


class Space(IntEnum):
    GENERIC, GLOBAL, SHARED, LOCAL, CONST, PARAM, CLUSTER = range(7)


class Mbarrier(IntEnum):
    """`op` of rt_mbarrier. DROP is an arrival that also reduces the arrivals that later phases expect. NO_COMPLETE is
    an arrival that must not complete the phase.
    """

    INIT, INVAL, ARRIVE, EXPECT, TEST, DROP, NO_COMPLETE = range(7)


class HeapCall(IntEnum):
    """Calls of native code to a heap: allocate memory, return the size of the allocation at an address (0 if there is
    none), free the allocation.
    """

    MALLOC, SIZE, FREE = range(3)


class Reduce(IntEnum):
    """How a reduction combines elements. An `Element` and an `Accumulate` are or-ed to it at their shifts. Functions
    whose argument is 0 for no reduction get the value or-ed with `REDUCES`.
    """

    ADD, MIN, MAX, AND, OR, XOR, INC, DEC = range(8)


class Element(IntEnum):
    """The type of the elements that a reduction combines. For a packed type, it is the type of each part."""

    B32, U32, S32, B64, U64, S64, F32, F64, F16, BF16, E4M3, E5M2 = range(12)


class Accumulate(IntEnum):
    """The precision of intermediate sums: that of the element, or a higher one."""

    ELEMENT, F16, F32 = range(3)


ELEMENT_SHIFT = 4
ACCUMULATE_SHIFT = 8
REDUCES = 1 << 16


# The word of an mbarrier, whose layout PTX leaves open; an arrival returns it as the state. The lowest bits are the
# number of arrivals still to come. The number of bytes still to come is signed.
MBARRIER_EXPECTED_SHIFT = 20  # arrivals of each phase
MBARRIER_BYTES_SHIFT = 40
MBARRIER_PARITY_BIT = 61
MBARRIER_COUNT_MASK = (1 << 20) - 1
MBARRIER_BYTES_MASK = (1 << 21) - 1
MBARRIER_PARITY = 1 << MBARRIER_PARITY_BIT
MBARRIER_USED = 1 << 62
MBARRIER_VALID = 1 << 63


# Findings -----------------------------------------------------------------------------------------------------------
class FaultKind(IntEnum):
    """Why a launch was stopped. `findings/faults.py` says for each kind what the fields of its record mean."""

    NONE, OUT_OF_BOUNDS, USE_AFTER_FREE, MISALIGNED, NO_ACCESS, READ_ONLY, UNINITIALISED = range(7)
    FOREIGN_SHARED, FOREIGN_LOCAL, TRAP, ASSERT, WARP_LANES, WARP_MISMATCH = range(7, 13)
    BARRIER_COUNT, BARRIER_DIVERGENCE, BARRIER_KINDS, BARRIER_LEFT = range(13, 17)
    UNSUPPORTED, ENDLESS, INTERRUPTED, COPY_SIZE, MBARRIER = range(17, 22)
    CLUSTER_ABSENT, CLUSTER_BARRIER, MULTICAST_PLAIN, NO_MULTICAST, MULTICAST_UNBOUND = range(22, 27)
    NO_CLUSTER, NO_FUNCTION, BAD_FREE, MATRIX_LANES, STACK_OVERFLOW = range(27, 32)


class BarrierCount(IntEnum):
    """Errors in the operands of a barrier."""

    OTHERS_DIFFER, NUMBER, THREADS = range(3)


class Endless(IntEnum):
    """What a thread that was stopped as endless has repeated, if it was not plain accesses: rounds of a loop, or
    resumes of all threads.
    """

    ROUNDS, RESUMES = range(2)


class MbarrierError(IntEnum):
    NONE, NO_BARRIER, COUNT, ARRIVALS, BYTES, PENDING, ELSEWHERE, COMPLETES, MOST = range(9)


class ClusterError(IntEnum):
    """Errors at the barrier of a cluster."""

    TWICE, NOT_ARRIVED = range(2)


class Absent(IntEnum):
    """Why a block of the cluster has no shared memory: it has not started, its threads have exited, or they exited
    before an asynchronous write arrived (LATE).
    """

    NOT_YET, EXITED, LATE = range(3)


class NoticeKind(IntEnum):
    """Kinds of findings that do not end a launch. At most `NOTICES` of them are kept until Python takes them."""

    SHUFFLE, VOTE, BARRIER = range(3)


NOTICES = 16


class EventKind(IntEnum):
    """Kinds of events in the engine's ring buffer."""

    START, END = range(2)
    LOAD, STORE, ATOMIC = range(2, 5)
    FENCE, BARRIER, GDC_WAIT, TRIGGER = range(5, 9)
    COPY, COPY_WAIT = range(9, 11)
    CLUSTER = 11


FOUND_RACES = 64  # races that the detector keeps until Python takes them
DOUBTS = 16  # races that depend on the value of one store, until the store is made
KNOWN_OPS = 32  # entries of the cache Race::known_ops
RECENT_JOINS = 1 << 8  # entries of the cache Race::recent_joins, chosen by the upper eight bits of a hash (native/clock.cuh)
CLASSES = 40  # size classes of the race detector's arena: powers of two
MISSED_FLAGS = 8  # flags that the detector remembers for each block as seen without an acquire


class Range(IntEnum):
    """The access of an operation to a range, for rt_race_range. FREE counts as a write of all bytes with accesses."""

    READ, WRITE, FREE = range(3)


class Entry(IntEnum):
    """Flags of the race detector's entries, each of which is an access or, with LOCATION, the state of a location."""

    WRITE = 1 << 0
    STRONG = 1 << 1
    ATOMIC = 1 << 2
    LOCATION = 1 << 3
    COPIED = 1 << 4  # the access of a cp.async for which its thread has waited
    COMMON = 1 << 6  # one entry in the lists of many lines, the last of each list; it is never changed
    ASYNC = 1 << 7


class Edge(IntEnum):
    """Why two accesses are not ordered."""

    NONE, BARRIER, WARP, RELEASED_EARLIER, RELAXED_STORE = range(5)
    RELAXED_LOAD, STORE_SCOPE, LOAD_SCOPE, GDC_WAIT = range(5, 9)
    ORDER, READ_ONLY_PATH, STRONG_SCOPES, STRONG_SIZES, FLAG_SIZES = range(9, 14)
    COPY_OWN, COPY, COPIED, BULK, COPY_EARLY, PROXY = range(14, 20)
    CLUSTER, CLUSTER_RELAXED, CLUSTER_START, CLUSTER_END, ALIAS = range(20, 25)


# Symbols that translated code calls: name -> (LLVM result type, LLVM argument types). Comments name the arguments. A
# result of type i32 is 0 if the thread may continue; otherwise a fault is recorded, and the translated code returns
# FAULT.
RUNTIME_FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    # thread, address, size, flags, site
    "rt_access": ("i32", ("ptr", "i64", "i32", "i32", "i32")),
    **{f"rt_{kind}{size}": ("i32", ("ptr", "i64", "i32")) for kind in ("read", "write") for size in (4, 8, 16)},
    # rt_read4 to rt_write16 are rt_access for a plain load or store of that size: thread, address, site
    "rt_fence": ("void", ("ptr", "i32", "i32")),  # thread, flags, site
    "rt_loop": ("i32", ("ptr", "i32")),  # thread, site; called after each LOOP_SLICE rounds of loops
    # thread, target, source, size, bytes read, site
    "rt_copy": ("i32", ("ptr", "i64", "i64", "i32", "i32", "i32")),
    "rt_copy_commit": ("i32", ("ptr",)),  # thread
    "rt_copy_wait": ("i32", ("ptr", "i32", "i32")),  # thread, groups that may stay pending, site
    "rt_mbarrier": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i64", "i32", "i32")),  # see native/mbarrier.cuh
    # thread, target, source, size, mbarrier, the ranks that receive (see native/mbarrier.cuh), Reduce, site
    "rt_bulk": ("i32", ("ptr", "i64", "i64", "i32", "i64", "i32", "i32", "i32")),
    # thread, target, low and high half of the stored value, size, mbarrier, Reduce, site
    "rt_st_async": ("i32", ("ptr", "i64", "i64", "i64", "i32", "i64", "i32", "i32")),
    # thread, target, source, size, Reduce, site
    "rt_bulk_store": ("i32", ("ptr", "i64", "i64", "i32", "i32", "i32")),
    "rt_copy_arrive": ("i32", ("ptr", "i64", "i32", "i32")),  # thread, mbarrier, 1 for .noinc, site
    "rt_bulk_commit": ("void", ("ptr",)),
    "rt_bulk_wait": ("i32", ("ptr", "i32", "i32", "i32")),  # thread, groups that may stay pending, 1 for .read, site
    # thread, address, size, flags, Reduce with Element and Accumulate, low and high half of the operand, site; the
    # result of multimem.ld_reduce is in op_value and op_seen
    "rt_multimem": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i64", "i64", "i32")),
    "rt_trigger": ("void", ("ptr",)),
    "rt_clock": ("i64", ("ptr", "i32")),
    "rt_vprintf": ("i32", ("ptr", "i64", "i64")),  # thread, format address, argument block address
    "rt_depth": ("i32", ("ptr", "i32")),  # thread, site; called at the start of recursive functions
    "rt_malloc": ("i64", ("ptr", "i64")),  # thread, bytes -> address, or 0
    "rt_free": ("i32", ("ptr", "i64", "i32")),  # thread, address, site
}

# Native libraries besides the runtime, which are loaded with modules that need them, and their functions. Each function
# takes the thread of the first lane. It returns 0, or 1 if it has recorded a fault (native/matrix.cu).
LIBRARIES = {"matrix": ("mx_multiply", "mx_load_rows", "mx_store_rows", "mx_transpose")}

# libm functions, from double to double, that translated code may call; native/loader.py binds them.
MATH_FUNCTIONS = ("exp2", "log2", "sin", "cos", "tanh")
