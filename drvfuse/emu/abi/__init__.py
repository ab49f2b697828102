# SPDX-License-Identifier: Apache-2.0
"""The only copy of the numbers and structures that translated code, the native runtime and Python share.

This module has the numbers, and imports those of findings from `kinds`. `structs` and `race_structs` have the
structures, `functions` the functions that translated code calls. `header` makes a C++ header from all of them for the
native runtime.

A device pointer is a host pointer. Every byte of the window has a shadow byte at `address + SHADOW_OFFSET`, which says
whether the byte is addressable and initialised. Every granule (64 KiB of the window) has an access word
(`space/window.py`). A GPU thread has a frame: the structure Thread, then the registers that it keeps across suspends.
The translated function of a kernel is `i32 symbol(ptr frame)`. It runs one GPU thread until the thread suspends, and
returns a `Status`.
"""

from __future__ import annotations

from enum import IntEnum

from .functions import LIBRARIES as LIBRARIES
from .functions import MATH_FUNCTIONS as MATH_FUNCTIONS
from .functions import RUNTIME_FUNCTIONS as RUNTIME_FUNCTIONS
from .kinds import CLASSES as CLASSES
from .kinds import DOUBTS as DOUBTS
from .kinds import FOUND_RACES as FOUND_RACES
from .kinds import KNOWN_OPS as KNOWN_OPS
from .kinds import MISSED_FLAGS as MISSED_FLAGS
from .kinds import NOTICES as NOTICES
from .kinds import RECENT_JOINS as RECENT_JOINS
from .kinds import Absent as Absent
from .kinds import BarrierCount as BarrierCount
from .kinds import ClusterError as ClusterError
from .kinds import Edge as Edge
from .kinds import Endless as Endless
from .kinds import Entry as Entry
from .kinds import EventKind as EventKind
from .kinds import FaultKind as FaultKind
from .kinds import MbarrierError as MbarrierError
from .kinds import NoticeKind as NoticeKind
from .kinds import Range as Range
from .layout import in_cxx

# Address window -----------------------------------------------------------------------------------------------------
WINDOW_BASE = 0x2000_0000_0000  # the lowest address of a window
WINDOW_GIB = 64  # the size of a window, unless a machine asks for another one
SHADOW_OFFSET = 0x0100_0000_0000  # the distance from a byte to its shadow byte
SHADOW_ADDRESSABLE = 1  # the two flags of a shadow byte
SHADOW_INITIALISED = 2
ACCESS_BASE = 0x2200_0000_0000  # the address of the access word of the granule at WINDOW_BASE
GRANULE_SHIFT = 16  # log2 of the bytes of a granule
CELL_BASE = 0x2300_0000_0000  # the address of the race detector's cell (a u32) of the line at WINDOW_BASE
LINE_SHIFT = 4  # log2 of the bytes of a line
PIECE_SHIFT = 21  # log2 of the bytes of a piece of a multicast object; each piece has its own members
MEMBERS = 8  # entries of a multicast piece's table of addresses, one per device
POOL_SHIFT = 10  # log2 of the bytes of a part of the window; the race detector's entries of one part lie together

# Owners of memory in an access word. Other values are numbers of devices.
OWNER_HOST = 0xFF
OWNER_SHARED = 0xFE
OWNER_LOCAL = 0xFD
KIND_INITIALISED = 0x40  # every byte of the granule counts as initialised
KIND_FULL = 0x80  # every byte of the granule is addressable, so the shadow only says which are initialised


@in_cxx("K_")
class Kind(IntEnum):
    """What memory a granule of the window holds. The granule's access word has it in the low bits of its kind field."""

    NONE = 0
    DEVICE = 1  # allocated by `Window.alloc`
    MAPPED = 2  # physical memory, mapped by `Mappings.map`
    HOST = 3
    GLOBALS = 4  # module variables of one device
    SHARED = 5  # shared memory of blocks
    LOCAL = 6  # local memory of threads
    PARAM = 7  # parameters of kernels
    FREED = 8
    MULTICAST = 9  # addresses of a multicast object, which have no memory of their own


@in_cxx("OF_")
class MemoryOf(IntEnum):
    """Whose memory an access reaches, as seen from the device that makes the access. Reports have separate counts of
    accesses for each value.

    DEVICE is memory of the same device, PEER memory of another device, HOST pinned host memory, and SHARED shared
    memory. MULTICAST is memory at a multicast address; an access to it counts once, not once for each device of the
    team.
    """

    DEVICE, PEER, HOST, SHARED, MULTICAST = range(5)


