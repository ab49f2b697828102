# SPDX-License-Identifier: Apache-2.0
"""What stopped a launch, and what its threads wait for, in words and with places in the source."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import abi
from ..abi.structs import POLL_BYTES, BlockStruct, PolledStruct, ThreadStruct, WarpStruct
from ..space.window import Window
from . import mbarriers
from .prints import text_at
from .timeline import called_at

if TYPE_CHECKING:
    from ..machine.engine import EngineLaunch

Dim = tuple[int, int, int]
_RAISE = "DRVFUSE_EMU_LOOP_LIMIT raises this limit"

KINDS = (
    "",
    "out_of_bounds",
    "use_after_free",
    "misaligned",
    "no_access",
    "read_only",
    "uninitialised",
    "foreign_shared",
    "foreign_local",
    "trap",
    "assert",
    "warp_lanes",
    "warp_mismatch",
    "barrier_count",
    "barrier_divergence",
    "barrier_kinds",
    "barrier_left",
    "unsupported",
    "endless",
    "interrupted",
    "copy_size",
    "mbarrier",
)
"""Fault kinds, in the order of `runtime.cu`."""


@dataclass(frozen=True)
class Fault:
    """The first fault of a launch; `kind` is one of KINDS. `line` is the PTX's where `file` is None."""

    kind: str
    message: str
    kernel: str
    file: str | None
    line: int | None
    device: int
    block: Dim
    thread: Dim
    address: int | None


@dataclass(frozen=True)
class Blocked:
    """A thread that waits. `address` and `seen` are those of the word it polls; `mbarrier` is what is pending there."""

    block: Dim
    thread: Dim
    status: str
    file: str | None
    line: int | None
    address: int | None = None
    seen: int | None = None
    mbarrier: str | None = None


def index(linear: int, extent: Dim) -> Dim:
    """The three-dimensional index of a linear one."""
    return linear % extent[0], linear // extent[0] % extent[1], linear // extent[0] // extent[1]


def _place(launch: EngineLaunch, site: int) -> tuple[str | None, int | None]:
    sites = launch.kernel.sites
    if site >= len(sites):
        return None, None
    return sites[site].file or None, sites[site].line or sites[site].ptx_line


def _callers(launch: EngineLaunch, site: int) -> str:
    """Where the functions that were inlined around a site were called, innermost first."""
    sites = launch.kernel.sites
    return called_at(sites[site].inlined) if site < len(sites) else ""


def describe(launch: EngineLaunch) -> Fault:
    """The fault that the runtime recorded."""
    f = launch._struct.fault
    kind = KINDS[f.kind]
    file, line = _place(launch, f.site)
    address = int(f.addr) if f.size else None
    return Fault(
        kind,
        _message(launch, kind, f) + _callers(launch, f.site),
        launch.kernel.name,
        file,
        line,
        launch.device,
        index(f.block, launch.grid),
        index(f.thread, launch.block),
        address,
    )


def _message(launch: EngineLaunch, kind: str, f: Any) -> str:
    window = launch.engine.window
    atomic, write = f.flags & abi.ACC_ATOMIC, f.flags & abi.ACC_WRITE
    what = f"{'atomic on' if atomic else 'write of' if write else 'read of'} {f.size} bytes at 0x{f.addr:x}"
    where = window.nearest(f.addr) if kind in KINDS[1:7] else ""
    if kind == "out_of_bounds":
        return f"{what}: {where}"
    if kind == "use_after_free":
        return f"{what}: {where}"
    if kind == "misaligned":
        return f"{what}, which is no multiple of {f.size}: {where}"
    if kind == "no_access":
        return (
            f"{what}: device {launch.device} was not given access to this memory (peer access, cuMemSetAccess): {where}"
        )
    if kind == "read_only":
        return f"{what}: device {launch.device} may only read this memory: {where}"
    if kind == "uninitialised" and f.value:
        _, line = _place(launch, f.value - 1)
        name, wait = "cp.async", "cp.async.wait_group of its thread that covers it"
        opcode = launch.kernel.sites[f.value - 1].opcode
        if ".bulk_group" in opcode:
            name, wait = "cp.async.bulk", "cp.async.bulk.wait_group (without .read) of its thread that covers it"
        elif ".bulk." in opcode:
            name, wait = "cp.async.bulk", "wait for its mbarrier (mbarrier.try_wait)"
        return f"{what}: nobody has written there, but the {name} at line {line} is to: no {wait} comes before"
    if kind == "uninitialised":
        return f"{what}: nobody has written there: {where}"
    if kind == "foreign_shared":
        return f"{what}: outside of the block's {launch._struct.shared_bytes} bytes of shared memory"
    if kind == "copy_size":
        if f.size == f.value:
            return f"cp.async.bulk of {f.size} bytes: 16, or a multiple of it, is expected"
        return f"cp.async of {f.size} bytes with a src-size of {f.value}"
    if kind == "mbarrier":
        return (
            f"at 0x{f.addr:x}: "
            + (
                "",
                "there is no mbarrier: no mbarrier.init before, or overwritten",
                f"a count of {f.value}, which is out of range",
                f"{f.value} arrivals, and fewer are to come in this phase",
                f"{f.value} bytes are more than an mbarrier can count",
                f"more than {f.value} bulk copies are pending",
            )[f.flags]
        )
    if kind == "foreign_local":
        return f"{what}: outside of the thread's {launch._struct.local_bytes} bytes of local memory"
    if kind == "assert":
        return _assertion(window, ThreadStruct.from_address(f.value))
    if kind == "trap":
        return "breakpoint" if f.flags == abi.Trap.BREAKPOINT else "trap"
    if kind == "warp_lanes":
        return f"warp operation with mask 0x{f.value:08x}, which lacks the calling lane"
    if kind == "warp_mismatch":
        _, line = _place(launch, f.flags)
        return f"warp operation with mask 0x{f.value:08x} meets another one, at line {line}, that waits for it"
    if kind == "barrier_count":
        if f.addr == 1:
            return f"barrier {f.value}; there are barriers 0 to 15"
        if f.addr == 2:
            return f"barrier of {f.value} threads; barriers count whole warps: a multiple of 32, which arrive must give"
        return f"barrier of {f.value or 'all'} threads, at which others wait for {f.flags or 'all'}"
    if kind == "barrier_divergence":
        _, line = _place(launch, f.flags)
        return f"lanes of one warp are at different barriers: this one at barrier {f.value}, another at line {line}"
    if kind == "barrier_kinds":
        return f"barrier {f.value} was joined by another kind: reductions go with none but the same reduction"
    if kind == "barrier_left":
        return f"the block has ended, and barrier {f.value}, at which this warp has arrived, was never completed"
    if kind == "endless":
        if f.addr == 1:
            return (
                f"threads have gone on from {f.value} strong accesses (or 16 times as many other waits) "
                f"while none ended and no block began: a livelock, or very long work; {_RAISE}"
            )
        if not f.size:
            return f"the thread has made {f.value} rounds of a loop that accesses no memory; {_RAISE}"
        why = f"the thread has made {f.value} plain accesses without a wait"
        return f"{what}: {why}; what others write must be read by a strong load; {_RAISE}"
    if kind == "interrupted":
        return "Ctrl-C ended what ran; this thread ran on and on"
    return f"status {f.flags} is not supported"


