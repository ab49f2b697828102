# SPDX-License-Identifier: Apache-2.0
"""The workspace of a rank: where its state, flags, payload and slots lie, and the report block in host memory.

This module alone defines the layout: the kernels receive it as preprocessor definitions (:func:`defines`).

    offset          what
    0               header: u64 epoch | u64 abort | u32 arrived | u32 reporter
    NUMBERS_OFFSET  u32 numbers[MAX_RANKS]: for each peer the number of the last call whose word was sent to it
    FLAGS_OFFSET    u64 flags[MAX_BLOCKS][MAX_RANKS]; flags[b][p] is written by peer p's block b
    CALLS_OFFSET    u64 calls[2][MAX_RANKS]; calls[g][p] is written by peer p: the word of a call (cu/sync/calls.cuh)
    NODES_OFFSET    u64 nodes[MAX_NODES]; nodes[n] is written by exchanges: the abort word of the peer on node n
    OWNER_OFFSET    u64 number of the group | u64 rank, written once if ranks are in several processes
    PAYLOAD_OFFSET  payload, `payload_bytes` long: the data that peers read by the pull algorithms
    slots_offset    slots, twice `half_bytes`: the data that peers store by the push algorithms

Every word before the payload starts at zero. The epoch counts barriers and push calls in units of EPOCH_UNIT: the low
bits hold what the warps of a running push call have added so far (cu/sync/push.cuh). The epoch has room for 2**46
units, enough for two years with a unit per microsecond, so it is never reset between calls. Between push calls every
word of the slots is 0xFFFFFFFF. Only the slots that calls need are filled with this value, since filling is slow on an
emulated device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import GroupMismatch
from ..nodes.layout import MAX_NODES, Nodes
from ..plans.limits import MAX_RANKS as MAX_RANKS
from ..plans.push import half_bytes
from ..runtime.array import view
from ..runtime.stream import Stream
from ..runtime.vmm import Undo
from ..structures import laid_out, record
from .calls import TABLE_BYTES, CallTable, ComparedCalls, number_in
from .transport import Identity, Transport

MAX_BLOCKS = 256

EPOCH_OFFSET = 0
ABORT_OFFSET = 8
ARRIVED_OFFSET = 16
REPORTER_OFFSET = 20
EPOCH_BITS = 18
EPOCH_UNIT = 1 << EPOCH_BITS
NUMBERS_OFFSET = 64
FLAGS_OFFSET = 128
CALLS_OFFSET = FLAGS_OFFSET + MAX_BLOCKS * MAX_RANKS * 8
NODES_OFFSET = CALLS_OFFSET + 2 * MAX_RANKS * 8
STATE_BYTES = NODES_OFFSET + MAX_NODES * 8
PAYLOAD_OFFSET = (STATE_BYTES + 16 + 4095) // 4096 * 4096
OWNER_OFFSET = PAYLOAD_OFFSET - 16


@laid_out("sync/workspace.cuh")
class Report(ctypes.Structure):
    """What the thread that gives up waiting writes to its rank's report block, the field `magic` last."""


REPORT_MAGIC = 0x44525646
REPORT_STRIDE = 64
CALL, EXCHANGE = 3, 4
WAIT_KINDS = ("barrier", "push", "gather", "call", "exchange")
"""The meanings of the field `kind` of a report: what the rank waited for. In push calls `word` is the index of the
16-byte word in the slots. For "call", whose number is CALL, `expected` and `seen` are words of calls
(cu/sync/calls.cuh). For "exchange", whose number is EXCHANGE, the rank did not wait: `peer` is the place of a node that
gave up, of `seen` places (cu/collectives/nodes/failure.cuh)."""
REPORT_DTYPE = record(Report, REPORT_STRIDE)
"""A rank's report block in pinned host memory."""

_FILL_BYTES = 64 << 10


