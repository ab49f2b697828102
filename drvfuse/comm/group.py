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
from ..errors import (
    CaptureError,
    ClosedError,
    DriverError,
    DrvfuseError,
    LaunchError,
    RankEnded,
    Unsupported,
    require_kind,
)
from ..nodes.exchange import Exchange, Member
from ..nodes.joint import Joint, NodesWanted
from ..nodes.layout import Nodes, find_nodes, find_order
from ..nodes.link import NodeLink
from ..runtime.device import Device
from ..runtime.driver import Owner, forked
from ..runtime.lifetime import Owned, flush, hold, release
from ..runtime.vmm import SymmetricBuffer, Undo
from . import arguments
from .alone import AloneLaunches
from .budget import BlockBudget
from .connect import connect
from .history import History, Noted
from .multicast_memory import MulticastMemory
from .partial import PartialCalls
from .rank import Rank
from .rank_graphs import RankGraphs
from .reports import error_of
from .split import split
from .transport import LocalTransport
from .workspace import Workspace

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..runtime.driver import Driver, DriverLike
    from ..runtime.graph import Graph
    from ..runtime.stream import Stream, StreamLike
    from .transport import Transport

_LOCAL_SECONDS = 60.0  # seconds that an engine may take to connect the ranks of one process

_log = logging.getLogger("drvfuse.comm")


