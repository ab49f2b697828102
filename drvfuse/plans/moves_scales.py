# SPDX-License-Identifier: Apache-2.0
"""How scales are gathered in the layouts "column" and "tiles", where a row's scales are not contiguous: offsets and
chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ArgumentError, counted
from .limits import ceil_div
from .quantisation import Quantisation
from .shared import PACK_BYTES

_TILE_ROWS = 128
_MOST_ROWS = 2**29 - 4  # the largest number of rows: kernels count the bytes of a column in 32 bits


@dataclass(frozen=True)
class Arrangement:
    """Scales that are gathered in the layout "column" or "tiles" of a `Quantisation`.

    A scale has `itemsize` bytes, and a row has `groups` scales. There are `total` rows, of which rank i sends the
    scales of `rows[i]`, beginning with row `first[i]`. A rank's scales have the layout of an array of only these rows,
    padding included. The receiving rank stores each scale where it belongs among all rows.
    """

    layout: str
    itemsize: int
    groups: int
    total: int
    first: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, quantisation: Quantisation, rows: Sequence[int], columns: int) -> Arrangement:
        """The arrangement of the scales of `rows[i]` rows of rank i, which have `columns` columns.

        Raises ArgumentError where there are more rows than the kernels can count.
        """
        assert quantisation.scales is not None
        if sum(rows) > _MOST_ROWS:
            expected = f"of at most {_MOST_ROWS} rows, where scales have the layout {quantisation.layout!r}"
            raise ArgumentError("inputs", f"of {counted(sum(rows), 'row')} in all", expected)
        first = [0, *itertools.accumulate(rows)][:-1]
        groups, itemsize = quantisation.groups(columns), quantisation.scales.itemsize
        return cls(quantisation.layout, itemsize, groups, sum(rows), tuple(first), tuple(rows))

    def of_ranks(self, ranks: Sequence[int]) -> Arrangement:
        """The arrangement in which rank i sends the scales that rank `ranks[i]` sends in this one."""
        return replace(self, first=tuple(self.first[i] for i in ranks), rows=tuple(self.rows[i] for i in ranks))

    @property
    def tiles(self) -> bool:
        """Whether the layout is "tiles"."""
        return self.layout == "tiles"

    def column_bytes(self, rows: int) -> int:
        """The bytes of one column of scales of `rows` rows, padded to a multiple of four rows."""
        return ceil_div(rows, 4) * 4 * self.itemsize

    @property
    def tiles_bytes(self) -> int:
        """The bytes of the tiles that hold the scales of 128 rows."""
        return ceil_div(self.groups, 4) * 4 * _TILE_ROWS

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The bytes that each rank sends."""
        if self.tiles:
            return tuple(ceil_div(rows, _TILE_ROWS) * self.tiles_bytes for rows in self.rows)
        return tuple(self.groups * self.column_bytes(rows) for rows in self.rows)


@dataclass(frozen=True)
class ScalesChunk:
    """A part of every rank's scales, with its own `arrangement`: whole columns, or the tiles of some rows.

    Rank i sends `nbytes[i]` bytes, which begin `sources[i]` bytes after the beginning of its scales. They are
    rearranged into the scales of all rows, from byte `target` on.
    """

    arrangement: Arrangement
    sources: tuple[int, ...]
    target: int

    @property
    def nbytes(self) -> tuple[int, ...]:
        return self.arrangement.rank_bytes

    @property
    def slot_bytes(self) -> int:
        """The bytes that a slot needs to hold any rank's part of the chunk: a multiple of 16."""
        return ceil_div(max(self.nbytes), PACK_BYTES) * PACK_BYTES


def chunks_of_scales(whole: Arrangement, payload_bytes: int, slots: int) -> list[ScalesChunk]:
    """All scales, divided into as few chunks as possible. A payload has `slots` slots, each for one rank's part of a
    chunk.

    Raises ArgumentError if a slot cannot hold one column of scales or, in the layout "tiles", the tiles of 128 rows.
    """
    most = max(whole.rows)
    unit_bytes = whole.tiles_bytes if whole.tiles else whole.column_bytes(most)
    units = ceil_div(most, _TILE_ROWS) if whole.tiles else whole.groups
    if not math.prod((unit_bytes, units)):
        return []
    at_once = payload_bytes // slots // PACK_BYTES * PACK_BYTES // unit_bytes
    if not at_once:
        needed = slots * ceil_div(unit_bytes, PACK_BYTES) * PACK_BYTES
        what = "the tiles of 128 rows" if whole.tiles else "a column of scales"
        expected = f"at least {needed} in the group's constructor, to hold {what} of a rank of each other node"
        raise ArgumentError("workspace_bytes", payload_bytes, expected)
    chunk = _tile_rows if whole.tiles else _columns
    return [chunk(whole, first, min(at_once, units - first)) for first in range(0, units, at_once)]


def _tile_rows(whole: Arrangement, first: int, count: int) -> ScalesChunk:
    """The chunk with the tiles of 128 * `count` rows of each rank, from tile row `first` on."""
    down = first * _TILE_ROWS
    rows = tuple(max(0, min(count * _TILE_ROWS, of_rank - down)) for of_rank in whole.rows)
    arrangement = replace(whole, first=tuple(begin + down for begin in whole.first), rows=rows)
    return ScalesChunk(arrangement, (first * whole.tiles_bytes,) * len(rows), 0)


def _columns(whole: Arrangement, first: int, count: int) -> ScalesChunk:
    """The chunk with `count` columns of the scales of each rank, from column `first` on."""
    sources = tuple(first * whole.column_bytes(rows) for rows in whole.rows)
    return ScalesChunk(replace(whole, groups=count), sources, first * whole.column_bytes(whole.total))
