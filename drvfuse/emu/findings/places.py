# SPDX-License-Identifier: Apache-2.0
"""Converts numbers of the native runtime to places in programs (operations, blocks, threads, source lines), and places
to text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..translate.code import Site

Index = tuple[int, int, int]
"""The index of a block or of a thread, (x, y, z)."""
_HASHED = re.compile(r"^.*/[^/]*[0-9a-f]{32,}[^/]*/")


@dataclass(frozen=True)
class Identity:
    """What reports say about an operation (a launch, a copy or a fill). `grid` and `block` are the shape of a launch,
    `sites` the instructions of its kernel; copies and fills have no blocks and no sites. `process` is the name of the
    operation's process if the machine has several.
    """

    kernel: str
    device: int
    grid: Index = (1, 1, 1)
    block: Index = (1, 1, 1)
    sites: tuple[Site, ...] = ()
    process: str | None = None

    def index(self, block: int, thread: int) -> tuple[Index, Index]:
        """(index of a block, index of a thread in the block), from their linear indices."""
        return _unravel(block, self.grid), _unravel(thread, self.block)

    def site(self, number: int) -> Site | None:
        """The site with a number; None for `abi.NO_SITE`."""
        return self.sites[number] if number < len(self.sites) else None

    def place(self, number: int) -> tuple[str | None, int | None]:
        """(file, line) of a site. Without a file, the line is that of the PTX. (None, None) for no site."""
        site = self.site(number)
        return (site.file or None, site.line or site.ptx_line) if site is not None else (None, None)

    def callers(self, number: int) -> str:
        """The calls through which the code of a site was inlined, as text; "" if there are none."""
        site = self.site(number)
        return called_at(site.inlined) if site is not None else ""


def long_place(file: str, line: int | None) -> str:
    """A place, with the path of the file. Folders of a cache that stores files by their hash are left out."""
    return f"{_HASHED.sub('', file)}:{line}"


def short_place(file: str | None, line: int | None) -> str:
    """A place, with only the name of the file. Without a file, the line is a line of the PTX."""
    return f"{PurePath(file).name}:{line}" if file else f"PTX line {line}"


def called_at(callers: Iterable[tuple[str, int]]) -> str:
    """The calls through which the code of a place was inlined, as text; "" if there are none. `callers` are (file,
    line), innermost first.
    """
    places = ", at ".join(short_place(*caller) for caller in callers)
    return f", called at {places}" if places else ""


def index_text(index: Index) -> str:
    """The index of a block or thread, in its shortest form."""
    x, y, z = index
    return str(x) if y == 0 and z == 0 else f"({x}, {y}, {z})"


def ravel(index: Index, extent: Index) -> int:
    """The linear index for a three-dimensional index."""
    return index[0] + extent[0] * (index[1] + extent[1] * index[2])


def _unravel(linear: int, extent: Index) -> Index:
    return linear % extent[0], linear // extent[0] % extent[1], linear // extent[0] // extent[1]
