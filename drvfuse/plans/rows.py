# SPDX-License-Identifier: Apache-2.0
"""How the fused norms over rows divide their work: grids, chunks, and the bytes of a row's results."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div
from .shared import MAX_BLOCKS, MAX_THREADS, PACK_BYTES, LaunchShape, Work, chunk_of, ragged

MAX_COLUMNS = 16384
# The largest number of rows. Kernels number rows by int, also the rows after the tensor's end in the last round.
MAX_ROWS = 2**30
_MAX_PAYLOAD = 2**32 - 1  # the largest payload in bytes: the kernels' offsets have 32 bits


@dataclass(frozen=True)
class RowsWork(Work):
    """The same for a kernel whose units are rows."""

    residual: bool = False  # a residual is added
    residual_itemsize: int = 0  # bytes of an element of the residual; 0 if it has the inputs' dtype
    normed: bool = False  # the normed rows, in the inputs' dtype, are results too
    group: int = 0  # columns that share a scale; 0: one scale per row
    scales_itemsize: int = 4  # bytes of a scale
    out_lanes: int = 1  # numbers that an element of the output holds: two in FP4, else one

    def sent_bytes(self, row_packs: int) -> int:
        """Bytes of a row's results, without scales, that its owner stores for the other ranks or sends to them."""
        if self.residual:
            return row_packs * self.width * (self.residual_itemsize or self.itemsize)
        pack = max(self.width * self.out_itemsize // self.out_lanes, 4)  # rounded up to whole words
        return row_packs * (pack + (PACK_BYTES if self.normed else 0))

    def scale_bytes(self, columns: int) -> int:
        """The largest number of bytes that a row's scales take where its owner stores them for other ranks: a word per
        scale."""
        return 4 * (columns // self.group if self.group else 1)

    def sent_scale_bytes(self, columns: int) -> int:
        """The bytes of the words in which push_two_shot sends a row's scales (cu/collectives/rows/scale_words.cuh)."""
        if self.scales_itemsize != 1 or not 0 < self.group <= 32:
            return self.scale_bytes(columns)
        return 4 * ceil_div(columns // self.group, 4)

    def phases(self, shape: LaunchShape, units: int) -> int:
        """The number of phases that a traced block records in one chunk, if its rank sums `units` rows there: the sum,
        norm and store of each row."""
        each = ceil_div(units, shape.blocks)
        # One phase for each row that the rank reduces, then three for each row of every rank.
        if self.algo == "two_stage" and self.residual:
            return each * (1 + 3 * self.ranks)
        return 3 * each + (self.algo == "two_stage")


def launch(rows: int, columns: int, itemsize: int, ranks: int, algo: str, max_blocks: int) -> LaunchShape:
    """Grid and block for 1 to MAX_ROWS rows of 1 to MAX_COLUMNS columns: one block per row, few packs per thread."""
    if rows > MAX_ROWS:
        raise ArgumentError("rows", rows, f"at most {MAX_ROWS}")
    if not 1 <= columns <= MAX_COLUMNS:
        raise ArgumentError("columns", columns, f"1 to {MAX_COLUMNS}")
    row_packs = ceil_div(columns * itemsize, PACK_BYTES)
    packs = ceil_div(row_packs, MAX_THREADS)
    threads = ceil_div(ceil_div(row_packs, packs), 32) * 32
    share = ceil_div(rows, ranks) if algo == "two_stage" else rows
    return LaunchShape(min(share, max_blocks, MAX_BLOCKS), threads, packs)


def heads_in_warps(rows: int, columns: int, head: int, itemsize: int) -> bool:
    """Whether each head of `head` columns lies within a warp when each thread holds one pack of a row of `columns`.

    If so, a row of the kernel has `columns` columns and several heads; otherwise each head is a row of the kernel."""
    packs = head * itemsize // PACK_BYTES
    whole = not ragged(head, itemsize) and packs in (1, 2, 4, 8, 16, 32)
    return whole and head < columns <= MAX_COLUMNS and rows * (columns // head) <= MAX_ROWS


def chunk(work: RowsWork, rows: int, columns: int, payload_bytes: int) -> int:
    """The number of rows of a chunk: all rows, or as many as the payload holds; 1 for a kernel without chunks."""
    row_packs = ceil_div(columns, work.width)
    row_bytes = row_packs * PACK_BYTES
    if work.algo == "two_stage":
        rows = ceil_div(rows, work.ranks)
        result = left_bytes(work, columns)
        each = work.ranks * row_bytes + result if work.staged else 2 * result
        if work.multimem:
            each = work.ranks * _multimem_slot(work, columns) * (1 if work.staged else 2)
    elif work.staged:
        each = 2 * row_bytes
    else:
        return 1
    return chunk_of(rows, each, min(payload_bytes, _MAX_PAYLOAD), "row of every rank")


def result_bytes(row_bytes: int) -> int:
    """The largest number of bytes that the results of a row (`row_bytes`) and its scale take in a payload, where both
    are rounded up to 16 bytes.
    """
    return row_bytes // 16 * 16 + 32


def left_bytes(work: RowsWork, columns: int) -> int:
    """The largest number of bytes that an owner stores in its payload for one row, for the other ranks to read."""
    sent = work.sent_bytes(ceil_div(columns, work.width))
    return sent if work.residual else result_bytes(sent) + (work.scale_bytes(columns) if work.group else 0)


def _multimem_slot(work: RowsWork, columns: int) -> int:
    """The bytes of multicast staging that a row takes: for the row and its results (in one place, unless the results
    are larger than the row); for its scales; and for its normed row."""
    row_packs = ceil_div(columns, work.width)
    row_bytes, sent = row_packs * PACK_BYTES, work.sent_bytes(row_packs)
    # In the staging, residual_out overwrites the input row. If it is larger than that row, it lies after the row.
    if work.residual:
        return sent + (row_bytes if work.staged and sent > row_bytes else 0)
    normed = row_bytes if work.normed else 0
    result = row_bytes if work.staged else ceil_div(sent - normed, 16) * 16
    scales = ceil_div(work.scale_bytes(columns), 16) * 16 if work.out_itemsize == 1 else 0
    return result + scales + normed
