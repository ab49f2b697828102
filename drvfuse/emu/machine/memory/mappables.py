# SPDX-License-Identifier: Apache-2.0
"""The lifetimes of memory of cuMemCreate and of multicast objects, which all processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..objects import Bind, Mappable, Memory, Multicast
from .descriptors import Descriptors

if TYPE_CHECKING:
    from ..machine import Machine


class Mappables:
    """The memory of cuMemCreate and the multicast objects of a machine. Each of them lives as long as something holds
    it: a handle with references, a mapping, an open descriptor or, for memory, a bind to a multicast object. When a
    multicast object is destroyed, its binds end.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._live: dict[Mappable, None] = {}
        self.descriptors = Descriptors(self)

    def memories(self) -> list[Memory]:
        return [item for item in self._live if isinstance(item, Memory)]

    def multicasts(self) -> list[Multicast]:
        return [item for item in self._live if isinstance(item, Multicast)]

    def hold(self, item: Mappable) -> None:
        """Add a holder to an item, which may be new."""
        self._live[item] = None
        item.holders += 1

    def let_go(self, item: Mappable) -> None:
        """Remove a holder. An item without holders is destroyed."""
        item.holders -= 1
        if item.holders:
            return
        del self._live[item]
        if isinstance(item, Memory):
            item.device.used -= item.nbytes
            self._machine.window.mappings.physical.release(item.physical)
        elif isinstance(item, Multicast):
            for bind in list(item.binds):
                self.unbind(item, bind)

    def unbind(self, item: Multicast, bind: Bind) -> None:
        """Undo one bind."""
        item.binds.remove(bind)
        item.members.unbind(bind.device.index, bind.offset, bind.nbytes)
        if bind.memory is not None:
            self._machine.window.mappings.drop_alias(bind.address, bind.nbytes, bind.memory.physical)
            self.let_go(bind.memory)