class Group(Owned, Owner):
    """Ranks 0 .. size-1 and what they share: workspaces with the barrier state, and the hang report.

    Made by :meth:`local`, with all ranks in this process, or by :meth:`connect`, with one of them. `ranks`, iteration
    and `len` are those of this process. A group serves one call at a time and is driven by one thread; calls on
    different streams are ordered by events. `peers_readable` says whether every rank can access every other rank's
    memory: without it the only algorithm is "naive".
    """

    def __init__(
        self,
        transport: Transport,
        workspace_bytes: int,
        max_blocks: int | None,
        joint: Joint,
    ) -> None:
        """A collective step, as every step of `transport` is."""
        Owner.__init__(self)
        self.transport, devices = transport, transport.devices
        self.driver: Driver = devices[0].driver
        self.size = len(transport.members)
        self.layout, self.wanted = joint.nodes, joint.wanted
        self.link: NodeLink | None = None
        self.sizes = workspace_bytes, max_blocks
        self._broken: Callable[[], DrvfuseError] | None = None
        self._stale = self._held = False
        self._partial = PartialCalls(transport.indices)
        self._history = History(transport.indices)
        self.ranks = tuple(Rank(i, device, self) for i, device in zip(transport.indices, devices, strict=True))
        with Undo() as undo:
            undo.append(transport.close)
            with transport.step("reserve multiprocessors"):
                for rank in self.ranks:
                    rank.require_no_capture()
                flush(self.driver)
                self._budget = BlockBudget(transport.members, devices, max_blocks)
                undo.append(self._budget.release)
                self.alone = AloneLaunches(self.ranks, self._partial, transport.identity)
                undo.append(self.alone.release)
                transport.open()
            self.workspace = Workspace(transport, workspace_bytes, self.layout)
            undo.append(self.workspace.close)
            self.calls = self.workspace.compared_calls(first=config.get("check_calls"))
            self._multicast = MulticastMemory(transport, self.ranks, self.workspace.payload_bytes)
            if self.nodes > 1:
                self.link = self._join(joint)
                undo.append(self.link.close)
            owned = self.ranks, self.workspace, self._multicast, self._budget, self.alone, transport, self.link
            self._owns(self.driver, _dispose, *owned)
            undo.commit()
        try:
            with transport.step("clear the workspaces"):
                self.workspace.clear([rank.stream for rank in self.ranks])
        except BaseException:
            if not self.together:
                super().close()
            raise

    def _join(self, joint: Joint) -> NodeLink:
        of, place = self.layout.of, self.layout.place
        members = [Member(rank.index, rank.device, of[rank.index], place(rank.index)) for rank in self.ranks]
        joined: list[NodeLink] = []
        with self.transport.step("find an engine between the nodes"):
            engine = joint.find_engine(self.together, self.driver.name == "emu")
        try:
            with self.transport.step("connect the nodes", joint.timeout):
                joined.append(joint.join(engine, members))
        except BaseException:
            for link in joined:
                link.close()
            raise
        return joined[0]

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
        `driver` is as for `drvfuse.device`, by default that of the objects. `workspace_bytes` is the payload of a
        rank's workspace, and also the size of its slots for push algorithms, so a rank takes twice as much: inputs
        larger than it are processed in chunks. `max_blocks` bounds the multiprocessors that a launch may fill on each
        device; the budgets of all open groups on a device sum to at most what it has. By default it is 64, and push
        launches may fill all multiprocessors while no other group is open on the devices.

        `nodes` splits the ranks into so many nodes of consecutive ranks, as if they were on different hosts, to try or
        test that (docs/nodes.md). `node_order` is "fixed" or "engine", by default "fixed" for up to four nodes;
        `exchange` is the engine between the nodes: "in_process" (the default), "nccl", or an object of one's own.

        Blocks until the workspaces are ready, and calls of other groups complete that count on having their devices
        alone: of PDLLevel.OVERLAP_AT_BEGINNING, or on more multiprocessors than others leave. Raises ArgumentError for
        a wrong size, id or budget, and where a graph holds such a call or some ranks are still to be launched with one,
        DriverUnavailable if the driver cannot be used, CaptureError while the own stream of a device, or one with such
        calls, is captured.
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
        """A group of `size` ranks, of which this process drives one, `rank`, and other processes the others.

        Every rank calls this. `rank` and `size` are by default what the launcher of the processes has set (torchrun,
        mpirun, srun, `drvfuse run`), and `device` the one of the process's number on its host, or the only visible one.
        `store` lets the processes find one another: an mpi4py communicator, a store or process group of
        torch.distributed, or any object with `set` and `get` as `drvfuse.bootstrap` says; None needs none on one host.
        The other arguments are those of `local`, and equal on all ranks. `timeout` bounds, in seconds, this and each
        later step of all ranks.

        Ranks of one host form a node, of up to eight ranks; a number `nodes` makes so many of consecutive ranks, also
        on one host. All nodes have equally many ranks. For several, docs/nodes.md says what calls then do. `node_order`
        is "fixed" or "engine", by default "fixed" for up to four nodes. `exchange` is the engine between them: "nccl",
        "mpi", or an object of one's own with the methods of `drvfuse.nodes.exchange.Exchange`; by default the first of
        both that is installed.

        Blocks until all ranks have come and the workspaces are ready. It raises the same on all ranks, or, on the rank
        that failed, its own error and on the others a GroupError that names that rank: GroupTimeout and RankEnded,
        which name the ranks that are missing, GroupMismatch where they differ in what must be equal, ArgumentError,
        Unsupported, DriverUnavailable, CaptureError and DriverError. Nothing is left then.

        Between calls the ranks take these steps together, and each raises as this does: `reset`, `split`, `symmetric`,
        and the first call with `use_multimem=True` that makes staging memory. `close` is each rank's own.
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
        """The group of the ranks of a board; see `comm.connect.connect`."""
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
        """A new group of the ranks that give the same `color`, in the order of `key` and then of their ranks here.

        `color` is an integer of at least 0, or None for a rank that is to be in no new group, which gets None. With
        several local ranks both are lists, with an entry for each (a single `key` counts for all), and a list comes
        back: with one local rank bare values are accepted in place of lists, and a bare group comes back. The other
        arguments are by default those of this group.

        All ranks of this group call it; see `connect` for what it raises then. Both groups work from then on, and
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
        """The ranks of that node, in their order."""
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
        return self.ranks[index]

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"devices={[rank.device.index for rank in self.ranks]}"
        return f"Group(size={self.size}, driver={self.driver.name!r}, {state})"

    def synchronize(self) -> None:
        """Wait for every local rank's stream and last call, then :meth:`check`."""
        self.require_open()
        for rank in self.ranks:
            rank.drain()
        self._forget_partial()
        self.check()
        self._history.settle()

    def check(self) -> None:
        """Raise BarrierTimeout if a rank has given up waiting since the last reset, CallMismatch if it has found that
        the call of a peer differs from its own. Reads host memory only.

        Never synchronises and is legal anywhere, also during capture. The error is raised again until the group is
        reset: by :meth:`reset`, or by the next collective after it has been raised once.
        """
        self.require_open()
        if self._broken is None and self.workspace.reported():
            found = self.workspace.first_report()
            self._broken = error_of(found, self._history, self.calls, self.transport.ended)
        if self._broken is not None:
            raise self._broken()
        if self.link is not None and self.link.failure is not None:
            self._stale = True
            raise self.link.failure

    def reset(self) -> None:
        """Make the group usable after a BarrierTimeout or a failed launch.

        Waits for everything queued on the local ranks' streams (waits of kernels are bounded), then clears barrier
        state and reports of every rank, whether or not it launched. Harmless at any other time. Raises CaptureError
        while a rank's stream is being captured.

        With ranks in other processes all of them call this, also those that have seen no error: a step as those of
        `connect`, which waits for ranks that are still in a call as long as that may take.
        """
        self.require_open()
        with self.transport.step("reset the group: wait for what is queued", config.get("spin_timeout")):
            for rank in self.ranks:
                rank.require_no_capture()
            for rank in self.ranks:
                rank.drain()
        self._forget_partial()
        with self.transport.step("reset the group: clear the workspaces"):
            self.workspace.clear([rank.stream for rank in self.ranks])
        if self.link is not None:
            with self.transport.step("reset the group: connect the nodes", self.link.timeout):
                self.link.reset()
        self._history.clear()
        self._broken = None
        self._stale = False

    def admit(self, streams: Sequence[Stream]) -> None:
        """Called first by every collective: raises a pending BarrierTimeout, or resets after one.

        Raises CaptureError where a reset is due and one of `streams` is being captured. With ranks in other processes
        nothing is reset here: the error is raised again, LaunchError after `abandon`, and RankEnded where a rank has
        ended, which would never come to the call.
        """
        self.require_open()
        if self._broken is not None or self._stale:
            if not self.together:
                self._refuse()
            if any(stream.capture_id() is not None for stream in streams):
                raise CaptureError("the group must be reset first, and that is impossible during a capture")
            self.reset()
        elif self.workspace.reported() or (self.link is not None and self.link.failure is not None):
            self.check()
        elif self.transport.ended:
            rank, how = next(iter(self.transport.ended.items()))  # the first one
            raise RankEnded("a call of the group", rank, how)

    def _refuse(self) -> None:
        self.check()
        raise LaunchError(
            "an earlier call of the group could not be launched on this rank, and the others wait for it or have given "
            "up: call group.reset() on all ranks"
        )

    @contextlib.contextmanager
    def capture(self, streams: Sequence[StreamLike] | None = None) -> Iterator[RankGraphs]:
        """Record what the block queues on `streams`, by default each rank's own, as one CUDA graph per local rank.

        `with group.capture() as graphs: ...`, then `graphs.launch()`. Nothing runs inside the block. Chains of
        collectives are faster than in one graph over all streams (`Graph.capture(streams)`), which starts and ends on
        one stream. The algorithm "naive" needs one graph and raises Unsupported here. For what else is raised see
        `Graph.capture`; `streams` has one stream of each local rank's device.
        """
        self.require_open()
        with RankGraphs.capture(self, streams) as graphs:
            yield graphs

    def captured(self, position: int, graph: Graph | None, call: Noted) -> None:
        """Called after the part of a local rank in `call` was captured, into `graph` or by another library (None)."""
        self._history.captured(position, graph, call.note)
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
        self._forget_partial()  # from here on the program must keep the order of the ranks' calls

    def begin(self, positions: Sequence[int], call: Noted) -> None:
        """Called right before `call` is launched on local ranks, outside a capture.

        Raises LaunchError if another rank was launched alone with another call, which these would meet on the device.
        While a call has been launched on some ranks only, nothing that was dropped is freed.
        """
        if self._partial.begin(positions, call):
            self._held = True
            hold(self)
        elif self._held:
            self._held = False
            release(self)
        if call.note.adapts:
            self.alone.launched()
        self._history.launched(positions, call.note)

    def _forget_partial(self) -> None:
        self._partial.clear()
        self._held = False
        release(self)

    def abandon(self) -> None:
        """Called by a collective that launched only some ranks: the group must be reset before the next call."""
        self._stale = True

    def symmetric(self, nbytes: int, multicast: bool = False) -> SymmetricBuffer:
        """Memory of one address per rank that every rank can read and write; the caller closes it.

        With `multicast` it also has `multicast_ptr`, the address that stands for byte 0 of all ranks' parts at once,
        for `multimem` instructions. Between accesses to a part by its own address and by that one stands a
        `fence.proxy.alias`, or the end of a kernel. This makes a multicast object, and blocks until the fabric is
        ready. Collectives with `use_multimem=True` take inputs in such memory from where they lie.

        Raises Unsupported where a pair of devices lacks peer access. With `multicast` it raises, with nothing made:
        Unsupported where the site forbids multicast (the CUDA driver only), where a device has none and for a group of
        one rank; CaptureError while a rank's stream is being captured; MulticastError, the same for all ranks, where
        the set-up fails.
        """
        self.require_open()
        with self.transport.step("allocate symmetric memory"):
            size = arguments.integer("nbytes", nbytes, 1)
            require_kind("multicast", multicast, bool, "True or False")
            if multicast:
                self.require_multicast()
            self._require_shared()
        return self._multicast.allocate(size) if multicast else self.transport.symmetric(size, multicast=False)

    def require_multicast(self) -> None:
        """Raise Unsupported unless the group may and can use multicast, the vetoes of the site first; makes nothing."""
        self.require_open()
        if self.nodes > 1:
            raise Unsupported("multicast memory is that of one node, and the group has several")
        self.transport.require_multicast()
        self._require_shared()

    def multicast_at(self, ptrs: Sequence[int], nbytes: int) -> int | None:
        """The multicast address of the `nbytes` that lie at `ptrs[i]` on local rank i, or None.

        There is one where all of them lie at the same offset of one open buffer of `symmetric(multicast=True)` of this
        group; memory of another group has none. Makes no driver call.
        """
        return self._multicast.at(ptrs, nbytes)

    def multicast_staging(self, streams: Sequence[Stream] = ()) -> SymmetricBuffer:
        """Multicast memory for the group's ops, as large as the payload (`workspace_bytes`), freed with the group.

        Made by the first call, which raises as `symmetric(multicast=True)` does, and CaptureError while one of
        `streams` is being captured too; later calls return the same buffer. Contents are undefined at first.
        """
        self.require_open()
        if not self._multicast.staged:
            self.require_multicast()
        return self._multicast.staging(streams)

    def _require_shared(self) -> None:
        if self.nodes > 1:
            raise Unsupported("symmetric memory is that of one node, and the group has several")
        if not self.peers_readable:
            raise Unsupported(
                f"symmetric memory needs peer access between all devices; missing (from, to): "
                f"{list(self.transport.missing)}"
            )

    def close(self) -> None:
        """Wait for the ranks' queued work and free the workspaces. Idempotent; arrays stay valid.

        Raises CaptureError while a rank's stream is being captured; the group stays open then. A group that is
        collected without it is freed later, by an allocation or synchronisation. A hang report that nobody has read is
        dropped. Memory that running kernels may still use, because waiting for them failed, is not freed.
        """
        if not self.closed and not forked() and not self.driver.closed:
            for rank in self.ranks:
                rank.require_no_capture()
            self._forget_partial()
        super().close()
        self.transport.close()  # also where the driver is gone, and nothing is left to free

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost_before = self.driver.lost
        try:
            self.close()
        except DrvfuseError as failure:
            if error is None and not (lost_before and isinstance(failure, DriverError)):
                raise
            _log.debug("closing a group after %r: %s", error, failure)  # the first error is the one to raise

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError("the group is closed")
        self.driver.require_open()


def _dispose(
    driver: Driver,
    ranks: Sequence[Rank],
    workspace: Workspace,
    multicast: MulticastMemory,
    budget: BlockBudget,
    alone: AloneLaunches,
    transport: Transport,
    link: NodeLink | None,
) -> None:
    """Free what a group holds once its queued work, whose waits are bounded, is done.

    Raises CaptureError, having freed nothing, while a rank's stream is being captured.
    """
    for rank in ranks:
        rank.require_no_capture()
    failure: DrvfuseError | None = None
    for rank in ranks:
        try:
            rank.drain()
        except DrvfuseError as error:
            failure = failure or error
    if failure is not None:
        if link is not None:
            link.stop()
        driver.abandoned.append((workspace, multicast, budget, link))  # kernels of the other ranks may still use it
        transport.close()
        raise failure
    budget.release()
    alone.release()
    with Undo() as undo:
        undo.append(transport.close)
        if link is not None:
            undo.append(link.close)
        undo.append(workspace.close)
        undo.append(multicast.close)
