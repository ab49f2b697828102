# SPDX-License-Identifier: Apache-2.0
"""How cu/gemv/gemv_partial_norm.cu divides its work: warps, packs, rows, stages in flight, and the rows of each block.

Results do not depend on a plan, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from .limits import Limits

MAX_ROWS = 8  # the maximum number of rows of act
PACK_BYTES = 16  # bytes of a pack, which a lane reads at once
GROUP = 32  # packs of a group, which a warp reads at once
SCALE_GROUP = 128  # columns of the weight that share a group scale
ACT_SCALE_GROUPS = (128, 64)  # the possible numbers of columns of act that share a group scale
GROUP_BYTES = PACK_BYTES * GROUP
PRODUCT_WARPS = 16  # the maximum number of warps that multiply
# The maximum number of warps that share a copied row. It is half of PRODUCT_WARPS, so that a block has room for two
# teams, which hide each other's latencies.
TEAM_WARPS = 8
RESIDENT = 32  # the maximum number of values of act that a lane keeps in registers
NORM_WARPS = 8  # the maximum number of warps that compute norms, over all rows of act
ROUND_COLUMNS = 4096  # the maximum number of normed columns that the last block waits for in one round
STAGES = 4  # the maximum number of stages in flight

# Copies to shared memory are faster than loads if a row of the weight has at least COPIED_ROW_BYTES and a block at
# least COPIED_ROWS rows. These numbers, and the sizes for copies and for loads, were timed on an H200.
COPIED_ROW_BYTES, COPIED_ROWS = 7 << 10, 8
# Used instead of COPIED_ROW_BYTES if act has several rows. Their products need many registers, which leaves few for
# loads, so copies are faster for shorter rows too.
MANY_COPIED_ROW_BYTES = 4 << 10
COPIED_STAGE_BYTES, COPIED_SUM_WARPS = 16 << 10, 2
COPIED_BYTES = 96 << 10  # the maximum number of bytes of copies in flight: more would delay other reads
LOADED_PACKS, LOADED_SUM_WARPS = 4, 4
COPY_CAPABILITY = (9, 0)
KERNEL_SHARED_BYTES = 4 << 10  # the maximum static shared memory of the kernel
# The maximum number of rows per block for which each warp computes whole rows by itself. With more rows per block it
# is faster if many warps load a row.
DIRECT_ROWS = 32


def groups_of_row(k: int, itemsize: int) -> int:
    """The number of groups of 32 packs in a row of `k` weights of `itemsize` bytes; the last group may be
    incomplete.
    """
    return -(-k * itemsize // GROUP_BYTES)


def _power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`."""
    return 1 << most.bit_length() - 1


