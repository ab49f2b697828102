# SPDX-License-Identifier: Apache-2.0
"""Counts of the memory accesses of launches. Times are not measured.

An access is an access of one thread. The bytes of an access are those that its instruction reads or writes, and not
those that hardware would transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from ..abi import MemoryOf

if TYPE_CHECKING:
    from ..translate.code import Site

Line = tuple[str, int]
_WIDTH = 120
_EXACT = 10_000_000  # numbers from this one on are rounded in tables


@dataclass(frozen=True)
class Count:
    """Numbers of accesses and bytes. In the names of the fields, "local" is memory of the launch's own device, "remote"
    memory of other devices, and "host" pinned memory.

    An atomic counts as one access that reads and writes. The bytes of accesses to parameters and to the local memory of
    threads (`.local`) are not counted. A multimem instruction is one access. "reduced" and "broadcast" are the bytes
    that multimem instructions read and write at multicast addresses, counted once for all devices of the multicast
    object. The bytes that they read and write in the memory of each device are in the other counts too.
    """

    accesses: int = 0
    local_read: int = 0
    local_written: int = 0
    remote_read: int = 0
    remote_written: int = 0
    host_read: int = 0
    host_written: int = 0
    shared_read: int = 0
    shared_written: int = 0
    reduced: int = 0
    broadcast: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Counters:
    """The counts of one launch: `total`, and `lines` by (file, line) of the source, with the `opcodes` of each line.

    barriers    the number of completed barriers of blocks
    warp_ops    the number of completed shuffles, votes and other warp operations
    resumes     the number of times that a thread was run until it suspended, which measures the emulator's own work

    A `Counters` is made from an array of `abi.structs.Site`, with one entry for each of the sites, and keeps a copy.
    """

    def __init__(
        self, rows: np.ndarray[Any, Any], sites: Sequence[Site], barriers: int, warp_ops: int, resumes: int
    ) -> None:
        self.barriers, self.warp_ops, self.resumes = barriers, warp_ops, resumes
        self._used = np.flatnonzero(rows["size"][: len(sites)])
        self._rows = rows[self._used]
        self._sites = sites

    @functools.cached_property
    def opcodes(self) -> dict[Line, tuple[str, ...]]:
        """The PTX opcodes whose accesses were counted for each line."""
        found: dict[Line, dict[str, None]] = {}
        for i in self._used.tolist():
            found.setdefault(_line(self._sites[i]), {})[self._sites[i].opcode] = None
        return {line: tuple(opcodes) for line, opcodes in found.items()}

    @functools.cached_property
    def lines(self) -> dict[Line, Count]:
        """The counts of each source line that made accesses."""
        lines: dict[Line, Count] = {}
        columns = (self._used, *(self._rows[name] for name in ("size", "reads", "writes")))
        for i, size, reads, writes in zip(*(column.tolist() for column in columns), strict=True):
            key = _line(self._sites[i])
            pairs = (n * size for pair in zip(reads, writes, strict=True) for n in pair)
            multimem = max(reads[MemoryOf.MULTICAST], writes[MemoryOf.MULTICAST])
            lines[key] = lines.get(key, Count()) + Count(multimem or max(sum(reads), sum(writes)), *pairs)
        return lines

    @functools.cached_property
    def total(self) -> Count:
        return sum(self.lines.values(), Count())

    def table(self) -> str:
        """The counts as a table with one row per source line, at most 120 characters wide."""
        return KernelCounters("").add(self).table()

    def json(self) -> dict[str, Any]:
        """All counts as plain data for JSON; "lines" has one entry per source line."""
        described = KernelCounters("").add(self).json()
        return {name: described[name] for name in ("barriers", "warp_ops", "total", "lines")}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Counters):
            return NotImplemented
        mine, theirs = (self.barriers, self.warp_ops, self.resumes), (other.barriers, other.warp_ops, other.resumes)
        return mine == theirs and self.lines == other.lines

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Counters(total={self.total}, barriers={self.barriers}, warp_ops={self.warp_ops})"


@dataclass
class KernelCounters:
    """The counts of all launches of one kernel, added up."""

    kernel: str
    launches: int = 0
    barriers: int = 0
    warp_ops: int = 0
    lines: dict[Line, Count] = field(default_factory=dict)
    opcodes: dict[Line, tuple[str, ...]] = field(default_factory=dict)

    def add(self, counters: Counters) -> KernelCounters:
        """Add the counts of a launch, and return this object."""
        self.launches += 1
        self.barriers += counters.barriers
        self.warp_ops += counters.warp_ops
        for line, count in counters.lines.items():
            self.lines[line] = self.lines.get(line, Count()) + count
            self.opcodes[line] = tuple(dict.fromkeys(self.opcodes.get(line, ()) + counters.opcodes[line]))
        return self

    @property
    def total(self) -> Count:
        return sum(self.lines.values(), Count())

    def table(self) -> str:
        """A table with one row per source line, and a last row with the sums. Bytes are listed by where the memory
        is (see `Count`). Columns that have only zeros are left out.
        """
        total = self.total
        names = [f.name for f in fields(Count) if getattr(total, f.name) or f.name == "accesses"]
        header = [name.replace("shared_", "smem_").replace("_read", " r").replace("_written", " w") for name in names]
        header = ["bcast" if name == "broadcast" else name for name in header]
        rows = [
            [f"{PurePath(file).name}:{line}", ", ".join(self.opcodes[file, line]), *_numbers(count, names)]
            for (file, line), count in sorted(self.lines.items())
        ]
        rows.append(["total", f"{self.barriers} barriers, {self.warp_ops} warp operations", *_numbers(total, names)])
        return _aligned([["line", "opcodes", *header], *rows])

    def json(self) -> dict[str, Any]:
        lines = [
            {"file": file, "line": line, "opcodes": list(self.opcodes[file, line]), **asdict(count)}
            for (file, line), count in sorted(self.lines.items())
        ]
        return {
            "kernel": self.kernel,
            "launches": self.launches,
            "barriers": self.barriers,
            "warp_ops": self.warp_ops,
            "total": asdict(self.total),
            "lines": lines,
        }


class Summary:
    """The counts of several launches, by kernel. `kernels` is in the order in which the kernels first
    completed a launch.
    """

    def __init__(self, launches: Iterable[tuple[str, Counters]]) -> None:
        self.kernels: dict[str, KernelCounters] = {}
        for kernel, counters in launches:
            self.kernels.setdefault(kernel, KernelCounters(kernel)).add(counters)

    def table(self) -> str:
        """A table for each kernel, under its name."""
        return "\n\n".join(
            f"{k.kernel}: {k.launches} launch{'es' * (k.launches > 1)}, bytes\n{k.table()}"
            for k in self.kernels.values()
        )

    def json(self) -> dict[str, Any]:
        return {"kernels": [k.json() for k in self.kernels.values()]}


def _line(site: Site) -> Line:
    return site.file or "", int(site.line or site.ptx_line)


def _numbers(count: Count, names: Sequence[str]) -> list[str]:
    return [_rounded(getattr(count, name)) for name in names]


def _rounded(number: int) -> str:
    if number < _EXACT:
        return str(number)
    power, unit = next(p for p in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M")) if number >= p[0])
    return f"{number / power:.3g} {unit}" if number < 1000 * power else f"{number // power} {unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text. The first two columns are aligned to the left, the others to the right. The second column is
    shortened if the table is too wide.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[1] = max(min(widths[1], _WIDTH - sum(widths) + widths[1] - len(widths) + 1), 8)
    return "\n".join(
        " ".join(
            _cut(cell, width).ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."