# Running ------------------------------------------------------------------------------------------------------------
LOOP_SLICE = 4096  # a thread calls rt_loop after this many iterations of loops without accesses
EVENTS = 1 << 14  # entries of the engine's ring buffer of events; a power of two
WRITES = 64  # entries of Engine::write: the most writes that a probe records between a thread's resume and its suspend
BARRIERS = 16  # the number of barriers of a block
CLUSTER_SHIFT = 18  # log2 of the distance between the shared memories of adjacent ranks of a cluster
POLL_WORDS = 32  # words in a Poll: the maximum that is recorded for a thread
POLL_COUNT = 0xFF  # mask of Thread::polls: the number of words that are recorded
NO_SITE = 0xFFFFFFFF  # means "no instruction" where the number of an instruction (a site) is expected


@in_cxx("")
class LaunchState(IntEnum):
    """The state of a launch: it runs, all its blocks have ended, or a fault has stopped it."""

    RUNNING, DONE, FAULTED = range(3)


@in_cxx("R_")
class RunEnd(IntEnum):
    """Why rt_run returned. rt_advance and rt_pass_time return MORE, too."""

    EVENT = 0
    IDLE = 1
    BUDGET = 2  # the time, or the number of resumes, that the call was given is used up
    MORE = 3  # the call has reached its work limit: call the function again, with `more`


@in_cxx("")
class Status(IntEnum):
    """The result of a translated function: why the thread is suspended, or that it has ended.

    Where a status has operands or results (after "->"), they are the named members of `structs.Thread`.
    """

    EXIT = 0
    YIELD = 1  # before a strong load or an atomic; the thread has set op_addr, op_size, site
    BARRIER = 2  # op_a barrier, op_b thread count (0 = all), op_kind = Barrier, op_c predicate -> op_result
    WARPOP = 3  # op_kind = WarpOp, op_mask; `WarpOp` names the other operands and the results
    GDC_WAIT = 4
    FAULT = 5  # a fault, which rt_access has recorded
    TRAP = 6  # op_kind = Trap
    SLEEP = 7  # op_a nanoseconds
    CLUSTER = 8  # at barrier.cluster: op_kind = ClusterBarrier; op_a = BARRIERS, which no barrier of a block has


@in_cxx("B_")
class Barrier(IntEnum):
    """The op_kind of a thread that suspends with the status BARRIER: its operation on a barrier of its block."""

    SYNC = 0
    ARRIVE = 1  # bar.arrive: the thread waits only until all lanes of its warp have arrived
    POPC = 2  # POPC, AND and OR are the reductions of barrier.red
    AND = 3
    OR = 4
    UNALIGNED = 8  # or-ed to the other values: lanes of one warp may arrive by different instructions


@in_cxx("CB_")
class ClusterBarrier(IntEnum):
    """The op_kind of a thread that suspends with the status CLUSTER: its operation on the barrier of its cluster."""

    ARRIVE = 0
    WAIT = 1
    RELAXED = 2  # or-ed to ARRIVE: the arrival is relaxed and releases nothing
    UNALIGNED = 8  # or-ed to the other values: a lane arrives without the rest of its warp


@in_cxx("TRAP_")
class Trap(IntEnum):
    """Why a thread suspends with the status TRAP: its op_kind."""

    TRAP = 0  # the instruction trap
    ASSERT = 1  # a failed assertion: message op_value, file op_addr, line op_a, function op_seen
    BREAKPOINT = 2  # the instruction brkpt
    NO_FUNCTION = 3  # an indirect call of op_addr, where no function begins
    TABLE = 4  # a branch (brx.idx) with an index outside of its table of targets


@in_cxx("")
class WarpOp(IntEnum):
    """The operation of a thread that suspends with the status WARPOP: its op_kind. op_mask is the member mask of the
    instruction (0xffffffff if it has none). The list has the operands and, after "->", the results.

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
    ACTIVEMASK = 20  # waits until no lane of the warp can run; op_result: the lanes that wait at the same instruction
    MATRIX = 21


@in_cxx("MX_")
class MatrixKind(IntEnum):
    """The type of a matrix's elements."""

    U8, S8, E4M3, E5M2, F16, BF16, F32, TF32, S32 = range(9)


@in_cxx("MX_")
class MatrixMethod(IntEnum):
    """The methods by which an H200 computes matrix products (docs/matrix.md)."""

    TENSOR = 0  # computed by steps of the tensor cores
    FP8 = 1  # computed by steps of the tensor cores on fp16 values, with C added at the end
    CHAIN = 2  # computed by fp32 operations of the ordinary cores
    INTEGER, SATURATED = 3, 4  # sums of 32-bit integers that wrap around, or saturate


EXCHANGE_WORDS = 20  # 32-bit words of a lane's exchange area, which holds its registers of a matrix instruction


class Clock(IntEnum):
    """The argument `kind` of rt_clock: which special register it reads."""

    GLOBALTIMER, CLOCK = range(2)