@dataclass(frozen=True)
class Shape:
    """The shape of a block. A stage is a part of the weight that is loaded as a unit."""

    warps_a_row: int
    """Warps of a team, which multiply a row together."""
    teams: int
    """Teams of a block."""
    packs: int
    """16-byte packs of a row that a lane holds."""
    step: int
    """Rows of a stage."""
    chunks: int
    """Stages of a row."""
    copied: bool
    """Whether stages are copied to shared memory; otherwise they are loaded to registers."""
    stages: int
    """Stages in flight."""
    sum_warps: int
    """Warps that add the products; 0: each warp computes whole rows and adds its products itself."""
    slots: int
    """Slots for stages."""

    def shared_bytes(self, m: int) -> int:
        """The bytes of shared memory for copied weights and group sums, with `m` rows of act."""
        groups = self.slots * self.step * self.warps_a_row * self.packs
        return self.copied * groups * GROUP_BYTES + -(-4 * groups * m // PACK_BYTES) * PACK_BYTES

    def norm_warps(self, m: int) -> int:
        """The number of warps that compute the norm of a row of act."""
        return _power_of_two(NORM_WARPS // m)

    def norm_batch(self, m: int, n_normed: int) -> int:
        """The number of packs, of four normed columns each, that a lane waits for in one round."""
        return next((batch for batch in (1, 2) if self._norm_columns(m, batch) >= n_normed), 4)

    def norm_held(self, m: int, n_normed: int) -> bool:
        """Whether one batch covers all normed columns of a lane, so that the lane waits only once."""
        return self._norm_columns(m, self.norm_batch(m, n_normed)) >= n_normed

    def _norm_columns(self, m: int, batch: int) -> int:
        return 4 * GROUP * batch * self.norm_warps(m)

    def threads(self, m: int) -> int:
        """The number of threads of a block: those of warps that multiply, that add, and that compute the norm."""
        return 32 * (self.warps_a_row * self.teams + self.sum_warps + m * self.norm_warps(m))

    @staticmethod
    def of(m: int, groups: int, width: int, rows: int, can_copy: bool) -> Shape:
        """The shape for `groups` groups per row of the weight, `width` weights per pack, and `rows` rows per block."""
        least_bytes = COPIED_ROW_BYTES if m == 1 else MANY_COPIED_ROW_BYTES
        copied = can_copy and groups * GROUP_BYTES >= least_bytes and rows >= COPIED_ROWS
        if not copied and m == 1 and groups <= LOADED_PACKS and groups * width <= RESIDENT and rows <= DIRECT_ROWS:
            return Shape._direct(groups, rows)
        choices = [p for p in (1, 2, 4) if copied and m == 1 and groups <= p * TEAM_WARPS and p * width <= RESIDENT]
        choices += [p for p in (1, 2, 4) if groups <= p * PRODUCT_WARPS]
        packs = choices[0] if choices else 4
        warps_a_row = min(PRODUCT_WARPS, -(-groups // packs))
        chunks = -(-groups // (packs * warps_a_row))
        # A stage may have a single row if lanes keep act in registers. Otherwise it has pairs of rows, which share
        # loads of act.
        least = 1 if m == 1 and chunks == 1 and packs * width <= RESIDENT else 2
        row_bytes = warps_a_row * packs * GROUP_BYTES
        step = COPIED_STAGE_BYTES // row_bytes if copied else LOADED_PACKS // packs
        step = max(least, min(step, 8 // packs, -(-rows * warps_a_row // PRODUCT_WARPS)))
        step += step % least
        most = min(STAGES, COPIED_BYTES // (step * row_bytes)) if copied else STAGES
        stages = min(_power_of_two(max(1, most)), _power_of_two(2 * -(-rows // step) * chunks - 1))
        teams = _power_of_two(min(stages, PRODUCT_WARPS // warps_a_row))
        sum_warps = 1 if chunks > 1 else min(stages, COPIED_SUM_WARPS if copied else LOADED_SUM_WARPS)
        slots = stages + max(teams, sum_warps)
        return Shape(warps_a_row, teams, packs, step, chunks, copied, stages, sum_warps, slots)

    @staticmethod
    def _direct(groups: int, rows: int) -> Shape:
        """A shape in which each warp computes whole rows, adds their products and publishes the sums itself."""
        packs = _power_of_two(2 * groups - 1)
        step = min(LOADED_PACKS // packs, -(-rows // PRODUCT_WARPS))
        return Shape(1, min(PRODUCT_WARPS, -(-rows // step)), packs, step, 1, False, 1, 0, 1)

    @property
    def sum_lanes(self) -> int:
        """The number of lanes that add the groups of a row."""
        return min(GROUP, _power_of_two(2 * self.warps_a_row * self.packs - 1))


@dataclass(frozen=True)
class Shares:
    """The number of blocks, and the numbers of rows of each. All fields except `grid` are those of `struct
    GemvParams`."""

    grid: int
    rows_share: int
    rows_more: int
    normed_share: int
    normed_more: int

    @staticmethod
    def of(n: int, n_normed: int, most: int) -> Shares:
        """How `n` rows, of which `n_normed` are normed, are divided among at most `most` blocks. Block b has rows b, b
        + grid, ..."""
        grid = min(most, n)
        return Shares(grid, *divmod(n, grid), *divmod(n_normed, grid))

    @property
    def most_rows(self) -> int:
        """The largest number of rows of a block."""
        return self.rows_share + (self.rows_more > 0)

    @property
    def polled_from(self) -> int:
        """The number of normed rows whose sums the last block has stored for the other blocks before it begins to poll
        theirs: all of its normed rows, or all except those of the last ROUND_COLUMNS columns.
        """
        if self.normed_share * self.grid <= ROUND_COLUMNS:
            return self.normed_share
        return max(0, self.normed_share - ROUND_COLUMNS // self.grid)


@dataclass(frozen=True)
class Plan:
    """A launch for `m` rows of act, with `padded` words for the normed columns of each row and `phases` phases that a
    traced block records.
    """

    m: int
    groups: int
    shape: Shape
    shares: Shares
    padded: int
    norm_batch: int
    norm_held: bool
    whole: bool
    phases: int

    @staticmethod
    def of(limits: Limits, m: int, n: int, k: int, itemsize: int, n_normed: int, access: int) -> Plan:
        """The plan for weights [n, k] of `itemsize` bytes whose rows begin and end at multiples of `access` bytes."""
        groups, shares = groups_of_row(k, itemsize), Shares.of(n, n_normed, limits.sm_count)
        can_copy = access == PACK_BYTES and limits.capability >= COPY_CAPABILITY
        width = PACK_BYTES // itemsize
        shape = Shape.of(m, groups, width, shares.most_rows, can_copy)
        # If copies need more shared memory than a block can have, which never happens on an H100, use loads instead.
        if shape.shared_bytes(m) + KERNEL_SHARED_BYTES > limits.shared_bytes:
            shape = Shape.of(m, groups, width, shares.most_rows, False)
        whole = k * itemsize == shape.chunks * shape.warps_a_row * shape.packs * GROUP_BYTES
        phases = 6 + 2 * -(-shares.most_rows // shape.step) * shape.chunks  # a block records two phases for each stage
        batch, held = shape.norm_batch(m, n_normed), shape.norm_held(m, n_normed)
        return Plan(m, groups, shape, shares, -(-n_normed // 4) * 4, batch, held, whole, phases)

    @property
    def words_bytes(self) -> int:
        """The number of bytes of the words through which blocks exchange normed sums."""
        return 8 * self.m * self.padded

    def shared_bytes(self, room: int) -> tuple[int, bool]:
        """(Bytes of dynamic shared memory, at most `room`; whether normed sums are kept there)."""
        needed, stash = self.shape.shared_bytes(self.m), 4 * self.m * self.padded * (not self.norm_held)
        return (needed + stash, stash > 0) if needed + stash <= room else (needed, False)
