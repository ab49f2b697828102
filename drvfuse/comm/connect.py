# SPDX-License-Identifier: Apache-2.0
"""The steps from ranks that have found one another to the transport of their group.

    1. open      each rank checks its arguments and opens its device; a vote, as all that follows needs a device
    2. agree     all records on all ranks (`comm.agreement`), which must go together
    3. yield     groups that fill these devices no longer do, on all of their ranks (`comm.alone`)
    4. transport

Whatever fails is raised on all ranks, and their board is closed then. Memory is the group's next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import alone
from .agreement import Record, agree
from .node_transport import NodeTransport
from .process_transport import ProcessTransport, voted

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..nodes.joint import NodesWanted
    from ..nodes.layout import Nodes
    from ..runtime.device import Device


def connect(
    board: Board, opened: Callable[[], tuple[Device, int, int | None]], wanted: NodesWanted
) -> tuple[ProcessTransport | NodeTransport, Record, Nodes]:
    """The transport of this board's ranks, which owns `board`, what this rank has said of itself, and the nodes.

    `opened` gives the device, the workspace bytes and the budget of blocks of this rank. Raises what it raises, and as
    `agree`, GroupError where another rank has failed, GroupTimeout and RankEnded.
    """
    try:
        with voted(board, "open the device"):
            device, workspace_bytes, max_blocks = opened()
            wanted.check()
            record = Record.of(device, workspace_bytes, max_blocks, wanted)
        agreement = agree([Record.decode(data) for data in board.gather("agree on the group", record.encode())])
        alone.disturb(device, agreement.disturbed)
        kind = ProcessTransport if agreement.layout.count == 1 else NodeTransport
        return kind(board, device, agreement), record, agreement.layout
    except BaseException:
        board.close()
        raise
