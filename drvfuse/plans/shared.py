# SPDX-License-Identifier: Apache-2.0
"""How the collectives divide their work: grids, chunks of the workspace, and how many phases a traced block records.

Everything here depends on shapes and limits that are the same on every rank, so every rank arrives at the same kernel,
grid and number of barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from .limits import ceil_div

PACK_BYTES = 16
MAX_BLOCKS = 256  # the number of blocks for which a workspace has flags
MAX_THREADS = 512
MAX_COLUMNS = 16384
# The largest number of rows. Kernels number rows by int, also the rows after the tensor's end in the last round.
MAX_ROWS = 2**30
_MAX_PAYLOAD = 2**32 - 1  # the largest payload in bytes: the fused kernels' offsets have 32 bits


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block, and the number of packs per thread that the kernel must be compiled for."""

    blocks: int
    threads: int
    packs: int


@dataclass(frozen=True)
class Work:
    """The properties of a collective's kernel that decide chunks and traces."""

    op: str
    algo: str
    ranks: int
    itemsize: int  # bytes of an element of the inputs
    out_itemsize: int  # bytes of an element of the output
    staged: bool = False  # the kernel copies its input to the workspace, where peers read it
    local: bool = False  # no peer takes part
    residual: bool = False  # a residual is added
    multimem: bool = False  # inputs are read through multicast memory; if they are staged, they are staged there
    to_outputs: bool = False  # results are stored through multicast memory to the outputs of all ranks
    nodes: bool = False  # the kernel adds the partial sums of nodes, which `node_sums` has written
    residual_itemsize: int = 0  # bytes of an element of the residual; 0 if it has the inputs' dtype
    normed: bool = False  # the normed rows, in the inputs' dtype, are results too
    group: int = 0  # columns that share a scale; 0: one scale per row
    scales_itemsize: int = 4  # bytes of a scale
    out_lanes: int = 1  # numbers that an element of the output holds: two in FP4, else one

    @property
    def width(self) -> int:
        """Elements of an input pack."""
        return PACK_BYTES // self.itemsize

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


def ragged(elements: int, itemsize: int) -> bool:
    """Whether the last pack of `elements` elements is incomplete."""
    return elements * itemsize % PACK_BYTES != 0


