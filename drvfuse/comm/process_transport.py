# SPDX-License-Identifier: Apache-2.0
"""The transport of a group with one rank in this process and the others in other processes of the host.

Processes share memory by passing file descriptors. Their ownership is as follows:

    descriptors    the exporter owns an exported descriptor, the receiver a received one. Each closes its own as soon as
                   the exchange or the import is over, so no descriptor is open between the steps of a set-up.
    memory         each process owns the memory of its rank, a handle for the memory of every other rank, and its
                   mappings of all. The driver keeps memory until no process has a handle or mapping of it. So a process
                   may close the group, or die, while kernels of its peers still use its memory.
    report blocks  rank 0 makes one anonymous memory file; all processes map it and register it with the driver. It is
                   freed when no process maps it any more. Only kernels of rank i write block i.
    multicast      each process owns a handle of the object, its binding and its mapping. The memory of a rank must not
                   be unbound while kernels of another rank use the object; `SymmetricMemory.close` waits for them.

In a `step` each rank does its part, and then all ranks vote. If a rank has failed, all ranks raise, and each rank
undoes what it has made in this step and in earlier ones, in reverse order; a rank can undo its steps without the
others. If the process of a rank has ended, or does not vote before the time-out, the vote fails on all other ranks in
the same way.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bootstrap.descriptors import closing, share
from ..bootstrap.waits import MOST_SECONDS
from ..errors import DrvfuseError, MulticastError, Unsupported, ranks_text
from ..runtime import shared_host
from ..runtime.multicast_support import require_multicast
from ..runtime.shared_host import SharedHostMemory
from ..runtime.vmm import MappedMemory, PhysicalMemory, SymmetricBuffer, Undo, round_up
from .multicast import set_up
from .transport import HostMemory, Identity, Member, Memory

if TYPE_CHECKING:
    from ..bootstrap.board import Board
    from ..runtime.device import Device
    from .agreement import Agreement

_PAGE = 4096
_LONGEST = math.nextafter(MOST_SECONDS, 0)
_MOMENT = 1.0  # seconds for which `all_ended` waits for the other ranks


@contextlib.contextmanager
def voted(board: Board, what: str, timeout: float | None = None) -> Iterator[None]:
    """A `with` block for a step (`Transport.step`), at whose end the ranks of `board` vote on whether all succeeded."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # an interrupt is raised at once; the other ranks detect it by the time-out
        failure = error
    try:
        board.vote(what, None if failure is None else f"{type(failure).__name__}: {failure}", timeout)
    except DrvfuseError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


