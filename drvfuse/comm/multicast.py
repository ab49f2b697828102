# SPDX-License-Identifier: Apache-2.0
"""Setting up multicast memory for the ranks of a group: afterwards it exists on all of them or on none.

    allocate      each rank allocates memory of the common size
    create        rank 0 creates the multicast object
    export        each process with peers in other processes exports its memory, and rank 0 the object, as descriptors
    vote          because a rank that has failed has no descriptors to send
    pass on       each process sends its descriptors to the processes of the other ranks
    import        each process maps the memory of each other rank, and imports the object
    add           each rank adds its device to the object
    vote          because a bind would wait for ever for the device of a rank that has failed
    bind          each rank binds its memory at offset 0 of the object
    map           each process maps the object once
    set access    each rank lets its device access the mapping
    vote          because a kernel may use the address only when the memory of every rank is bound and mapped
    publish       the buffer gets its multicast address

A rank that fails does nothing more before the next vote, but it votes. A vote gives all ranks one answer. If the answer
is a failure, each rank undoes its steps in reverse order and raises the same MulticastError. Error code 802 means that
the fabric manager was not ready: then all ranks undo their steps and start again together, up to ATTEMPTS times. (A
rank that started again alone would wait for the others in its bind.) If undoing fails, there is no further attempt.

A `Team` knows the ranks and how they vote. If all ranks are in this process, no descriptors are sent, and a vote sees
every outcome at once (`LocalTeam`). Between processes, outcomes and descriptors are sent over the group's board.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..bootstrap.descriptors import closing
from ..errors import DriverError, MulticastError
from ..runtime.lifetime import flush
from ..runtime.multicast import NOT_READY, Multicast, explained
from ..runtime.vmm import MappedMemory, PhysicalMemory, SymmetricBuffer, Undo, granularity, round_up

if TYPE_CHECKING:
    from ..runtime.device import Device
    from ..runtime.driver import Driver

ATTEMPTS = 10
PAUSE_SECONDS = 1.0

_log = logging.getLogger("drvfuse.comm")


class Team(Protocol):
    """The `size` ranks that set up a multicast object, each with a device. `places` has the devices of this process by
    rank."""

    size: int
    places: Mapping[int, Device]

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        """Exchange the outcomes of all processes since the last vote, and return them. An outcome is an error, or None
        after success; `own` is that of this process."""

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        """Exchange descriptors between the processes. Returns the descriptors of the memory of the ranks of other
        processes, by rank, and the descriptor of the object, which is None in the process of rank 0.

        All processes call it with the descriptors that they have exported. Each process closes the descriptors that it
        has exported, and those that it has received.
        """


class LocalTeam:
    """The team of a group whose ranks are all in this process, on `devices`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.size = len(devices)
        self.places: Mapping[int, Device] = dict(enumerate(devices))

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        return [own]

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        return {}, None


def set_up(team: Team, nbytes: int) -> SymmetricBuffer:
    """A symmetric buffer of `nbytes`, rounded up, on the ranks of `team`, with a multicast address over its parts.

    The caller must have called `require_multicast`, and owns the returned buffer. Blocks until the fabric has added all
    devices. Raises MulticastError for the driver call that failed first; no rank keeps anything then.
    """
    flush(_driver(team))
    attempt = 1
    while True:
        try:
            return _form(team, nbytes)
        except MulticastError as failure:
            leaks = hasattr(failure, "__notes__")  # undoing has failed too, so another attempt would leak more memory
            if failure.code != NOT_READY or leaks or attempt == ATTEMPTS:
                raise
            _log.info("multicast was not ready (attempt %d of %d): %s", attempt, ATTEMPTS, failure)
        attempt += 1
        time.sleep(PAUSE_SECONDS)


def _form(team: Team, nbytes: int) -> SymmetricBuffer:
    with Undo() as undo:
        with contextlib.ExitStack() as opened:
            with vote(team):
                parts = allocate(team, nbytes, undo)
                made = create(team, _size(parts), undo)
                exported = export(team, parts, made, opened)
            descriptors, of_object = team.pass_on(exported)
        with vote(team), closing([*descriptors.values(), *([] if of_object is None else [of_object])]):
            parts |= import_parts(team, descriptors, _size(parts), undo)
            multicast = made if made is not None else import_object(team, of_object, _size(parts), undo)
            add(team, multicast)
        with vote(team):
            bind(multicast, [(rank, parts[rank]) for rank in team.places])
            ptr = map_object(team, multicast)
            set_access(team, multicast, ptr)
        undo.commit()
    return SymmetricBuffer.of([parts[rank] for rank in range(team.size)], tuple(team.places), multicast, ptr)