def allreduce_launch(
    count: int, itemsize: int, ranks: int, algo: str, max_blocks: int, multimem: bool = False
) -> LaunchShape:
    """Grid and block for `count` >= 1 elements: one thread per pack that the rank sums, if `max_blocks` allows that.

    A thread has up to eight loads in flight, and at most four sums. With `multimem` a sum takes one load.
    """
    packs = ceil_div(count * itemsize, PACK_BYTES)
    if algo == "two_stage":
        packs = ceil_div(packs, ranks)
    threads = 256 if packs <= 256 * 64 else MAX_THREADS
    blocks = min(ceil_div(packs, threads), max_blocks, MAX_BLOCKS)
    return LaunchShape(blocks, threads, min(4, max(1, 8 // (1 if multimem else ranks))))


def rmsnorm_launch(rows: int, columns: int, itemsize: int, ranks: int, algo: str, max_blocks: int) -> LaunchShape:
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


def allreduce_chunk(work: Work, count: int, payload_bytes: int) -> int:
    """The number of packs of a chunk: all packs, or as many as the payload holds; 1 for a kernel without chunks."""
    packs = ceil_div(count, work.width)
    out_bytes = work.width * work.out_itemsize
    if work.algo == "two_stage":
        packs = ceil_div(packs, work.ranks)
        if work.to_outputs:
            return packs
        each = work.ranks * PACK_BYTES + out_bytes if work.staged else 2 * out_bytes
        if work.multimem:
            each = work.ranks * PACK_BYTES * (1 if work.staged else 2)
    elif work.staged:
        each = 2 * PACK_BYTES
    else:
        return 1
    return chunk_of(packs, each, payload_bytes, "16-byte pack of every rank")


def rmsnorm_chunk(work: Work, rows: int, columns: int, payload_bytes: int) -> int:
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


def left_bytes(work: Work, columns: int) -> int:
    """The largest number of bytes that an owner stores in its payload for one row, for the other ranks to read."""
    sent = work.sent_bytes(ceil_div(columns, work.width))
    return sent if work.residual else result_bytes(sent) + (work.scale_bytes(columns) if work.group else 0)


def _multimem_slot(work: Work, columns: int) -> int:
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


def chunk_of(wanted: int, each: int, payload_bytes: int, what: str) -> int:
    """The number of items of a chunk: `wanted`, or as many items of `each` bytes as the payload holds.

    Raises ArgumentError if the payload holds none.
    """
    chunk = min(wanted, payload_bytes // each)
    if chunk < 1:
        raise ArgumentError(
            "workspace_bytes", payload_bytes, f"at least {each} in Group.local for this call: one {what}"
        )
    return chunk


def naive_slot(payload_bytes: int, ranks: int, unit: int) -> int:
    """The largest number of bytes of a rank's input that a chunk of algorithm "naive" takes, a multiple of `unit`.

    The payload has one slot of this size for each other rank. Slots begin at multiples of 16 bytes. Raises
    ArgumentError if a slot has no room for one unit.
    """
    available = payload_bytes // max(ranks - 1, 1) // 16 * 16
    if available < unit:
        needed = ceil_div(unit, 16) * 16 * (ranks - 1)
        raise ArgumentError("workspace_bytes", payload_bytes, f"at least {needed} in Group.local for this call")
    return available // unit * unit


def barriers(work: Work, items: int, chunk: int) -> int:
    """The number of barriers that a launch over `items` elements (all-reduce) or rows (fused) passes with chunks of
    `chunk` packs or rows.
    """
    if work.local:
        return 0
    if work.op == "node_sums":
        return 1 + work.staged
    if work.nodes:
        return 1
    if work.op == "allreduce":
        items = ceil_div(items, work.width)
    if work.algo == "two_stage":
        chunks = ceil_div(ceil_div(items, work.ranks), chunk)
        return 1 + chunks * (2 if work.staged else 1)
    return 1 + (ceil_div(items, chunk) if work.staged else 1)


def trace_counts(work: Work, shape: LaunchShape, items: int, chunk: int) -> tuple[int, int]:
    """(The largest number of phases, the number of barriers) that a traced block records for `items` elements
    (all-reduce) or rows (fused)."""
    rounds, chunks = barriers(work, items, chunk), 1
    if work.algo == "two_stage":
        items = ceil_div(items if work.op != "allreduce" else ceil_div(items, work.width), work.ranks)
    elif work.op == "allreduce":
        items = ceil_div(items, work.width)
    if work.staged or work.algo == "two_stage":
        chunks, items = ceil_div(items, chunk), min(items, chunk)
    of_rows = work.op == "allreduce_rmsnorm_fp8"
    phases = _rmsnorm_phases(work, shape, items) if of_rows else _allreduce_phases(work, shape, items)
    if work.local:
        return 1 + phases + 1, 0
    return 1 + 2 * rounds + chunks * (work.staged + phases) + 1, rounds


def _allreduce_phases(work: Work, shape: LaunchShape, packs: int) -> int:
    """The number of phases that a traced block records in one chunk, if its rank reduces `packs` packs there: one load
    for several packs, and a sum and a store for each pack.
    """
    each = ceil_div(packs, shape.blocks * shape.threads)
    loads = each // shape.packs + (shape.packs - 1 if each >= shape.packs else each)
    return loads + 2 * each + (work.algo == "two_stage")


def _rmsnorm_phases(work: Work, shape: LaunchShape, rows: int) -> int:
    """The number of phases that a traced block records in one chunk, if its rank reduces `rows` rows there: the sum,
    norm and store of each row."""
    each = ceil_div(rows, shape.blocks)
    # One phase for each row that the rank reduces, then three for each row of every rank.
    if work.algo == "two_stage" and work.residual:
        return each * (1 + 3 * work.ranks)
    return 3 * each + (work.algo == "two_stage")
