# SPDX-License-Identifier: Apache-2.0
"""`Trace`: the memory in which traced kernels record the phases of their blocks, and the records read from it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..comm.group import Group
from ..errors import ArgumentError, CaptureError, counted, kind_of, require_integer
from ..runtime.device import Device
from . import clocks, decode, layout
from .clocks import Clock

if TYPE_CHECKING:
    from ..runtime.array import Array

DEFAULT_BYTES = 4 << 20


@dataclass(eq=False)
class Section:
    """The part of a device's buffer that one prepared launch writes. It must be kept as long as the launch may run.

    `launch` is the number of the launch in its trace; the launches of one call on all ranks have the same number.
    """

    rank: int
    launch: int
    kernel: str
    blocks: int
    phases: int  # the maximum number of phases of a block
    rounds: int  # how many times a block waits for peers
    peers: int  # the number of peers for which a block waits each time
    offset: int  # offset of the section in the buffer, in bytes
    array: Array = field(repr=False)  # the whole buffer

    @property
    def words(self) -> int:
        """How many words of the section each block has."""
        return layout.block_words(self.phases, self.rounds * self.peers)

    @property
    def nbytes(self) -> int:
        return self.blocks * self.words * layout.WORD_BYTES

    @property
    def capacity(self) -> int:
        """The number of words per block for which the kernel is compiled (`layout.defines`), at least `words`."""
        return layout.capacity(self.words)

    @property
    def parameters(self) -> layout.TraceParams:
        """The last argument of the traced kernel, which tells it where to write its words."""
        return layout.TraceParams(self.array.ptr + self.offset, self.words, self.rounds * self.peers)


class Trace:
    """Records of the phases of the blocks of traced launches, on the ranks of a group or on one device.

    Pass it to an op as `trace=`; any number of ops and calls may share it. It has a buffer of `nbytes` on each device.
    Every prepared call has a part of each buffer. The part is free again once the call is dropped and `clear()` is
    called after that. Each launch of the call overwrites the records of its previous launch. A call raises
    ArgumentError before it launches anything if the buffer has too little room.

    A Trace cannot be made in a capture: it allocates memory, and waits until its buffers are zeroed.
    """

    def __init__(self, where: Group | Device, *, nbytes: int = DEFAULT_BYTES) -> None:
        if isinstance(where, Group):
            where.require_open()
            self.devices, self.ranks = zip(*((rank.device, rank.index) for rank in where), strict=True)
            self._readable = where.peers_readable
        elif isinstance(where, Device):
            self.devices, self.ranks, self._readable = (where,), (0,), False
        else:
            raise ArgumentError("where", kind_of(where), "a Group or a Device")
        asked = require_integer("nbytes", nbytes, "an integer, at least 1024", 1024)
        self.nbytes = asked // layout.ALIGNMENT * layout.ALIGNMENT
        for device in self.devices:
            if device.stream.capture_id() is not None:
                raise CaptureError(f"a Trace cannot be made while {device.stream!r} is being captured")
        self._arrays = [device.zeros(self.nbytes // layout.WORD_BYTES, "uint64") for device in self.devices]
        for device in self.devices:
            device.stream.synchronize()
        self._launches = 0
        self._sections: list[Section] = []
        self._living: weakref.WeakSet[Section] = weakref.WeakSet()  # sections of calls that may still be launched
        self._clocks: tuple[Clock, ...] | None = None

    def __repr__(self) -> str:
        launches = counted(len(self._sections), "launch", "launches")
        return f"<Trace of {launches} on ranks {list(self.ranks)}, {self.nbytes} bytes each>"

    def sections(
        self,
        devices: Sequence[Device],
        kernel: str,
        blocks: int,
        phases: int,
        rounds: int = 0,
        peers: int = 0,
        writers: int = 1,
    ) -> list[Section]:
        """For ops: reserve room for a launch of `kernel` on each of `devices`, with `blocks` blocks.

        A block has up to `phases` phases, and waits `rounds` times for `peers` peers. `writers` threads of a block
        write records, each into words of its own in shared memory.

        Raises ArgumentError, and reserves nothing, if one block or all blocks need too many words.
        """
        positions = [self._position(device) for device in devices]
        words = layout.block_words(phases, rounds * peers)
        if words > layout.MOST_WORDS // writers:
            most = layout.MOST_WORDS // writers - layout.block_words(0, rounds * peers)
            shown = f"of {kernel} with {phases} phases a block"
            expected = f"of at most {most} phases a block: make a smaller call, or use more blocks"
            raise ArgumentError("trace", shown, expected)
        wanted = blocks * words * layout.WORD_BYTES
        offsets = [self._room(position, wanted, f"{counted(blocks, 'block')} of {kernel}") for position in positions]
        launch = self._launches, kernel, blocks, phases, rounds, peers
        found = [
            Section(self.ranks[position], *launch, offset, self._arrays[position])
            for position, offset in zip(positions, offsets, strict=True)
        ]
        self._launches += 1
        self._sections += found
        self._living.update(found)
        return found

    def buffer(self, device: Device) -> Array:
        """For ops: the memory that launches on `device` write. Raises ArgumentError if there is none."""
        return self._arrays[self._position(device)]

    def _position(self, device: Device) -> int:
        for position, known in enumerate(self.devices):
            if known is device:
                return position
        made = f"made for {list(self.devices)}"
        raise ArgumentError("trace", made, f"made for {device!r} too, as Trace(group) is for all of a group's devices")

    def _room(self, position: int, wanted: int, what: str) -> int:
        """The offset of the first gap of `wanted` bytes in the buffer of the device at `position`. Raises ArgumentError
        if there is none."""
        rank, end, widest = self.ranks[position], 0, 0
        taken = sorted((s.offset, s.nbytes) for s in self._living if s.rank == rank)
        for offset, nbytes in [*taken, (self.nbytes, 0)]:
            if offset - end >= wanted:
                return end
            widest, end = max(widest, offset - end), offset + nbytes
        raise ArgumentError(
            "trace",
            f"too small: {widest} of its {self.nbytes} bytes are free in one piece",
            f"a Trace with {wanted} bytes free for {what}: pass nbytes, or clear() it",
        )

    def clear(self) -> None:
        """Delete all records, and free the room of calls that do not exist any more. Waits for the launches that write
        records.

        Raises CaptureError while a stream of a device is being captured.
        """
        with self._outside_captures("cleared"):
            for array in self._arrays:
                array.copy_from(np.zeros(array.shape, np.uint64))
        self._sections.clear()
        self._sections += sorted(self._living, key=lambda section: (section.launch, section.rank))

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """The clocks of the ranks, in rank order. `records` measures them; if it has not, they are measured now."""
        if self._clocks is None:
            self._clocks = clocks.measure(self.devices, self._readable)
        return self._clocks

    def records(self) -> npt.NDArray[np.void]:
        """The records, as an array of `decode.RECORD`, ordered by launch, rank, block and time.

        Waits for the launches that write records. One record is one phase of a block: `rank`, `launch`, `kernel`,
        `block`, `sm`, `role`, `peer` (the rank that the block waited for, else -1), `start` and `end` in cycles of the
        SM's clock since the block's entry, `start_ns` and `end_ns` in nanoseconds since the first entry on any rank, by
        the clock of the first rank. The record of role "block" is the whole block. Records of waits lie inside a
        "barrier"; all other phases follow each other without gaps.

        Each call measures the clocks by small kernels on the devices' own streams, since the timers of two devices
        drift apart by some microseconds per second. Raises CaptureError while a stream of a device is being captured.
        """
        with self._outside_captures("read"):
            words = [array.numpy() for array in self._arrays]
        self._clocks = None
        return decode.records(self._sections, dict(zip(self.ranks, words, strict=True)), self._by_rank())

    @contextlib.contextmanager
    def _outside_captures(self, what: str) -> Iterator[None]:
        """A `with` block in which a CaptureError about an array of the trace becomes one about the trace."""
        try:
            yield
        except CaptureError as error:
            raise CaptureError(f"{self!r} cannot be {what} while a stream that uses it is being captured") from error

    def _by_rank(self) -> dict[int, Clock]:
        return dict(zip(self.ranks, self.clocks, strict=True))

    def chrome(self, path: str | Path) -> None:
        """Write the records as a Chrome trace (JSON), which chrome://tracing and ui.perfetto.dev open."""
        from .chrome import write

        write(path, self.records(), self._by_rank())

    def summary(self) -> str:
        """Tables of the records: time by phase, the slowest block, the waits for peers."""
        from .summary import summary

        return summary(self.records(), self._by_rank())

    def plot(self, path: str | Path) -> None:
        """Write a timeline, with a row for each block, to an image file. The suffix of `path` selects the format.

        Raises Unsupported without matplotlib (extra `plot`), and ArgumentError for a suffix that matplotlib lacks.
        """
        from .plot import plot

        plot(path, self.records(), self._by_rank())
