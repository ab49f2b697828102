# SPDX-License-Identifier: Apache-2.0
"""The collectives that add the ranks' arrays, in numpy, bit for bit: what every algorithm, grid, rank and driver must
return.

All arithmetic is fp32 (numpy's float32 operations are IEEE, round to nearest even, like the kernels'), sums begin at +0
and add ranks in order, and a value is rounded to its output dtype once. A NaN is the dtype's canonical NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..dtypes import DTypeLike
from ..errors import ArgumentError
from ..plans.sums import split_rows
from .arithmetic import Floats, NDArray, require_shape, round_to


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
        require_shape(f"inputs[{position}]", values, np.shape(inputs[0]))
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
    total = total_of(inputs, multimem, nodes)
    if epilogue is not None:
        with np.errstate(all="ignore"):
            total = np.asarray(epilogue(total), np.float32)
    return round_to(total, inputs[0].dtype if dtype is None else dtype)


def total_of(inputs: Sequence[NDArray], multimem: bool, nodes: int | Sequence[int]) -> Floats:
    """The sum of `sum_ranks`, which `multimem` rounds to the inputs' dtype."""
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


def owned_rows(rows: int, ranks: int, splits: Sequence[int] | None) -> Sequence[int]:
    """The number of rows of each rank: `splits`, or numbers as equal as possible."""
    if splits is None:
        return split_rows(rows, ranks)
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        raise ArgumentError("splits", list(splits), f"{ranks} numbers of rows, each 0 or more, with the sum {rows}")
    return splits


def own_parts(values: NDArray, splits: Sequence[int]) -> list[NDArray]:
    """The rows of each rank."""
    return np.split(values, np.cumsum(splits)[:-1])


def reduce_scatter(
    inputs: Sequence[NDArray],
    splits: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[[Floats], NDArray] | None = None,
    *,
    nodes: int | Sequence[int] = 1,
) -> list[NDArray]:
    """For each rank, its rows of `allreduce(inputs, dtype, epilogue, nodes=nodes)`.

    `splits` has the number of rows, along dimension 0, of each rank. If `splits` is None, the numbers are as equal as
    possible, and the first (rows mod ranks) ranks have one row more than the others.
    """
    total = allreduce(inputs, dtype, epilogue, nodes=nodes)
    if not total.ndim:
        raise ArgumentError("inputs[0]", "of shape ()", "of at least one dimension")
    return own_parts(total, owned_rows(total.shape[0], len(inputs), splits))
