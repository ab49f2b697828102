# SPDX-License-Identifier: Apache-2.0
"""How the forward kernels of cu/coat/fp8_*norm_forward*.cu divide rows and tiles among blocks and threads."""

from __future__ import annotations

from math import inf

from .coat_rows import column_run
from .definitions import Defines, defines
from .limits import Limits, ceil_div
from .scratch import MAX_WORD_BLOCKS, MAX_WORD_ROWS, MAX_WORD_SUMS

MAX_COLUMNS = 1 << 18
_SEGMENT = 512
_SUMS_BYTES = 16384
_MEETINGS_BYTES = 32
_ALONE = 8192
_FEW_ROWS, _FEW_WITHOUT_TEAMS = 8, 20  # rows per multiprocessor
_LAYER_ROWS = 512  # with fewer rows the three grid barriers of LayerNorm cost more than they gain
_EXCHANGE = 16  # the number of rows of a segment that take as long as the exchange of a team's sums
_CLUSTERS = (9, 0)  # the least compute capability with clusters
_PORTABLE_CLUSTER = 8  # blocks of a cluster that every device with clusters can run
_HELD_ROWS, _HELD_WARPS, _BLOCK_WARPS = 16, 32, 8
_SHARED_SUMS = 1 << 14  # rows times segments, up to which blocks share rows in plans other than `HeldTiles`
_ROOM_BESIDE_L1 = (
    195 << 10
)  # bytes; with more, the L1 cache shrinks and reading again gets slower (H200: by 5 % for 67 million elements)
_STRIP_WORDS = 16  # distance between two strips' words, which lie among those of rows


def forward_plan(limits: Limits, rows: int, columns: int, QB: int) -> HeldRows | HeldTiles | FewRows | ManyRows:
    """Kernel, grid, tiles, and which data stays in registers or shared memory. Results do not depend on it."""
    if limits.capability >= _CLUSTERS and HeldRows.fits(rows, columns) and HeldRows.pays(rows):
        return HeldRows(rows, columns)
    tiles = HeldTiles.best(limits, rows, columns)
    if tiles is not None and HeldTiles.pays(rows, columns):
        return tiles
    teams = rows * ceil_div(columns, _SEGMENT) <= _SHARED_SUMS
    few = (_FEW_ROWS if teams else _FEW_WITHOUT_TEAMS) * min(limits.sm_count, MAX_WORD_BLOCKS)
    if rows > min(few, MAX_WORD_ROWS):
        return ManyRows(limits, rows, columns, QB)
    return FewRows(limits, rows, columns)


def layernorm_plan(limits: Limits, rows: int, columns: int, QB: int, affine: bool) -> HeldTiles | ManyRows | None:
    """The plan of LayerNorm's forward, with w and b or without. None where LayerNorm's own kernel is quicker, which has
    fewer grid barriers and reads x twice.
    """
    if rows < _LAYER_ROWS:
        return None
    tiles = HeldTiles.best(limits, rows, columns)
    if tiles is not None:
        return tiles
    if rows * ceil_div(columns, _SEGMENT) > _SHARED_SUMS and rows <= _FEW_WITHOUT_TEAMS * limits.sm_count:
        return None
    plan = ManyRows(limits, rows, columns, QB, layer=True, affine=affine)
    return None if affine and plan.rereads else plan


class _Plan:
    """The fields and methods that every plan has."""

    cluster, waits = 1, True  # blocks of a cluster; whether blocks wait for one another through the workspace
    warps: int
    tile_rows: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def run(self, batch_rows: int, address: int) -> int:
        """Bytes that one store of qy_t at `address` can take."""
        return column_run(self.tile_rows, batch_rows, address)


class HeldRows(_Plan):
    """One to 16 rows, of up to 16384 elements for one block and 65536 for one cluster of up to 8, which hold them in
    registers: x is read once, and no workspace is used.

    A warp holds 4 rows, or the only one, of a segment.
    """

    kernel = "fp8_rmsnorm_forward_few"
    waits, whole, known, row_lanes, tile_columns, shared_bytes = False, False, True, 1, 16, 0
    parts, groups, longer, resident_columns, chunk_rows = 1, 1, 0, 0, 0

    def __init__(self, rows: int, columns: int) -> None:
        self.tile_rows, self.block_rows = self._rows(rows)
        groups, segments = self.block_rows // self.tile_rows, ceil_div(columns, _SEGMENT)
        each = segments if groups * segments <= _BLOCK_WARPS else ceil_div(segments, _PORTABLE_CLUSTER)
        self.cluster = 1 << (ceil_div(segments, each) - 1).bit_length()
        self.grid, self.warps, self.part_columns = self.cluster, each * groups, each * _SEGMENT

    @staticmethod
    def _rows(rows: int) -> tuple[int, int]:
        """Rows of a warp and rows of a block; some of them may lie beyond the last row."""
        return (1, 1) if rows == 1 else (4, ceil_div(rows, 4) * 4)

    @classmethod
    def fits(cls, rows: int, columns: int) -> bool:
        """Whether this kind of plan can be made for these numbers of rows and columns."""
        each, padded = cls._rows(rows)
        return 1 <= rows <= _HELD_ROWS and padded // each * ceil_div(columns, _SEGMENT) <= _HELD_WARPS

    @staticmethod
    def pays(rows: int) -> bool:
        """Whether this plan is quicker than `FewRows`. Where the number of rows is no multiple of 4, a column of qy_t
        is not made of whole words, and few blocks store it slowly: 2x2048 takes 6.2 us on an H200 where `FewRows` takes
        3.8, 4x2048 2.9 for 4.4.
        """
        return rows == 1 or rows % 4 == 0

    def run(self, batch_rows: int, address: int) -> int:
        return column_run(16, 16 if self.block_rows == 1 else batch_rows, address)

    def defines(self, aligned: bool) -> Defines:
        return _tile_defines(self, self.tile_rows, aligned) + defines(cluster=self.cluster)


