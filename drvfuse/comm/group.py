# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that run collectives together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

from .. import config
from ..bootstrap.rendezvous import meet
from ..errors import CaptureError, ClosedError, DriverError, DrvfuseError, require_integer
from ..nodes.exchange import Exchange
from ..nodes.joint import Joint, NodesWanted
from ..nodes.layout import Nodes, find_nodes, find_order
from ..runtime.device import Device
from ..runtime.driver import Owner, forked
from ..runtime.lifetime import Owned
from ..runtime.vmm import SymmetricBuffer
from . import arguments
from .call_state import CallState
from .connect import connect
from .rank import Rank
from .rank_graphs import RankGraphs
from .resources import Resources, dispose
from .split import split
from .transport import LocalTransport

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..runtime.driver import Driver, DriverLike
    from ..runtime.graph import Graph
    from ..runtime.stream import Stream, StreamLike
    from .history import Noted
    from .transport import Transport

_LOCAL_SECONDS = 60.0  # seconds that an engine may take to connect the ranks of one process

_log = logging.getLogger("drvfuse.comm")


class Group(Owned, Owner):
    """Ranks 0 .. size-1 and what they share: workspaces with the barrier state, and the reports of kernels that gave up
    waiting (hang reports).

    Made by :meth:`local`, with all ranks in this process, or by :meth:`connect`, with one of them. `size` is the number
    of all ranks; `ranks`, iteration and `len` cover the ranks of this process. A group serves one call at a time and is
    driven by one thread; calls on different streams are ordered by events. `peers_readable` says whether every rank can
    access every other rank's memory: without it the only algorithm is "naive".
    """

    def __init__(
        self,
        transport: Transport,
        workspace_bytes: int,
        max_blocks: int | None,
        joint: Joint,
    ) -> None:
        """All ranks of the group construct it together, step by step (`Transport.step`)."""
        Owner.__init__(self)
        self.transport, devices = transport, transport.devices
        self.driver: Driver = devices[0].driver
        self.size = len(transport.members)
        self.layout, self.wanted = joint.nodes, joint.wanted
        self.sizes = workspace_bytes, max_blocks
        self.ranks = tuple(Rank(i, device, self) for i, device in zip(transport.indices, devices, strict=True))
        own = Resources(transport, self.ranks, workspace_bytes, max_blocks, joint)
        self._owns(self.driver, dispose, own)
        self.workspace, self.link, self.alone = own.workspace, own.link, own.alone
        self._memory, self._budget = own.memory, own.budget
        self.calls = self.workspace.compared_calls(first=config.get("check_calls"))
        self.state = CallState(transport, own.partial, self.alone, self.workspace, self.link)
        try:
            with transport.step("clear the workspaces"):
                self.workspace.clear([rank.stream for rank in self.ranks])
        except BaseException:
            if not self.together:
                super().close()
            raise

    @classmethod
    def local(
        cls,
        devices: int | Sequence[int | Device],
        *,
        driver: DriverLike = None,
        workspace_bytes: int = 64 << 20,
        max_blocks: int | None = None,
        nodes: int = 1,
        node_order: str | None = None,
        exchange: str | Exchange | None = None,
    ) -> Group:
        """A group whose ranks are all driven by this process.

        `devices` is a number of devices (0 .. n-1), or a list of device ids or of `Device` objects, rank by rank.
        `driver` is as for `drvfuse.device`; the default is the driver of the `Device` objects. `workspace_bytes` is the
        size of the payload of a rank's workspace. The slots for push algorithms have this size too, so each rank
        allocates about twice `workspace_bytes`. Larger inputs are processed in chunks. `max_blocks` bounds the
        multiprocessors that a launch may fill on each device; the budgets of all open groups on a device sum to at most
        the number of its multiprocessors. The default is 64, and then push launches may fill all multiprocessors while
        no other group is open on the devices.

        `nodes` splits the ranks into that number of nodes of consecutive ranks, as if the nodes were different hosts,
        for trials and tests (docs/nodes.md). `node_order` is "fixed" or "engine", by default "fixed" for up to four
        nodes. `exchange` is the engine between the nodes: "in_process" (the default), "nccl", or an object of your own.

        Blocks until the workspaces are ready. It also waits for calls of other groups that rely on being alone on their
        devices: calls with PDLLevel.OVERLAP_AT_BEGINNING, and calls on more multiprocessors than the group's budget.
        Raises ArgumentError for a wrong size, id or budget, if a graph holds such a call, and if such a call is not yet
        launched on all ranks of its group; DriverUnavailable if the driver cannot be used; CaptureError while the
        default stream of a device, or a stream with such calls, is being captured.
        """
        payload, budget = arguments.sizes(workspace_bytes, max_blocks)
        found = arguments.local_devices(devices, driver)
        layout = find_nodes([0] * len(found), nodes)
        find_order(node_order, layout.count)
        return cls.of_devices(found, payload, budget, layout, NodesWanted(nodes, node_order, exchange))

    @classmethod
    def of_devices(
        cls, devices: Sequence[Device], payload: int, budget: int | None, layout: Nodes, wanted: NodesWanted
    ) -> Group:
        joint = Joint(layout, wanted, lambda values: values, _LOCAL_SECONDS)
        return cls(LocalTransport(devices), payload, budget, joint)

    @classmethod
    def connect(
        cls,
        rank: int | None = None,
        size: int | None = None,
        *,
        device: int | Device | None = None,
        store: object = None,
        driver: DriverLike = None,
        workspace_bytes: int = 64 << 20,
        max_blocks: int | None = None,
        timeout: float = 60.0,
        nodes: str | int = "auto",
        node_order: str | None = None,
        exchange: str | Exchange | None = None,
    ) -> Group:
        """A group of `size` ranks, of which this process drives rank `rank`, and other processes drive the others.

        Every rank calls this. The defaults of `rank` and `size` are the values that the launcher of the processes has
        set (torchrun, mpirun, srun, `drvfuse run`); the default of `device` is the device whose number is the process's
        rank on its host, or the only visible device. `store` lets the processes find one another: an mpi4py
        communicator, a store or process group of torch.distributed, or any object with `set` and `get` as
        `drvfuse.bootstrap` describes them; on one host it may be None. The other arguments are those of `local`, and
        must be equal on all ranks. `timeout` is the time limit, in seconds, of this step and of each later step that
        all ranks take together.

        By default the ranks of one host form a node, of up to eight ranks. If `nodes` is a number, the ranks form that
        number of nodes of consecutive ranks, also on one host. All nodes have equally many ranks. docs/nodes.md
        describes calls of groups of several nodes. `node_order` is "fixed" or "engine", by default "fixed" for up to
        four nodes. `exchange` is the engine between the nodes: "nccl", "mpi", or an object of your own with the methods
        of `drvfuse.nodes.exchange.Exchange`; by default "nccl" if it is installed, else "mpi".

        Blocks until all ranks have connected and the workspaces are ready. If one rank fails, it raises its own error,
        and the other ranks raise a GroupError with the number of the failed rank. GroupTimeout and RankEnded name the
        ranks that are missing; GroupMismatch is raised if the ranks differ in a value that must be equal. Other errors
        are ArgumentError, Unsupported, DriverUnavailable, CaptureError and DriverError. Nothing stays allocated after
        an error.

        Later the ranks take these steps together, between calls, and each raises the same errors: `reset`, `split`,
        `symmetric`, and the first call with `use_multimem=True` that makes staging memory. Each rank calls `close` by
        itself.
        """

        def opened() -> tuple[Device, int, int | None]:
            payload, budget = arguments.sizes(workspace_bytes, max_blocks)
            return arguments.own_device(device, place.local_rank, driver), payload, budget

        place, board = meet(rank, size, store, timeout)
        return cls.of_board(board, opened, NodesWanted(nodes, node_order, exchange))

    @classmethod
    def of_board(
        cls, board: Board, opened: Callable[[], tuple[Device, int, int | None]], wanted: NodesWanted | None = None
    ) -> Group:
        """A group of the ranks of `board`. `comm.connect.connect` says what `opened` returns, and which errors are
        raised.
        """
        wanted = wanted or NodesWanted()
        transport, record, layout = connect(board, opened, wanted)

        def gather(values: Sequence[bytes]) -> list[bytes]:
            (own,) = values
            return board.gather("connect the engine between the nodes", own)

        return cls(transport, record.workspace_bytes, record.max_blocks, Joint(layout, wanted, gather, board.timeout))

    @property
    def together(self) -> bool:
        """Whether this process drives all ranks of the group."""
        return len(self.ranks) == self.size

    @overload
    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        workspace_bytes: int | None = None,
        max_blocks: int | None = None,
    ) -> Group | None: ...

    @overload
    def split(
        self,
        color: Sequence[int | None],
        key: int | Sequence[int] = 0,
        *,
        workspace_bytes: int | None = None,
        max_blocks: int | None = None,
    ) -> list[Group | None]: ...

    def split(
        self,
        color: int | None | Sequence[int | None],
        key: int | Sequence[int] = 0,
        *,
        workspace_bytes: int | None = None,
        max_blocks: int | None = None,
    ) -> Group | None | list[Group | None]:
        """A new group of the ranks that give the same `color`, ordered by `key` and then by their ranks in this group.

        `color` is an integer of at least 0; a rank that gives None joins no new group, and gets None. With several
        local ranks `color` and `key` are lists with an entry for each local rank (a single `key` counts for all), and
        the result is a list. With one local rank single values are accepted, and the result is a group or None, not a
        list. The other arguments are by default those of this group.

        All ranks of this group call it; it raises the errors of `connect`. Both groups can be used afterwards, and
        either may be closed first.
        """
        self.require_open()
        return split(self, color, key, workspace_bytes, max_blocks)

    @property
    def peers_readable(self) -> bool:
        """Whether every rank can access every other rank's memory."""
        return self.transport.shared

    @property
    def nodes(self) -> int:
        """How many nodes the group spans."""
        return self.layout.count

    @property
    def node(self) -> int:
        """The node of the first local rank."""
        return self.layout.of[self.ranks[0].index]

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of the node `self.node`, in ascending order."""
        return self.layout.ranks(self.node)

    @property
    def max_blocks(self) -> int:
        """The multiprocessors that a launch of this group may fill on a device, whatever other groups are open."""
        return self._budget.blocks

    @property
    def max_blocks_alone(self) -> int:
        """The multiprocessors that a push launch may fill while no other group is open on the devices: all, or
        `max_blocks` if that was given.
        """
        return self._budget.alone

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def __getitem__(self, index: int) -> Rank:
        return self.ranks[require_integer("index", index, "the index of a local rank")]

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"devices={[rank.device.index for rank in self.ranks]}"
        return f"Group(size={self.size}, driver={self.driver.name!r}, {state})"

    def synchronize(self) -> None:
        """Wait for every local rank's stream and last call, then :meth:`check`."""
        self.require_open()
        for rank in self.ranks:
            rank.drain()
        self.state.forget_partial()
        self.check()
        self.state.history.settle()

    def check(self) -> None:
        """Raise BarrierTimeout if a rank has given up waiting since the last reset, or CallMismatch if the call of a
        rank differed from that of a peer. Reads host memory only.

        Never synchronises and is legal anywhere, also during capture. The error is raised again until the group is
        reset: by :meth:`reset`, or, if all ranks are in this process, by the next collective.
        """
        self.require_open()
        self.state.check(self.calls)

    def reset(self) -> None:
        """Make the group usable after a BarrierTimeout or a failed launch.

        Waits for everything queued on the local ranks' streams (waits of kernels are bounded), then clears the barrier
        state and the report of every rank. A reset without an earlier error does no harm. Raises CaptureError while a
        rank's stream is being captured.

        If the group has ranks in other processes, all ranks call this, also those that have seen no error. It raises
        the errors of `connect`, and its time limit is the group's `timeout` plus `spin_timeout`, so that ranks that
        still wait in a call can give up first.
        """
        self.require_open()
        with self.transport.step("reset the group: wait for what is queued", config.get("spin_timeout")):
            for rank in self.ranks:
                rank.require_no_capture()
            for rank in self.ranks:
                rank.drain()
        self.state.forget_partial()
        with self.transport.step("reset the group: clear the workspaces"):
            self.workspace.clear([rank.stream for rank in self.ranks])
        if self.link is not None:
            with self.transport.step("reset the group: connect the nodes", self.link.timeout):
                self.link.reset()
        self.state.clear()

    def admit(self, streams: Sequence[Stream]) -> None:
        """Raise a pending BarrierTimeout, or reset the group after one. Every collective calls this first.

        Raises CaptureError if a reset is due and one of `streams` is being captured. A group with ranks in other
        processes is not reset here: this method raises the error again, or LaunchError after a launch that failed on
        some ranks. It raises RankEnded if the process of a rank has ended, since that rank would never take part in the
        call.
        """
        self.require_open()
        if self.state.admit(self.calls):
            if not self.together:
                self.state.refuse(self.calls)
            if any(stream.capture_id() is not None for stream in streams):
                raise CaptureError("the group must be reset first, and that is impossible during a capture")
            self.reset()

    @contextlib.contextmanager
    def capture(self, streams: Sequence[StreamLike] | None = None) -> Iterator[RankGraphs]:
        """Record what the block queues on `streams`, by default each rank's own, as one CUDA graph per local rank.

        Use it as `with group.capture() as graphs: ...`, then call `graphs.launch()`. Nothing runs inside the block.
        `streams` has one stream for each local rank, on the rank's device. A chain of collectives is faster in these
        graphs than in one graph over all streams (`Graph.capture(streams)`), which starts and ends on one stream. The
        algorithm "naive" needs one graph over all streams, and raises Unsupported here. Otherwise raises the errors of
        `Graph.capture`.
        """
        self.require_open()
        with RankGraphs.capture(self, streams) as graphs:
            yield graphs

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        """Record that the launch of `call` on the local rank at `position` was captured into `graph`, or into a graph
        of another library if `graph` is None.
        """
        self.state.history.captured(position, graph, call.note)
        if call.note.adapts:
            self.alone.captured(graph)
        if graph is not None:
            rank = self.ranks[position]
            graph.before_launch(self._before_replay)
            graph.before_launch(rank.before_replay)
            graph.after_launch(rank.after_replay)

    def _before_replay(self, stream: Stream) -> None:
        self.admit([stream])
        self.alone.before_replay()
        # Calls of a replay are not recorded as partial calls, so the recorded order of calls is incomplete from now on.
        self.state.forget_partial()

    def symmetric(self, nbytes: int, multicast: bool = False) -> SymmetricBuffer:
        """Memory on each rank's device that every rank can read and write. The caller closes it.

        With `multicast` this method makes a multicast object, and blocks until the fabric is ready. The buffer then
        also has `multicast_ptr`, one address for byte 0 of all ranks' parts, for `multimem` instructions. Between an
        access to a part by its unicast address (`ptrs`) and an access by `multicast_ptr` there must be a
        `fence.proxy.alias` or the end of a kernel. Collectives with `use_multimem=True` read inputs that lie in such a
        buffer directly, without a copy to staging memory.

        Raises Unsupported if a pair of devices lacks peer access. With `multicast` it raises, and makes nothing:
        Unsupported if a veto forbids multicast (the CUDA driver only), if a device has no multicast, or if the group
        has one rank; CaptureError while a rank's stream is being captured; MulticastError, the same on all ranks, if
        the set-up fails.
        """
        self.require_open()
        return self._memory.allocate(nbytes, multicast)

    def require_multicast(self) -> None:
        """Raise Unsupported if a veto forbids multicast, or if a device of the group lacks it. Makes nothing."""
        self.require_open()
        self._memory.require_multicast()

    def multicast_at(self, ptrs: Sequence[int], nbytes: int) -> int | None:
        """The multicast address of the `nbytes` bytes that lie at `ptrs[i]` on local rank i, or None.

        The bytes have a multicast address if they lie at the same offset of one open buffer that
        `symmetric(multicast=True)` of this group has made. Makes no driver call.
        """
        return self._memory.multicast_at(ptrs, nbytes)

    def multicast_staging(self, streams: Sequence[Stream] = ()) -> SymmetricBuffer:
        """Multicast memory for the group's ops, as large as the payload (`workspace_bytes`), freed with the group.

        The first call makes the buffer, and raises the errors of `symmetric(multicast=True)`, and CaptureError while
        one of `streams` is being captured. Later calls return the same buffer. Its contents are undefined at first.
        """
        self.require_open()
        return self._memory.staging(streams)

    def close(self) -> None:
        """Wait for the ranks' queued work and free the workspaces. Idempotent; arrays stay valid.

        Raises CaptureError while a rank's stream is being captured; the group stays open then. A group that is garbage
        collected without `close` is freed at a later allocation or synchronisation. An unread report of a
        kernel that gave up waiting is dropped. If waiting for the queued work fails, memory that running kernels may
        still use is not freed.
        """
        if not self.closed and not forked() and not self.driver.closed:
            for rank in self.ranks:
                rank.require_no_capture()
            self.state.forget_partial()
        super().close()
        self.transport.close()  # the transport is closed even if the driver is closed and nothing is left to free

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost_before = self.driver.lost
        try:
            self.close()
        except DrvfuseError as failure:
            if error is None and not (lost_before and isinstance(failure, DriverError)):
                raise
            _log.debug("closing a group after %r: %s", error, failure)  # not raised: `error` came first

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError("the group is closed")
        self.driver.require_open()