def defines() -> dict[str, int]:
    """The layout as preprocessor definitions for the kernels."""
    return {
        "DRVFUSE_MAX_RANKS": MAX_RANKS,
        "DRVFUSE_MAX_BLOCKS": MAX_BLOCKS,
        "DRVFUSE_EPOCH_OFFSET": EPOCH_OFFSET,
        "DRVFUSE_EPOCH_BITS": EPOCH_BITS,
        "DRVFUSE_ARRIVED_OFFSET": ARRIVED_OFFSET,
        "DRVFUSE_ABORT_OFFSET": ABORT_OFFSET,
        "DRVFUSE_REPORTER_OFFSET": REPORTER_OFFSET,
        "DRVFUSE_NUMBERS_OFFSET": NUMBERS_OFFSET,
        "DRVFUSE_FLAGS_OFFSET": FLAGS_OFFSET,
        "DRVFUSE_CALLS_OFFSET": CALLS_OFFSET,
        "DRVFUSE_NODES_OFFSET": NODES_OFFSET,
        "DRVFUSE_PAYLOAD_OFFSET": PAYLOAD_OFFSET,
        "DRVFUSE_REPORT_MAGIC": REPORT_MAGIC,
    }


def differs(report: Any) -> bool:
    """Whether a report says that the rank's call differs from a peer's; otherwise the rank has given up waiting."""
    return bool(report["kind"] == CALL and number_in(int(report["expected"])) == number_in(int(report["seen"])))


