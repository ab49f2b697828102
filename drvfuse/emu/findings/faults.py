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
    """The first fault of a launch. `kind` is the name of an `abi.FaultKind` in lower case. If `file` is None, `line` is
    a line of the PTX.
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
    """The fault that the native runtime has recorded for a launch. Call this before other blocks run in the launch's
    block slots: the description reads the frames of the launch's threads, which other blocks would overwrite.
    """
    f = launch.fault
    record = Record(launch, identity, window)
    return Fault(
        record.kind.name.lower(),
        _words(record) + identity.callers(f.site),
        identity.kernel,
        *identity.place(f.site),
        identity.device,
        *identity.index(f.block, f.thread),
        int(f.addr) if f.size and not record.of_parameter else None,
        identity.process,
        _missing_write(record) if record.kind is FaultKind.UNINITIALISED and not record.value else None,
    )


_UNWRITTEN = (
    "if a fill, a copy or a kernel of another stream is to write this memory, an event or a wait of the host must "
    "order it before this kernel"
)


def _missing_write(f: Record) -> str | None:
    """A hint for a read of memory that was never written and that no pending copy will write: which write may be
    missing, or which order between a write and this read. None if there is no hint.
    """
    if f.space is not Kind.SHARED:
        return _UNWRITTEN if f.space is Kind.DEVICE else None
    lines = f.shared_writers
    if not lines:
        return None
    return (
        f"the kernel writes shared memory at {', '.join(lines)}: if another thread of the block is to write this word, "
        "a barrier (__syncthreads) is missing between that write and this read"
    )


def _words(record: Record) -> str:
    """The message of a fault."""
    words = _SENTENCES[record.kind]
    if not isinstance(words, str):
        words = words[_REASONS[record.kind](record)]
    return words.format(f=record)


_REASONS: dict[FaultKind, Callable[[Record], Any]] = {
    FaultKind.OUT_OF_BOUNDS: lambda f: f.of_parameter,
    FaultKind.MISALIGNED: lambda f: f.of_parameter,
    FaultKind.UNINITIALISED: lambda f: bool(f.value),
    FaultKind.FOREIGN_SHARED: lambda f: f.reaches_cluster,
    FaultKind.TRAP: lambda f: abi.Trap(f.flags),
    FaultKind.BARRIER_COUNT: lambda f: BarrierCount(f.addr),
    FaultKind.ENDLESS: lambda f: None if f.size else Endless(f.addr),
    # True for a bulk copy, which reads as many bytes as it writes. A cp.async has this fault if its src-size is larger.
    FaultKind.COPY_SIZE: lambda f: f.size == f.value,
    FaultKind.MBARRIER: lambda f: MbarrierError(f.flags),
    FaultKind.CLUSTER_ABSENT: lambda f: Absent(f.value & 0xFFFFFFFF),
    FaultKind.CLUSTER_BARRIER: lambda f: ClusterError(f.flags),
}
"""For kinds with several reasons: a function that finds the reason in a record."""

_SENTENCES: dict[FaultKind, str | dict[Any, str]] = {
    FaultKind.OUT_OF_BOUNDS: {False: "{f.access}: {f.where}", True: "{f.parameter}"},
    FaultKind.USE_AFTER_FREE: "{f.access}: {f.where}",
    FaultKind.MISALIGNED: {
        False: "{f.access}, which is no multiple of {f.size}: {f.where}",
        True: "{f.parameter}: the offset is no multiple of {f.size}",
    },
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
        False: "{f.access}: this memory was never written: {f.where}",
        True: "{f.access}: this memory is not written yet: {f.pending_copy} comes before the read",
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
        abi.Trap.TABLE: "a branch (brx.idx) with an index outside of its table of targets",
    },
    FaultKind.ASSERT: "{f.assertion}",
    FaultKind.WARP_LANES: "warp operation with mask 0x{f.value:08x}, which lacks the calling lane",
    FaultKind.WARP_MISMATCH: (
        "lanes of a warp wait for one another at different operations: this one has mask 0x{f.value:08x}, the other is "
        "at line {f.other_line}"
    ),
    FaultKind.MATRIX_LANES: (
        "{f.opcode} needs all 32 lanes of a warp, and only lanes 0x{f.value:08x} are there: the others have exited, or "
        "the block does not have them"
    ),
    FaultKind.BARRIER_COUNT: {
        BarrierCount.NUMBER: "barrier {f.value} does not exist: a block has the barriers 0 to 15",
        BarrierCount.THREADS: (
            "barrier of {f.value} threads: the number must be a multiple of 32, and barrier.arrive must have one"
        ),
        BarrierCount.OTHERS_DIFFER: "barrier of {f.joining} threads, at which others wait for {f.others}",
    },
    FaultKind.BARRIER_DIVERGENCE: (
        "lanes of one warp are at different barriers: this one at {f.barrier}, another at line {f.other_line}"
    ),
    FaultKind.BARRIER_KINDS: (
        "threads are at barrier {f.value} by different instructions: a barrier with a reduction (barrier.red) needs "
        "the same reduction in all threads"
    ),
    FaultKind.BARRIER_LEFT: (
        "the block has ended, and barrier {f.value}, at which this warp has arrived, was never completed"
    ),
    FaultKind.UNSUPPORTED: "status {f.flags} is not supported",
    FaultKind.ENDLESS: {
        Endless.RESUMES: (
            "no thread has exited and no block has started during {f.value} strong accesses (or 16 times as many other "
            "waits): a livelock, or very long work; " + RAISE_LIMIT
        ),
        Endless.ROUNDS: "the thread has made {f.value} rounds of a loop that accesses no memory; " + RAISE_LIMIT,
        None: (
            "{f.access}: the thread has made {f.value} plain accesses without a wait; "
            "a word that other threads write must be read by a strong load; " + RAISE_LIMIT
        ),
    },
    FaultKind.INTERRUPTED: "Ctrl-C ended the running kernels; this thread was running",
    FaultKind.COPY_SIZE: {
        True: "cp.async.bulk of {f.size} bytes: 16, or a multiple of it, is expected",
        False: "cp.async of {f.size} bytes with a src-size of {f.value}",
    },
    FaultKind.MBARRIER: {
        MbarrierError.NO_BARRIER: (
            "at 0x{f.addr:x}: there is no mbarrier: it was not initialised (mbarrier.init), or it was overwritten"
        ),
        MbarrierError.COUNT: "at 0x{f.addr:x}: a count of {f.value}, which is out of range",
        MbarrierError.ARRIVALS: "at 0x{f.addr:x}: {f.value} arrivals are more than the phase expects",
        MbarrierError.BYTES: "at 0x{f.addr:x}: {f.value} bytes are more than an mbarrier can count",
        MbarrierError.PENDING: "at 0x{f.addr:x}: more than {f.value} bulk copies are pending",
        MbarrierError.COMPLETES: (
            "at 0x{f.addr:x}: an arrival with .noComplete completes the phase, which PTX does not allow"
        ),
        MbarrierError.MOST: "at 0x{f.addr:x}: the phase already expects as many arrivals as an mbarrier can count",
        MbarrierError.ELSEWHERE: (
            "at 0x{f.addr:x}: the mbarrier is not in the shared memory of the block that is written"
        ),
    },
    FaultKind.CLUSTER_ABSENT: {
        Absent.NOT_YET: (
            "{f.access}: shared memory of block {f.absent}, which has not started (CTA not present): the first access "
            "to another block's memory needs, for example, a barrier of the cluster before it"
        ),
        Absent.EXITED: (
            "{f.access}: shared memory of block {f.absent}, whose threads have exited (CTA not present): that block "
            "has to wait, for example at a barrier of the cluster, until all other blocks have made their accesses"
        ),
        Absent.LATE: (
            "{f.access}: the write is asynchronous, and the threads of block {f.absent}, to whose shared memory it "
            "goes, have exited before it arrived (CTA not present): that block has to wait for its mbarrier"
        ),
    },
    FaultKind.BAD_FREE: (
        "free of 0x{f.addr:x}, which is no live allocation by malloc in a kernel of this context: {f.where}"
    ),
    FaultKind.STACK_OVERFLOW: (
        "the recursion is too deep: it needs more than {f.value} MiB of stack; "
        "a GPU has CU_LIMIT_STACK_SIZE bytes for each thread, 1024 by default"
    ),
    FaultKind.NO_FUNCTION: (
        "an indirect call of 0x{f.addr:x}, at which this module has no function with these parameters and results"
    ),
    FaultKind.NO_CLUSTER: (
        "{f.access}: st.async and red.async are illegal instructions in a launch without clusters (tried on an H200); "
        "clusters of one block are enough (the launch attribute, or __cluster_dims__)"
    ),
    FaultKind.CLUSTER_BARRIER: {
        ClusterError.TWICE: (
            "the thread arrives at the barrier of the cluster again, without having waited (barrier.cluster.wait) "
            "since its last arrival"
        ),
        ClusterError.NOT_ARRIVED: (
            "the thread waits at the barrier of the cluster, without having arrived (barrier.cluster.arrive) since its "
            "last wait"
        ),
    },
}
"""The message of a fault by its kind and, for kinds with several reasons, by its reason. `f` is the `Record`."""
