# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group reach each other's memory.

One transport exists: all ranks in this process, memory mapped by the driver's virtual memory calls. Kernels see a
table of addresses only, so another transport (processes) replaces this module and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from ..runtime.memory import SymmetricBuffer

if TYPE_CHECKING:
    from ..runtime.device import Device


class LocalTransport:
    """Peers of one process. `shared` says whether every rank can read and write every other rank's memory.

    Enables peer access of contexts and memory pools between all pairs that allow it, and never disables it again:
    another library may rely on it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        pairs = list(permutations(self.devices, 2))
        self.missing = tuple((a.index, b.index) for a, b in pairs if not a.can_access_peer(b))
        self.shared = not self.missing
        for device, peer in pairs:
            if (device.index, peer.index) not in self.missing:
                device.enable_peer(peer)
        for device in self.devices:
            readers = [p for p in self.devices if p is not device and (p.index, device.index) not in self.missing]
            device.allow_peers(readers)

    def allocate(self, nbytes: int) -> Memory:
        """`nbytes` per rank: one symmetric buffer where memory is shared, else a buffer of its own for each."""
        if self.shared:
            return Memory([SymmetricBuffer(self.devices, nbytes)])
        buffers: list[SymmetricBuffer] = []
        try:
            for device in self.devices:
                buffers.append(SymmetricBuffer([device], nbytes))
        except BaseException:
            Memory(buffers).close()
            raise
        return Memory(buffers)


class Memory:
    """Memory of every rank: `ptrs[i]` is rank i's. Owns its buffers."""

    def __init__(self, buffers: Sequence[SymmetricBuffer]) -> None:
        self._buffers = tuple(buffers)
        self.ptrs: tuple[int, ...] = tuple(pointer for buffer in buffers for pointer in buffer.ptrs)

    def close(self) -> None:
        """Unmap and free. Idempotent."""
        for buffer in self._buffers:
            buffer.close()
