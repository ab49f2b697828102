# SPDX-License-Identifier: Apache-2.0
"""What stopped a launch, in words and with places in the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import abi
from ..abi import Absent, BarrierCount, ClusterError, Endless, FaultKind, MbarrierError, structs
from ..space.window import Window
from .blocked import RAISE_LIMIT
from .places import Identity, Index, index_text
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


def describe(launch: structs.Launch, identity: Identity, window: Window) -> Fault:
    """The fault that the native runtime recorded for a launch, whose blocks are still where they were."""
    f = launch.fault
    record = Record(launch, identity, window)
    return Fault(
        record.kind.name.lower(),
        _SENTENCES[record.kind](record) + identity.callers(f.site),
        identity.kernel,
        *identity.place(f.site),
        identity.device,
        *identity.index(f.block, f.thread),
        int(f.addr) if f.size else None,
    )


class _Sentence:
    """Words for one kind of fault. In braces stand members of `Record` and `meanings`: for this kind, what a field of
    the record is (its name, or a function of the record).
    """

    def __init__(self, words: str, **meanings: str | Callable[[Record], Any]) -> None:
        self._words, self._meanings = words, meanings

    def __call__(self, record: Record) -> str:
        return self._words.format_map(_Names(record, self._meanings))


class _Names(dict[str, Any]):
    def __init__(self, record: Record, meanings: Mapping[str, str | Callable[[Record], Any]]) -> None:
        super().__init__({k: getattr(record, m) if isinstance(m, str) else m(record) for k, m in meanings.items()})
        self._record = record

    def __missing__(self, name: str) -> Any:
        return getattr(self._record, name)


class _OneOf:
    """A sentence for each reason that a kind of fault can have; `reason` finds it in the record."""

    def __init__(self, reason: Callable[[Record], Any], sentences: Mapping[Any, _Sentence]) -> None:
        self._reason, self._sentences = reason, sentences

    def __call__(self, record: Record) -> str:
        return self._sentences[self._reason(record)](record)


def _pending_copy(record: Record) -> tuple[str, str]:
    """The copy that will write what was read (`value` is its site, plus one), and what waits for it."""
    opcode = record.identity.sites[record.value - 1].opcode
    if ".bulk_group" in opcode:
        return "cp.async.bulk", "cp.async.bulk.wait_group (without .read) of its thread that covers it"
    if ".bulk." in opcode:
        return "cp.async.bulk", "wait for its mbarrier (mbarrier.try_wait)"
    return "cp.async", "cp.async.wait_group of its thread that covers it"


def _asserting(record: Record) -> structs.Thread:
    """The thread whose assertion has failed; `value` is where its frame is."""
    return structs.Thread.from_address(record.value)


def _absent(record: Record) -> str:
    """The block of the cluster that is not there: the upper half of `value`."""
    return index_text(record.identity.index(record.value >> 32, 0)[0])


def _endless(record: Record) -> Endless | None:
    return None if record.size else Endless(record.addr)


_SENTENCES: dict[FaultKind, Callable[[Record], str]] = {
    FaultKind.OUT_OF_BOUNDS: _Sentence("{access}: {where}"),
    FaultKind.USE_AFTER_FREE: _Sentence("{access}: {where}"),
    FaultKind.MISALIGNED: _Sentence("{access}, which is no multiple of {size}: {where}"),
    FaultKind.NO_ACCESS: _Sentence(
        "{access}: device {device} was not given access to this memory (peer access, cuMemSetAccess): {where}"
    ),
    FaultKind.MULTICAST_PLAIN: _Sentence(
        "{access}, an address of a multicast object, which only multimem instructions may use: {where}"
    ),
    FaultKind.NO_MULTICAST: _Sentence("multimem {access}, which is no address of a multicast object: {where}"),
    FaultKind.MULTICAST_UNBOUND: _Sentence(
        "multimem {access}, where the device(s) {missing} of its team have bound no memory: {where}",
        missing=lambda f: ", ".join(str(device) for device in range(abi.MEMBERS) if f.value >> device & 1),
    ),
    FaultKind.READ_ONLY: _Sentence("{access}: device {device} may only read this memory: {where}"),
    FaultKind.UNINITIALISED: _OneOf(
        lambda f: bool(f.value),
        {
            False: _Sentence("{access}: nobody has written there: {where}"),
            True: _Sentence(
                "{access}: nobody has written there, but the {copy[0]} at line {at} is to: no {copy[1]} comes before",
                copy=_pending_copy,
                at=lambda f: f.line(f.value - 1),
            ),
        },
    ),
    FaultKind.FOREIGN_SHARED: _OneOf(
        lambda f: f.reaches_cluster,
        {
            False: _Sentence("{access}: outside of the block's {shared_bytes} bytes of shared memory"),
            True: _Sentence(
                "{access}: outside of the {shared_bytes} bytes of shared memory of each of the {blocks} blocks of the "
                "cluster",
                blocks=lambda f: f.launch.cluster_size,
            ),
        },
    ),
    FaultKind.FOREIGN_LOCAL: _Sentence("{access}: outside of the thread's {local_bytes} bytes of local memory"),
    FaultKind.TRAP: _OneOf(
        lambda f: f.flags == abi.Trap.BREAKPOINT, {False: _Sentence("trap"), True: _Sentence("breakpoint")}
    ),
    FaultKind.ASSERT: _Sentence(
        "{file}:{line}: {function}: assertion `{message}` failed",
        file=lambda f: f.string(_asserting(f).op_addr),
        line=lambda f: _asserting(f).op_a,
        function=lambda f: f.string(_asserting(f).op_seen),
        message=lambda f: f.string(_asserting(f).op_value),
    ),
    FaultKind.WARP_LANES: _Sentence(
        "warp operation with mask 0x{mask:08x}, which lacks the calling lane", mask="value"
    ),
    FaultKind.WARP_MISMATCH: _Sentence(
        "warp operation with mask 0x{mask:08x} meets another one, at line {other}, that waits for it",
        mask="value",
        other=lambda f: f.line(f.flags),
    ),
    FaultKind.BARRIER_COUNT: _OneOf(
        lambda f: BarrierCount(f.addr),
        {
            BarrierCount.NUMBER: _Sentence("barrier {number}; there are barriers 0 to 15", number="value"),
            BarrierCount.THREADS: _Sentence(
                "barrier of {threads} threads; barriers count whole warps: a multiple of 32, which arrive must give",
                threads="value",
            ),
            BarrierCount.OTHERS_DIFFER: _Sentence(
                "barrier of {threads} threads, at which others wait for {others}",
                threads=lambda f: f.value or "all",
                others=lambda f: f.flags or "all",
            ),
        },
    ),
    FaultKind.BARRIER_DIVERGENCE: _Sentence(
        "lanes of one warp are at different barriers: this one at {barrier}, another at line {other}",
        barrier=lambda f: "the barrier of the cluster" if f.value == abi.BARRIERS else f"barrier {f.value}",
        other=lambda f: f.line(f.flags),
    ),
    FaultKind.BARRIER_KINDS: _Sentence(
        "barrier {number} was joined by another kind: reductions go with none but the same reduction", number="value"
    ),
    FaultKind.BARRIER_LEFT: _Sentence(
        "the block has ended, and barrier {number}, at which this warp has arrived, was never completed",
        number="value",
    ),
    FaultKind.UNSUPPORTED: _Sentence("status {status} is not supported", status="flags"),
    FaultKind.ENDLESS: _OneOf(
        _endless,
        {
            Endless.RESUMES: _Sentence(
                "threads have gone on from {limit} strong accesses (or 16 times as many other waits) "
                "while none ended and no block began: a livelock, or very long work; " + RAISE_LIMIT,
                limit="value",
            ),
            Endless.ROUNDS: _Sentence(
                "the thread has made {limit} rounds of a loop that accesses no memory; " + RAISE_LIMIT, limit="value"
            ),
            None: _Sentence(
                "{access}: the thread has made {limit} plain accesses without a wait; "
                "what others write must be read by a strong load; " + RAISE_LIMIT,
                limit="value",
            ),
        },
    ),
    FaultKind.INTERRUPTED: _Sentence("Ctrl-C ended what ran; this thread ran on and on"),
    FaultKind.COPY_SIZE: _OneOf(
        lambda f: f.size == f.value,  # what is read of a bulk copy is its size
        {
            True: _Sentence("cp.async.bulk of {size} bytes: 16, or a multiple of it, is expected"),
            False: _Sentence("cp.async of {size} bytes with a src-size of {source}", source="value"),
        },
    ),
    FaultKind.MBARRIER: _OneOf(
        lambda f: MbarrierError(f.flags),
        {
            MbarrierError.NO_BARRIER: _Sentence(
                "at 0x{addr:x}: there is no mbarrier: no mbarrier.init before, or overwritten"
            ),
            MbarrierError.COUNT: _Sentence("at 0x{addr:x}: a count of {count}, which is out of range", count="value"),
            MbarrierError.ARRIVALS: _Sentence(
                "at 0x{addr:x}: {arrivals} arrivals, and fewer are to come in this phase", arrivals="value"
            ),
            MbarrierError.BYTES: _Sentence(
                "at 0x{addr:x}: {nbytes} bytes are more than an mbarrier can count", nbytes="value"
            ),
            MbarrierError.PENDING: _Sentence("at 0x{addr:x}: more than {most} bulk copies are pending", most="value"),
            MbarrierError.ELSEWHERE: _Sentence(
                "at 0x{addr:x}: the mbarrier is not in the shared memory of the block that is written"
            ),
        },
    ),
    FaultKind.CLUSTER_ABSENT: _OneOf(
        lambda f: Absent(f.value & 0xFFFFFFFF),
        {
            Absent.NOT_YET: _Sentence(
                "{access}: shared memory of block {absent}, which has not begun (CTA not present): nothing makes it "
                "certain, such as a barrier of the cluster before the first access to another block's memory",
                absent=_absent,
            ),
            Absent.EXITED: _Sentence(
                "{access}: shared memory of block {absent}, whose threads have exited (CTA not present): it has to "
                "wait, such as at a barrier of the cluster, until all others have made their accesses",
                absent=_absent,
            ),
            Absent.LATE: _Sentence(
                "{access}: it is asynchronous, and the threads of block {absent}, whose shared memory that is, have "
                "exited before it arrived (CTA not present): that block has to wait for its mbarrier",
                absent=_absent,
            ),
        },
    ),
    FaultKind.CLUSTER_BARRIER: _OneOf(
        lambda f: ClusterError(f.flags),
        {
            ClusterError.TWICE: _Sentence(
                "the thread arrives at the barrier of the cluster, and has not waited (barrier.cluster.wait) since it "
                "arrived there before"
            ),
            ClusterError.NOT_ARRIVED: _Sentence(
                "the thread waits at the barrier of the cluster, and has not arrived (barrier.cluster.arrive) since it "
                "waited there before"
            ),
        },
    ),
}
"""By the kind of a fault, what is said of it."""
