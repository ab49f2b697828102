# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of the matrix-vector product with partial norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.reference import bits
from drvfuse.reference import gemv as gemv_reference

EPS = 1e-3


class Case(NamedTuple):
    act: np.ndarray
    weight: np.ndarray
    gamma: np.ndarray
    scales: np.ndarray | None = None
    act_scales: np.ndarray | None = None


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values of both signs and several magnitudes, so that a sum depends on the order of its additions."""
    values = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-6, 7, shape)).astype(np.float32)
    return values.clip(-440, 440).astype(dtypes.get(dtype).numpy)


def case(
    rng: np.random.Generator,
    m: int | None,
    n: int,
    k: int,
    n_normed: int,
    act: str = "bfloat16",
    weight: str = "bfloat16",
    gamma: str = "bfloat16",
    scales: str | None = None,
    act_scales: str | int | None = None,
) -> Case:
    """Random arrays of a call. If `m` is None, act is [K]. `scales` is None, "tensor", "row" or "group"; `act_scales`
    is None, "tensor", "row" or the number of columns of a group.
    """
    shapes = {"tensor": (), "row": (n,), "group": (n, -(-k // 128))}
    factors = None if scales is None else rng.uniform(0.5, 2, shapes[scales]).astype(np.float32)
    lead = () if m is None else (m,)
    of_act = (
        {"tensor": (), "row": lead}.get(act_scales) if not isinstance(act_scales, int) else (*lead, -(-k // act_scales))
    )
    factors_of_act = None if of_act is None else rng.uniform(0.5, 2, of_act).astype(np.float32)
    made = numbers(rng, (*lead, k), act), numbers(rng, (n, k), weight), numbers(rng, (n_normed,), gamma)
    return Case(*made, factors, factors_of_act)


def run(device: df.Device, values: Case, **rest: Any) -> tuple[df.Array, df.Array]:
    given = {"weight_scales": values.scales, "act_scales": values.act_scales}
    rest |= {name: device.array(array) for name, array in given.items() if array is not None}
    arrays = (device.array(array) for array in values[:3])
    return df.gemv_partial_norm(*arrays, n_normed=len(values.gamma), epsilon=EPS, **rest)


def expected(values: Case, out: str | None = None, epsilon: float = EPS, **rest: Any) -> gemv_reference.Normed:
    rest |= {"weight_scales": values.scales, "act_scales": values.act_scales, "out_dtype": out}
    return gemv_reference.gemv_partial_norm(*values[:3], n_normed=len(values.gamma), epsilon=epsilon, **rest)


def check(results: Any, wanted: gemv_reference.Normed) -> None:
    """Compare both results with the reference, bit for bit."""
    for name, found, value in zip(wanted._fields, results, wanted, strict=True):
        host = found.numpy()
        assert (host.shape, host.dtype) == (value.shape, value.dtype), name
        wrong = np.flatnonzero(bits(host).reshape(-1) != bits(value).reshape(-1))
        assert not wrong.size, f"{name}: {wrong.size} of {host.size} differ, first at {wrong[0]}"
