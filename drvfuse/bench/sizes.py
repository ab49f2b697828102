# SPDX-License-Identifier: Apache-2.0
"""What ops and their peers have in common in a measurement: sizes, numbers of sets of inputs, and epsilon. The
processes of peers import this module, so it imports no other."""

EPSILON = 1e-6
SUMS = ("allreduce_many", "reduce_scatter", "reduce_scatter_rmsnorm_fp8")
MOVES = ("all_gather", "broadcast", "all_to_all")
"""The ops whose measurements have a size in bytes in place of rows and columns."""
_MOST_COLUMNS = 4096
_ROTATED_BYTES = 256 << 20  # a rank's sets of inputs have this many bytes in all, more than any cache holds


def sets_of(nbytes: int, most: int) -> int:
    """The number of sets of inputs that a run uses if an input has `nbytes`; at most `most`."""
    return max(2, min(most, _ROTATED_BYTES // nbytes))


def unit_of(ranks: int) -> int:
    """A number of bytes. The size of a call is rounded up to a multiple of it, so that the part of an input for each
    rank consists of whole packs.
    """
    return 16 * ranks**2


def input_bytes(op: str, ranks: int, nbytes: int) -> int:
    """The bytes of a rank's input. For all_gather it is the rank's part of an output of `nbytes`, else `nbytes`."""
    return nbytes // ranks if op == "all_gather" else nbytes


def columns_of(nbytes: int, ranks: int) -> int:
    """The number of columns of an input of `nbytes`: the largest multiple of 8, up to 4096, that divides the number of
    elements in a rank's part. A part must have a multiple of 8 elements."""
    part = nbytes // 2 // ranks
    rows = -(-part // _MOST_COLUMNS)
    return next(part // count for count in range(rows, part + 1) if part % (8 * count) == 0)


def tensors_of(nbytes: int) -> int:
    """The number of tensors into which an input of `nbytes` is divided: 16 if each one then begins at a multiple of
    16 bytes, else 1."""
    return 16 if nbytes % 256 == 0 else 1
