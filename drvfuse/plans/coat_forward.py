# SPDX-License-Identifier: Apache-2.0
"""How the forward kernels cu/coat/fp8_*norm_forward*.cu divide rows and tiles among blocks and threads.

Results do not depend on a plan, bit for bit. Which plan is quickest was measured on an H200.
"""

from __future__ import annotations

from math import inf

from .coat_rows import column_run
from .definitions import Defines, defines
from .limits import Limits, ceil_div
from .scratch import MAX_WORD_BLOCKS, MAX_WORD_ROWS, MAX_WORD_SUMS

MAX_COLUMNS = 1 << 18  # the largest number of columns that the kernels take
_SEGMENT = 512  # columns of a segment: what a warp reads at once
_SUMS_BYTES = 16384  # the largest number of bytes of shared memory for the sums of a chunk of rows
_MEETINGS_BYTES = 32  # the size of `struct Meetings` of cu/coat/forward_meeting.cuh
_ONE_BLOCK_ELEMENTS = 8192  # the largest number of elements for which `FewRows` has a single block
# The largest numbers of rows per multiprocessor for which `FewRows` is quicker than `ManyRows`: if blocks of `ManyRows`
# can share rows, and if they cannot.
_FEW_ROWS, _FEW_UNSHARED_ROWS = 8, 20
# With fewer rows than this, LayerNorm uses cu/coat/fp8_layernorm_forward.cu. It has one grid barrier, and is then
# quicker than the kernels of the plans below, whose blocks exchange data at least three times.
_LAYER_ROWS = 512
_EXCHANGE_ROWS = 16  # exchanging sums between blocks takes as long as the work on this number of rows of 512 columns
_CLUSTER_CAPABILITY = (9, 0)  # the least compute capability with clusters
_PORTABLE_CLUSTER = 8  # the number of blocks of a cluster that every device with clusters can run
_HELD_ROWS = 16  # the largest number of rows of `HeldRows`
_HELD_WARPS = 32  # the largest number of warps of `HeldRows`, over the blocks of the cluster
_BLOCK_WARPS = 8  # the largest number of warps of `HeldRows` for which one block suffices
_SHARED_SUMS = 1 << 14  # the largest product rows * segments for which blocks of `ManyRows` share rows
# The largest shared memory, in bytes, of a block that reads x again. With more of it the L1 cache would be smaller, and
# reading x again slower: by 5 % on an H200 for 67 million elements.
_REREADING_BYTES = 195 << 10
_STRIP_WORDS = 16  # the number of words from one strip's word to the next strip's (cu/coat/forward_strips.cuh)


def forward_plan(limits: Limits, rows: int, columns: int, QB: int) -> HeldRows | HeldTiles | FewRows | ManyRows:
    """The quickest plan of RMSNorm's forward: kernel, grid, tiles, and which data stays in registers or shared memory.
    `QB` is the number of columns of a group."""
    if limits.capability >= _CLUSTER_CAPABILITY and HeldRows.fits(rows, columns) and HeldRows.pays(rows):
        return HeldRows(rows, columns)
    tiles = HeldTiles.best(limits, rows, columns)
    if tiles is not None and HeldTiles.pays(rows, columns):
        return tiles
    teams = rows * ceil_div(columns, _SEGMENT) <= _SHARED_SUMS
    few = (_FEW_ROWS if teams else _FEW_UNSHARED_ROWS) * min(limits.sm_count, MAX_WORD_BLOCKS)
    if rows > min(few, MAX_WORD_ROWS):
        return ManyRows(limits, rows, columns, QB)
    return FewRows(limits, rows, columns)


def layernorm_plan(limits: Limits, rows: int, columns: int, QB: int, affine: bool) -> HeldTiles | ManyRows | None:
    """The quickest plan of LayerNorm's forward, with w and b if `affine`. None where cu/coat/fp8_layernorm_forward.cu
    is quicker: that kernel reads x twice, but has fewer grid barriers.
    """
    if rows < _LAYER_ROWS:
        return None
    tiles = HeldTiles.best(limits, rows, columns)
    if tiles is not None:
        return tiles
    if rows * ceil_div(columns, _SEGMENT) > _SHARED_SUMS and rows <= _FEW_UNSHARED_ROWS * limits.sm_count:
        return None
    plan = ManyRows(limits, rows, columns, QB, layer=True, affine=affine)
    return None if affine and plan.rereads else plan