class HeldTiles(_Plan):
    """Up to some thousand rows, held in the registers of one grid, so that x is read once.

    A block has `block_rows` rows of a segment, or of one part in `split` of it, and waits for all others.
    """

    kernel = "fp8_norm_forward_tiles"
    row_lanes, tile_columns, shared_bytes = 8, 16, 0
    parts, groups, longer, part_columns, resident_columns, chunk_rows = 1, 1, 0, 0, 0, 0

    def __init__(self, limits: Limits, rows: int, columns: int, tile_rows: int, split: int) -> None:
        self.tile_rows, self.split, self.warps = tile_rows, split, 8 // split
        self.block_rows = tile_rows * self.row_lanes
        self.segments = ceil_div(columns, _SEGMENT)
        self.strips = ceil_div(rows, self.block_rows)
        self.grid = self.strips * self.segments * split
        self.whole = rows % self.block_rows == 0 and columns % _SEGMENT == 0
        self.pairs = self.block_rows * self.segments * (2 * split if split > 1 else 1)  # the pairs of a strip
        self.resident = ceil_div(self.grid, limits.sm_count)

    @classmethod
    def best(cls, limits: Limits, rows: int, columns: int) -> HeldTiles | None:
        """The plan that is quickest on an H200 of those that fit; None if none fits.

        Smaller tiles occupy more multiprocessors, but blocks then read more of one another's words.
        """
        segments = ceil_div(columns, _SEGMENT)
        for tile_rows, split in ((4, 2), (4, 1), (8, 1)):
            tiles = cls(limits, rows, columns, tile_rows, split)
            if split > 1:
                quick = segments <= 16 and tiles.grid <= limits.sm_count * (1.0 if segments <= 4 else 0.8)
            else:
                quick = tile_rows == 8 or segments <= 8 or tiles.grid <= limits.sm_count
            if quick and tiles.fits:
                return tiles
        return None

    @staticmethod
    def pays(rows: int, columns: int) -> bool:
        """Whether this plan is quicker than `FewRows`: where the number of rows is no multiple of 4, a column of qy_t
        is not made of whole words, and few blocks store it slowly.
        """
        return rows >= 12 and (rows % 4 == 0 or rows >= 64 or (rows > 16 and columns >= 8192))

    @property
    def fits(self) -> bool:
        """Whether all blocks can be resident and have words."""
        return (
            0 < self.resident * self.threads <= 512
            and self.grid <= MAX_WORD_BLOCKS
            and self.strips * _STRIP_WORDS <= MAX_WORD_ROWS
            and 4 * self.strips * self.pairs <= MAX_WORD_SUMS  # LayerNorm exchanges sums twice
        )

    def defines(self, aligned: bool) -> Defines:
        turns = self.threads // self.block_rows
        more = defines(split=self.split, slots=ceil_div(self.segments, turns), resident=self.resident)
        return _tile_defines(self, self.tile_rows, aligned) + more


