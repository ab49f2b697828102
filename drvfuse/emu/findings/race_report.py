# SPDX-License-Identifier: Apache-2.0
"""The reports of races that the detector has found."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import counted
from ..abi import NO_SITE, Edge, Entry, race_structs
from .places import Identity, Index, called_at, index_text, short_place
from .reports import Place, Report

if TYPE_CHECKING:
    from ..translate.code import Site

_EDGES = {
    Edge.NONE: "no release and acquire order the two accesses",
    Edge.BARRIER: "no barrier of the block (__syncthreads) is between them",
    Edge.WARP: "no __syncwarp and no barrier of the block is between them; shuffles and votes do not order memory",
    Edge.RELEASED_EARLIER: "the last release of that block that was seen came before the {other}",
    Edge.RELAXED_STORE: "the flag{store} was stored without a release or a fence before it",
    Edge.RELAXED_LOAD: "the flag was read{load} without an acquire, and no fence of a sufficient scope follows",
    Edge.STORE_SCOPE: "the scope of the release at the flag{store} does not include the reader",
    Edge.LOAD_SCOPE: "the scope of the acquire{load} does not include the writer",
    Edge.GDC_WAIT: "the dependent launch has not executed griddepcontrol.wait before its access",
    Edge.ORDER: "neither stream order, an event, the host, nor a flag orders the two operations",
    Edge.READ_ONLY_PATH: "the read-only path (ld.global.nc) may return the contents from before the kernel started",
    Edge.STRONG_SCOPES: "both are strong, but their scopes do not include each other",
    Edge.STRONG_SIZES: "both are strong, but not of the same size",
    Edge.FLAG_SIZES: "the flag{store} was not read in the size in which it was written{load}",
    Edge.COPY_OWN: "the thread has not waited for this copy: no {wait} that covers it comes before",
    Edge.COPY: (
        "the copying thread has not waited for this copy: no {wait} that covers it, followed by {then}, comes before"
    ),
    Edge.COPIED: "no barrier is between the copying thread's wait ({wait}) and this access",
    Edge.BULK: "no wait for the mbarrier that this bulk copy completes (mbarrier.try_wait) comes before",
    Edge.COPY_EARLY: (
        "nothing orders the read before this copy: no barrier, and no mbarrier at which the reader arrives, is between "
        "the read and the copy's issue; if the read was meant to find the copied data, it needs {lacks}"
    ),
    Edge.PROXY: (
        "the copy reads by the async proxy what was written by the generic proxy, and no fence.proxy.async of the "
        "writing thread, or of a thread that knew of the write, is between them"
    ),
    Edge.ALIAS: (
        "one of them was made by a multicast address and the other by the memory's own address, and no "
        "fence.proxy.alias is between them in the order of the two"
    ),
    Edge.CLUSTER: (
        "no barrier of the cluster (barrier.cluster.arrive.release and .wait), and no release and acquire of cluster "
        "scope, order the two accesses"
    ),
    Edge.CLUSTER_RELAXED: (
        "the block of the earlier access arrived at the barrier of the cluster with .relaxed, which releases only what "
        "a fence before it covers, and fence.mbarrier_init covers nothing but mbarrier.init"
    ),
    Edge.CLUSTER_START: (
        "nothing ensures that the block whose shared memory is accessed has started: no barrier of the cluster "
        "(barrier.cluster), and no release and acquire, order this access after its threads"
    ),
    Edge.CLUSTER_END: (
        "the block may have ended, and its shared memory be gone, before this access: nothing, such as a barrier of "
        "the cluster or a wait for its mbarrier, orders the access before the exit of the block's threads"
    ),
}
"""For each `Edge`: why two accesses are not ordered."""

_APART = 6  # the maximum number of lines of PTX between the load and the store of a counter
_COUNTER = (
    "each of the threads reads this word and writes it back, as for a counter; an atomic (atomicAdd, atomicMax, ...) "
    "does that in one step, without a race"
)


def report(
    f: race_structs.Found,
    identities: Mapping[int, Identity],
    flag: str | None,
    multicast: tuple[int, int] | None = None,
) -> Report:
    """The report of a race.

    `identities` has the Identity of each operation, by its number. `flag` says what is wrong with the flag that was to
    order the accesses, if that is known. `multicast` is (multicast address, device of the memory) for memory that is
    bound to a multicast object.
    """
    lane = (f.other_lanes & -f.other_lanes).bit_length() - 1
    mine = _place(identities.get(f.op), f.site, f.block, f.thread, f.edge == Edge.CLUSTER_END)
    other_thread = f.other_warp * 32 + lane
    other = _place(identities.get(f.other_op), f.other_site, f.other_block, other_thread, f.edge == Edge.CLUSTER_START)
    store, load = (
        "" if site == NO_SITE else f" at {_line(_site(identities.get(op), site))}"
        for op, site in ((f.store_op, f.store_site), (f.op, f.load_site))
    )
    verb = _verb(f.other_flags)
    at = f" at {short_place(other.file, other.line)}" if other.line else ""
    here = _site(identities.get(f.op), f.site)
    there = _site(identities.get(f.other_op), f.other_site)
    wait = _wait(here, f.flags) if f.edge == Edge.COPY_EARLY else _wait(there, f.other_flags)
    lacks = f"the copying thread's wait ({wait}) and a barrier after that"
    if here is not None and "mbarrier" in here.opcode:
        lacks = "a wait for the mbarrier that the copy completes (mbarrier.try_wait)"
    earlier = f"thread's wait ({wait}) for the copy{at}" if f.other_flags & Entry.ASYNC else verb + at
    near = (f.op, f.block) == (f.other_op, f.other_block)
    then = "a barrier" if near else "a release and an acquire of it"
    edge = flag or _EDGES[Edge(f.edge)].format(store=store, load=load, other=earlier, wait=wait, then=then, lacks=lacks)
    what = f"{_verb(f.flags)} of {counted(f.size, 'byte')}{called_at(mine.callers)}"
    address, member = (int(f.addr), "") if multicast is None else (multicast[0], f" (device {multicast[1]}'s memory)")
    message = f"{what}, of which the byte at 0x{address:x}{member} is not ordered after the {verb} by {other}: {edge}"
    if f.edge == Edge.CLUSTER_START:
        message = f"{what} at 0x{f.addr:x}, in the shared memory of block {_block(other.block)}: {edge}"
    elif f.edge == Edge.CLUSTER_END:
        what = f"the end of block {_block(mine.block)} is not ordered after the {verb} of its shared memory"
        message = f"{what}, at 0x{f.addr:x}, by {other}: {edge}"
    return Report(
        "race", message, mine.kernel, mine.file, mine.line, mine.device, mine.block, mine.thread, address,
        other=other, edge=edge, callers=mine.callers, process=mine.process,
        hint=_COUNTER if _counts(here, there, identities.get(f.op)) else None,
    )  # fmt: skip


def _counts(here: Site | None, there: Site | None, identity: Identity | None) -> bool:
    """Whether the two accesses look like the increment of a counter: a load of a word, and a later store to it in the
    same source line. Without line information, the two instructions must be near each other in the PTX.
    """
    if here is None or there is None or identity is None or not here.address:
        return False
    sites = [s for s in identity.sites if (s.address, s.function) == (here.address, here.function)]
    loads = [s for s in sites if s.opcode.startswith("ld.")]
    pairs = [
        (load, store)
        for load, store in itertools.product(loads, (s for s in sites if s.opcode.startswith("st.")))
        if (load.file, load.line, load.inlined) == (store.file, store.line, store.inlined)
        and 0 < store.ptx_line - load.ptx_line <= (_APART if not load.line else store.ptx_line)
    ]
    return any({here, there} <= set(pair) for pair in pairs)


def plain_flag(identity: Identity | None, site: int) -> str:
    """What is wrong with a flag that was stored by a plain write at this site, as text."""
    at = _line(_site(identity, site))
    return f"the flag at {at} was stored by a plain write, which releases nothing, not even after a fence"


def _wait(copy: Site | None, flags: int) -> str:
    """The instruction by which a thread waits for a copy that it started. `flags` are those of the copy's access. If
    they have WRITE, the thread must wait until the copy has written, otherwise only until the copy has read.
    """
    if copy is None or ".bulk_group" not in copy.opcode:
        return "cp.async.wait_group or cp.async.wait_all"
    return "cp.async.bulk.wait_group" + (" without .read" if flags & Entry.WRITE else ".read")


def _verb(flags: int) -> str:
    """The kind of an access as text, such as "strong write"; `flags` are those of `Entry`."""
    strong = "strong " if flags & Entry.STRONG else "asynchronous " if flags & Entry.ASYNC else ""
    return "atomic" if flags & Entry.ATOMIC else f"{strong}write" if flags & Entry.WRITE else f"{strong}read"


def _site(identity: Identity | None, number: int) -> Site | None:
    return identity.site(number) if identity is not None else None


def _line(site: Site | None) -> str:
    if site is None:
        return "an unknown place"
    return short_place(site.file, site.line or site.ptx_line)


def _block(index: Index | None) -> str:
    return "?" if index is None else index_text(index)


def _place(identity: Identity | None, number: int, block: int, thread: int, whole: bool = False) -> Place:
    """The place of an access or, with `whole`, of the start or the end of a block."""
    if identity is None:
        return Place("an operation long ago", None, None, 0, None, None)
    site = identity.site(number)
    if site is None:
        where = identity.index(block, 0)[0] if whole else None
        return Place(identity.kernel, None, None, identity.device, where, None, process=identity.process)
    place, index = identity.place(number), identity.index(block, thread)
    return Place(identity.kernel, *place, identity.device, *index, site.inlined, identity.process)