def _assertion(window: Window, t: ThreadStruct) -> str:
    file, function, message = (
        text_at(window, address).decode(errors="replace") for address in (t.op_addr, t.op_seen, t.op_value)
    )
    return f"{file}:{t.op_a}: {function}: assertion `{message}` failed"


# Waiting threads -----------------------------------------------------------------------------------------------------

_WAITS = (
    ("yielded", "polling"),
    ("warpop", ""),
    ("asking", "at activemask"),
    ("barrier", ""),
    ("gdc", "at griddepcontrol.wait"),
    ("sleeping", "sleeping"),
    ("cluster", "at the cluster's barrier"),
    ("ready", "runnable"),
)


def blocked(launch: EngineLaunch) -> list[Blocked]:
    """What each live thread of a launch waits for."""
    found = [item for block in _blocks(launch) for item in _waiting(launch, block)]
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _blocks(launch: EngineLaunch) -> Iterator[BlockStruct]:
    s = launch._struct
    for slot in range(s.high):
        block = BlockStruct.from_address(s.slots + slot * s.slot_stride)
        if block.active:
            yield block


def _polled_by(block: BlockStruct, t: ThreadStruct) -> int:
    """The site of the instruction by which a thread polls its word, wherever it is at the moment."""
    for i in range(t.polls & 0xFF):
        word = PolledStruct.from_address(block.polls + t.linear * POLL_BYTES + i * sizeof(PolledStruct))
        if word.addr == t.op_addr:
            return int(word.site)
    return int(t.site)


def _waiting(launch: EngineLaunch, block: BlockStruct) -> Iterator[tuple[tuple[int, int], Blocked]]:
    s = launch._struct
    for w in range(s.warps):
        warp = WarpStruct.from_buffer_copy(WarpStruct.from_address(block.warps + w * 64))
        for field, text in _WAITS:
            lanes = getattr(warp, field)
            while lanes:
                lane = (lanes & -lanes).bit_length() - 1
                lanes &= lanes - 1
                t = ThreadStruct.from_address(block.frames + (w * 32 + lane) * s.frame_stride)
                file, line = _place(launch, t.site)
                status, address, seen, told = text, None, None, None
                if field == "barrier":
                    status = f"at barrier {t.op_a}"
                elif field == "warpop":
                    status = f"at {abi.WarpOp(t.op_kind).name.lower()} with mask 0x{t.op_mask:08x}"
                elif field == "yielded" or (field == "sleeping" and t.polls & 0xFF):
                    status = "polling" if field == "yielded" else "polling, asleep at the moment"
                    if launch.engine.undecided:
                        status += f" (registers still changed after {launch.engine.undecided} polls; {_RAISE})"
                    address = int(t.op_addr)
                    nbytes = min(int(t.op_size), 16)
                    if launch.engine.window.contains(address, nbytes):
                        seen = int.from_bytes(bytes(launch.engine.window.view(address, nbytes)), "little")
                        told = mbarriers.told(launch.kernel.sites[_polled_by(block, t)].opcode, seen)
                index = tuple(block.ctaid), tuple(t.tid)
                status += _callers(launch, t.site)
                yield (block.index, t.linear), Blocked(*index, status, file, line, address, seen, told)
