# SPDX-License-Identifier: Apache-2.0
"""The symmetric memory of a group: buffers that its users allocate, and the multicast staging of its ops."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CaptureError, Unsupported, require_kind
from ..runtime.vmm import SymmetricBuffer
from . import arguments

if TYPE_CHECKING:
    from ..runtime.stream import Stream
    from .rank import Rank
    from .transport import Transport


class SymmetricMemory:
    """Allocates the symmetric memory of one group, and keeps its open multicast buffers.

    It allocates nothing before the first buffer is requested. `several` says whether the group spans several nodes, and
    `staging_bytes` is the size of the staging.
    """

    def __init__(self, transport: Transport, ranks: Sequence[Rank], several: bool, staging_bytes: int) -> None:
        self._transport, self._ranks, self._several = transport, tuple(ranks), several
        self._staging_bytes = staging_bytes
        self._staging: SymmetricBuffer | None = None
        self._buffers: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()  # the open buffers, which their users own

    def allocate(self, nbytes: int, multicast: bool) -> SymmetricBuffer:
        """Allocate the buffer that `Group.symmetric` returns, with its checks and errors."""
        with self._transport.step("allocate symmetric memory"):
            size = arguments.integer("nbytes", nbytes, 1)
            require_kind("multicast", multicast, bool, "True or False")
            if multicast:
                self.require_multicast()
            self._require_shared()
        return self._multicast(size) if multicast else self._transport.symmetric(size, multicast=False)

    def _multicast(self, nbytes: int) -> SymmetricBuffer:
        with self._transport.step("make multicast memory, outside of captures"):
            for rank in self._ranks:
                rank.require_no_capture()
        buffer = self._transport.symmetric(nbytes, multicast=True)
        self._buffers.add(buffer)
        return buffer

    def require_multicast(self) -> None:
        """Raise Unsupported if the group cannot have multicast memory, as `Group.require_multicast` describes."""
        if self._several:
            raise Unsupported("multicast memory exists inside one node only, and the group has several nodes")
        self._transport.require_multicast()
        self._require_shared()

    def _require_shared(self) -> None:
        if self._several:
            raise Unsupported("symmetric memory exists inside one node only, and the group has several nodes")
        if not self._transport.shared:
            raise Unsupported(
                f"symmetric memory needs peer access between all devices; missing (from, to): "
                f"{list(self._transport.missing)}"
            )

    @property
    def staged(self) -> bool:
        """Whether the group's staging memory exists."""
        return self._staging is not None

    def multicast_at(self, ptrs: Sequence[int], nbytes: int) -> int | None:
        """The multicast address of the memory at `ptrs`, or None, as `Group.multicast_at` describes."""
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
        """The multicast staging of the group, which the first call makes (`Group.multicast_staging`)."""
        if self._staging is None:
            self.require_multicast()
            with self._transport.step("make the multicast staging"):
                for stream in streams:
                    if stream.capture_id() is not None:
                        raise CaptureError(
                            f"the group's multicast staging cannot be made while {stream!r} is being captured: make "
                            "one call with use_multimem=True before the capture"
                        )
            self._staging = self._multicast(self._staging_bytes)
        return self._staging

    def close(self) -> None:
        """Free the staging. No kernel of the group may be running in this process. Idempotent.

        Kernels of other ranks access this rank's part of the staging through the multicast object until the part is
        unbound. So unless all ranks confirm within a second that their kernels have ended, the staging is kept as long
        as the driver lives.
        """
        staging, self._staging = self._staging, None
        if staging is None:
            return
        if self._transport.all_ended():
            staging.close()
        else:
            staging.devices[0].driver.abandoned.append(staging)
