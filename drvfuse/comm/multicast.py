# SPDX-License-Identifier: Apache-2.0
"""Setting up multicast memory for the ranks of a group: afterwards it exists on all of them or on none.

    allocate      each rank: memory of the common size, at an address of its own
    create        one rank: the object
    export        each process whose memory others must map: descriptors of it and of the object
    vote          who has failed has nothing to pass on
    pass on       the descriptors, to the processes of the other ranks
    import        each process: what it has got, the memory of each rank at an address
    add           each rank: its device
    vote          a bind would wait for ever for the device of a rank that has failed
    bind          each rank: its memory, at offset 0
    map           each process: the object, once
    set access    each rank: its device may use the mapping
    vote          a kernel may use the address only once the memory of every rank is bound and mapped
    publish       the buffer has its multicast address

A rank that fails does nothing more before the next vote, but it votes. A vote gives all ranks one answer. Where that is
a failure, each rank takes back what it has made, in reverse, and raises the same MulticastError. The code 802 says that
the fabric manager was late: then every rank takes everything back and all begin anew together, up to ATTEMPTS times.
A rank that tried again alone would wait for the others in its bind. An attempt that cannot be taken back is the last.

A `Team` knows the ranks and how they vote. Where all are in this process, nothing is passed on, and a vote sees every
outcome at once (`LocalTeam`). Between processes outcomes and descriptors go over the group's board.
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
    """The ranks of a set-up, each with one of `size` devices. `places` are those of this process, by rank."""

    size: int
    places: Mapping[int, Device]

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        """The outcomes of the steps since the last vote in all processes; `own` are those of this process."""

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        """Descriptors of the memory of ranks of other processes and, where rank 0 is in another one, of the object.

        They are this process's. All processes call it with what they have exported, which stays theirs.
        """


class LocalTeam:
    """All ranks are in this process, on `devices`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.size = len(devices)
        self.places: Mapping[int, Device] = dict(enumerate(devices))

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        return [own]

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        return {}, None


def set_up(team: Team, nbytes: int) -> SymmetricBuffer:
    """A symmetric buffer of `nbytes`, rounded up, on the ranks of `team`, with a multicast address over its parts.

    Blocks until the fabric has formed the team. The buffer is the caller's, who has called `require_multicast`.
    Raises MulticastError for the call that failed first; nothing is left then, on any rank.
    """
    flush(_driver(team))
    attempt = 1
    while True:
        try:
            return _form(team, nbytes)
        except MulticastError as failure:
            left = hasattr(failure, "__notes__")  # the clean-up failed too: another attempt would leak more
            if failure.code != NOT_READY or left or attempt == ATTEMPTS:
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
    """A block that ends in a vote on whether the steps inside have succeeded on all ranks.

    Raises what the ranks agree on. An error that is no MulticastError (of an interrupt, say) goes on at once.
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
    """The verdict of a vote: None where nobody failed, else the failure that every rank raises.

    A failure that stays comes before one that may pass (802), and then that of the lowest rank, so that all who see
    these outcomes do the same: go on, begin anew, or give up.
    """
    failures = [outcome for outcome in outcomes if outcome is not None]
    return min(failures, key=lambda failure: (failure.code == NOT_READY, failure.rank or 0), default=None)


@contextlib.contextmanager
def step_of(rank: int) -> Iterator[None]:
    """A block in which the failure of a driver call becomes that of `rank`, with the meaning that its code has for
    multicast.
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
    """Memory of every rank of this process, of a size that both allocations and binds may have."""
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
    """The object, made by rank 0; None in the processes of other ranks."""
    if 0 not in team.places:
        return None
    with step_of(0):
        multicast = Multicast(list(team.places.values()), nbytes, count=team.size)
        undo.append(multicast.close)
    return multicast


def export(
    team: Team, parts: Mapping[int, MappedMemory], made: Multicast | None, opened: contextlib.ExitStack
) -> list[int]:
    """Descriptors of the memory of the rank of this process, and of the object that it has made, closed by `opened`."""
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
    """The memory of the ranks of other processes."""
    parts = {}
    for rank, descriptor in descriptors.items():
        with step_of(min(team.places)):
            parts[rank] = MappedMemory.imported(team.places[min(team.places)], descriptor, nbytes)
            undo.append(parts[rank].close)
    return parts


def import_object(team: Team, descriptor: int | None, nbytes: int, undo: Undo) -> Multicast:
    """The object that another process has made."""
    assert descriptor is not None
    with step_of(min(team.places)):
        devices = list(team.places.values())
        multicast = Multicast(devices, nbytes, count=team.size, descriptor=descriptor)
        undo.append(multicast.close)
    return multicast


def add(team: Team, multicast: Multicast) -> None:
    """Every rank's device joins the team."""
    for rank, device in team.places.items():
        with step_of(rank):
            multicast.add(device)


def bind(multicast: Multicast, parts: Sequence[tuple[int, MappedMemory]]) -> None:
    """The memory of every rank of this process, at the beginning of the object."""
    for rank, part in parts:
        assert isinstance(part.memory, PhysicalMemory)
        with step_of(rank):
            multicast.bind_memory(part.device, part.memory)


def map_object(team: Team, multicast: Multicast) -> int:
    """The object's address in this process."""
    with step_of(min(team.places)):
        return multicast.map()


def set_access(team: Team, multicast: Multicast, ptr: int) -> None:
    """Every rank's device may use the mapping."""
    for rank, device in team.places.items():
        with step_of(rank):
            multicast.set_access(ptr, device)
