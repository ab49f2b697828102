# SPDX-License-Identifier: Apache-2.0
"""What each thread of a launch waits for, with the place in the source at which it waits."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import sizeof
from dataclasses import dataclass

from .. import abi
from ..abi import structs
from ..space.window import Window
from . import mbarriers
from .places import Identity, Index

RAISE_LIMIT = "DRVFUSE_EMU_LOOP_LIMIT raises this limit"

_WAITS = (
    ("yielded", "polling"),
    ("warpop", ""),
    ("at_activemask", "at activemask"),
    ("barrier", ""),
    ("cluster", ""),
    ("gdc", "at griddepcontrol.wait"),
    ("sleeping", "sleeping"),
    ("ready", "runnable"),
)
"""The masks of an `abi.structs.Warp`, and what the lanes in each mask do; "" where the operation decides that."""


@dataclass(frozen=True)
class Blocked:
    """A thread that waits: what it waits for (`status`), and the place. If the thread polls a word, `address` and
    `seen` are the address and the present value of the word; `mbarrier` describes the word if it is an mbarrier.
    """

    block: Index
    thread: Index
    status: str
    file: str | None
    line: int | None
    address: int | None = None
    seen: int | None = None
    mbarrier: str | None = None


def blocked(launch: structs.Launch, identity: Identity, window: Window, undecided: int = 0) -> list[Blocked]:
    """All threads of a launch that have not exited, and what each waits for, sorted by block and thread.

    If `undecided` is not 0, registers of polling threads still changed after that number of polls, so it is not certain
    that the threads wait for ever.
    """
    found = []
    for block in resident(launch):
        for field, text, t in _waiting(launch, block):
            status, address, seen, mbarrier = text, None, None, None
            if field == "barrier":
                status = f"at barrier {t.op_a}"
            elif field == "cluster":
                status = _at_cluster_barrier(launch, block, t)
            elif field == "warpop":
                status = _at_warp_operation(identity, t)
            elif field == "yielded" or (field == "sleeping" and t.polls & abi.POLL_COUNT):
                status = "polling" if field == "yielded" else "polling, asleep at the moment"
                if undecided:
                    status += f" (registers still changed after {undecided} polls; {RAISE_LIMIT})"
                address = int(t.op_addr)
                nbytes = min(int(t.op_size), 16)
                if window.contains(address, nbytes):
                    seen = int.from_bytes(bytes(window.view(address, nbytes)), "little")
                    mbarrier = mbarriers.describe(identity.sites[_polled_by(block, t)].opcode, seen)
            status += identity.callers(t.site)
            item = Blocked(tuple(block.ctaid), tuple(t.tid), status, *identity.place(t.site), address, seen, mbarrier)
            found.append(((block.index, t.linear), item))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _at_warp_operation(identity: Identity, t: structs.Thread) -> str:
    if t.op_kind == abi.WarpOp.MATRIX:
        return f"at {identity.sites[t.site].opcode.split('.')[0]}, which takes all 32 lanes of the warp"
    return f"at {abi.WarpOp(t.op_kind).name.lower()} with mask 0x{t.op_mask:08x}"


def _at_cluster_barrier(launch: structs.Launch, block: structs.Block, t: structs.Thread) -> str:
    lead = structs.Block.from_address(launch.slots + (block.slot - block.cluster_rank) * launch.slot_stride)
    status = f"at the barrier of the cluster, which misses {lead.cluster_missing} of its threads"
    if t.op_kind & abi.ClusterBarrier.WAIT:
        return status
    return f"{status}, arriving"


def resident(launch: structs.Launch) -> Iterator[structs.Block]:
    """The blocks of a launch that have started and not ended."""
    for slot in range(launch.slots_used):
        block = structs.Block.from_address(launch.slots + slot * launch.slot_stride)
        if block.active:
            yield block


def thread_of(launch: structs.Launch, block: structs.Block, linear: int) -> structs.Thread:
    """The header of a thread's frame. `linear` is the linear index of the thread in its block."""
    return structs.Thread.from_address(block.frames + linear * launch.frame_stride)


def _waiting(launch: structs.Launch, block: structs.Block) -> Iterator[tuple[str, str, structs.Thread]]:
    """The waiting threads of a block, each as (name, text, thread): `name` is the member of `Warp` whose mask has the
    thread's lane, `text` is what `_WAITS` says for this member.
    """
    for w in range(launch.warps):
        warp = structs.Warp.from_buffer_copy(structs.Warp.from_address(block.warps + w * sizeof(structs.Warp)))
        for field, text in _WAITS:
            lanes = getattr(warp, field)
            while lanes:
                yield field, text, thread_of(launch, block, w * 32 + (lanes & -lanes).bit_length() - 1)
                lanes &= lanes - 1


def _polled_by(block: structs.Block, t: structs.Thread) -> int:
    """The site of the instruction by which a thread polls the word that it waits for, from the list of the words that
    it polls. If the list does not have the word, the site at which the thread is suspended.
    """
    poll = structs.Poll.from_address(block.polls + t.linear * sizeof(structs.Poll))
    for word in poll.word[: t.polls & abi.POLL_COUNT]:
        if word.addr == t.op_addr:
            return int(word.site)
    return int(t.site)
