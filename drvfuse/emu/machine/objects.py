# SPDX-License-Identifier: Apache-2.0
"""The objects that handles of the emulated driver name: devices, contexts, streams, events, pools, modules, functions.

A handle is a number that is used only once in the life of the process. So the handle of a destroyed object, or of an
object of another machine, is always invalid and never refers to a different object.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .process.failure import Failure

if TYPE_CHECKING:
    from ..findings.reports import Report
    from ..space.allocation import Physical
    from ..space.members import Members
    from .graphs.capture import Capture
    from .graphs.graph import Edge, Node
    from .memory.heap import Heap
    from .process.process import Process
    from .run.engine import EngineModule
    from .run.work import Op

_handles = itertools.count(0x5500_0000_1000, 0x40)
_chains = itertools.count(1)


def new_chain() -> int:
    """A number for a new chain: operations of a stream, or of a branch of a graph, that run one after another."""
    return next(_chains)


@dataclass(eq=False)
class Object:
    handle: int = field(default_factory=_handles.__next__, init=False)


@dataclass(eq=False)
class Listener(Object):
    """A callback that is called with the reports of failed calls (cuLogsRegisterCallback)."""

    tell: Callable[[bytes], None]


@dataclass(eq=False)
class Device:
    """One emulated GPU. Of its `total` bytes of device memory, `used` bytes are allocated."""

    index: int
    total: int
    used: int = 0


@dataclass(eq=False)
class Tenancy:
    """The objects that each process has on a device: a primary context, a default pool and a current pool."""

    device: Device
    default_pool: Pool
    pool: Pool
    primary: Context | None = None
    primary_references: int = 0
    primary_flags: int = 0


@dataclass(eq=False)
class Context(Object):
    """A context. After a fault, which `finding` describes, `error` is the CUresult that all later calls return, and
    nothing runs in the context any more.
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
    uses: int = 1  # the reference count, which cuCtxAttach raises
    awaited: list[Op] = field(default_factory=list)  # the operations for which streams created later have to wait
    legacy: Stream = field(init=False)
    per_thread: dict[int, Stream] = field(default_factory=dict)
    heap: Heap | None = None  # None before the first launch

    def __post_init__(self) -> None:
        self.legacy = Stream(self)


@dataclass(eq=False)
class Stream(Object):
    """A stream. `tail` are the operations for which its next operation has to wait."""

    context: Context
    flags: int = 0
    priority: int = 0
    tail: list[Op] = field(default_factory=list)
    # the operation that was queued last; None if it was a batch, or if the stream had to wait for other work after it
    last: Op | None = None
    capture: Capture | None = None
    capture_tail: dict[Node, Edge] = field(default_factory=dict)
    attributes: dict[str, bytes] = field(default_factory=dict)  # the attributes that the program has set
    destroyed: bool = False
    chain: int = field(default_factory=new_chain)

    def __post_init__(self) -> None:
        self.tail += self.context.awaited

    @property
    def blocking(self) -> bool:
        """Whether the stream is ordered with the legacy default stream of its context."""
        return not self.flags & 1

    @property
    def is_legacy(self) -> bool:
        return self is self.context.legacy

    def refuse_captured(self, code: Any) -> None:
        """If the stream is being captured, invalidate the capture and raise Failure(code)."""
        if self.capture is not None:
            self.capture.invalidate()
            raise Failure(code)


@dataclass(eq=False)
class Mark:
    """The last record of an event: `op` is a marker in a stream. If the event is exported, several processes share the
    Mark, and `home` is the process that has exported it.
    """

    op: Op | None = None
    home: Process | None = None


@dataclass(eq=False)
class Event(Object):
    """An event. `op` is the marker of its last record. If the event was recorded in a capture, `captured` has the
    capture and the nodes before the record.
    """

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
    """A memory pool. `access` maps each device, except the pool's own, to its CUmemAccess_flags."""

    device: Device
    is_default: bool = False
    access: dict[int, int] = field(default_factory=dict)
    attributes: dict[int, int] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    used: int = 0
    used_high: int = 0
    maximum: int = 0
    handle_types: int = 0
    imported: bool = False  # a pool of another process: memory of it can be opened here, but not allocated
    origin: Pool | None = None  # for an imported pool: the pool in the process that owns it
    destroyed: bool = False


@dataclass(eq=False)
class Module(Object):
    """PTX that is loaded into a context. Its variables are at `globals_address`, on the device of the context."""

    context: Context
    image: EngineModule
    globals_address: int = 0
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Library(Object):
    """PTX that is loaded for all contexts. A context gets a module of its own at the first use."""

    image: EngineModule
    modules: dict[Context, Module] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass
class LegacyLaunch:
    """The settings that legacy functions such as cuParamSetv have made for launches of a kernel by cuLaunch or
    cuLaunchGrid. Such a launch uses the first `size` bytes of `parameters`.
    """

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
    attributes: dict[int, int] = field(default_factory=dict)  # the attributes that the program has set
    legacy: LegacyLaunch | None = None
    # attributes per device, for the kernel of a library
    on_device: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def code(self) -> Any:
        return self.image.kernels[self.name]


@dataclass(eq=False)
class Mappable:
    """An object that cuMemMap can map (memory of cuMemCreate or a multicast object), or a pool. All of them can be
    exported.

    handle_types  the CUmemAllocationHandleType bits with which it may be exported
    holders       the number of its handles, mappings, binds and open file descriptors, which `Mappables` counts
    """

    nbytes: int
    handle_types: int
    holders: int = field(default=0, init=False)


@dataclass(eq=False)
class SharedPool(Mappable):
    """A memory pool that was exported as a file descriptor."""

    pool: Pool


@dataclass(eq=False)
class Memory(Mappable):
    """A physical allocation of the VMM functions."""

    device: Device
    physical: Physical


@dataclass(eq=False)
class Handle(Object):
    """The handle of one process for a Mappable. While the handle has references, it keeps the Mappable alive."""

    item: Mappable
    references: int = field(default=1, init=False)


@dataclass(eq=False)
class Bind:
    """Memory of one device that is bound to part of a multicast object. The native runtime accesses it by `address`.
    `memory` is None for memory of a pool.
    """

    device: Device
    offset: int
    nbytes: int
    address: int
    memory: Memory | None


@dataclass(eq=False)
class Multicast(Mappable):
    """A multicast object with a team of `size` devices, each of which may bind `nbytes` of its memory."""

    size: int
    members: Members
    devices: list[Device] = field(default_factory=list)
    binds: list[Bind] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all devices were added."""
        return len(self.devices) == self.size
