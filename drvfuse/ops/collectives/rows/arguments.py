# SPDX-License-Identifier: Apache-2.0
"""The arguments that the fused ops have in common, checked: rows, norm and quantisation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError, require_integer
from ....plans import shared as plans
from ....plans.quantisation import Quantisation
from ...call import operands, options
from ...call.operands import Operand
from ..shared.kernel import INPUT_DTYPES
from ..shared.split import owned_rows
from .form import NORMS

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType

Shapes = tuple[int, ...] | list[tuple[int, ...]]
"""A shape, or a list with a shape for each local rank."""


@dataclass(frozen=True)
class FusedRows:
    """The inputs of a fused op as rows.

    The kernel sees `rows` rows of `columns` elements. If the heads have a length that the kernel supports, a row of the
    kernel has several heads, and `head` is the number of columns of a head. Otherwise each head is a row of the kernel,
    and `head` is 0. Without heads `head` is 0 too. In all cases `normed` columns are normed together.

    `full` is the shape of arrays with all columns of the rows that a rank gets. `each` is the shape of arrays with one
    value for every `normed` columns. `counts` are the numbers of kernel rows that each rank of the group gets;
    `counts` is empty if every rank gets all rows.
    """

    inputs: list[Operand]
    rows: int
    columns: int
    head: int
    normed: int
    full: Shapes
    each: Shapes
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, inputs: list[Operand], head_columns: Any) -> FusedRows:
        """Return the rows of these inputs, for an op by which every rank gets all rows. Raises ArgumentError for a
        dtype, a shape or a length of heads that no kernel supports."""
        first = inputs[0]
        options.one_of(f"dtype of {first.name}", first.dtype.name, INPUT_DTYPES)
        each, normed = _rows(first, head_columns)
        shape = first.shape
        rows = math.prod(shape[:-1])
        if plans.heads_in_warps(rows, shape[-1], normed, first.dtype.itemsize):
            return cls(inputs, rows, shape[-1], normed, normed, shape, each)
        return cls(inputs, math.prod(each), normed, 0, normed, shape, each)

    def split(self, group: Group, splits: Any) -> FusedRows:
        """Return the same rows, for an op that gives `splits[r]` of them to rank r. If `splits` is None, the ranks get
        numbers of rows that are as equal as possible. Raises ArgumentError for splits whose sum is not the number of
        rows."""
        assert isinstance(self.each, tuple)
        shape = self.inputs[0].shape
        heads = self.each[len(shape) - 1 :]  # () without heads
        counts = owned_rows(group, math.prod(shape[:-1]), splits)
        full: Shapes = [(counts[rank.index], shape[-1]) for rank in group]
        each: Shapes = [(counts[rank.index], *heads) for rank in group]
        per_row = 1 if self.head else math.prod(heads)
        return replace(self, full=full, each=each, counts=tuple(count * per_row for count in counts))

    @property
    def dtype(self) -> DType:
        return self.inputs[0].dtype

    @property
    def input_bytes(self) -> int:
        """The number of bytes in an input that belong to one row of the kernel."""
        return self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class NormArguments:
    """The arguments of a fused op's norm. `gammas`, `betas` and `residuals` have one array per local rank; `betas` and
    `residuals` are empty if the call has none. `layer`: the norm is LayerNorm. `numbers` are epsilon and the weight
    offset."""

    gammas: list[Operand]
    betas: list[Operand]
    residuals: list[Operand]
    layer: bool
    numbers: tuple[float, float]

    @classmethod
    def of(
        cls,
        group: Group,
        rows: FusedRows,
        norm: Any,
        gammas: Any,
        betas: Any,
        residuals: Any,
        epsilon: Any,
        weight_offset: Any,
    ) -> NormArguments:
        """Return the checked arguments that the caller gave under these names. Raises ArgumentError."""
        either = dict.fromkeys((rows.dtype.name, "float32"))
        weights = _like(group, "gammas", gammas, (rows.normed,), either)
        added = [] if residuals is None else _like(group, "residuals", residuals, rows.full, either)
        options.one_of("norm", norm, NORMS)
        if betas is not None and norm != "layer":
            raise ArgumentError("betas", "given", 'None, as norm is "rms"')
        shifts = [] if betas is None else _like(group, "betas", betas, (rows.normed,), [weights[0].dtype.name])
        numbers = options.real("epsilon", epsilon, least=0.0), options.real("weight_offset", weight_offset)
        return cls(weights, shifts, added, norm == "layer", numbers)

    @property
    def arrays(self) -> list[list[Operand]]:
        """The lists `gammas`, `betas` and `residuals`, without those that are empty."""
        return [of_ranks for of_ranks in (self.gammas, self.betas, self.residuals) if of_ranks]


def quantisation_of(rows: FusedRows, quantisation: Quantisation | None) -> Quantisation:
    """Return the quantisation of a call. Raises ArgumentError if it does not fit the rows."""
    found = options.quantisation(quantisation)
    found.check(rows.normed, rows.dtype)
    return found


def _rows(first: Operand, head_columns: int | None) -> tuple[tuple[int, ...], int]:
    """Return two values for inputs like `first`: the shape of an array with one value for each row or head that is
    normed, and the number of columns of a row or head."""
    shape = first.shape
    if head_columns is None:
        if not shape or not 1 <= shape[-1] <= plans.MAX_COLUMNS:
            raise ArgumentError(first.name, f"of shape {shape}", f"of shape [..., 1 to {plans.MAX_COLUMNS} columns]")
        return shape[:-1], shape[-1]
    if not shape or not shape[-1]:
        raise ArgumentError(first.name, f"of shape {shape}", "of shape [..., columns] with at least one column")
    needed = f"None, or a number from 1 to {plans.MAX_COLUMNS} that divides the {shape[-1]} columns"
    columns = require_integer("head_columns", head_columns, needed, 1, plans.MAX_COLUMNS)
    if shape[-1] % columns:
        raise ArgumentError("head_columns", columns, needed)
    return (*shape[:-1], shape[-1] // columns), columns


def _like(group: Group, argument: str, value: Any, shape: Shapes, names: Iterable[str]) -> list[Operand]:
    """Return the caller's arrays, one per local rank. They must have the shape `shape`, and their common dtype must be
    one of `names`."""
    found = operands.of_ranks(group, argument, value, shape, None, "as the inputs require")
    if found[0].dtype.name not in names:
        wanted = f"of dtype {' or '.join(names)}, as the inputs require"
        raise ArgumentError(found[0].name, f"of dtype {found[0].dtype}", wanted)
    return found
