# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group reach each other's memory, and how they take steps together.

A `Transport` knows all ranks of the group and which of them this process drives. Kernels get tables of addresses, by
rank, so only the transport knows how the memory was mapped. `LocalTransport` is that of a group whose ranks are all in
this process: memory is mapped by the driver's virtual memory calls, and no other process takes part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import permutations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..runtime.multicast_support import require_multicast
from ..runtime.pinned import PinnedBuffer
from ..runtime.vmm import SymmetricBuffer
from .multicast import LocalTeam, set_up

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..runtime.device import Device

_NOBODY: Mapping[int, str] = MappingProxyType({})


class Member(NamedTuple):
    """What plans need to know about the device of a rank. The rank may be in another process."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    multicast: bool

    @classmethod
    def of(cls, device: Device) -> Member:
        multicast = bool(device.attribute("MULTICAST_SUPPORTED"))
        return cls(device.name, device.capability, device.sm_count, multicast)


class Identity(NamedTuple):
    """The identity of a group with ranks in several processes: its number, which no other group has, how many ranks it
    has, and whether it was opened without a budget (`max_blocks`) while no other group was open on any of its devices
    (`alone`).
    """

    number: int
    size: int
    alone: bool


class Memory(Protocol):
    """Memory of every rank: `ptrs[i]` is the address of rank i's memory for the devices of this process."""

    @property
    def ptrs(self) -> tuple[int, ...]: ...

    def close(self) -> None:
        """Unmap and free this process's part of the memory. Idempotent."""


class HostMemory(Protocol):
    """Host memory that the devices of all ranks write; `ptr` is its address for the devices of this process."""

    @property
    def ptr(self) -> int: ...

    def view(self, dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
        """All of the memory as an array."""

    def close(self) -> None:
        """Release this process's use of the memory. Idempotent."""


class Transport(Protocol):
    """How the ranks of a group reach each other's memory, and how they take steps together. `members[i]` is rank i;
    `indices` are the ranks of this process, and `devices` their devices.

    `shared` says whether every rank can read and write every other rank's memory; `missing` are the pairs of devices
    (from, to) without access. `ended` are the ranks whose processes are known to have ended, and how they ended; it is
    read before every call, so reading it must be cheap.
    """

    members: tuple[Member, ...]
    indices: tuple[int, ...]
    devices: tuple[Device, ...]
    shared: bool
    missing: tuple[tuple[int, int], ...]
    identity: Identity | None
    """None if all ranks are in this process."""

    @property
    def ended(self) -> Mapping[int, str]: ...

    def open(self) -> None:
        """Let the devices of this process access the memory of the other ranks' devices, where the hardware allows
        it."""

    def step(self, what: str, longer: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which every rank does its part of a step. At its end all ranks have succeeded, or all
        raise.

        Collective. A rank that fails raises its own error, and the others raise one that names the rank. `what` names
        the step in messages. The time-out of the step is that of the group plus `longer` seconds.
        """

    def allocate(self, nbytes: int) -> Memory:
        """Allocate `nbytes` for every rank. Collective: every rank gets its memory, or all raise and keep nothing."""

    def host_memory(self, nbytes: int) -> HostMemory:
        """Allocate `nbytes` of zeroed host memory that all ranks share. Collective, as `allocate` is."""

    def require_multicast(self) -> None:
        """Raise Unsupported if a veto forbids multicast, which is checked first, or if a device lacks it."""

    def symmetric(self, nbytes: int, multicast: bool) -> SymmetricBuffer:
        """Allocate the buffer that `Group.symmetric` returns; the caller has checked the arguments. Collective, as
        `allocate` is."""

    def all_ended(self) -> bool:
        """Whether all ranks call this within a second. A rank calls it when its kernels of the group have ended."""

    def close(self) -> None:
        """Release the resources of the transport itself. Not collective. Idempotent."""


class LocalTransport:
    """The transport of a group whose ranks are all in this process.

    `open` enables peer access of contexts and memory pools between all pairs of devices that can have it. The access is
    never disabled again, since another library may rely on it.
    """

    ended = _NOBODY
    identity: Identity | None = None

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.indices = tuple(range(len(self.devices)))
        self.members = tuple(map(Member.of, self.devices))
        pairs = permutations(self.devices, 2)
        self.missing = tuple((a.index, b.index) for a, b in pairs if not a.can_access_peer(b))
        self.shared = not self.missing

    def open(self) -> None:
        for device, peer in permutations(self.devices, 2):
            if (device.index, peer.index) not in self.missing:
                device.enable_peer(peer)
        for device in self.devices:
            readers = [p for p in self.devices if p is not device and (p.index, device.index) not in self.missing]
            device.allow_peers(readers)

    def step(self, what: str, longer: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate(self, nbytes: int) -> Memory:
        """One symmetric buffer if all ranks can access one another's memory, else a separate buffer for each rank."""
        if self.shared:
            return SymmetricBuffer(self.devices, nbytes)
        buffers: list[SymmetricBuffer] = []
        try:
            for device in self.devices:
                buffers.append(SymmetricBuffer([device], nbytes))
        except BaseException:
            _Separate(buffers).close()
            raise
        return _Separate(buffers)

    def host_memory(self, nbytes: int) -> HostMemory:
        return PinnedBuffer(self.devices[0].driver, nbytes)

    def require_multicast(self) -> None:
        require_multicast(self.devices)

    def symmetric(self, nbytes: int, multicast: bool) -> SymmetricBuffer:
        return set_up(LocalTeam(self.devices), nbytes) if multicast else SymmetricBuffer(self.devices, nbytes)

    def all_ended(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Separate:
    """Memory of ranks that cannot access one another's memory: a separate buffer for each rank."""

    def __init__(self, buffers: Sequence[SymmetricBuffer]) -> None:
        self._buffers = tuple(buffers)
        self.ptrs: tuple[int, ...] = tuple(pointer for buffer in buffers for pointer in buffer.ptrs)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
