# SPDX-License-Identifier: Apache-2.0
"""The record of a fault by the native runtime, and the memory that the fault concerns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...errors import counted
from ..abi import BARRIERS, MEMBERS, SPACE_SHIFT, Access, FaultKind, Kind, MemoryOf, Space, structs
from ..space.allocation import nearby
from ..space.window import Window
from .blocked import resident, thread_of
from .places import Identity, index_text, long_place, short_place
from .prints import text_at

_OUTSIDE = {Kind.SHARED: FaultKind.FOREIGN_SHARED, Kind.LOCAL: FaultKind.FOREIGN_LOCAL}
_PLACES = 3  # the maximum number of source lines that a hint names
_SPACES = {"global": Kind.DEVICE, "shared": Kind.SHARED, "local": Kind.LOCAL}


@dataclass(frozen=True)
class Lent:
    """Memory that the native engine assigns to blocks, threads or a kernel, in `count` pieces. The first piece is at
    the address `first`; the next ones follow at distances of `stride` bytes. The first `nbytes` of a piece may be
    accessed. The thread with the fault owns the piece at the address `own`.
    """

    kind: Kind
    owner: str
    what: str
    own: int
    first: int
    stride: int
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"the {self.owner}'s {self.nbytes} bytes of {self.what}"

    def holding(self, address: int) -> str | None:
        """Where an address lies in one of the `count` pieces of this memory, as text. None if no piece contains it."""
        number, at = divmod(address - self.first, max(self.stride, 1))
        if not 0 <= number < self.count or at >= self.nbytes:
            return None
        return f"{at} bytes into {self if address - at == self.own else f'{self.what} of another {self.owner}'}"


class Record:
    """The native record of a fault, with the parts of the message as properties. What `flags`, `addr` and `value` mean
    depends on the kind of the fault.
    """

    def __init__(self, launch: structs.Launch, identity: Identity, window: Window) -> None:
        self.launch, self.identity, self.window = launch, identity, window
        f = launch.fault
        self.size, self.flags, self.addr, self.value = int(f.size), int(f.flags), int(f.addr), int(f.value)
        self.device = identity.device
        self.shared_bytes, self.local_bytes = int(launch.shared_bytes), int(launch.local_bytes)

    @cached_property
    def kind(self) -> FaultKind:
        """The kind of the fault. The native runtime decides it by the memory at the address. A wrong address may, by
        chance, lie in memory that the native engine assigns to blocks and threads; then the state space of the
        instruction decides instead. An instruction without a state space counts as an access to global memory, since
        nearly all accesses to shared and local memory name their state space.
        """
        kind = FaultKind(self.launch.fault.kind)
        if not FaultKind.NONE < kind <= FaultKind.FOREIGN_LOCAL or self.of_parameter:
            return kind
        if self.space in _OUTSIDE:
            inside = any(lent.kind is self.space and lent.holding(self.addr) for lent in self._lent)
            return kind if inside else _OUTSIDE[self.space]
        found = self.window.index.find(self.addr)
        wild = kind in _OUTSIDE.values() or (self.space is Kind.DEVICE and found is not None and found.lent)
        return FaultKind.OUT_OF_BOUNDS if wild else kind

    @cached_property
    def space(self) -> Kind | None:
        """The state space that the instruction names for this access: DEVICE (global), SHARED, LOCAL or None."""
        site = self.identity.site(self.launch.fault.site)
        parts = [part.split("::")[0] for part in site.opcode.split(".")] if site is not None else []
        named = [_SPACES[part] for part in parts if part in _SPACES]
        if not named:
            return None
        # An access of 8 bytes is the one to the mbarrier, because a bulk copy accesses its data in pieces of 16 bytes.
        if "mbarrier" in parts and self.size == 8:
            return Kind.SHARED
        # A copy names two state spaces: that of its destination first, that of its source last.
        return named[0 if self.flags & Access.WRITE else -1]

    @property
    def of_parameter(self) -> bool:
        """Whether the access names a parameter. Then `addr` is the offset in it, and `value` its size plus one."""
        return self.launch.fault.kind in (FaultKind.OUT_OF_BOUNDS, FaultKind.MISALIGNED) and self.value > 0

    @property
    def parameter(self) -> str:
        """The access to a parameter as text."""
        what = "write of" if self.flags & Access.WRITE else "read of"
        offset = self.addr - (self.addr >> 63 << 64)
        size, whole = counted(self.size, "byte"), counted(self.value - 1, "byte")
        return f"{what} {size} at offset {offset} of a parameter of {whole}"

    @property
    def reaches_cluster(self) -> bool:
        """Whether the instruction may access the shared memory of other blocks."""
        return self.launch.cluster_size > 1 and self.flags >> SPACE_SHIFT & 0xF != Space.SHARED

    @property
    def access(self) -> str:
        """The access as text: what it is, its bytes and its address."""
        atomic, write = self.flags & Access.ATOMIC, self.flags & Access.WRITE
        what = "atomic on" if atomic else "write of" if write else "read of"
        return f"{what} {counted(self.size, 'byte')} at 0x{self.addr:x}"

    @property
    def where(self) -> str:
        """The memory that the address lies in or near, as text."""
        text = self.window.index.nearest(self.addr)
        if self.space is Kind.DEVICE:
            return text
        found = self.window.index.find(self.addr)
        for lent in self._lent:
            if (inside := lent.holding(self.addr)) is not None:
                return inside
            # The instruction may have meant the allocation that `text` names, or the thread's own piece of `lent`. As
            # it is not known which, `text` then names both.
            if found is not None and found.kind is lent.kind and lent.nbytes:
                text += f"; and {nearby(self.addr, lent.own, lent.nbytes)} {lent}"
        return text

    @property
    def shared_writers(self) -> list[str]:
        """Some source lines at which the launch has written shared memory so far or, if there are none, at which the
        kernel writes it.
        """
        launch, sites = self.launch, self.identity.sites
        stores = [n for n, s in enumerate(sites) if s.opcode.split(".")[0] in ("st", "atom", "red")]
        rows = (structs.Site * len(sites)).from_address(launch.sites) if launch.sites else ()
        written = [n for n in stores if rows and rows[n].writes[MemoryOf.SHARED]]
        written = written or [
            n for n in stores if ".shared" in sites[n].opcode and sites[n].function == self.identity.kernel
        ]
        return list(dict.fromkeys(short_place(*self.identity.place(n)) for n in written))[:_PLACES]

    @property
    def opcode(self) -> str:
        """The instruction's name without its modifiers."""
        site = self.identity.site(self.launch.fault.site)
        return site.opcode.split(".")[0] if site is not None else "the instruction"

    @property
    def other_line(self) -> int | None:
        """The source line at which the other threads wait. Its site is in `flags` of the record."""
        return self.identity.place(self.flags)[1]

    @property
    def joining(self) -> int | str:
        """The thread count in the barrier instruction of this thread: `value`, or "all" for 0."""
        return self.value or "all"

    @property
    def others(self) -> int | str:
        """The thread count in the barrier instruction of the other threads: `flags`, or "all" for 0."""
        return self.flags or "all"

    @property
    def barrier(self) -> str:
        """The barrier as text. `value` is its number."""
        return "the barrier of the cluster" if self.value == BARRIERS else f"barrier {self.value}"

    @property
    def absent(self) -> str:
        """The index of the block whose shared memory was accessed although the block is not running. The upper half of
        `value` is the block's linear index.
        """
        return index_text(self.identity.index(self.value >> 32, 0)[0])

    @property
    def unbound(self) -> str:
        """The devices that have bound no memory at a multicast address. `value` has a bit for each."""
        return ", ".join(str(device) for device in range(MEMBERS) if self.value >> device & 1)

    @property
    def assertion(self) -> str:
        """The failed assertion as text. `value` is the address of the thread's frame."""
        t = structs.Thread.from_address(self.value)
        file, function, message = (
            text_at(self.window, at).decode(errors="replace") for at in (t.op_addr, t.op_seen, t.op_value)
        )
        return f"{long_place(file, t.op_a)}: {function}: assertion `{message}` failed"

    @property
    def pending_copy(self) -> str:
        """The copy that was to write the memory but had not yet written it when it was read, and the missing wait for
        this copy, as text. `value` is the site of the copy's instruction plus one.
        """
        site = self.value - 1
        opcode, copy = self.identity.sites[site].opcode, "cp.async.bulk"
        if ".bulk_group" in opcode:
            wait = "cp.async.bulk.wait_group (without .read) of its thread that covers it"
        elif ".bulk." in opcode:
            wait = "wait for its mbarrier (mbarrier.try_wait)"
        else:
            copy, wait = "cp.async", "cp.async.wait_group of its thread that covers it"
        return f"the {copy} at line {self.identity.place(site)[1]} will write it, and no {wait}"

    @cached_property
    def _lent(self) -> list[Lent]:
        """The memory that the native engine assigns to the launch: parameters, shared memory and local memory."""
        s, f = self.launch, self.launch.fault
        found = [Lent(Kind.PARAM, "kernel", "parameters", s.params, s.params, s.param_bytes, 1, s.param_bytes)]
        block = next((b for b in resident(s) if b.index == f.block), None)
        if block is not None:
            pieces = s.shared_base, s.shared_stride, s.slot_count, s.shared_bytes
            found.append(Lent(Kind.SHARED, "block", "shared memory", block.shared_base, *pieces))
            pieces = s.local_base, s.local_stride, s.slot_count * s.threads, s.local_bytes
            own = thread_of(s, block, f.thread).local_base
            found.append(Lent(Kind.LOCAL, "thread", "local memory", own, *pieces))
        return found
