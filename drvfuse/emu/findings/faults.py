# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the faults that stopped a launch, with places in the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import abi
from ..abi import Absent, BarrierCount, ClusterError, Endless, FaultKind, Kind, MbarrierError, structs
from ..space.window import Window
from .blocked import RAISE_LIMIT
from .places import Identity, Index
from .records import Record


@dataclass(frozen=True)
class Fault:
    """The first fault of a launch; `kind` is the name of an `abi.FaultKind`, in small letters. `line` is the PTX's
    where `file` is None.
    """

    kind: str
    message: str
    kernel: str
    file: str | None
    line: int | None
    device: int
    block: Index
    thread: Index
    address: int | None
    process: str | None
    hint: str | None


def describe(launch: structs.Launch, identity: Identity, window: Window) -> Fault:
    """The fault that the native runtime recorded for a launch, whose blocks are still where they were."""
    f = launch.fault
    record = Record(launch, identity, window)
    return Fault(
        record.kind.name.lower(),
        _words(record) + identity.callers(f.site),
        identity.kernel,
        *identity.place(f.site),
        identity.device,
        *identity.index(f.block, f.thread),
        int(f.addr) if f.size else None,
        identity.process,
        _missing_barrier(record) if record.kind is FaultKind.UNINITIALISED else None,
    )


def _missing_barrier(f: Record) -> str | None:
    """A hint for a read of shared memory that was never written and that no pending copy will write: where a barrier
    may be missing.
    """
    lines = f.shared_writers if f.space is Kind.SHARED and not f.value else []
    if not lines:
        return None
    return (
        f"the kernel writes shared memory at {', '.join(lines)}: if another thread of the block is to write this word, "
        "a barrier (__syncthreads) is missing between that and this read"
    )


def _words(record: Record) -> str:
    words = _SENTENCES[record.kind]
    if not isinstance(words, str):
        words = words[_REASONS[record.kind](record)]
    return words.format(f=record)


_REASONS: dict[FaultKind, Callable[[Record], Any]] = {
    FaultKind.UNINITIALISED: lambda f: bool(f.value),
    FaultKind.FOREIGN_SHARED: lambda f: f.reaches_cluster,
    FaultKind.TRAP: lambda f: abi.Trap(f.flags),
    FaultKind.BARRIER_COUNT: lambda f: BarrierCount(f.addr),
    FaultKind.ENDLESS: lambda f: None if f.size else Endless(f.addr),
    FaultKind.COPY_SIZE: lambda f: f.size == f.value,  # what is read of a bulk copy is its size
    FaultKind.MBARRIER: lambda f: MbarrierError(f.flags),
    FaultKind.CLUSTER_ABSENT: lambda f: Absent(f.value & 0xFFFFFFFF),
    FaultKind.CLUSTER_BARRIER: lambda f: ClusterError(f.flags),
}
"""Of kinds that have several reasons, the one that a record has."""

