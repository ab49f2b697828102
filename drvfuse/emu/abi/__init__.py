# SPDX-License-Identifier: Apache-2.0
"""Numbers shared by the translator, which emits them, the native runtime (`runtime.cu` has the structs) and the engine.

A device pointer is the host pointer. Every byte of the window has a shadow byte at `addr + SHADOW_OFFSET`, every 64 KiB
granule an access word. A GPU thread is a frame: a fixed header, then slots for what lives across a suspend. A kernel's
generated function is `i32 symbol(ptr frame)`: it runs one GPU thread until that suspends and returns a `Status`.
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
CELL_BASE = 0x2300_0000_0000  # one u32 a line, for the race detector
LINE_SHIFT = 4
OWNER_HOST = 0xFF
OWNER_SHARED = 0xFE
OWNER_LOCAL = 0xFD

# Thread frame -------------------------------------------------------------------------------------------------------
T_RESUME = 0
T_STATUS = 4
T_TID_X = 8
T_TID_Y = 12
T_TID_Z = 16
T_LANE = 20
T_WARP = 24
T_LINEAR = 28
T_OP_ADDR = 32
T_OP_SEEN = 40
T_OP_MASK = 48
T_OP_A = 52
T_OP_B = 56
T_OP_C = 60
T_OP_RESULT = 64
T_OP_PRED = 68
T_OP_KIND = 72
T_SITE = 76
T_LOCAL_BASE = 80
T_BLOCK = 88
T_LAUNCH = 96
T_OP_VALUE = 104
T_OP_SIZE = 112
T_SLOTS = 128

# Block --------------------------------------------------------------------------------------------------------------
B_SHARED_BASE = 0
B_CTAID_X = 8
B_CTAID_Y = 12
B_CTAID_Z = 16
B_INDEX = 20
B_CLUSTER_RANK = 24
B_SMID = 28
B_ENGINE = 64

# Launch -------------------------------------------------------------------------------------------------------------
L_PARAMS = 0
L_GLOBALS = 8
L_NCTAID_X = 16
L_NCTAID_Y = 20
L_NCTAID_Z = 24
L_NTID_X = 28
L_NTID_Y = 32
L_NTID_Z = 36
L_DEVICE = 40
L_SMEM_DYNAMIC = 44
L_SHARED_STATIC = 48
L_CLUSTER = 52  # dims packed x | y << 8 | z << 16; 0 = no cluster
L_CLOCK = 56
L_SM_COUNT = 64
L_ENVREG1 = 68  # high half of the workspace address that cooperative grid barriers use
L_ENVREG2 = 72  # low half
L_ENGINE = 128


class Status(IntEnum):
    """What a generated function returns."""

    EXIT = 0
    YIELD = 1  # before a strong load or an atomic: op_addr, op_size, site
    BARRIER = 2  # op_a id, op_b thread count (0 = all), op_kind = Barrier, op_c predicate -> op_result
    WARPOP = 3  # op_kind = WarpOp, op_mask, op_a.. -> op_result, op_pred
    GDC_WAIT = 4
    FAULT = 5  # rt_access has recorded it
    TRAP = 6  # op_kind = Trap
    SLEEP = 7  # op_a nanoseconds
    CLUSTER_BARRIER = 8


class Barrier(IntEnum):
    """op_kind of BARRIER. ARRIVE also suspends, until its warp has come."""

    SYNC = 0
    ARRIVE = 1
    RED_POPC = 2
    RED_AND = 3
    RED_OR = 4


BARRIER_UNALIGNED = 8  # or-ed to that: the lanes of a warp may come by different instructions


class Trap(IntEnum):
    """op_kind of TRAP."""

    TRAP = 0
    ASSERT = 1  # of `__assertfail`: message op_value, file op_addr, line op_a, function op_seen
    BREAKPOINT = 2


class WarpOp(IntEnum):
    """op_kind of WARPOP; op_mask is the member mask of the instruction (0xffffffff where it has none).

    SHFL: op_a value (32 bits), op_b lane or delta, op_c clamp/segment word -> op_result value, op_pred in range.
    VOTE: op_a predicate (0/1) -> op_result (0/1, or the mask for BALLOT).
    MATCH: op_value the value (64 bits) -> op_result mask, op_pred (ALL only) 1 if all equal.
    REDUX: op_a value -> op_result. WARP_SYNC: orders memory. ELECT: op_result leader lane, op_pred 1 on the leader.
    """

    SHFL_UP = 0
    SHFL_DOWN = 1
    SHFL_BFLY = 2
    SHFL_IDX = 3
    VOTE_ALL = 4
    VOTE_ANY = 5
    VOTE_UNI = 6
    VOTE_BALLOT = 7
    MATCH_ANY = 8
    MATCH_ALL = 9
    REDUX_ADD = 10
    REDUX_MIN_S = 11
    REDUX_MAX_S = 12
    REDUX_MIN_U = 13
    REDUX_MAX_U = 14
    REDUX_AND = 15
    REDUX_OR = 16
    REDUX_XOR = 17
    WARP_SYNC = 18
    ELECT = 19
    ACTIVEMASK = 20  # no mask: op_result is the lanes that are at the same instruction when the warp can go no further


# Flags of rt_access(thread, addr, size, flags, site) and rt_fence(thread, flags, site) ------------------------------
ACC_WRITE = 1 << 0
ACC_ATOMIC = 1 << 1  # reads and writes
ACC_STRONG = 1 << 2
ACC_SCOPE_SHIFT = 4
ACC_ORDER_SHIFT = 6
ACC_NC = 1 << 8
ACC_VOLATILE = 1 << 9
ACC_SPACE_SHIFT = 12
ACC_REDUCTION = 1 << 16  # an atomic without a result
ACC_SWAP = 1 << 17  # a compare-and-swap: what it compares with is in op_value, the upper half in op_seen
ACC_ELEMENTS_SHIFT = 18  # of strong accesses: log2 of the number of elements, in two bits


class Scope(IntEnum):
    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3


class Order(IntEnum):
    RELAXED = 0
    ACQUIRE = 1
    RELEASE = 2
    ACQ_REL = 3


class Space(IntEnum):
    GENERIC = 0
    GLOBAL = 1
    SHARED = 2
    LOCAL = 3
    CONST = 4
    PARAM = 5


class Mbarrier(IntEnum):
    """`op` of rt_mbarrier."""

    INIT = 0
    INVAL = 1
    ARRIVE = 2
    EXPECT = 3
    TEST = 4


MBARRIER_PARITY = 61  # the bit of an mbarrier's word, and of the state that an arrival gives


FENCE_SC = 1 << 10  # rt_fence: fence.sc and membar; else fence.acq_rel
FENCE_PROXY = 1 << 11  # rt_fence: fence.proxy.*
FENCE_ASYNC = 1 << 12  # rt_fence: and it is fence.proxy.async, of shared memory too


LOOP_SLICE = 4096  # rounds of loops without accesses after which a thread asks rt_loop whether it may go on


class Clock(IntEnum):
    """`kind` of rt_clock."""

    GLOBALTIMER = 0
    CLOCK = 1


# Symbols that generated code calls: name -> (LLVM result type, LLVM argument types).
RUNTIME_FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rt_access": (
        "i32",
        ("ptr", "i64", "i32", "i32", "i32"),
    ),  # thread, addr, size, flags, site -> 0 ok, else return FAULT
    **{f"rt_{kind}{size}": ("i32", ("ptr", "i64", "i32")) for kind in ("read", "write") for size in (4, 8, 16)},
    # rt_access for a plain load or store of that size: thread, addr, site
    "rt_fence": ("void", ("ptr", "i32", "i32")),  # thread, flags, site
    "rt_loop": ("i32", ("ptr", "i32")),  # thread, site: LOOP_SLICE rounds were made -> 0 ok, else return FAULT
    "rt_copy": (
        "i32",
        ("ptr", "i64", "i64", "i32", "i32", "i32"),
    ),  # thread, target, source, size, bytes read, site -> 0 ok, else return FAULT
    "rt_copy_commit": ("i32", ("ptr",)),  # likewise
    "rt_copy_wait": ("i32", ("ptr", "i32", "i32")),  # thread, groups that may stay pending, site; likewise
    "rt_mbarrier": ("i32", ("ptr", "i64", "i32", "i32", "i32", "i64", "i32", "i32")),  # as in native/mbarrier.cuh
    "rt_bulk": ("i32", ("ptr", "i64", "i64", "i32", "i64", "i32")),  # thread, target, source, size, mbarrier, site
    "rt_bulk_store": ("i32", ("ptr", "i64", "i64", "i32", "i32")),  # thread, target, source, size, site; likewise
    "rt_bulk_commit": ("void", ("ptr",)),
    "rt_bulk_wait": ("i32", ("ptr", "i32", "i32", "i32")),  # thread, groups as above, 1 if only for the reads, site
    "rt_trigger": ("void", ("ptr",)),
    "rt_clock": ("i64", ("ptr", "i32")),
    "rt_vprintf": ("i32", ("ptr", "i64", "i64")),  # thread, format address, argument block address
}

# libm symbols that generated code may call (double -> double); the engine binds them by `add_symbol`.
MATH_FUNCTIONS = ("exp2", "log2", "sin", "cos", "tanh")
