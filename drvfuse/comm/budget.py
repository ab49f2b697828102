# SPDX-License-Identifier: Apache-2.0
"""Block budgets: how many blocks the open groups may have resident on a device at once.

Blocks that wait for a peer must be able to run together with those of every other open group on the device, or two
groups could starve each other. So a budget counts multiprocessors, and the budgets of all open groups on a device sum
to at most the number of its multiprocessors. A pull launch has at most one block for each multiprocessor of its budget,
and every block of drvfuse fits on one multiprocessor. A push launch may have several blocks for each multiprocessor of
its budget: as many blocks of its kernel as fit on one. The device may spread these blocks over more multiprocessors, so
another group whose blocks need most of a multiprocessor may find none with enough room. Two groups still cannot starve
each other: the group with the smaller blocks finds room on all its devices, whichever group was launched first, so its
call ends, and then the call of the other group is placed. This argument does not cover three or more groups: their
calls may starve each other, until one of them times out.

Kernels that are launched with PDL after a call are not counted. If a call triggers at its end, no such kernel is
resident while the call waits for a peer. Calls trigger earlier only while their group is alone on its devices
(`alone.py`). Then push launches of a group that was opened without a budget may fill all multiprocessors.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..errors import ArgumentError
from .workspace import MAX_BLOCKS

if TYPE_CHECKING:
    from ..runtime.device import Device
    from .transport import Member

DEFAULT_BLOCKS = 64

_lock = threading.Lock()
_reserved: WeakKeyDictionary[Device, int] = WeakKeyDictionary()


class BlockBudget:
    """A budget of `blocks` multiprocessors on each of `devices`, held until `release()`. While no other group has a
    budget on these devices, launches may fill `alone` multiprocessors.

    `members` are all ranks of the group, whose launches have grids of the same size; `devices` are the devices of this
    process.
    """

    def __init__(self, members: Sequence[Member], devices: Sequence[Device], max_blocks: int | None) -> None:
        """Raises ArgumentError if a device has fewer than `max_blocks` multiprocessors left."""
        self.devices = tuple(devices)
        if max_blocks is None:
            self.alone = min(member.sm_count for member in members)
            self.blocks = min(DEFAULT_BLOCKS, self.alone)
        else:
            self.alone = self.blocks = max_blocks
        with _lock:
            for device in self.devices:
                used = _reserved.get(device, 0)
                free = device.sm_count - used
                if self.blocks > min(free, MAX_BLOCKS):
                    raise ArgumentError(
                        "max_blocks",
                        self.blocks if max_blocks is not None else f"{self.blocks} (the default)",
                        f"at most {min(free, MAX_BLOCKS)} on device {device.index}: it has {device.sm_count} "
                        f"multiprocessors and open groups hold {used} of them; close a group or pass smaller budgets",
                    )
            for device in self.devices:
                _reserved[device] = _reserved.get(device, 0) + self.blocks
        self._held = True

    def release(self) -> None:
        """Give the blocks back. Idempotent."""
        with _lock:
            if self._held:
                self._held = False
                for device in self.devices:
                    _reserved[device] -= self.blocks
