# SPDX-License-Identifier: Apache-2.0
"""The case of the matrix-vector product with a partial norm. Results are compared with `drvfuse.reference.gemv`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ops.call.options import PDLLevel
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..reference import gemv as gemv_reference
from ..runtime.array import Array
from .run import Run
from .steps import STEPS, Step, random, steps

EPSILON = 1e-6
E4M3 = "float8_e4m3fn"
ROWS, COLUMNS = 37, 12296  # the shape of the weight: so large that a block has more stages than can be in flight
NORMED = 27


@functools.lru_cache(maxsize=STEPS)
def _solved(number: int) -> Step:
    act = random(number, (2, COLUMNS), "bfloat16")
    weight, gamma = random(0, (ROWS, COLUMNS), "bfloat16"), random(0, (NORMED,), "bfloat16")
    found = gemv_reference.gemv_partial_norm(act, weight, gamma, n_normed=NORMED, epsilon=EPSILON)
    return Step((act,), found._asdict(), (weight, gamma))


def _launch(
    act: Array,
    weight: Array,
    gamma: Array,
    out: Mapping[str, Array],
    pdl_level: PDLLevel,
    act_scales: Array | None = None,
    weight_scales: Array | None = None,
) -> None:
    gemv_partial_norm(
        act,
        weight,
        gamma,
        n_normed=NORMED,
        epsilon=EPSILON,
        normed_output=out["normed"],
        unnormed_output=out["unnormed"],
        pdl_level=pdl_level,
        act_scales=act_scales,
        weight_scales=weight_scales,
    )


def partial_norm(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the GEMV with two rows of bfloat16 activations. Each step is one call."""
    steps(run, _solved, _launch, pdl, sm_count=4)


@functools.lru_cache(maxsize=STEPS)
def _solved_fp8(number: int) -> Step:
    """Return a step with three rows of FP8 activations, an FP8 weight, and a scale for each 128 columns of a row of
    both."""
    act, weight = (random(number, (3, COLUMNS), E4M3), random(0, (ROWS, COLUMNS), E4M3))
    of_act, of_weight = (
        np.abs(random(number if rows == 3 else 0, (rows, -(-COLUMNS // 128)), "float32")) for rows in (3, ROWS)
    )
    gamma = random(0, (NORMED,), "bfloat16")
    scales: dict[str, Any] = {"act_scales": of_act, "weight_scales": of_weight}
    found = gemv_reference.gemv_partial_norm(act, weight, gamma, n_normed=NORMED, epsilon=EPSILON, **scales)
    return Step((act, of_act), found._asdict(), (weight, of_weight, gamma))


def _launch_fp8(
    act: Array,
    of_act: Array,
    weight: Array,
    of_weight: Array,
    gamma: Array,
    out: Mapping[str, Array],
    pdl_level: PDLLevel,
) -> None:
    _launch(act, weight, gamma, out, pdl_level, of_act, of_weight)


def fp8(run: Run) -> None:
    """Check the GEMV with FP8 activations, an FP8 weight, and the group scales of both."""
    steps(run, _solved_fp8, _launch_fp8, None, sm_count=4)
