# SPDX-License-Identifier: Apache-2.0
"""How the forward kernels share out rows and tiles: the host's side of cu/fp8_rmsnorm_forward*.cu."""

from __future__ import annotations

from ..runtime.device import Device
from .scratch import STATE_BYTES

MAX_COLUMNS = 1 << 18
MAX_BLOCKS = 256
MAX_WORD_ROWS = 2048
MAX_WORD_SUMS = 1 << 14
WORDS_BYTES = STATE_BYTES + 8 * (2 * MAX_BLOCKS + MAX_WORD_ROWS + MAX_WORD_SUMS)  # `struct GridWords`
_SEGMENT = 512
_SUMS_BYTES = 16384
_MEETINGS_BYTES = 32
_ALONE = 8192
_FEW_ROWS = 8  # a multiprocessor
_EXCHANGE = 16  # what the sums of a team cost, in rows of a segment


def forward_plan(device: Device, rows: int, columns: int, QB: int) -> FewRows | ManyRows:
    """Kernel, grid, tiles and what stays on the chip. Results do not depend on it."""
    if rows > min(_FEW_ROWS * min(device.sm_count, MAX_BLOCKS), MAX_WORD_ROWS):
        return ManyRows(device, rows, columns, QB)
    return FewRows(device, rows, columns)


class FewRows:
    """Rows and tiles are shared out by themselves: x is read twice."""

    kernel = "fp8_rmsnorm_forward"
    parts, resident_rows = 1, 0

    def __init__(self, device: Device, rows: int, columns: int) -> None:
        multiprocessors = min(device.sm_count, MAX_BLOCKS)
        self.part_columns = columns
        self.block_rows = 1
        self.warps = 8 if 2 < rows <= multiprocessors else 16
        lanes = next(n for n in (1, 2, 4, 8) if n == 8 or 4 * n >= rows)
        for warps, shape in ((16, (16, 8, 4)), (16, (16, 4, 4)), (8, (8, 4, 4)), (self.warps, (4, 4, lanes))):
            self.tile_rows, self.tile_columns, self.row_lanes = shape
            down = _ceil_div(rows, self.tile_rows * self.row_lanes)
            tiles = down * _ceil_div(columns, 32 // self.row_lanes * self.tile_columns)
            if rows >= 64 and tiles >= (warps - 1) * multiprocessors:
                break
        self.warps = warps
        blocks = 1 if rows * columns <= _ALONE else max(rows, _ceil_div(tiles, self.warps))
        self.grid = max(1, min(multiprocessors, blocks))
        self.groups, self.longer = divmod(rows, self.grid)
        segments = _ceil_div(columns, _SEGMENT)
        self.chunk_rows = max(1, min(_ceil_div(rows, self.grid), _SUMS_BYTES // (8 * segments)))
        rstds = (rows if self.grid == 1 else 0) + self.warps * self.tile_rows * self.row_lanes
        self.shared_bytes = 8 * segments * self.chunk_rows + 4 * rstds

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        return _tile_defines(self, 1)


class ManyRows:
    """A block takes groups of 32 or 64 rows, or some of their columns, which it keeps as far as they fit and quantises.

    With groups of 16 rows qy_t would be written in half sectors, which is dear.
    """

    kernel = "fp8_rmsnorm_forward_rows"
    tile_rows, tile_columns = 4, 16

    def __init__(self, device: Device, rows: int, columns: int, QB: int) -> None:
        multiprocessors = min(device.sm_count, MAX_BLOCKS)
        segments = _ceil_div(columns, _SEGMENT)
        self._all_segments, self._QB = segments, QB
        self._room = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        most = min(segments, multiprocessors)
        splits = [n for n in (1, 2, 4, 8) if n <= most and (n == 1 or rows * segments <= MAX_WORD_SUMS)]
        self.block_rows, self.parts = min(
            ((size, parts) for size in (64, 32) for parts in splits),
            key=lambda way: _busiest(rows, segments, multiprocessors, *way) + _EXCHANGE * (way[1] > 1),
        )
        self._take(rows, columns, multiprocessors)

    def _take(self, rows: int, columns: int, multiprocessors: int) -> None:
        each = _ceil_div(self._all_segments, self.parts)
        self.parts = _ceil_div(self._all_segments, each)
        self.part_columns = each * _SEGMENT
        self.row_lanes = self.block_rows // self.tile_rows
        groups = _ceil_div(rows, self.block_rows)
        teams = max(1, min(multiprocessors // self.parts, groups))
        self.grid = teams * self.parts
        self.groups, self.longer = divmod(groups, teams)
        width = min(self.part_columns, columns)
        most = (self.groups + (self.longer > 0)) * self.block_rows
        per_row = 4 * (self._all_segments + 1)
        self.chunk_rows = max(4, min(most, _SUMS_BYTES // per_row // 4 * 4))
        known_bytes = most * (2 * _ceil_div(width, self._QB) + 4)
        self.shared_bytes = _MEETINGS_BYTES + per_row * self.chunk_rows
        self.known = self.shared_bytes + known_bytes <= self._room
        self.shared_bytes += known_bytes * self.known
        pitch = _ceil_div(width, 128) * 128
        self.resident_rows = min(most, (self._room - self.shared_bytes) // pitch // 4 * 4)
        self.shared_bytes += self.resident_rows * pitch
        # Warps that stay in a segment have its weights.
        self.warps = next((n for n in (24, 22, 20) if n % each == 0 or each % n == 0), 24)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        return (*_tile_defines(self, 4), ("DRVFUSE_KNOWN", int(self.known)))


def _tile_defines(plan: FewRows | ManyRows, batch: int) -> tuple[tuple[str, str | int], ...]:
    return (
        ("DRVFUSE_WARPS", plan.warps),
        ("DRVFUSE_BATCH", batch),
        ("DRVFUSE_BLOCK_ROWS", plan.block_rows),
        ("DRVFUSE_TILE_ROWS", plan.tile_rows),
        ("DRVFUSE_TILE_COLUMNS", plan.tile_columns),
        ("DRVFUSE_ROW_LANES", plan.row_lanes),
    )


def _busiest(rows: int, segments: int, multiprocessors: int, size: int, parts: int) -> int:
    """Rows times segments of the block that has most."""
    groups = _ceil_div(_ceil_div(rows, size), max(1, multiprocessors // parts))
    return groups * size * _ceil_div(segments, parts)


def column_run(tile_rows: int, batch_rows: int, address: int) -> int:
    """Bytes of a column of qy_t that one store can take: they must be aligned and stay in one batch."""
    run = tile_rows
    while run > 1 and (batch_rows % run or address % run):
        run //= 2
    return run if run >= 4 else 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
