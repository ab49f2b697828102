# SPDX-License-Identifier: Apache-2.0
"""The resources of a group: how all ranks acquire them together, and how they are freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import DrvfuseError
from ..nodes.exchange import Member
from ..nodes.joint import Joint
from ..nodes.link import NodeLink
from ..runtime.lifetime import flush
from ..runtime.vmm import Undo
from .alone import AloneLaunches
from .budget import BlockBudget
from .partial import PartialCalls
from .rank import Rank
from .symmetric_memory import SymmetricMemory
from .workspace import Workspace

if TYPE_CHECKING:
    from ..runtime.driver import Driver
    from .transport import Transport


class Resources:
    """The budget of multiprocessors, the workspaces and other memory of a group, and the connection between its nodes
    (`link`, None in a group of one node). `dispose` frees all of it, with the transport.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[Rank],
        workspace_bytes: int,
        max_blocks: int | None,
        joint: Joint,
    ) -> None:
        """All ranks of the group construct it together, step by step (`Transport.step`). If a step fails on any rank,
        nothing stays open on any rank, and `transport` is closed.
        """
        self.transport, self.ranks = transport, tuple(ranks)
        self.partial = PartialCalls(transport.indices)
        self.link: NodeLink | None = None
        driver = transport.devices[0].driver
        with Undo() as undo:
            undo.append(transport.close)
            with transport.step("reserve multiprocessors"):
                for rank in self.ranks:
                    rank.require_no_capture()
                flush(driver)
                self.budget = BlockBudget(transport.members, transport.devices, max_blocks)
                undo.append(self.budget.release)
                self.alone = AloneLaunches(self.ranks, self.partial, transport.identity)
                undo.append(self.alone.release)
                transport.open()
            self.workspace = Workspace(transport, workspace_bytes, joint.nodes)
            undo.append(self.workspace.close)
            several = joint.nodes.count > 1
            self.memory = SymmetricMemory(transport, self.ranks, several, self.workspace.payload_bytes)
            if several:
                self.link = self._join(joint, driver)
                undo.append(self.link.close)
            undo.commit()

    def _join(self, joint: Joint, driver: Driver) -> NodeLink:
        """Connect the nodes."""
        of, place, transport = joint.nodes.of, joint.nodes.place, self.transport
        members = [Member(rank.index, rank.device, of[rank.index], place(rank.index)) for rank in self.ranks]
        joined: list[NodeLink] = []
        with transport.step("find an engine between the nodes"):
            engine = joint.find_engine(len(members) == len(of), driver.name == "emu")
        try:
            with transport.step("connect the nodes", joint.timeout):
                joined.append(joint.join(engine, members))
        except BaseException:
            for link in joined:
                link.close()
            raise
        return joined[0]


def dispose(driver: Driver, owned: Resources) -> None:
    """Wait for the queued work of a group (waits of its kernels are bounded), and free everything that the group owns.

    Raises CaptureError, having freed nothing, while a rank's stream is being captured.
    """
    link, transport = owned.link, owned.transport
    for rank in owned.ranks:
        rank.require_no_capture()
    failure: DrvfuseError | None = None
    for rank in owned.ranks:
        try:
            rank.drain()
        except DrvfuseError as error:
            failure = failure or error
    if failure is not None:
        if link is not None:
            link.stop()
        driver.abandoned.append(owned)  # not freed, as kernels of the other ranks may still use the memory
        transport.close()
        raise failure
    owned.budget.release()
    owned.alone.release()
    with Undo() as undo:
        undo.append(transport.close)
        if link is not None:
            undo.append(link.close)
        undo.append(owned.workspace.close)
        undo.append(owned.memory.close)
