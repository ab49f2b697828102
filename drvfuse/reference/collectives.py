# SPDX-License-Identifier: Apache-2.0
"""The collectives in numpy, bit for bit: what every algorithm, grid, rank and driver must return.

All arithmetic is fp32 (numpy's float32 operations are IEEE, round to nearest even, like the kernels'), sums begin at +0
and add ranks in order, and a value is rounded to its output dtype once. A NaN is the dtype's canonical NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import DType, DTypeLike
from ..errors import ArgumentError
from ..plans.quantisation import PER_ROW, Quantisation
from .arithmetic import Floats, NDArray, round_to
from .norms import normalise
from .quantised import quantise


class Normalised(NamedTuple):
    """The fused op's results: `scales` is None without quantisation, `residual` without a residual."""

    output: NDArray
    scales: NDArray | None
    residual: NDArray | None


def _require_shape(argument: str, values: Any, shape: tuple[int, ...]) -> None:
    if np.shape(values) != shape:
        raise ArgumentError(argument, f"of shape {np.shape(values)}", f"of shape {shape}")


def sum_ranks(inputs: Sequence[NDArray], nodes: int | Sequence[int] = 1) -> Floats:
    """+0 + inputs[0] + inputs[1] + ... in fp32, in that order. ArgumentError unless all have one shape.

    Over several nodes the ranks of each node are added first, and the sum is +0 + node 0 + node 1 + ... `nodes` is the
    number of nodes of equal size that the ranks form, in their order, or a list with the node of each rank.
    """
    if not isinstance(nodes, int) or nodes != 1:
        return sum_ranks([sum_ranks(of_node) for of_node in _by_node(inputs, nodes)])
    if not len(inputs):
        raise ArgumentError("inputs", "empty", "one array per rank")
    for position, values in enumerate(inputs):
        _require_shape(f"inputs[{position}]", values, np.shape(inputs[0]))
    total = np.zeros(np.shape(inputs[0]), np.float32)
    with np.errstate(all="ignore"):
        for values in inputs:
            total += np.asarray(values).astype(np.float32)
    return total