@contextlib.contextmanager
def vote(team: Team) -> Iterator[None]:
    """A `with` block that ends in a vote on whether the steps inside have succeeded on all ranks.

    Raises the failure that the ranks agree on. Any error but MulticastError, such as KeyboardInterrupt, is raised at
    once, without a vote.
    """
    outcome = None
    try:
        yield
    except MulticastError as failure:
        outcome = failure
    verdict = agreed(team.outcomes(outcome))
    if verdict is not None:
        raise verdict


def agreed(outcomes: Sequence[MulticastError | None]) -> MulticastError | None:
    """The answer of a vote: None if no rank failed, else the failure that every rank raises.

    A permanent failure is chosen before a temporary one (code 802). Among failures of one kind, that of the lowest rank
    is chosen. So all ranks that see these outcomes do the same: go on, start again, or give up.
    """
    failures = [outcome for outcome in outcomes if outcome is not None]
    return min(failures, key=lambda failure: (failure.code == NOT_READY, failure.rank or 0), default=None)


@contextlib.contextmanager
def step_of(rank: int) -> Iterator[None]:
    """A `with` block in which the error of a driver call becomes a MulticastError of `rank`, which explains what the
    error code means for multicast.
    """
    try:
        yield
    except DriverError as error:
        raise explained(error, rank) from error


def _driver(team: Team) -> Driver:
    return next(iter(team.places.values())).driver


def _size(parts: Mapping[int, MappedMemory]) -> int:
    return next(iter(parts.values())).nbytes


def allocate(team: Team, nbytes: int, undo: Undo) -> dict[int, MappedMemory]:
    """Allocate memory for every rank of this process: `nbytes`, rounded up to what allocations and binds need."""
    devices = list(team.places.values())
    with step_of(min(team.places)):
        unit = Multicast.granularity(devices, count=team.size)
    for rank, device in team.places.items():
        with step_of(rank):
            unit = max(unit, granularity(device))
    parts = {}
    for rank, device in team.places.items():
        with step_of(rank):
            parts[rank] = MappedMemory(device, round_up(nbytes, unit), devices)
            undo.append(parts[rank].close)
    return parts


def create(team: Team, nbytes: int, undo: Undo) -> Multicast | None:
    """Create the object in rank 0's process, and return it; None in other processes."""
    if 0 not in team.places:
        return None
    with step_of(0):
        multicast = Multicast(list(team.places.values()), nbytes, count=team.size)
        undo.append(multicast.close)
    return multicast


def export(
    team: Team, parts: Mapping[int, MappedMemory], made: Multicast | None, opened: contextlib.ExitStack
) -> list[int]:
    """Export the memory of this process's rank and, if this process has made it, the multicast object, as descriptors.
    `opened` closes these.
    """
    exported: list[int] = []
    if len(team.places) < team.size:
        (rank,) = team.places
        with step_of(rank):
            for item in (parts[rank].memory, made):
                if isinstance(item, PhysicalMemory | Multicast):
                    exported.append(item.export())
                    opened.callback(os.close, exported[-1])
    return exported


def import_parts(team: Team, descriptors: Mapping[int, int], nbytes: int, undo: Undo) -> dict[int, MappedMemory]:
    """Map the memory of the ranks of other processes."""
    parts = {}
    for rank, descriptor in descriptors.items():
        with step_of(min(team.places)):
            parts[rank] = MappedMemory.imported(team.places[min(team.places)], descriptor, nbytes)
            undo.append(parts[rank].close)
    return parts


def import_object(team: Team, descriptor: int | None, nbytes: int, undo: Undo) -> Multicast:
    """Import the object that another process has made."""
    assert descriptor is not None
    with step_of(min(team.places)):
        devices = list(team.places.values())
        multicast = Multicast(devices, nbytes, count=team.size, descriptor=descriptor)
        undo.append(multicast.close)
    return multicast


def add(team: Team, multicast: Multicast) -> None:
    """Add the device of every rank of this process to the object."""
    for rank, device in team.places.items():
        with step_of(rank):
            multicast.add(device)


def bind(multicast: Multicast, parts: Sequence[tuple[int, MappedMemory]]) -> None:
    """Bind the memory of every rank of this process at offset 0 of the object."""
    for rank, part in parts:
        assert isinstance(part.memory, PhysicalMemory)
        with step_of(rank):
            multicast.bind_memory(part.device, part.memory)


def map_object(team: Team, multicast: Multicast) -> int:
    """Map the object, and return its address in this process."""
    with step_of(min(team.places)):
        return multicast.map()


def set_access(team: Team, multicast: Multicast, ptr: int) -> None:
    """Let the device of every rank of this process access the mapping."""
    for rank, device in team.places.items():
        with step_of(rank):
            multicast.set_access(ptr, device)
