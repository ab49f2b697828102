# SPDX-License-Identifier: Apache-2.0
"""Launches that rely on being alone: on no other group being open on their devices. While another group is open, they
take another form.

Two kinds of launches may fill a device. A launch of PDLLevel.OVERLAP_AT_BEGINNING lets the next kernel of its stream
start while it waits for peers. That kernel occupies multiprocessors in its `griddepcontrol.wait`, and may in turn let a
further kernel start, so a whole chain of kernels may be resident after a call that waits. No budget counts the chain,
since the kernels may belong to any library. The chain cannot stop the call that it follows, whose blocks are all
resident already, but it can stop a call of another group: on one device the chain of group A may leave no room for a
call of group B, while on another device the chain of B leaves no room for a call of A. Then neither call can complete.
Likewise a push launch of a group that was opened without a budget fills all multiprocessors, if it has work for enough
blocks.

So a launch triggers early or fills its device only while its group is the only one open on its devices. While other
groups are open, it triggers at its end, like launches of the other PDL levels, and fills only the group's budget. Then
no kernel that follows a waiting call is resident, all blocks of calls fit into the budgets, and all other kernels on
the device end by themselves. Opening a group waits until the launches of other groups that rely on being alone are
complete. Opening a group fails while a graph holds such a launch, because the form of a launch in a graph cannot
change. It also fails while a call with such launches is not yet launched on all ranks of the call's group, since
waiting for that call would not end.

For a group with ranks in other processes the two kinds follow different rules. A chain of dependent kernels keeps
others out only on its own device, so each rank triggers early while no other group is open on its own device. But a
push launch must have one grid on all ranks, since blocks of equal index meet (cu/sync/push.cuh). So the group fills its
devices (`wide`) only if no other group was open on any of them when it was opened, and only until another group is
opened on one of them. If all ranks of the wide group take part in that opening, all of them go back to the budget at
the same time (`disturb`). Otherwise the opening fails, since the ranks that take part could not inform the others. The
group does not become wide again, since groups are closed at different times on different ranks.
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
    """A launch that has two forms: one for a group that is alone on its devices, and one for a group that shares them
    with others."""

    def adapt(self, alone: bool, wide: bool) -> None:
        """Choose the form of later launches. If `alone` is true, they may let dependent kernels start early; if `wide`
        is true, they may fill all multiprocessors.
        """


class AloneLaunches:
    """Chooses the form of a group's launches (`Adapting`), from the opening of the group until `release()`.

    `ranks` are the group's ranks in this process, and `partial` has the calls that are launched on some of these ranks
    only. `identity` is given for a group with ranks in other processes.
    """

    def __init__(self, ranks: Sequence[Rank], partial: PartialCalls, identity: Identity | None = None) -> None:
        """Counts the group as open on its devices. The other groups that are open on one of these devices are not alone
        any more, so this waits for their launches that rely on being alone.

        Raises ArgumentError if a graph holds such a launch, if a call with such launches is not yet launched on all of
        its ranks, or if only some ranks of a group that fills its devices (`wide`) take part in the opening;
        CaptureError if a stream with such launches is being captured.
        """
        self._ranks, self._launches = tuple(ranks), WeakSet[Adapting]()
        self.identity = identity
        # a weak reference, so that partial calls of a dropped group, which nobody can complete, block no other group
        self._partial = ref(partial)
        self._open = ranks[0].device.driver.part(_Open).groups
        self._graphs, self._foreign = WeakSet["Graph"](), False
        # whether launches were queued while this group was alone, since `_settle` has last waited for all launches
        self._queued = False
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
        """Count the group as closed, so that other groups on its devices may be alone again. Idempotent."""
        with _lock:
            others = self._others()
            for rank in self._ranks:
                self._open[rank.device] = [one for one in self._open[rank.device] if one is not self]
            for other in others:
                other._set(not other._others())

    def add(self, launch: Adapting) -> None:
        """Add a launch of the group. Its form is chosen now, and again when another group opens or closes."""
        with _lock:
            self._launches.add(launch)
            launch.adapt(self.alone, self.wide)

    def launched(self) -> None:
        """Record that launches with two forms (`Adapting`) are queued next. If the group is alone, they rely on being
        alone."""
        self._queued |= self.alone

    def captured(self, graph: Graph | None) -> None:
        """Record that `graph` holds a launch with two forms (`Adapting`). If the group is alone, the launch relies on
        being alone. If `graph` is None, a graph of another library holds the launch.
        """
        if not self.alone:
            return
        if graph is None:
            self._foreign = True
        else:
            self._graphs.add(graph)

    def before_replay(self) -> None:
        """Record that a graph is launched next. Its launches may rely on the group being alone."""
        self._queued |= bool(self._graphs)

    def _others(self) -> list[AloneLaunches]:
        found = {id(one): one for rank in self._ranks for one in self._open[rank.device]}
        return [one for one in found.values() if one is not self]

    def _require_no_graph(self) -> None:
        if self._foreign or any(graph.launchable for graph in self._graphs):
            devices = [rank.device.index for rank in self._ranks]
            graph = "a graph of another library" if self._foreign else "a graph"
            raise ArgumentError(
                "devices",
                f"shared with the open group of devices {devices}, and {graph} holds calls of that group that rely on "
                "being alone on the devices: calls with PDLLevel.OVERLAP_AT_BEGINNING, or on more than 64 "
                "multiprocessors",
                "other devices, as the groups could starve each other; close that graph or group, or give that group a "
                "max_blocks and capture with PDLLevel.ON",
            )

    def _require_all_ranks(self) -> None:
        partial = self._partial()
        call = partial.first if self._queued and partial is not None else None
        if call is not None:
            devices = [rank.device.index for rank in self._ranks]
            raise ArgumentError(
                "devices",
                f"shared with the open group of devices {devices}, and {call} was launched on some ranks of that group "
                "only",
                "other devices until that call is launched on all ranks of that group, or until the group is reset",
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
                f"shared with an open group of {self.identity.size} ranks in several processes, whose calls rely on "
                "being alone on all of its devices",
                "other devices: open the new group by split() of the open group, or give the open group a max_blocks",
            )

    def _set(self, alone: bool) -> None:
        self.alone = alone
        if self.identity is None:
            self.wide = alone
        for launch in list(self._launches):
            launch.adapt(alone, self.wide)


def counting(device: Device) -> list[tuple[int, int]]:
    """(number, size) of each open group that has ranks in other processes and may fill all multiprocessors of the
    device with push launches (`wide`)."""
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
    """Let the push launches of the groups numbered `numbers` fill only their budget from now on. All ranks of such a
    group must call this function at the same place in the sequence of the group's calls.
    """
    with _lock:
        for one in _open_on(device):
            if one.identity is not None and one.identity.number in numbers:
                one.wide = False
                one._set(one.alone)


def _open_on(device: Device) -> list[AloneLaunches]:
    return device.driver.part(_Open).groups[device]
