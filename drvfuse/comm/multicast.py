# SPDX-License-Identifier: Apache-2.0
"""Setting up multicast memory for the ranks of a group, so that it stands on all of them or on none.

    allocate      each rank: memory of the common size, at an address of its own that all ranks can use
    create        one rank: the object
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

All ranks are in this process and driven by one thread, so that a vote sees every outcome at once. Ranks in other
processes get the object's handle between `create` and `add`, and their outcomes go into `agreed`; the rest is as it is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import DriverError, MulticastError
from ..runtime.lifetime import flush
from ..runtime.multicast import NOT_READY, Multicast, explained
from ..runtime.vmm import MappedMemory, PhysicalMemory, SymmetricBuffer, Undo, granularity, round_up

if TYPE_CHECKING:
    from ..runtime.device import Device

ATTEMPTS = 10
PAUSE_SECONDS = 1.0

_log = logging.getLogger("drvfuse.comm")


def set_up(devices: Sequence[Device], nbytes: int) -> SymmetricBuffer:
    """A symmetric buffer of `nbytes`, rounded up, on `devices`, rank by rank, with a multicast address over its parts.

    Blocks until the fabric has formed the team. The buffer is the caller's, who has called `require_multicast`.
    Raises MulticastError for the call that failed first; nothing is left then, on any rank.
    """
    flush(devices[0].driver)
    attempt = 1
    while True:
        try:
            return _form(devices, nbytes)
        except MulticastError as failure:
            left = hasattr(failure, "__notes__")  # taking back failed too: another attempt would leave even more
            if failure.code != NOT_READY or left or attempt == ATTEMPTS:
                raise
            _log.info("multicast was not ready (attempt %d of %d): %s", attempt, ATTEMPTS, failure)
        attempt += 1
        time.sleep(PAUSE_SECONDS)


def _form(devices: Sequence[Device], nbytes: int) -> SymmetricBuffer:
    with Undo() as undo:
        with vote():
            parts = allocate(devices, nbytes, undo)
            multicast = create(devices, parts[0].nbytes, undo)
            add(multicast, devices)
        with vote():
            bind(multicast, parts)
            ptr = map_object(multicast)
            set_access(multicast, devices, ptr)
        undo.commit()
    return SymmetricBuffer.of(parts, range(len(parts)), multicast, ptr)


@contextlib.contextmanager
def vote() -> Iterator[None]:
    """Ends in a vote: the steps inside, of all local ranks, have succeeded or one has failed.

    Raises what the ranks agree on. An error that is no MulticastError (of an interrupt, say) goes on at once.
    """
    outcome = None
    try:
        yield
    except MulticastError as failure:
        outcome = failure
    verdict = agreed([outcome])
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
    """A failure of a driver call inside is that of `rank`, with the meaning that its code has for multicast."""
    try:
        yield
    except DriverError as error:
        raise explained(error, rank) from error


def allocate(devices: Sequence[Device], nbytes: int, undo: Undo) -> list[MappedMemory]:
    """Memory of every rank, of a size that both allocations and binds may have."""
    with step_of(0):
        unit = Multicast.granularity(devices)
    for rank, device in enumerate(devices):
        with step_of(rank):
            unit = max(unit, granularity(device))
    parts = []
    for rank, device in enumerate(devices):
        with step_of(rank):
            parts.append(MappedMemory(device, round_up(nbytes, unit), devices))
            undo.append(parts[-1].close)
    return parts


def create(devices: Sequence[Device], nbytes: int, undo: Undo) -> Multicast:
    """The object, made by rank 0."""
    with step_of(0):
        multicast = Multicast(devices, nbytes)
        undo.append(multicast.close)
    return multicast


def add(multicast: Multicast, devices: Sequence[Device]) -> None:
    """Every rank's device joins the team."""
    for rank, device in enumerate(devices):
        with step_of(rank):
            multicast.add(device)


def bind(multicast: Multicast, parts: Sequence[MappedMemory]) -> None:
    """Every rank's memory, at the beginning of the object."""
    for rank, part in enumerate(parts):
        with step_of(rank):
            assert isinstance(part.memory, PhysicalMemory)
            multicast.bind_memory(part.device, part.memory)


def map_object(multicast: Multicast) -> int:
    """The object's address in this process."""
    with step_of(0):
        return multicast.map()


def set_access(multicast: Multicast, devices: Sequence[Device], ptr: int) -> None:
    """Every rank's device may use the mapping."""
    for rank, device in enumerate(devices):
        with step_of(rank):
            multicast.set_access(ptr, device)
