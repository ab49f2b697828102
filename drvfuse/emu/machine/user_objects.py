# SPDX-License-Identifier: Apache-2.0
"""Objects of the program that live as long as something refers to them: graphs, or the program itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .objects import Object

if TYPE_CHECKING:
    from .process import Process


@dataclass(eq=False)
class UserObject(Object):
    """A program's object at `pointer`; the host function `destroy` is called with it when no reference is left."""

    pointer: int
    destroy: int
    references: int
    keep: Any = None

    def retain(self, count: int) -> None:
        self.references += count

    def release(self, process: Process, count: int) -> None:
        """Release that many references; there are at least as many. The destructor of the last one runs before this
        returns, as a host function, without the machine's lock.
        """
        self.references -= count
        if self.references == 0:
            process.remove(self)
            process.machine.progress.call_host(process, self.destroy, self.pointer)
