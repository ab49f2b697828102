# SPDX-License-Identifier: Apache-2.0
"""The objects behind the handles of the emulated driver: devices, contexts, streams, events, pools, modules, functions.

A handle is a number that is given out once in the life of the process, so one that was destroyed, or that belongs to
another machine, is an invalid handle and never somebody else's object.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .failure import Failure

if TYPE_CHECKING:
    from ..findings.reports import Report
    from ..space.allocation import Physical
    from ..space.members import Members
    from .capture import Capture
    from .engine import EngineModule
    from .graph import Edge, Node
    from .heap import Heap
    from .process import Process
    from .work import Op

_handles = itertools.count(0x5500_0000_1000, 0x40)
_chains = itertools.count(1)


def new_chain() -> int:
    """A number for operations of which each is behind the one before: a stream's, or those of a branch of a graph."""
    return next(_chains)


@dataclass(eq=False)
class Object:
    handle: int = field(default_factory=_handles.__next__, init=False)


@dataclass(eq=False)
class Listener(Object):
    """A callback for failed calls and their reports (cuLogsRegisterCallback)."""

    tell: Callable[[bytes], None]


@dataclass(eq=False)
class Device:
    """One emulated GPU. `used` counts the bytes of live device memory against `total`."""

    index: int
    total: int
    used: int = 0


@dataclass(eq=False)
class Tenancy:
    """The objects that every process has on a device: a primary context, a default pool and a current pool."""

    device: Device
    default_pool: Pool
    pool: Pool
    primary: Context | None = None
    primary_references: int = 0
    primary_flags: int = 0


@dataclass(eq=False)
class Context(Object):
    """A context. `error` is the CUresult that sticks to it after a fault, which `finding` describes; nothing more runs
    in it then.
    """

    process: Process
    device: Device
    flags: int = 0
    primary: bool = False
    error: Any = None
    finding: Report | None = None
    destroyed: bool = False
    peers: set[Context] = field(default_factory=set)
    streams: set[Stream] = field(default_factory=set)
    modules: set[Module] = field(default_factory=set)
    events: set[Event] = field(default_factory=set)
    limits: dict[int, int] = field(default_factory=dict)
    cache_config: int = 0
    uses: int = 1  # one, and those of cuCtxAttach
    gate: list[Op] = field(default_factory=list)  # operations that streams made from now on have to wait for
    legacy: Stream = field(init=False)
    per_thread: dict[int, Stream] = field(default_factory=dict)
    heap: Heap | None = None  # from its first launch on

    def __post_init__(self) -> None:
        self.legacy = Stream(self)


@dataclass(eq=False)
class Stream(Object):
    """A stream. `tail` holds the operations that the next one has to wait for."""

    context: Context
    flags: int = 0
    priority: int = 0
    tail: list[Op] = field(default_factory=list)
    last: Op | None = None  # the operation queued last, None once something else (a wait) came after it
    capture: Capture | None = None
    capture_tail: dict[Node, Edge] = field(default_factory=dict)
    attributes: dict[str, bytes] = field(default_factory=dict)  # those set by the user
    destroyed: bool = False
    chain: int = field(default_factory=new_chain)

    def __post_init__(self) -> None:
        self.tail += self.context.gate

    @property
    def blocking(self) -> bool:
        """Ordered against the legacy default stream of its context."""
        return not self.flags & 1

    @property
    def is_legacy(self) -> bool:
        return self is self.context.legacy

    def refuse_captured(self, code: Any) -> None:
        """Raise Failure(code), and invalidate the capture, if the stream is being captured."""
        if self.capture is not None:
            self.capture.invalidate()
            raise Failure(code)


@dataclass(eq=False)
class Mark:
    """The last record of an event, which processes may share: its marker. `home` is the process that exports it."""

    op: Op | None = None
    home: Process | None = None


@dataclass(eq=False)
class Event(Object):
    """An event. `op` is the marker of its last record, `captured` where it was recorded in a capture."""

    context: Context
    flags: int = 0
    mark: Mark = field(default_factory=Mark)
    captured: tuple[Capture, dict[Node, Edge]] | None = None

    @property
    def op(self) -> Op | None:
        return self.mark.op

    @op.setter
    def op(self, op: Op | None) -> None:
        self.mark.op = op

    @property
    def timed(self) -> bool:
        return not self.flags & 2

    @property
    def interprocess(self) -> bool:
        return bool(self.flags & 4)


@dataclass(eq=False)
class Pool(Object):
    """A memory pool. `access` maps a device to the CUmemAccess_flags it has beside the pool's own device."""

    device: Device
    is_default: bool = False
    access: dict[int, int] = field(default_factory=dict)
    attributes: dict[int, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    used: int = 0
    used_high: int = 0
    maximum: int = 0
    handle_types: int = 0
    imported: bool = False  # of another process, whose pool is `origin`: memory of it can be opened, none be allocated
    origin: Pool | None = None
    destroyed: bool = False


@dataclass(eq=False)
class Module(Object):
    """PTX loaded into a context; its variables live at `globals_address` on that context's device."""

    context: Context
    image: EngineModule
    globals_address: int = 0
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Library(Object):
    """PTX loaded for all contexts; a context gets its own module on first use."""

    image: EngineModule
    modules: dict[Context, Module] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass
class LegacyLaunch:
    """What the legacy functions (cuParamSetv, ...) have set for the next launch, with `size` bytes of parameters."""

    block: tuple[int, int, int] | None = None
    smem: int = 0
    size: int = 0
    parameters: bytearray = field(default_factory=lambda: bytearray(4096))


@dataclass(eq=False)
class Function(Object):
    """A kernel of a module (CUfunction) or of a library (CUkernel; `module` is None then)."""

    name: str
    image: EngineModule
    module: Module | None = None
    library: Library | None = None
    attributes: dict[int, int] = field(default_factory=dict)  # those set by the user
    legacy: LegacyLaunch | None = None
    on_device: dict[int, dict[int, int]] = field(default_factory=dict)  # a library's kernel: device -> attributes

    @property
    def code(self) -> Any:
        return self.image.kernels[self.name]


@dataclass(eq=False)
class Mappable:
    """An object that cuMemMap can map. `holders` counts its handles, mappings, binds and descriptors (`Mappables`).

    handle_types  the bits of CUmemAllocationHandleType by which it may be exported
    """

    nbytes: int
    handle_types: int
    holders: int = field(default=0, init=False)


@dataclass(eq=False)
class SharedPool(Mappable):
    """A memory pool that was exported by descriptors."""

    pool: Pool


@dataclass(eq=False)
class Memory(Mappable):
    """A physical allocation of the VMM functions."""

    device: Device
    physical: Physical


@dataclass(eq=False)
class Handle(Object):
    """The handle by which one process names something mappable; it holds that while it has references."""

    item: Mappable
    references: int = field(default=1, init=False)


@dataclass(eq=False)
class Bind:
    """Memory of one device at part of a multicast object. `address` is where the runtime finds it; `memory` is None for
    that of a pool.
    """

    device: Device
    offset: int
    nbytes: int
    address: int
    memory: Memory | None


@dataclass(eq=False)
class Multicast(Mappable):
    """A multicast object: a team of `size` devices, each of which may bind `nbytes` of its memory."""

    size: int
    members: Members
    devices: list[Device] = field(default_factory=list)
    binds: list[Bind] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all devices were added."""
        return len(self.devices) == self.size
