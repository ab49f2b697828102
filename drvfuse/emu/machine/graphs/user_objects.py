# SPDX-License-Identifier: Apache-2.0
"""User objects: objects of the program that live as long as a graph, or the program, has references to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..objects import Object

if TYPE_CHECKING:
    from ..process.process import Process


@dataclass(eq=False)
class UserObject(Object):
    """An object of the program. When no reference is left, the host function `destroy` is called with `pointer`."""

    pointer: int
    destroy: int
    references: int
    keep: Any = None

    def retain(self, count: int) -> None:
        self.references += count

    def release(self, process: Process, count: int) -> None:
        """Release `count` references; the caller has checked that the program or graph has them. When the last one is
        released, the destructor runs before this returns, as a host function, without the machine's lock.
        """
        self.references -= count
        if self.references == 0:
            process.remove(self)
            process.machine.progress.call_host(process, self.destroy, self.pointer)