class _Plan:
    """The fields and methods that all plans have in common."""

    cluster = 1  # blocks of a cluster
    waits = True  # blocks wait for one another through the workspace
    warps: int  # warps of a block
    tile_rows: int  # rows of a lane's part of a tile

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return 32 * self.warps

    def run(self, batch_rows: int, address: int) -> int:
        """The number of bytes of one store to qy_t, for batches of `batch_rows` rows and a qy_t at `address`."""
        return column_run(self.tile_rows, batch_rows, address)


class HeldRows(_Plan):
    """The plan of cu/coat/fp8_rmsnorm_forward_few.cu: one block, or one cluster of up to 8 blocks, holds x in
    registers.

    It is for tensors of 1 to 16 rows that at most 32 warps can hold: up to 8 warps are one block, and more are a
    cluster. A warp holds a segment (512 columns) of 4 rows, or of the only row of x. x is read once, and no workspace
    is used.
    """

    kernel = "fp8_rmsnorm_forward_few"
    waits, whole, known, row_lanes, tile_columns, shared_bytes = False, False, True, 1, 16, 0
    parts, groups, longer, resident_columns, chunk_rows = 1, 1, 0, 0, 0

    def __init__(self, rows: int, columns: int) -> None:
        self.tile_rows, self.block_rows = self._rows(rows)
        groups, segments = self.block_rows // self.tile_rows, ceil_div(columns, _SEGMENT)
        block_segments = segments if groups * segments <= _BLOCK_WARPS else ceil_div(segments, _PORTABLE_CLUSTER)
        self.cluster = 1 << (ceil_div(segments, block_segments) - 1).bit_length()
        self.grid, self.warps = self.cluster, block_segments * groups
        self.part_columns = block_segments * _SEGMENT

    @staticmethod
    def _rows(rows: int) -> tuple[int, int]:
        """(Rows of a warp, rows of a block). The block's last rows may lie beyond the tensor's last row."""
        return (1, 1) if rows == 1 else (4, ceil_div(rows, 4) * 4)

    @classmethod
    def fits(cls, rows: int, columns: int) -> bool:
        """Whether one cluster can hold a tensor of this shape."""
        warp_rows, block_rows = cls._rows(rows)
        return 1 <= rows <= _HELD_ROWS and block_rows // warp_rows * ceil_div(columns, _SEGMENT) <= _HELD_WARPS

    @staticmethod
    def pays(rows: int) -> bool:
        """Whether this plan is quicker than `FewRows`.

        If the number of rows is no multiple of 4, columns of qy_t do not consist of whole words, and the few blocks of
        this plan take long to store them. On an H200 a 2x2048 tensor takes 6.2 us with this plan and 3.8 us with
        `FewRows`; a 4x2048 tensor takes 2.9 us with this plan and 4.4 us with `FewRows`.
        """
        return rows == 1 or rows % 4 == 0

    def run(self, batch_rows: int, address: int) -> int:
        return column_run(16, 16 if self.block_rows == 1 else batch_rows, address)

    def defines(self, aligned: bool) -> Defines:
        return _tile_defines(self, self.tile_rows, aligned) + defines(cluster=self.cluster)


class HeldTiles(_Plan):
    """The plan of cu/coat/fp8_norm_forward_tiles.cu: x, which has up to a few thousand rows, is in the registers of one
    grid and is read once.

    A block holds `block_rows` rows of a segment of 512 columns, or of one of the `split` parts of such a segment. It
    waits for all other blocks.
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
        self.pairs = self.block_rows * self.segments * (2 * split if split > 1 else 1)  # sums that a strip publishes
        self.resident = ceil_div(self.grid, limits.sm_count)  # blocks that a multiprocessor runs at the same time

    @classmethod
    def best(cls, limits: Limits, rows: int, columns: int) -> HeldTiles | None:
        """The quickest of the plans that fit; None if none fits.

        Smaller tiles occupy more multiprocessors, but then each block reads more words of other blocks.
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
        """Whether this plan is quicker than `FewRows`. If the number of rows is no multiple of 4, columns of qy_t do
        not consist of whole words, and storing them takes long if there are few blocks.
        """
        return rows >= 12 and (rows % 4 == 0 or rows >= 64 or (rows > 16 and columns >= 8192))

    @property
    def fits(self) -> bool:
        """Whether all blocks can run at the same time, and the workspace has enough words."""
        return (
            0 < self.resident * self.threads <= 512
            and self.grid <= MAX_WORD_BLOCKS
            and self.strips * _STRIP_WORDS <= MAX_WORD_ROWS
            and 4 * self.strips * self.pairs <= MAX_WORD_SUMS  # two words per sum, and LayerNorm exchanges sums twice
        )

    def defines(self, aligned: bool) -> Defines:
        turns = self.threads // self.block_rows
        more = defines(split=self.split, slots=ceil_div(self.segments, turns), resident=self.resident)
        return _tile_defines(self, self.tile_rows, aligned) + more


