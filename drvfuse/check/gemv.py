# SPDX-License-Identifier: Apache-2.0
"""The case of the matrix-vector product with a partial norm. Results are compared with `drvfuse.reference.gemv`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..ops.call.options import PDLLevel
from ..ops.gemv.gemv_partial_norm import gemv_partial_norm
from ..reference import gemv as gemv_reference
from ..runtime.array import Array
from .run import Run
from .steps import STEPS, Step, random, steps

EPSILON = 1e-6
ROWS, COLUMNS = 37, 12296  # shape of the weight: a block has more stages than are in flight
NORMED = 27


@functools.lru_cache(maxsize=STEPS)
def _solved(number: int) -> Step:
    act = random(number, (2, COLUMNS), "bfloat16")
    weight, gamma = random(0, (ROWS, COLUMNS), "bfloat16"), random(0, (NORMED,), "bfloat16")
    found = gemv_reference.gemv_partial_norm(act, weight, gamma, n_normed=NORMED, eps=EPSILON)
    return Step((act,), found._asdict(), (weight, gamma))


def _launch(act: Array, weight: Array, gamma: Array, out: Mapping[str, Array], pdl_level: PDLLevel) -> None:
    gemv_partial_norm(
        act,
        weight,
        gamma,
        n_normed=NORMED,
        eps=EPSILON,
        normed_output=out["normed"],
        unnormed_output=out["unnormed"],
        pdl_level=pdl_level,
    )


def partial_norm(run: Run, pdl: PDLLevel | None = None) -> None:
    """One product in each step."""
    steps(run, _solved, _launch, pdl, sm_count=4)
