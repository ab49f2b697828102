# SPDX-License-Identifier: Apache-2.0
"""`rmsnorm_fp8` in numpy, bit for bit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..errors import ArgumentError
from ..plans.quantisation import Quantisation
from .arithmetic import NDArray, round_to
from .norms import normalise
from .quantised import quantise


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
    quantisation: Quantisation | None = None,
    residual: NDArray | None = None,
    beta: NDArray | None = None,
    norm: str = "rms",
    head_columns: int | None = None,
) -> NormedRows:
    """Residual, norm and quantisation of rows [..., columns], with the arguments of the op.

    The result is that of `allreduce_rmsnorm_fp8` with one rank: +0 is added to the inputs first, so a -0 becomes +0.
    """
    shape = inputs.shape
    if not shape or not shape[-1]:
        raise ArgumentError("inputs", f"of shape {shape}", "of shape [..., columns] with at least one column")
    made = Quantisation.per_row() if quantisation is None else quantisation
    columns = shape[-1] if head_columns is None else head_columns
    row_shape = shape[:-1] if head_columns is None else (*shape[:-1], shape[-1] // columns)
    source = dtypes.get(inputs.dtype)
    with np.errstate(all="ignore"):
        x = np.float32(0) + inputs.reshape(math.prod(row_shape), columns).astype(np.float32)
        stored = None
        if residual is not None:
            stored = round_to(x + residual.reshape(x.shape).astype(np.float32), residual.dtype)
            x = stored.astype(np.float32)
    y, maxima = normalise(x, source, gamma, epsilon, weight_offset, norm, beta)
    output, scales = quantise(y.reshape(*row_shape, columns), made, source, maxima if made.kind == "row" else None)
    return NormedRows(
        output.reshape(made.output_shape(shape)),
        scales,
        None if stored is None else stored.reshape(shape),
        round_to(y, source).reshape(shape),
    )
