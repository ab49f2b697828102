# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes of the structures in the workspaces of one-device ops, as the headers of cu/sync lay them out."""

from __future__ import annotations

STATE_BYTES = 16  # the size of `struct ScratchState` of scratch.cuh
GRID_BYTES = STATE_BYTES + 512 * 8  # the size of `struct GridWorkspace` of grid_barrier.cuh
MAX_GRID = 512  # the maximum number of blocks that a grid barrier joins

MAX_WORD_BLOCKS = 256
MAX_WORD_ROWS = 2048
MAX_WORD_SUMS = 1 << 16
WORDS_BYTES = STATE_BYTES + 8 * (2 * MAX_WORD_BLOCKS + MAX_WORD_ROWS + MAX_WORD_SUMS)  # the size of `struct GridWords`

# The offset of the words of the backward ops. These words are 0 between launches, and follow the words of all other
# ops.
SUMS_AT = -(-max(WORDS_BYTES, GRID_BYTES) // 16) * 16
