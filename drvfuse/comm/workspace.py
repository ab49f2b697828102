# SPDX-License-Identifier: Apache-2.0
"""The workspace of a rank: where its barrier state, flags and payload lie, and the report block in host memory.

The numbers here are the only copy: the kernels receive them as preprocessor definitions (:func:`defines`).

    offset          what
    0               header: u64 epoch | u32 arrived | u32 abort | u32 reporter
    FLAGS_OFFSET    u64 flags[MAX_BLOCKS][MAX_RANKS]; flags[b][p] is written by peer p's block b
    PAYLOAD_OFFSET  payload, `payload_bytes` long

Every word starts at zero. Epochs are 64 bits wide, so they never wrap and need no reset between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..runtime.pinned import PinnedBuffer
from .transport import LocalTransport

if TYPE_CHECKING:
    from ..runtime.stream import Stream

MAX_RANKS = 8
MAX_BLOCKS = 256

EPOCH_OFFSET = 0
ARRIVED_OFFSET = 8
ABORT_OFFSET = 12
REPORTER_OFFSET = 16
FLAGS_OFFSET = 128
STATE_BYTES = FLAGS_OFFSET + MAX_BLOCKS * MAX_RANKS * 8
PAYLOAD_OFFSET = (STATE_BYTES + 4095) // 4096 * 4096

REPORT_MAGIC = 0x44525646
REPORT_STRIDE = 64
REPORT_DTYPE = np.dtype(
    {
        "names": ["rank", "peer", "block", "phase", "expected", "seen", "magic"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 8, 12, 16, 24, 32],
        "itemsize": REPORT_STRIDE,
    }
)
"""A rank's report block in pinned host memory: the thread that gives up writes it, `magic` last."""


def defines() -> dict[str, int]:
    """The layout as preprocessor definitions for the kernels."""
    return {
        "DRVFUSE_MAX_RANKS": MAX_RANKS,
        "DRVFUSE_MAX_BLOCKS": MAX_BLOCKS,
        "DRVFUSE_EPOCH_OFFSET": EPOCH_OFFSET,
        "DRVFUSE_ARRIVED_OFFSET": ARRIVED_OFFSET,
        "DRVFUSE_ABORT_OFFSET": ABORT_OFFSET,
        "DRVFUSE_REPORTER_OFFSET": REPORTER_OFFSET,
        "DRVFUSE_FLAGS_OFFSET": FLAGS_OFFSET,
        "DRVFUSE_PAYLOAD_OFFSET": PAYLOAD_OFFSET,
        "DRVFUSE_REPORT_MAGIC": REPORT_MAGIC,
    }


class Workspace:
    """The workspaces of all ranks of a group, and their report blocks.

    `pointers[i]` is rank i's workspace, valid on rank i's device and, where the transport is shared, on every other.
    `report_pointers[i]` is rank i's report block as its device sees it. Owned by the group; `close()` frees it.
    """

    def __init__(self, transport: LocalTransport, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        devices = transport.devices
        self._memory = transport.allocate(PAYLOAD_OFFSET + payload_bytes)
        self.pointers: tuple[int, ...] = self._memory.ptrs
        try:
            driver = devices[0].driver
            self._pinned = PinnedBuffer(driver, REPORT_STRIDE * len(devices))
        except BaseException:
            self._memory.close()
            raise
        self.reports = self._pinned.view(REPORT_DTYPE)
        self._magic = self.reports["magic"]
        self._magic[:] = 0
        self._magics = self._magic.data  # quicker to read one by one than by numpy
        self.report_pointers = tuple(self._pinned.ptr + REPORT_STRIDE * i for i in range(len(devices)))

    def reported(self) -> bool:
        """Whether any rank has given up waiting. Reads host memory only."""
        return any(self._magics)

    def first_report(self) -> dict[str, int]:
        """The report of the lowest rank that has one, by field name."""
        report = self.reports[int(np.flatnonzero(self._magic)[0])]
        return {name: int(report[name]) for name in REPORT_DTYPE.names or ()}

    def clear(self, streams: Sequence[Stream]) -> None:
        """Zero state, flags and reports of every rank, each on its stream; returns when that is done.

        No kernel of the group may be running.
        """
        self.reports["magic"] = 0
        for pointer, stream in zip(self.pointers, streams, strict=True):
            stream.fill(pointer, 0, STATE_BYTES)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """Free everything. Idempotent; no kernel of the group may be running."""
        self._memory.close()
        self._pinned.close()
