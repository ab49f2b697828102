# SPDX-License-Identifier: Apache-2.0
"""The steps in which ranks that have a common board make the transport of their group.

    1. open       each rank checks its arguments and opens its device; a vote, since all later steps need the device
    2. agree      each rank gets the records of all ranks and checks that they fit one another (`comm.agreement`)
    3. yield      open groups that fill these devices go back to their budgets, on all ranks (`comm.alone`)
    4. transport  each rank makes its transport; the group allocates memory later

A failure of one rank is raised on all ranks, and the board is closed then.
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
    """(the transport of the ranks of `board`, the record of this rank, the nodes). The transport owns `board`.

    `opened` returns the device, the workspace bytes and the budget of blocks of this rank. Raises what `opened` and
    `agree` raise, GroupError if another rank has failed, GroupTimeout and RankEnded.
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