class FewRows(_Plan):
    """The plan of cu/coat/fp8_rmsnorm_forward.cu: the rows of phase 1 and the tiles of phase 2 are divided among the
    blocks independently of each other, so x is read twice."""

    kernel = "fp8_rmsnorm_forward"
    parts, resident_columns, whole = 1, 0, False

    def __init__(self, limits: Limits, rows: int, columns: int) -> None:
        multiprocessors = min(limits.sm_count, MAX_WORD_BLOCKS)
        self.part_columns = columns
        self.block_rows = 1 if rows <= multiprocessors else 2 if rows <= 2 * multiprocessors else 4
        lanes = next(n for n in (1, 2, 4, 8) if n == 8 or 4 * n >= rows)
        # Take the first choice in which no warp has more than `most` tiles. The choices begin with the smallest tiles.
        for self.warps, shape, most in (
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
        blocks = 1 if rows * columns <= _ONE_BLOCK_ELEMENTS else max(groups, ceil_div(tiles, self.warps))
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
    """The plan of cu/coat/fp8_norm_forward_rows.cu: a block takes groups of 32 or 64 rows, or some columns of these
    rows, and keeps as much of them in shared memory as fits.

    With groups of 16 rows qy_t would be written in half sectors, which is slow.
    """

    kernel = "fp8_norm_forward_rows"
    warps = 16

    def __init__(
        self, limits: Limits, rows: int, columns: int, QB: int, *, layer: bool = False, affine: bool = False
    ) -> None:
        """`layer`: the norm is LayerNorm, with w and b if `affine`. With w and b each block has whole rows."""
        self._row_bytes = 8 if layer else 4  # bytes of a row's rstd and, with LayerNorm, mean
        segments = ceil_div(columns, _SEGMENT)
        shared = rows * segments <= _SHARED_SUMS and not affine
        widest = min(segments, limits.sm_count, MAX_WORD_BLOCKS) if shared else 1
        self._share_out(limits, rows, columns, QB, widest)
        # If `known` is False, rstd does not fit into shared memory. Several blocks of a team would then write and read
        # rstd of the same rows in global memory, so a team has one block.
        if self.parts > 1 and not self.known:
            self._share_out(limits, rows, columns, QB, 1)

    def _share_out(self, limits: Limits, rows: int, columns: int, QB: int, widest: int) -> None:
        """Set all fields to those of the plan whose teams have at most `widest` blocks."""
        multiprocessors = min(limits.sm_count, MAX_WORD_BLOCKS)
        segments = ceil_div(columns, _SEGMENT)
        self.block_rows, split = min(
            ((size, parts) for size in (64, 32) for parts in (1, 2, 4, 8) if parts <= widest),
            key=lambda way: _busiest(rows, segments, multiprocessors, *way) + _EXCHANGE_ROWS * (way[1] > 1),
        )
        each = ceil_div(segments, split)
        self.parts = ceil_div(segments, each)
        self.part_columns = each * _SEGMENT
        # Several blocks share rows only if there are few rows; tiles are then small. Otherwise a lane has 16 rows of a
        # tile, so that it stores columns with wider instructions.
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
            room = min(room, _REREADING_BYTES)
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
    """The work of the busiest block, as rows * segments, if teams of `parts` blocks take groups of `size` rows."""
    groups = ceil_div(ceil_div(rows, size), max(1, multiprocessors // parts))
    return groups * size * ceil_div(segments, parts)
