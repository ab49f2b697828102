# SPDX-License-Identifier: Apache-2.0
"""The multicast memory of a group: buffers of its users, and the staging of its ops."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CaptureError
from ..runtime.vmm import SymmetricBuffer

if TYPE_CHECKING:
    from ..runtime.stream import Stream
    from .rank import Rank
    from .transport import Transport


class MulticastMemory:
    """The open multicast buffers of one group. It allocates nothing before the first one is requested."""

    def __init__(self, transport: Transport, ranks: Sequence[Rank], staging_bytes: int) -> None:
        self._transport, self._ranks = transport, tuple(ranks)
        self._staging_bytes = staging_bytes
        self._staging: SymmetricBuffer | None = None
        self._buffers: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()  # which belong to their users

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A multicast buffer that belongs to the caller. Raises as `Group.symmetric` does."""
        with self._transport.step("make multicast memory, outside of captures"):
            for rank in self._ranks:
                rank.require_no_capture()
        buffer = self._transport.symmetric(nbytes, multicast=True)
        self._buffers.add(buffer)
        return buffer

    @property
    def staged(self) -> bool:
        """Whether the group's staging memory exists."""
        return self._staging is not None

    def at(self, ptrs: Sequence[int], nbytes: int) -> int | None:
        """See `Group.multicast_at`."""
        for buffer in self._buffers:
            if buffer.closed:
                continue
            starts = [buffer.ptrs[rank.index] for rank in self._ranks]
            offset = ptrs[0] - starts[0]
            if (
                0 <= offset <= buffer.nbytes - nbytes
                and buffer.multicast_ptr is not None
                and all(ptr - start == offset for ptr, start in zip(ptrs, starts, strict=True))
            ):
                return buffer.multicast_ptr + offset
        return None

    def staging(self, streams: Sequence[Stream]) -> SymmetricBuffer:
        """See `Group.multicast_staging`."""
        if self._staging is None:
            with self._transport.step("make the multicast staging"):
                for stream in streams:
                    if stream.capture_id() is not None:
                        raise CaptureError(
                            f"the group's multicast staging cannot be made while {stream!r} is being captured: make "
                            "one call with use_multimem=True before the capture"
                        )
            self._staging = self.allocate(self._staging_bytes)
        return self._staging

    def close(self) -> None:
        """Free the staging. No kernel of the group may be running in this process. Idempotent.

        Kernels of other ranks access this rank's memory through the object until it is unbound. So where the other
        ranks do not confirm within a moment that their kernels have ended, the memory is kept as long as the driver
        lives.
        """
        staging, self._staging = self._staging, None
        if staging is None:
            return
        if self._transport.all_ended():
            staging.close()
        else:
            staging.devices[0].driver.abandoned.append(staging)