class OnBoard:
    """The common part of transports whose process has one rank, and whose ranks take their steps on `board`.

    It owns the board. `close` closes it, and so informs the other ranks that this rank has closed the group.
    """

    shared: bool = True
    missing: tuple[tuple[int, int], ...] = ()

    def __init__(self, board: Board, device: Device, agreement: Agreement) -> None:
        self.board = board
        self.members: tuple[Member, ...] = agreement.members
        self.indices: tuple[int, ...] = (board.rank,)
        self.devices: tuple[Device, ...] = (device,)
        self.identity: Identity | None = agreement.identity

    @property
    def ended(self) -> Mapping[int, str]:
        return self.board.ended

    def step(self, what: str, longer: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return voted(self.board, what, min(self.board.timeout + longer, _LONGEST))

    def close(self) -> None:
        self.board.close()


class ProcessTransport(OnBoard):
    """The transport of a group whose ranks are in processes of one host, one in each. It shares memory by passing file
    descriptors."""

    def __init__(self, board: Board, device: Device, agreement: Agreement) -> None:
        super().__init__(board, device, agreement)
        self._device, self._agreement = device, agreement

    def open(self) -> None:
        """Raise Unsupported if this process sees the device of another rank and this rank's device cannot access that
        device.

        For a device that this process does not see, only the mapping of its memory shows whether it is accessible.
        """
        driver = self._device.driver
        count = int(driver.cuDeviceGetCount())
        visible = {bytes(driver.cuDeviceGetUuid(driver.cuDeviceGet(i)).bytes).hex(): i for i in range(count)}
        for rank, gpu in enumerate(self._agreement.gpus):
            index = visible.get(gpu, self._device.index)  # an int, as a Device object would create a context
            other = index != self._device.index
            if other and not driver.cuDeviceCanAccessPeer(self._device.handle, driver.cuDeviceGet(index)):
                raise Unsupported(f"{self._device!r} cannot access the memory of rank {rank}, on device {index}")

    def require_multicast(self) -> None:
        require_multicast(self.devices, len(self.members))
        lacking = [rank for rank, member in enumerate(self.members) if not member.multicast]
        if lacking:
            raise Unsupported(f"the devices of {ranks_text(lacking)} have no multicast (attribute MULTICAST_SUPPORTED)")

    def allocate(self, nbytes: int) -> Memory:
        return self.symmetric(nbytes, multicast=False)

    def symmetric(self, nbytes: int, multicast: bool) -> SymmetricBuffer:
        if multicast:
            return set_up(ProcessTeam(self.board, self._device), nbytes)
        size = round_up(nbytes, self._agreement.unit)
        with Undo() as undo:
            with contextlib.ExitStack() as sent:
                with self.step(f"allocate {size} bytes"):
                    own = MappedMemory(self._device, size, self.devices)
                    undo.append(own.close)
                    assert isinstance(own.memory, PhysicalMemory)
                    descriptor = own.memory.export()
                    sent.callback(os.close, descriptor)
                received = share(self.board, [descriptor], "pass the memory on")
            parts = {self.board.rank: own}
            with self.step("map the memory of the other ranks"), closing(*received.values()):
                for rank, (descriptor,) in received.items():
                    parts[rank] = MappedMemory.imported(self._device, descriptor, size)
                    undo.append(parts[rank].close)
            undo.commit()
        return SymmetricBuffer.of([parts[rank] for rank in range(self.board.size)], self.indices)

    def host_memory(self, nbytes: int) -> HostMemory:
        size = round_up(nbytes, _PAGE)
        with contextlib.ExitStack() as opened, Undo() as undo:
            made: list[int] = []
            with self.step("make the report blocks"):
                if self.board.rank == 0:
                    made.append(shared_host.create(size))
                    opened.callback(os.close, made[0])
            received = share(self.board, made, "pass the report blocks on")
            with self.step("map the report blocks"), closing(*received.values()):
                memory = SharedHostMemory(self._device, (made or received[0])[0], size)
                undo.append(memory.close)
            undo.commit()
        return memory

    def all_ended(self) -> bool:
        try:
            self.board.gather("close the group, which has multicast memory", b"", _MOMENT)
        except DrvfuseError:
            return False
        return True


_FIELDS = ("call", "args_text", "code", "name", "explanation", "calls", "rank")


class ProcessTeam:
    """A `comm.multicast.Team` of the ranks of `board`. One of these ranks is in this process, on `device`."""

    def __init__(self, board: Board, device: Device) -> None:
        self._board = board
        self.size = board.size
        self.places: Mapping[int, Device] = {board.rank: device}

    def outcomes(self, own: MulticastError | None) -> Sequence[MulticastError | None]:
        """The outcomes of all processes, by rank. The outcome of this process is the object `own` itself, which keeps
        its notes and its cause."""
        outcome = json.dumps(None if own is None else [getattr(own, field) for field in _FIELDS]).encode()
        answers = self._board.gather("set up multicast memory", outcome)
        return [own if rank == self._board.rank else _read(answer) for rank, answer in enumerate(answers)]

    def pass_on(self, exported: Sequence[int]) -> tuple[Mapping[int, int], int | None]:
        received = share(self._board, exported, "pass multicast memory on")
        of_object = received[0].pop() if self._board.rank else None
        return {rank: descriptor for rank, (descriptor,) in received.items()}, of_object


def _read(answer: bytes) -> MulticastError | None:
    values: list[Any] | None = json.loads(answer)
    if values is None:
        return None
    return MulticastError(*values)
