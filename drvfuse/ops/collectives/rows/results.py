# SPDX-License-Identifier: Apache-2.0
"""The arrays that a fused op writes: arrays of the caller, which are checked, and new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import ArgumentError
from ....plans.quantisation import Quantisation
from ....runtime.array import Array
from ...call import operands, results
from ...call.operands import Operand
from .arguments import FusedRows, NormArguments, Shapes

if TYPE_CHECKING:
    from ....comm.group import Group
    from ....dtypes import DType
    from ....runtime.stream import Stream


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
class FusedResults:
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
        rows: FusedRows,
        norm: NormArguments,
        quantisation: Quantisation,
        outputs: Any,
        scales: Any,
        normed_outputs: Any,
        residual_outputs: Any,
    ) -> FusedResults:
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
