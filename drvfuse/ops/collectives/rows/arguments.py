# SPDX-License-Identifier: Apache-2.0
"""The arguments that the fused ops have in common, checked: rows, norm, quantisation, and the arrays that a call
writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import ArgumentError, require_integer
from ....plans import rows as plans
from ....plans.quantisation import Quantisation
from ....runtime.array import Array
from ...call import operands, options, results
from ...call.operands import Operand
from ..shared.kernel import INPUT_DTYPES
from ..shared.split import owned_rows
from .kernel import NORMS

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....runtime.stream import Stream

Shapes = tuple[int, ...] | list[tuple[int, ...]]
"""A shape, or a list with a shape for each local rank."""


@dataclass(frozen=True)
class InputRows:
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
    def of(cls, inputs: list[Operand], head_columns: Any) -> InputRows:
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

    def split(self, group: Group, splits: Any) -> InputRows:
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
        rows: InputRows,
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


def quantisation_of(rows: InputRows, quantisation: Quantisation | None) -> Quantisation:
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


class NormResult(NamedTuple):
    """The results of a fused op: lists with an array per local rank, or bare arrays. `scales` and `residual` are None
    if the call has none. Arrays that the caller gave are returned as they are.
    """

    output: list[Array]
    scales: list[Array] | None
    residual: list[Array] | None


class _Wanted(NamedTuple):
    """A result of a call: its argument, the caller's value of it, and the shape, dtype and alignment of its arrays."""

    argument: str
    given: Any
    shape: Shapes
    dtype: DType
    alignment: int = operands.VECTOR

    def targets(self, group: Group) -> list[Operand]:
        """Return the caller's arrays, checked; an empty list if the caller gave none."""
        if self.given is None:
            return []
        why = "as the other arguments require"
        return operands.of_ranks(
            group, self.argument, self.given, self.shape, self.dtype, why, alignment=self.alignment, writable=True
        )


@dataclass(frozen=True)
class RowsResults:
    """The results of a fused call, and the caller's arrays for them.

    `normed`: the results include the normed rows. `row_bytes` is the number of bytes that the owner of a row sends to
    each rank that gets the row.
    """

    wanted: Sequence[_Wanted]
    targets: Sequence[list[Operand]]
    normed: bool
    row_bytes: int

    @classmethod
    def of(
        cls,
        group: Group,
        rows: InputRows,
        norm: NormArguments,
        quantisation: Quantisation,
        outputs: Any,
        scales: Any,
        normed_outputs: Any,
        residual_outputs: Any,
    ) -> RowsResults:
        """Return the results of a call, for the arguments `outputs`, `scales`, `normed_outputs` and `residual_outputs`
        of the op. Raises ArgumentError if an array does not fit, or is given for a result that this call does not
        have."""
        out = quantisation.output_dtype(rows.dtype)
        scales_shape = _each(lambda each: quantisation.scales_shape(each, rows.normed), rows.each)
        if scales is not None and scales_shape is None:
            why = "the scale is given" if quantisation.kind == "static" else f"outputs of {out} are not quantised"
            raise ArgumentError("scales", "given", f"None: {why}")
        if normed_outputs is not None and out == rows.dtype:
            raise ArgumentError("normed_outputs", "given", f"None: outputs of {out} are not quantised")
        if residual_outputs is not None and not norm.residuals:
            raise ArgumentError("residual_outputs", "given", "None, as there are no residuals")
        wanted = [_Wanted("outputs", outputs, _each(quantisation.output_shape, rows.full), out)]
        if scales_shape is not None and quantisation.scales is not None:
            alignment = quantisation.scales_alignment
            wanted.append(_Wanted("scales", scales, scales_shape, quantisation.scales, alignment))
        row_bytes = quantisation.row_bytes(rows.columns, rows.dtype)
        if normed_outputs is not None:
            wanted.append(_Wanted("normed_outputs", normed_outputs, rows.full, rows.dtype))
            row_bytes += rows.input_bytes
        if norm.residuals:
            dtype = norm.residuals[0].dtype
            wanted.append(_Wanted("residual_outputs", residual_outputs, rows.full, dtype))
            row_bytes = rows.columns * dtype.itemsize
        targets = [each.targets(group) for each in wanted]
        read, given = _flat([rows.inputs, *norm.arrays]), _flat(targets)
        operands.no_overlap(read, given, list(zip(norm.residuals, targets[-1], strict=False)))
        return cls(wanted, targets, normed_outputs is not None, row_bytes)

    def allocate(
        self, group: Group, queues: Sequence[Stream], bare: bool
    ) -> tuple[dict[str, list[Operand]], NormResult]:
        """Return the arrays to write, by argument and local rank, and the call's result.

        Arrays that the caller did not give are allocated in the order of the streams `queues`. `bare`: the result has
        bare arrays in place of lists."""
        written: dict[str, list[Operand]] = {}
        returned: dict[str, Any] = {}
        for (argument, given, shape, dtype, _), targets in zip(self.wanted, self.targets, strict=True):
            written[argument], values = results.of_ranks(group, argument, given, targets, shape, dtype, queues)
            returned[argument] = values[0] if bare else values
        result = NormResult(returned["outputs"], returned.get("scales"), returned.get("residual_outputs"))
        return written, result


def _each(function: Callable[[tuple[int, ...]], Any], shapes: Shapes) -> Any:
    """Return the value of `function` for a shape, or the list of its values for a list of shapes; None if one of the
    values is None."""
    if not isinstance(shapes, list):
        return function(shapes)
    found = [function(shape) for shape in shapes]
    return None if None in found else found


def _flat(of_arguments: Iterable[list[Operand]]) -> list[Operand]:
    return [operand for of_ranks in of_arguments for operand in of_ranks]
