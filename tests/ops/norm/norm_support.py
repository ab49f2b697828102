# SPDX-License-Identifier: Apache-2.0
"""Calls of `rmsnorm_fp8`: their host arrays, and how results are compared with the reference."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import drvfuse as df
from drvfuse import dtypes, reference

Q = df.Quantisation
EPSILON, OFFSET = 1e-5, 0.5
WRITTEN = ("output", "scales", "residual_output", "normed_output")


class Call(NamedTuple):
    """The arguments of a call: `arrays` by name, and in `rest` the other arguments of the op and its reference."""

    arrays: dict[str, np.ndarray[Any, Any]]
    rest: dict[str, Any]


def numbers(rng, shape, dtype):
    """Random values of very different magnitudes, no two of them equal."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, shape))
    return values.astype(dtypes.get(dtype).numpy)


def call(rng, shape, dtype="bfloat16", gamma=None, residual=None, beta=False, head_columns=None, special=True, **rest):
    """A `Call` with random arrays. With `special`, and at least 5 rows, one row each is all 0, is all -0, has a NaN,
    has an infinity, and has small numbers."""
    columns = head_columns or shape[-1]
    arrays = {"inputs": numbers(rng, shape, dtype), "gamma": numbers(rng, columns, gamma or dtype)}
    if residual is not None:
        arrays["residual"] = numbers(rng, shape, residual)
    if beta:
        arrays["beta"] = numbers(rng, columns, gamma or dtype)
    if special and math.prod(shape) >= 5 * columns:
        for name in ("inputs", "residual"):
            if name in arrays:
                rows = arrays[name].reshape(-1, columns)
                rows[-1], rows[-2], rows[-3, columns // 3] = 0, -0.0, np.nan
                if name == "inputs":
                    rows[-4, columns // 2] = np.inf
                    rows[-5] = rows[-5].astype(np.float32) * 2.0**-14
    return Call(arrays, {"head_columns": head_columns, **rest})


def expected(of):
    """The results of the reference, by the names of the op's output arguments."""
    found = reference.rmsnorm_fp8(epsilon=EPSILON, weight_offset=OFFSET, **of.arrays, **of.rest)
    return dict(zip(WRITTEN, found[:3] + found[3:], strict=True))


def on_device(device, of):
    return {name: device.array(values) for name, values in of.arrays.items()}


def results(device, of, normed=False):
    """Arrays for the results, filled with a pattern."""
    wanted = expected(of)
    given = {}
    for name, values in wanted.items():
        if values is not None and (normed or name != "normed_output"):
            quantisation = of.rest.get("quantisation") or Q.per_row()
            fp4 = name == "output" and quantisation.dtype == dtypes.FP4
            given[name] = device.empty(values.shape, dtypes.FP4 if fp4 else values.dtype)
            given[name].copy_from(np.full(values.nbytes, 0xA5, np.uint8).view(values.dtype).reshape(values.shape))
    return given


def run(device, of, given=None, **options):
    """Run the op. Returns the results by name, in new arrays for those that are not given."""
    given = given or {}
    arrays = on_device(device, of)
    found = df.rmsnorm_fp8(epsilon=EPSILON, weight_offset=OFFSET, **arrays, **given, **of.rest, **options)
    return dict(zip(WRITTEN, (*found, given.get("normed_output")), strict=True))


def check(found, wanted, without=()):
    for name, values in wanted.items():
        array = found.get(name)
        if name == "normed_output" and array is None:
            continue
        assert (array is None) == (values is None), name
        if array is not None:
            assert array.shape == values.shape, name
            right = reference.bits(values) == reference.bits(array.numpy())
            assert right.all(), (name, np.argwhere(~right)[:5].tolist())


BF16 = ml_dtypes.bfloat16
