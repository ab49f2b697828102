# SPDX-License-Identifier: Apache-2.0
"""The norm of rows as the kernels compute it, bit for bit, and `rmsnorm_fp8`.

Every sum over a row has the order of `row_sum`. All operations are in float32, each is rounded once, and they are:

- "rms": f = 1 / sqrt(row_sum(x * x) / columns + epsilon), y = (x * g) * f.
- "layer": mean = row_sum(x) / columns and d = x - mean; f = 1 / sqrt(row_sum(d * d) / columns + epsilon);
  y = (d * g) * f; then beta is added, if there is one.

g is gamma + weight_offset.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import DType, DTypeLike
from ..errors import ArgumentError, shown
from ..plans.quantisation import PER_ROW, Quantisation
from .arithmetic import Floats, NDArray, butterfly, in_order, require_shape, round_to
from .quantised import quantise

_PACK_BYTES = 16
_GROUP = 32
_LANES = 32
NORMS = ("rms", "layer")


class Norm(NamedTuple):
    """`y` [rows, columns] in float32, and `maxima` [rows], the maximum of |y| of each row, which decides its scale.

    Without beta a maximum is computed as max|x * g| * f, where g is gamma + weight_offset and f is 1 / sqrt(mean of
    squares + epsilon). In the norm "layer" both formulas have x - mean in place of x. Since rounding is monotone, the
    result is max|y|, unless f is infinite and an element is 0.
    """

    y: Floats
    maxima: Floats


def row_sum(rows: Floats, dtype: DTypeLike) -> Floats:
    """The sum of each row of `rows` [rows, columns], in the order that the kernels define.

    `dtype` is the dtype of the input: a pack has as many elements as 16 bytes hold. Elements are added in order inside
    a pack, and the packs of an aligned group of 32 by butterfly. Lane l adds the sums of groups l, l + 32, ... in
    order, and the 32 lanes are added by butterfly. Every sum begins at +0.
    """
    width = _PACK_BYTES // dtypes.get(dtype).itemsize
    count, columns = rows.shape
    groups = -(-columns // (width * _GROUP))
    rounds = -(-groups // _LANES)
    packs_of_row = rounds * _LANES * _GROUP
    padded = np.zeros((count, packs_of_row * width), np.float32)
    padded[:, :columns] = rows
    with np.errstate(all="ignore"):
        elements = padded.reshape(count, packs_of_row, width)
        groups_of_packs = in_order(elements).reshape(count, rounds * _LANES, _GROUP)
        return butterfly(in_order(butterfly(groups_of_packs).reshape(count, rounds, _LANES), axis=1))


def row_sum_of_squares(rows: Floats, dtype: DTypeLike) -> Floats:
    """The sum of squares of each row. Every square is rounded to float32; they are added in the order of `row_sum`."""
    with np.errstate(all="ignore"):
        return row_sum(np.asarray(rows, np.float32) ** 2, dtype)


def normalise(
    x: Floats,
    dtype: DTypeLike,
    gamma: NDArray,
    epsilon: float,
    weight_offset: float = 0.0,
    norm: str = "rms",
    beta: NDArray | None = None,
) -> Norm:
    """The norm of each row of float32 `x` [rows, columns]. Sums have the order of `row_sum` for inputs of `dtype`.

    `gamma` and `beta` [columns] may have any dtype that converts to float32 exactly. Raises ArgumentError for another
    norm than "rms" and "layer", and for a beta with "rms".
    """
    if norm not in NORMS:
        raise ArgumentError("norm", shown(norm), '"rms" or "layer"')
    if beta is not None and norm != "layer":
        raise ArgumentError("beta", "given", 'None, as norm="rms" has no beta')
    columns = np.float32(x.shape[-1])
    with np.errstate(all="ignore"):
        if norm == "layer":
            x = x - (row_sum(x, dtype) / columns)[:, None]
        mean_square = row_sum_of_squares(x, dtype) / columns
        factor = np.float32(1) / np.sqrt(mean_square + np.float32(epsilon))
        scaled = x * (np.asarray(gamma).astype(np.float32) + np.float32(weight_offset))
        y = scaled * factor[:, None]
        if beta is None:
            return Norm(y, _largest(scaled) * factor)
        y = y + np.asarray(beta).astype(np.float32)
        return Norm(y, _largest(y))


def _largest(values: Floats) -> Floats:
    return np.asarray(np.abs(values).max(axis=-1, initial=0), np.float32)


class NormedRows(NamedTuple):
    """The results of `rmsnorm_fp8`; `normed` is what it stores in `normed_output`."""

    output: NDArray
    scales: NDArray | None
    residual: NDArray | None
    normed: NDArray


def rmsnorm_fp8(
    inputs: NDArray,
    gamma: NDArray,
    epsilon: float,
    weight_offset: float = 0.0,
    quantisation: Quantisation = PER_ROW,
    residual: NDArray | None = None,
    beta: NDArray | None = None,
    norm: str = "rms",
    head_columns: int | None = None,
) -> NormedRows:
    """Residual, norm and quantisation of rows [..., columns], with the arguments of the op.

    The result is that of `allreduce_rmsnorm_fp8` with one rank: +0 is added to the inputs first, so a -0 becomes +0.
    """
    with np.errstate(all="ignore"):
        total = np.float32(0) + inputs.astype(np.float32)
    source = dtypes.get(inputs.dtype)
    return norm_rows(
        "inputs", total, source, gamma, epsilon, weight_offset, residual, norm, beta, head_columns, quantisation
    )


def norm_rows(
    argument: str,
    total: Floats,
    source: DType,
    gamma: NDArray,
    epsilon: float,
    weight_offset: float,
    residual: NDArray | None,
    norm: str,
    beta: NDArray | None,
    head_columns: int | None,
    quantisation: Quantisation,
) -> NormedRows:
    """Residual, norm and quantisation of float32 sums [..., columns] of arrays of the dtype `source`.

    Raises ArgumentError for sums without columns, which names `argument`, and for other arguments that do not fit.
    """
    shape = total.shape
    if not shape or not shape[-1]:
        raise ArgumentError(argument, f"of shape {shape}", "of shape [..., columns] with at least one column")
    if residual is not None:
        require_shape("residual", residual, shape)
    columns = shape[-1] if head_columns is None else head_columns
    if columns < 1 or shape[-1] % columns:
        raise ArgumentError("head_columns", columns, f"a number that divides the {shape[-1]} columns")
    row_shape = shape[:-1] if head_columns is None else (*shape[:-1], shape[-1] // columns)
    for vector_of, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None:
            require_shape(vector_of, vector, (columns,))
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
    return NormedRows(
        found.output.reshape(quantisation.output_shape(shape)),
        None if found.scales is None or scales_shape is None else found.scales.reshape(scales_shape),
        None if stored is None else stored.reshape(shape),
        round_to(y, source).reshape(shape),
    )