class FewRows(_Plan):
    """Rows and tiles are divided among blocks independently of each other, so x is read twice."""

    kernel = "fp8_rmsnorm_forward"
    parts, resident_columns, whole = 1, 0, False

    def __init__(self, limits: Limits, rows: int, columns: int) -> None:
        multiprocessors = min(limits.sm_count, MAX_WORD_BLOCKS)
        self.part_columns = columns
        self.block_rows = 1 if rows <= multiprocessors else 2 if rows <= 2 * multiprocessors else 4
        lanes = next(n for n in (1, 2, 4, 8) if n == 8 or 4 * n >= rows)
        for self.warps, shape, most in (  # the smallest tiles in which no warp has more than `most`
            (16 if rows <= 2 else 8, (4, 4, lanes), 1 if rows >= 64 else inf),
            (8, (8, 4, 4), 1),
            (8, (8, 8, 4), 1),
            (8, (16, 8, 4), 1),
            (16, (16, 4, 4), 2),
            (16, (16, 8, 4), inf),
        ):
            self.tile_rows, self.tile_columns, self.row_lanes = shape
            down = ceil_div(rows, self.tile_rows * self.row_lanes)
            tiles = down * ceil_div(columns, 32 // self.row_lanes * self.tile_columns)
            if tiles <= most * self.warps * multiprocessors:
                break
        groups = ceil_div(rows, self.block_rows)
        blocks = 1 if rows * columns <= _ALONE else max(groups, ceil_div(tiles, self.warps))
        self.grid = max(1, min(multiprocessors, blocks))
        self.groups, self.longer = divmod(groups, self.grid)
        segments, step = ceil_div(columns, _SEGMENT), self.block_rows
        most = (self.groups + (self.longer > 0)) * step
        self.chunk_rows = max(step, min(most, _SUMS_BYTES // (8 * segments) // step * step))
        rstds = (rows if self.grid == 1 else 0) + self.warps * self.tile_rows * self.row_lanes
        self.shared_bytes = 8 * segments * self.chunk_rows + 4 * rstds

    def defines(self, aligned: bool) -> Defines:
        return _tile_defines(self, self.block_rows, aligned)


class ManyRows(_Plan):
    """A block takes groups of 32 or 64 rows, or some of their columns, which it keeps as far as they fit and quantises.

    With groups of 16 rows qy_t would be written in half sectors, which is slow.
    """

    kernel = "fp8_norm_forward_rows"
    warps = 16

    def __init__(
        self, limits: Limits, rows: int, columns: int, QB: int, *, layer: bool = False, affine: bool = False
    ) -> None:
        """`layer`: the norm is LayerNorm, with w and b if `affine`; then each block has whole rows."""
        self._row_bytes = 8 if layer else 4  # rstd, and with LayerNorm the mean
        segments = ceil_div(columns, _SEGMENT)
        shared = rows * segments <= _SHARED_SUMS and not affine
        widest = min(segments, limits.sm_count, MAX_WORD_BLOCKS) if shared else 1
        self._share_out(limits, rows, columns, QB, widest)
        if self.parts > 1 and not self.known:  # otherwise all parts would write and read rstd of the same rows
            self._share_out(limits, rows, columns, QB, 1)

    def _share_out(self, limits: Limits, rows: int, columns: int, QB: int, widest: int) -> None:
        """The plan whose teams have at most `widest` blocks."""
        multiprocessors = min(limits.sm_count, MAX_WORD_BLOCKS)
        segments = ceil_div(columns, _SEGMENT)
        self.block_rows, split = min(
            ((size, parts) for size in (64, 32) for parts in (1, 2, 4, 8) if parts <= widest),
            key=lambda way: _busiest(rows, segments, multiprocessors, *way) + _EXCHANGE * (way[1] > 1),
        )
        each = ceil_div(segments, split)
        self.parts = ceil_div(segments, each)
        self.part_columns = each * _SEGMENT
        # Small tiles where there are few tiles, else those whose columns are stored with wider instructions.
        self.tile_rows, self.tile_columns = (4, 16) if self.parts > 1 else (16, 8)
        self.row_lanes = self.block_rows // self.tile_rows
        tile_columns = 32 // self.row_lanes * self.tile_columns
        self.whole = rows % self.block_rows == 0 and columns % tile_columns == 0
        groups = ceil_div(rows, self.block_rows)
        teams = max(1, min(multiprocessors // self.parts, groups))
        self.grid = teams * self.parts
        self.groups, self.longer = divmod(groups, teams)
        width = min(self.part_columns, columns)
        most = (self.groups + (self.longer > 0)) * self.block_rows
        room = limits.shared_bytes
        self.rereads = most * width > 2 * room
        if self.rereads:
            room = min(room, _ROOM_BESIDE_L1)
        per_row = 4 * (segments + 1)
        self.chunk_rows = max(4, min(most, _SUMS_BYTES // per_row // 4 * 4))
        known_bytes = most * (2 * ceil_div(width, QB) + self._row_bytes)
        self.shared_bytes = _MEETINGS_BYTES + per_row * self.chunk_rows
        self.known = self.shared_bytes + known_bytes <= room
        self.shared_bytes += known_bytes * self.known
        self.resident_columns = min(ceil_div(width, 128), (room - self.shared_bytes) // (128 * most)) * 128
        self.shared_bytes += self.resident_columns * most

    def defines(self, aligned: bool) -> Defines:
        return _tile_defines(self, 4, aligned) + defines(known=self.known, parts=self.parts, rereads=self.rereads)


def _tile_defines(plan: HeldRows | HeldTiles | FewRows | ManyRows, batch: int, aligned: bool) -> Defines:
    rows = defines(warps=plan.warps, batch=batch, block_rows=plan.block_rows, tile_rows=plan.tile_rows)
    return rows + defines(tile_columns=plan.tile_columns, row_lanes=plan.row_lanes, whole=aligned and plan.whole)


def _busiest(rows: int, segments: int, multiprocessors: int, size: int, parts: int) -> int:
    """The largest number of rows times segments that a block has."""
    groups = ceil_div(ceil_div(rows, size), max(1, multiprocessors // parts))
    return groups * size * ceil_div(segments, parts)