def _by_node(inputs: Sequence[NDArray], nodes: int | Sequence[int]) -> list[list[NDArray]]:
    size = len(inputs)
    if isinstance(nodes, int):
        if nodes < 1 or size % nodes:
            raise ArgumentError("nodes", nodes, f"a number that divides the {size} ranks, or the node of each rank")
        nodes = [rank // (size // nodes) for rank in range(size)]
    if len(nodes) != size or not size or {*nodes} != {*range(max(nodes) + 1)}:
        needed = f"a list of {size} nodes, one for each rank, numbered from 0 without gaps"
        raise ArgumentError("nodes", list(nodes), needed)
    return [[each for each, of in zip(inputs, nodes, strict=True) if of == node] for node in range(max(nodes) + 1)]


def allreduce(
    inputs: Sequence[NDArray],
    dtype: DTypeLike | None = None,
    epilogue: Callable[[Floats], NDArray] | None = None,
    *,
    multimem: bool = False,
    nodes: int | Sequence[int] = 1,
) -> NDArray:
    """The sum of one array per rank, in `dtype` (default: the inputs').

    `epilogue` maps the fp32 sums, in the inputs' shape, to the values to round; it should compute in float32.

    `multimem` gives the result of a call with `use_multimem=True`, which rounds the sums to the inputs' dtype before
    the epilogue. The switch adds the ranks in an unspecified order, so the bits agree only if every order gives the
    same sum; `sum_bounds` gives the range of all sums.

    `nodes` are the nodes of a group over several nodes, as in `sum_ranks`. The bits are those of `node_order="fixed"`;
    "engine" may give any sum within `sum_bounds`.
    """
    total = _sums(inputs, multimem, nodes)
    if epilogue is not None:
        with np.errstate(all="ignore"):
            total = np.asarray(epilogue(total), np.float32)
    return round_to(total, inputs[0].dtype if dtype is None else dtype)


def _sums(inputs: Sequence[NDArray], multimem: bool, nodes: int | Sequence[int]) -> Floats:
    total = sum_ranks(inputs, nodes)
    return round_to(total, inputs[0].dtype).astype(np.float32) if multimem else total


def sum_bounds(inputs: Sequence[NDArray]) -> tuple[NDArray, NDArray]:
    """The least and the largest sum of finite `inputs` that fp32 additions in any order can give, in the inputs' dtype.

    Each of the n - 1 additions, in a sequence or as a tree, has a relative error of at most u = 2**-24. So before the
    rounding to the dtype the error is at most g sum|x|, with g = (n-1)u / (1 - (n-1)u), which is (n-1) 2**-24 to first
    order. The rounding is monotone.
    """
    sum_ranks(inputs)  # raises ArgumentError unless the inputs have one shape
    values = np.stack([np.asarray(each).astype(np.float64) for each in inputs])
    steps = (len(inputs) - 1) * 2.0**-24
    # The term with 2**-53 is for the errors of the sums in float64 that this function computes.
    slack = (steps / (1 - steps) + len(inputs) * 2.0**-53) * np.abs(values).sum(axis=0)
    with np.errstate(over="ignore"):
        low, high = ((values.sum(axis=0) + sign * slack).astype(np.float32) for sign in (-1, 1))
    return round_to(low, inputs[0].dtype), round_to(high, inputs[0].dtype)


def allreduce_rmsnorm_fp8(
    inputs: Sequence[NDArray],
    gamma: NDArray,
    epsilon: float,
    weight_offset: float = 0.0,
    residual: NDArray | None = None,
    *,
    norm: str = "rms",
    beta: NDArray | None = None,
    head_columns: int | None = None,
    quantisation: Quantisation = PER_ROW,
    multimem: bool = False,
    nodes: int | Sequence[int] = 1,
) -> Normalised:
    """Sum of the ranks' inputs [..., columns], plus residual, norm and quantisation of each row.

    Without a residual the norm reads the fp32 sum. With a residual it reads `residual` of the result: the sum plus the
    residual, rounded to the residual's dtype, which is that of the inputs or float32. `norms.normalise` describes
    `norm`, gamma and `beta`. With `Quantisation.none()` the result is what the op stores to `normed_outputs`.

    With `head_columns` the last dimension is split into heads of that number of columns, and each head is normalised as
    a row. gamma and `beta` have that number of elements, and the scales have one more dimension, for the heads.

    `multimem` and `nodes` are those of `allreduce`; sums by multimem are rounded to the inputs' dtype first.

    Inputs without rows give empty results. Rows without columns are refused, as by the op, since they have no mean.
    """
    total = _sums(inputs, multimem, nodes)
    shape = total.shape
    if not shape or not shape[-1]:
        raise ArgumentError("inputs[0]", f"of shape {shape}", "of shape [..., columns] with at least one column")
    if residual is not None:
        _require_shape("residual", residual, shape)
    columns = shape[-1] if head_columns is None else head_columns
    if columns < 1 or shape[-1] % columns:
        raise ArgumentError("head_columns", columns, f"a number that divides the {shape[-1]} columns")
    row_shape = shape[:-1] if head_columns is None else (*shape[:-1], shape[-1] // columns)
    for argument, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None:
            _require_shape(argument, vector, (columns,))
    source: DType = dtypes.get(inputs[0].dtype)
    x = total.reshape(math.prod(row_shape), columns)
    stored = None
    if residual is not None:
        kept = dtypes.get(residual.dtype)
        if kept.name not in (source.name, "float32"):
            raise ArgumentError("residual", f"of dtype {kept}", f"of dtype {source} or float32")
        with np.errstate(all="ignore"):
            stored = round_to(x + np.asarray(residual).astype(np.float32).reshape(x.shape), kept)
        x = stored.astype(np.float32)
    y, maxima = normalise(x, source, gamma, epsilon, weight_offset, norm, beta)
    found = quantise(y, quantisation, source, maxima if quantisation.kind == "row" else None)
    scales_shape = quantisation.scales_shape(row_shape, columns)
    return Normalised(
        found.output.reshape(quantisation.output_shape(shape)),
        None if found.scales is None or scales_shape is None else found.scales.reshape(scales_shape),
        None if stored is None else stored.reshape(shape),
    )
