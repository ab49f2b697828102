# SPDX-License-Identifier: Apache-2.0
"""Splits the ranks of a group into new groups, for `Group.split`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..nodes.layout import find_nodes
from ..runtime.vmm import Undo
from . import arguments
from .alone import disturb
from .node_transport import NodeTransport
from .process_transport import ProcessTransport

if TYPE_CHECKING:
    from .group import Group

Sizes = tuple[int, int | None]
"""The arguments `workspace_bytes` and `max_blocks` of a group."""


def split(
    group: Group,
    color: int | None | Sequence[int | None],
    key: int | Sequence[int],
    workspace_bytes: int | None,
    max_blocks: int | None,
) -> Group | None | list[Group | None]:
    """The result of `Group.split` for these arguments."""
    with group.transport.step("check the arguments of split"):
        colors, keys = arguments.colors(len(group), color, key)
        usual = group.sizes
        sizes = arguments.sizes(
            usual[0] if workspace_bytes is None else workspace_bytes, usual[1] if max_blocks is None else max_blocks
        )
    transport = group.transport
    if isinstance(transport, (ProcessTransport, NodeTransport)):
        found = [_on_board(group, transport, colors[0], keys[0], sizes)]
    else:
        found = _of_devices(group, colors, keys, sizes)
    return found if isinstance(color, (list, tuple)) else found[0]


def _of_devices(group: Group, colors: Sequence[int | None], keys: Sequence[int], sizes: Sizes) -> list[Group | None]:
    """The split of a group whose ranks are all in this process: each rank's new group, None for a rank without one."""
    groups: dict[int | None, Group | None] = {None: None}
    with Undo() as undo:
        for color in dict.fromkeys(one for one in colors if one is not None):
            members = [i for _, i in sorted((keys[i], i) for i in range(len(group)) if colors[i] == color)]
            layout = find_nodes([group.layout.of[i] for i in members])
            devices = [group.ranks[i].device for i in members]
            made = group.of_devices(devices, *sizes, layout, group.wanted.of_part(""))
            groups[color] = made
            undo.append(made.close)
        undo.commit()
    return [groups[color] for color in colors]


def _on_board(
    group: Group, transport: ProcessTransport | NodeTransport, color: int | None, key: int, sizes: Sizes
) -> Group | None:
    """The new group of this process's only rank; None if the rank's colour is None."""
    device = group.ranks[0].device
    board = transport.board.split(color, key)
    if transport.identity is not None:
        # Called by all ranks of the old group, as `disturb` requires, also by those that join no new group.
        disturb(device, [transport.identity.number])
    if board is None:
        return None
    return group.of_board(board, lambda: (device, *sizes), group.wanted.of_part(f" node {group.node}"))