_SENTENCES: dict[FaultKind, str | dict[Any, str]] = {
    FaultKind.OUT_OF_BOUNDS: "{f.access}: {f.where}",
    FaultKind.USE_AFTER_FREE: "{f.access}: {f.where}",
    FaultKind.MISALIGNED: "{f.access}, which is no multiple of {f.size}: {f.where}",
    FaultKind.NO_ACCESS: (
        "{f.access}: device {f.device} was not given access to this memory (peer access, cuMemSetAccess): {f.where}"
    ),
    FaultKind.MULTICAST_PLAIN: (
        "{f.access}, an address of a multicast object, which only multimem instructions may use: {f.where}"
    ),
    FaultKind.NO_MULTICAST: "multimem {f.access}, which is no address of a multicast object: {f.where}",
    FaultKind.MULTICAST_UNBOUND: (
        "multimem {f.access}, where the device(s) {f.unbound} of its team have bound no memory: {f.where}"
    ),
    FaultKind.READ_ONLY: "{f.access}: device {f.device} may only read this memory: {f.where}",
    FaultKind.UNINITIALISED: {
        False: "{f.access}: nobody has written there: {f.where}",
        True: "{f.access}: nobody has written there, but {f.pending_copy} comes before",
    },
    FaultKind.FOREIGN_SHARED: {
        False: "{f.access}: outside of the block's {f.shared_bytes} bytes of shared memory",
        True: (
            "{f.access}: outside of the {f.shared_bytes} bytes of shared memory of each of the "
            "{f.launch.cluster_size} blocks of the cluster"
        ),
    },
    FaultKind.FOREIGN_LOCAL: "{f.access}: outside of the thread's {f.local_bytes} bytes of local memory",
    FaultKind.TRAP: {
        abi.Trap.TRAP: "trap",
        abi.Trap.BREAKPOINT: "breakpoint",
        abi.Trap.TABLE: "a branch by a number that its table of targets (brx.idx) does not have",
    },
    FaultKind.ASSERT: "{f.assertion}",
    FaultKind.WARP_LANES: "warp operation with mask 0x{f.value:08x}, which lacks the calling lane",
    FaultKind.WARP_MISMATCH: (
        "warp operation with mask 0x{f.value:08x} meets another one, at line {f.other_line}, that waits for it"
    ),
    FaultKind.MATRIX_LANES: (
        "{f.opcode} takes all 32 lanes of a warp, and only lanes 0x{f.value:08x} have come: the others have exited, or "
        "the block does not have them"
    ),
    FaultKind.BARRIER_COUNT: {
        BarrierCount.NUMBER: "barrier {f.value}; there are barriers 0 to 15",
        BarrierCount.THREADS: (
            "barrier of {f.value} threads; barriers count whole warps: a multiple of 32, which arrive must give"
        ),
        BarrierCount.OTHERS_DIFFER: "barrier of {f.joining} threads, at which others wait for {f.others}",
    },
    FaultKind.BARRIER_DIVERGENCE: (
        "lanes of one warp are at different barriers: this one at {f.barrier}, another at line {f.other_line}"
    ),
    FaultKind.BARRIER_KINDS: (
        "barrier {f.value} was joined by another kind: reductions go with none but the same reduction"
    ),
    FaultKind.BARRIER_LEFT: (
        "the block has ended, and barrier {f.value}, at which this warp has arrived, was never completed"
    ),
    FaultKind.UNSUPPORTED: "status {f.flags} is not supported",
    FaultKind.ENDLESS: {
        Endless.RESUMES: (
            "threads have gone on from {f.value} strong accesses (or 16 times as many other waits) "
            "while none ended and no block began: a livelock, or very long work; " + RAISE_LIMIT
        ),
        Endless.ROUNDS: "the thread has made {f.value} rounds of a loop that accesses no memory; " + RAISE_LIMIT,
        None: (
            "{f.access}: the thread has made {f.value} plain accesses without a wait; "
            "what others write must be read by a strong load; " + RAISE_LIMIT
        ),
    },
    FaultKind.INTERRUPTED: "Ctrl-C ended what ran; this thread ran on and on",
    FaultKind.COPY_SIZE: {
        True: "cp.async.bulk of {f.size} bytes: 16, or a multiple of it, is expected",
        False: "cp.async of {f.size} bytes with a src-size of {f.value}",
    },
    FaultKind.MBARRIER: {
        MbarrierError.NO_BARRIER: "at 0x{f.addr:x}: there is no mbarrier: no mbarrier.init before, or overwritten",
        MbarrierError.COUNT: "at 0x{f.addr:x}: a count of {f.value}, which is out of range",
        MbarrierError.ARRIVALS: "at 0x{f.addr:x}: {f.value} arrivals, and fewer are to come in this phase",
        MbarrierError.BYTES: "at 0x{f.addr:x}: {f.value} bytes are more than an mbarrier can count",
        MbarrierError.PENDING: "at 0x{f.addr:x}: more than {f.value} bulk copies are pending",
        MbarrierError.COMPLETES: (
            "at 0x{f.addr:x}: an arrival with .noComplete completes the phase, which PTX does not allow"
        ),
        MbarrierError.MOST: "at 0x{f.addr:x}: as many arrivals are to come as an mbarrier can count",
        MbarrierError.ELSEWHERE: (
            "at 0x{f.addr:x}: the mbarrier is not in the shared memory of the block that is written"
        ),
    },
    FaultKind.CLUSTER_ABSENT: {
        Absent.NOT_YET: (
            "{f.access}: shared memory of block {f.absent}, which has not begun (CTA not present): nothing makes it "
            "certain, such as a barrier of the cluster before the first access to another block's memory"
        ),
        Absent.EXITED: (
            "{f.access}: shared memory of block {f.absent}, whose threads have exited (CTA not present): it has to "
            "wait, such as at a barrier of the cluster, until all others have made their accesses"
        ),
        Absent.LATE: (
            "{f.access}: it is asynchronous, and the threads of block {f.absent}, whose shared memory that is, have "
            "exited before it arrived (CTA not present): that block has to wait for its mbarrier"
        ),
    },
    FaultKind.BAD_FREE: (
        "free of 0x{f.addr:x}, which malloc has not given to a kernel of this context, or which was freed: {f.where}"
    ),
    FaultKind.STACK_OVERFLOW: (
        "too many calls of a function by itself are open: more than {f.value} MiB of stack; "
        "a GPU has CU_LIMIT_STACK_SIZE bytes for each thread, 1024 by default"
    ),
    FaultKind.NO_FUNCTION: (
        "a call by the address 0x{f.addr:x}, which no function of this module with such parameters and results has"
    ),
    FaultKind.NO_CLUSTER: (
        "{f.access}: st.async and red.async are illegal instructions in a launch without clusters (tried on an H200); "
        "clusters of one block are enough (the launch attribute, or __cluster_dims__)"
    ),
    FaultKind.CLUSTER_BARRIER: {
        ClusterError.TWICE: (
            "the thread arrives at the barrier of the cluster, and has not waited (barrier.cluster.wait) since it "
            "arrived there before"
        ),
        ClusterError.NOT_ARRIVED: (
            "the thread waits at the barrier of the cluster, and has not arrived (barrier.cluster.arrive) since it "
            "waited there before"
        ),
    },
}
"""By the kind of a fault, and its reason where it has several, what is said of it: `f` is its `Record`."""