class Workspace:
    """The workspaces of all ranks of a group, and their report blocks.

    All tables have an entry for each rank of the group. `pointers[i]` is rank i's workspace, valid on rank i's device
    and, if all ranks can access one another's memory, on every device. `report_pointers[i]` is rank i's report block as
    the devices of this process see it, and `reports[i]` is its contents. A process fills and clears only the workspaces
    of its own ranks. The group owns this object; `close()` frees the memory.
    """

    def __init__(self, transport: Transport, payload_bytes: int, nodes: Nodes) -> None:
        """Allocates the workspaces. Collective, as `Transport.allocate` is. Kernels report a peer by its number inside
        its node, and `nodes` converts this number to a rank.
        """
        self.nodes = nodes
        self.payload_bytes = payload_bytes
        self.slots_offset = (PAYLOAD_OFFSET + payload_bytes + 127) // 128 * 128
        self.half_bytes = half_bytes(payload_bytes)
        self._own, self._devices = transport.indices, transport.devices
        size = len(transport.members)
        # How many bytes of each half of the slots have been filled with 0xFF. A rank of another process may store into
        # slots before this process knows of the call, so `clear` fills all slots if there are such ranks.
        self._filled = 0 if len(self._own) == size else self.half_bytes
        with Undo() as undo:
            self._memory = transport.allocate(self.slots_offset + 2 * self.half_bytes)
            undo.append(self._memory.close)
            self.pointers: tuple[int, ...] = self._memory.ptrs
            if transport.identity is not None:
                self._compare_owners(transport, transport.identity)
            tables = 0 if transport.identity is None else TABLE_BYTES * size
            self._host = transport.host_memory(REPORT_STRIDE * size + tables)
            undo.commit()
        self.reports = self._host.view(REPORT_DTYPE)[:size]
        self._tables = self._host.view("uint8")[REPORT_STRIDE * size :] if tables else None
        self._magic = self.reports["magic"]
        self.reported = partial(any, self._magic.data)
        """Whether any rank has given up waiting. Reads host memory only; every call asks it, so it is no Python
        function, and reads the elements one by one, which is faster than with numpy."""
        self.report_pointers = tuple(self._host.ptr + REPORT_STRIDE * i for i in range(size))

    def compared_calls(self, first: bool) -> ComparedCalls | None:
        """The data for the comparison of the ranks' calls; None for a group that does not compare them.

        Ranks in several processes always compare their calls; ranks of one process compare theirs only with `first`.
        With `first` calls are compared before any data moves.
        """
        if self._tables is None:
            return ComparedCalls.of_one_process(first=True) if first else None
        (own,) = self._own
        tables = [CallTable(self._tables[TABLE_BYTES * rank :]) for rank in range(len(self.pointers))]
        return ComparedCalls(tables[own], [table for rank, table in enumerate(tables) if rank != own], first=first)

    def _compare_owners(self, transport: Transport, identity: Identity) -> None:
        """Raise GroupMismatch if the memory mapped as a rank's workspace belongs to another rank or another group."""
        (own,), (device,) = self._own, self._devices
        with transport.step("sign the workspaces"):
            mine = view(self.pointers[own] + OWNER_OFFSET, 2, "uint64", device)
            mine.copy_from(np.array([identity.number, own], np.uint64))
            device.stream.synchronize()
        with transport.step("compare the owners of the workspaces"):
            for rank, pointer in enumerate(self.pointers):
                if not pointer:  # the rank is on another node
                    continue
                number, of = view(pointer + OWNER_OFFSET, 2, "uint64", device).numpy().tolist()
                if (number, of) != (identity.number, rank):
                    values = {own: f"group {identity.number:x}, rank {rank}", rank: f"group {number:x}, rank {of}"}
                    raise GroupMismatch("the owner of a workspace", values)

    def first_report(self) -> dict[str, int]:
        """The report that explains a failure best, by field name.

        A report of a call that differs from a peer's comes first. Next comes a report about a peer that has made no
        report itself, since a peer with a report was only waiting for a further rank. A report that another node gave
        up comes last. Among equal reports, that of the lowest rank is returned.
        """
        ranks = np.flatnonzero(self._magic)
        of_exchange = self.reports[ranks]["kind"] == EXCHANGE
        if of_exchange.all():
            return self._fields(self.reports[ranks[0]]) | {"rank": int(ranks[0])}
        ranks = ranks[~of_exchange]
        found = self.reports[ranks]
        pairs = zip(ranks.tolist(), found["peer"].tolist(), strict=True)
        found["rank"], found["peer"] = ranks, [self.nodes.peer(rank, place) for rank, place in pairs]
        differing = found[[differs(report) for report in found]]
        blamed = found[~np.isin(found["peer"], found["rank"])]
        report = (differing if differing.size else blamed if blamed.size else found)[0]
        return self._fields(report)

    @staticmethod
    def _fields(report: Any) -> dict[str, int]:
        return {name: int(report[name]) for name in REPORT_DTYPE.names or ()}

    def require_slots(self, nbytes: int) -> None:
        """Fill the first `nbytes` of both halves of the slots of this process's ranks, so that calls may use them.

        Blocks if the slots are not filled yet. They are filled on separate streams, so this is legal during a capture,
        and while calls that use fewer slots run.
        """
        if nbytes <= self._filled:
            return
        wanted = min(max(nbytes, 2 * self._filled, _FILL_BYTES), self.half_bytes)
        streams = [Stream(device) for device in self._devices]
        self._fill_slots(streams, self._filled, wanted)
        for stream in streams:
            stream.synchronize()
            stream.close()
        self._filled = wanted

    def _fill_slots(self, streams: Sequence[Stream], begin: int, end: int) -> None:
        for rank, stream in zip(self._own, streams, strict=True):
            for half in range(2):
                stream.fill(self.pointers[rank] + self.slots_offset + half * self.half_bytes + begin, 0xFF, end - begin)

    def clear(self, streams: Sequence[Stream]) -> None:
        """Zero state, flags and reports of this process's ranks, and fill their slots with 0xFF bytes, all on
        `streams`. Wait until this is done.

        No kernel of the group may be running on any rank, nor start on one before all ranks have returned.
        """
        for rank, stream in zip(self._own, streams, strict=True):
            self._magic[rank] = 0
            stream.fill(self.pointers[rank], 0, STATE_BYTES)
        self._fill_slots(streams, 0, self._filled)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """Free everything. Idempotent; no kernel of the group may be running."""
        self._memory.close()
        self._host.close()
