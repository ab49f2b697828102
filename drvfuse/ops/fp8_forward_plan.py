# SPDX-License-Identifier: Apache-2.0
"""How the forward kernel shares out its rows and tiles: the host's side of cu/fp8_rmsnorm_forward.cu."""

from __future__ import annotations

from ..runtime.device import Device
from .scratch import STATE_BYTES

MAX_COLUMNS = 1 << 18
MAX_BLOCKS = 256
MAX_WORD_ROWS = 2048
WORDS_BYTES = STATE_BYTES + 8 * (2 * MAX_BLOCKS + MAX_WORD_ROWS)  # `struct GridWords` of cu/grid_words.cuh
_SEGMENT = 512
_SUMS_BYTES = 16384
_ALONE = 8192


class ForwardPlan:
    """Grid, tiles and what stays on the chip. Results do not depend on it.

    With many rows a block takes groups of 32 or 64 rows, keeps and quantises them itself (`own`); with groups of 16
    qy_t would be written in half sectors, which is dear. With fewer rows the tiles are shared out by themselves.
    """

    def __init__(self, device: Device, rows: int, columns: int, QB: int) -> None:
        self.rows, self.columns, self.QB = rows, columns, QB
        self.segments = _ceil_div(columns, _SEGMENT)
        self._shared_bytes = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        multiprocessors = min(device.sm_count, MAX_BLOCKS)
        self.warps = 16
        self.own = rows > min(20 * multiprocessors, MAX_WORD_ROWS)
        if self.own:
            self.batch, self.tile_rows, self.tile_columns = 4, 16, 8
            busiest = {size: _ceil_div(_ceil_div(rows, size), multiprocessors) * size for size in (64, 32)}
            self.block_rows = min(busiest, key=lambda size: busiest[size])
            self.row_lanes = self.block_rows // 16
            blocks = _ceil_div(rows, self.block_rows)
        else:
            self.batch = self.block_rows = 4 if rows >= 8 * multiprocessors else 1
            self.warps = 8 if 2 < rows <= multiprocessors else 16
            lanes = next(n for n in (1, 2, 4, 8) if n == 8 or 4 * n >= rows)
            for shape in ((16, 8, 4), (16, 4, 4), (4, 4, lanes)):
                self.tile_rows, self.tile_columns, self.row_lanes = shape
                down = _ceil_div(rows, self.tile_rows * self.row_lanes)
                tiles = down * _ceil_div(columns, 32 // self.row_lanes * self.tile_columns)
                if rows >= 64 and tiles >= 15 * multiprocessors:
                    break
            blocks = max(_ceil_div(rows, self.block_rows), _ceil_div(tiles, self.warps))
            if rows * columns <= _ALONE:
                blocks = 1
        self.grid = max(1, min(multiprocessors, blocks))
        self.groups, self.longer = divmod(_ceil_div(rows, self.block_rows), self.grid)
        most = (self.groups + (self.longer > 0)) * self.block_rows
        step = self.block_rows
        self.chunk_rows = max(step, min(most, _SUMS_BYTES // (8 * self.segments) // step * step))
        self._most = most

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        return (
            ("DRVFUSE_WARPS", self.warps),
            ("DRVFUSE_BATCH", self.batch),
            ("DRVFUSE_BLOCK_ROWS", self.block_rows),
            ("DRVFUSE_TILE_ROWS", self.tile_rows),
            ("DRVFUSE_TILE_COLUMNS", self.tile_columns),
            ("DRVFUSE_ROW_LANES", self.row_lanes),
            ("DRVFUSE_OWN", int(self.own)),
        )

    def memory(self, static_bytes: int) -> tuple[int, int, int]:
        """(rows of a block of which x stays, rows of which scales and rstd stay, dynamic shared memory)."""
        sums = 8 * self.segments * self.chunk_rows
        if not self.own:
            return 0, 0, sums + 4 * self._most + 4 * self.warps * self.tile_rows * self.row_lanes
        room = self._shared_bytes - static_bytes - sums
        factors = 2 * _ceil_div(self.columns, self.QB) + 4
        known = min(self._most, room // factors // 4 * 4)
        pitch = _ceil_div(self.columns, 128) * 128
        resident = min(known, (room - known * factors) // pitch // 4 * 4)
        return resident, known, sums + known * factors + resident * pitch


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