# Accesses: flags of rt_access(thread, addr, size, flags, site) and rt_fence(thread, flags, site) --------------------
@in_cxx("A_")
class Access(IntEnum):
    """Flags of an access. A Scope, an Order, a Space and a number of elements are or-ed to them, at the shifts
    below. An access without WRITE and ATOMIC is a read.
    """

    WRITE = 1 << 0
    ATOMIC = 1 << 1  # reads and writes
    STRONG = 1 << 2
    NC = 1 << 8  # by the read-only path (ld.global.nc)
    VOLATILE = 1 << 9
    REDUCTION = 1 << 16  # an atomic whose result is not returned
    SWAP = 1 << 17  # a compare-and-swap: the value to compare with is in op_value, its upper half in op_seen
    LATER = 1 << 20  # a write that is checked before it is made; the check does not mark its bytes as initialised
    BULK = 1 << 21  # the read of shared memory by a bulk copy
    MULTIMEM = 1 << 23  # an access to the members of a multicast address
    MBARRIER = 1 << 22  # an operation on an mbarrier; without STRONG: mbarrier.init or .inval


SCOPE_SHIFT = 4
ORDER_SHIFT = 6
SPACE_SHIFT = 12
ELEMENTS_SHIFT = 18  # two bits: log2 of the number of elements of a strong access, or of a load with UNREAD bits
UNREAD_SHIFT = 24  # for plain loads: a bit for each element whose register is never read


@in_cxx("FENCE_")
class Fence(IntEnum):
    """Flags of a fence. A Scope and an Order are or-ed to them, as for an access."""

    SC = 1 << 10  # fence.sc or membar; without it, fence.acq_rel
    PROXY = 1 << 11  # any fence.proxy
    ALIAS = 1 << 14  # with PROXY: fence.proxy.alias
    ASYNC = 1 << 12  # with PROXY: fence.proxy.async that includes shared memory
    INIT = 1 << 13  # fence.mbarrier_init


@in_cxx("SCOPE_")
class Scope(IntEnum):
    CTA, CLUSTER, GPU, SYS = range(4)


@in_cxx("ORDER_")
class Order(IntEnum):
    RELAXED, ACQUIRE, RELEASE, ACQ_REL = range(4)


@in_cxx("SPACE_")
class Space(IntEnum):
    GENERIC, GLOBAL, SHARED, LOCAL, CONST, PARAM, CLUSTER = range(7)


@in_cxx("MB_")
class Mbarrier(IntEnum):
    """`op` of rt_mbarrier. EXPECT is expect_tx, and TEST is test_wait or try_wait. DROP is an arrival that also reduces
    the arrivals that later phases expect. NO_COMPLETE is an arrival that must not complete the phase.
    """

    INIT, INVAL, ARRIVE, EXPECT, TEST, DROP, NO_COMPLETE = range(7)


@in_cxx("HEAP_")
class HeapCall(IntEnum):
    """Calls of native code to a heap: allocate memory, return the size of the allocation at an address (0 if there is
    none), free the allocation.
    """

    MALLOC, SIZE, FREE = range(3)


@in_cxx("REDUCE_")
class Reduce(IntEnum):
    """How a reduction combines elements. An `Element` and an `Accumulate` are or-ed to it at their shifts. Some
    functions take 0 for no reduction; for a reduction, they take the value or-ed with `REDUCES`.
    """

    ADD, MIN, MAX, AND, OR, XOR, INC, DEC = range(8)


@in_cxx("ELEMENT_")
class Element(IntEnum):
    """The type of the elements that a reduction combines. For a packed type, it is the type of each part."""

    B32, U32, S32, B64, U64, S64, F32, F64, F16, BF16, E4M3, E5M2 = range(12)


@in_cxx("ACCUMULATE_")
class Accumulate(IntEnum):
    """The precision of the intermediate sums of multimem.ld_reduce: that of the element, or a higher one."""

    ELEMENT, F16, F32 = range(3)


ELEMENT_SHIFT = 4
ACCUMULATE_SHIFT = 8
REDUCES = 1 << 16


# The word of an mbarrier, whose layout PTX leaves open. An arrival returns the word as the state.
MBARRIER_COUNT_MASK = (1 << 20) - 1  # the lowest 20 bits: the number of arrivals still to come in this phase
MBARRIER_EXPECTED_SHIFT = 20  # the lowest of the next 20 bits: the number of arrivals that each phase expects
MBARRIER_BYTES_SHIFT = 40  # the lowest of the next 21 bits: the number of bytes still to come, signed
MBARRIER_BYTES_MASK = (1 << 21) - 1
MBARRIER_PARITY_BIT = 61
MBARRIER_PARITY = 1 << MBARRIER_PARITY_BIT  # the parity of the phase
MBARRIER_USED = 1 << 62  # a thread has arrived or expected bytes since the initialisation
MBARRIER_VALID = 1 << 63  # the word is an mbarrier
