# SPDX-License-Identifier: Apache-2.0
"""Launches that rely on no other group being open on their devices, and the form that they take while there is one.

A launch of PDLLevel.OVERLAP_AT_BEGINNING lets the next kernel of its stream start while it waits for peers. That one
holds multiprocessors in its `griddepcontrol.wait`, and may let a further one start: a whole chain may be resident
behind a call that waits. No budget counts it, as the kernels may be anyone's. It cannot stop the call, all of whose
blocks were placed before. It can stop another group's: on one device A's chain may leave no room for B's call while on
another B's leaves none for A's, and each waits for the other. In the same way a push launch of a group without a
budget of its own fills all multiprocessors, where it has work for so many blocks.

So a launch does either only while its group is the only one open on its devices. While there are others it triggers at
its end, as those of the other levels, and fills the group's budget. Then only what ends by itself is beside a call that
waits, and the budgets hold. A group is opened after those launches of the others that counted on being alone are
complete, and not at all while a graph holds such a launch, which nobody can change, or while some ranks are still to be
launched with such a call, which would never be complete.

With ranks in other processes the two must be told apart. A chain of dependents keeps others out only where it is, so
each rank triggers early while its own device is the group's alone. But a push launch must have one grid on all ranks,
since progress goes by block index (cu/sync/push.cuh). So such a group fills its devices (`wide`) only if all of its
ranks had theirs alone when it was opened, until the next opening on any of them. That is a step of all of its ranks,
in which they stop together (`disturb`), or it is refused: a rank by itself could not tell the others. They do not
begin again, since groups are closed at different times.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet, ref

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.driver import Driver
    from ..runtime.graph import Graph
    from .partial import PartialCalls
    from .rank import Rank
    from .transport import Identity

_lock = threading.RLock()


class _Open:
    """The open groups of a driver on each device."""

    def __init__(self, driver: Driver) -> None:
        self.groups: defaultdict[Device, list[AloneLaunches]] = defaultdict(list)


class Adapting(Protocol):
    """A launch that has two forms: one for a group that is alone on its devices, and one beside other groups."""

    def adapt(self, alone: bool, wide: bool) -> None:
        """Take one of the two forms from the next launch on; `wide`: on all multiprocessors."""


class AloneLaunches:
    """The launches of a group that have two forms, from its opening until `release()`.

    `ranks` are the group's in this process, and `partial` its calls that some of them are not launched with yet.
    `identity` is that of a group with ranks in other processes.
    """

    def __init__(self, ranks: Sequence[Rank], partial: PartialCalls, identity: Identity | None = None) -> None:
        """Waits for the launches of other groups on these devices that counted on being alone.

        Raises ArgumentError where a graph holds such a launch, where some ranks are still to be launched with such a
        call, and for a group whose other ranks do not know; CaptureError where streams that have some are captured.
        """
        self._ranks, self._launches = tuple(ranks), WeakSet[Adapting]()
        self.identity = identity
        self._partial = ref(partial)  # no further rank of a dropped group is launched
        self._open = ranks[0].device.driver.part(_Open).groups
        self._graphs, self._foreign = WeakSet["Graph"](), False
        self._queued = False  # launches that count on being alone, since the last wait for all
        with _lock:
            others = self._others()
            for other in others:
                other._require_no_graph()
                other._require_all_ranks()
                other._require_disturbed()
            for other in others:
                other._set(False)
            self.alone = not others
            self.wide = self.alone if identity is None else identity.alone
            for rank in self._ranks:
                self._open[rank.device].append(self)
            try:
                for other in others:
                    other._settle()
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Called when the group is closed. Idempotent."""
        with _lock:
            others = self._others()
            for rank in self._ranks:
                self._open[rank.device] = [one for one in self._open[rank.device] if one is not self]
            for other in others:
                other._set(not other._others())

    def add(self, launch: Adapting) -> None:
        """Add a launch of the group, which adapts from now on."""
        with _lock:
            self._launches.add(launch)
            launch.adapt(self.alone, self.wide)

    def launched(self) -> None:
        """Note that launches which rely on being alone follow."""
        self._queued |= self.alone

    def captured(self, graph: Graph | None) -> None:
        """Note that a graph, another library's if None, holds a launch that relies on being alone."""
        if not self.alone:
            return
        if graph is None:
            self._foreign = True
        else:
            self._graphs.add(graph)

    def before_replay(self) -> None:
        """Called before a graph that holds calls of the group is launched."""
        self._queued |= bool(self._graphs)

    def _others(self) -> list[AloneLaunches]:
        found = {id(one): one for rank in self._ranks for one in self._open[rank.device]}
        return [one for one in found.values() if one is not self]

    def _require_no_graph(self) -> None:
        if self._foreign or any(graph.launchable for graph in self._graphs):
            devices = [rank.device.index for rank in self._ranks]
            what = "with a graph of another library" if self._foreign else "with a graph"
            raise ArgumentError(
                "devices",
                f"shared with the open group of devices {devices}, {what} of calls that count on having them alone, "
                "of PDLLevel.OVERLAP_AT_BEGINNING or on more than 64 multiprocessors",
                "other ones, as the groups could starve each other; close that graph or group, or give that group a "
                "max_blocks and capture with PDLLevel.ON",
            )

    def _require_all_ranks(self) -> None:
        partial = self._partial()
        call = partial.first if self._queued and partial is not None else None
        if call is not None:
            devices = [rank.device.index for rank in self._ranks]
            raise ArgumentError(
                "devices",
                f"shared with the open group of devices {devices}, some of whose ranks wait for others that are not "
                f"yet launched with {call}",
                "other ones until all ranks of that group are launched with that call, or until it is reset",
            )

    def _settle(self) -> None:
        if self._queued:
            for rank in self._ranks:
                rank.require_no_capture()
            for rank in self._ranks:
                rank.drain()
            self._queued = False

    def _require_disturbed(self) -> None:
        if self.wide and self.identity is not None:
            raise ArgumentError(
                "devices",
                f"shared with an open group of {self.identity.size} ranks in several processes, whose calls count on "
                "having all of their devices alone",
                "other ones: open the new group with split() of that one, or give that one a max_blocks",
            )

    def _set(self, alone: bool) -> None:
        self.alone = alone
        if self.identity is None:
            self.wide = alone
        for launch in list(self._launches):
            launch.adapt(alone, self.wide)


def counting(device: Device) -> list[tuple[int, int]]:
    """Numbers and sizes of the groups with ranks in other processes that fill this device and all their other
    devices.
    """
    with _lock:
        return [
            (one.identity.number, one.identity.size)
            for one in _open_on(device)
            if one.wide and one.identity is not None
        ]


def is_free(device: Device) -> bool:
    """Whether no group is open on the device."""
    return not _open_on(device)


def disturb(device: Device, numbers: Sequence[int]) -> None:
    """Make these groups stop filling their devices. All of their ranks do this between the same calls."""
    with _lock:
        for one in _open_on(device):
            if one.identity is not None and one.identity.number in numbers:
                one.wide = False
                one._set(one.alone)


def _open_on(device: Device) -> list[AloneLaunches]:
    return device.driver.part(_Open).groups[device]
