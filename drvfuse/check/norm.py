# SPDX-License-Identifier: Apache-2.0
"""Cases of norms with quantisation on one device. Results are compared with `drvfuse.reference.rmsnorm_fp8`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from .. import dtypes
from ..ops.call.options import PDLLevel
from ..ops.norm.rmsnorm_fp8 import rmsnorm_fp8
from ..plans.quantisation import Quantisation
from ..reference.norm import rmsnorm_fp8 as reference
from ..runtime.array import Array, view
from .problems import FORMS, HEAD, QUANTISATIONS, Problem
from .run import Run
from .steps import STEPS, Step, random, steps

EPSILON = 1e-6
SHAPE, MULTIPROCESSORS = (13, 2048), 2  # a shape with several rows per block
FEW_SHAPE, FEW_MULTIPROCESSORS = (2, 8192), 4  # a shape with one row per cluster
GROUPS = Quantisation.per_group(layout="column")


@functools.lru_cache(maxsize=2 * STEPS)
def _solved(number: int, shape: tuple[int, int]) -> Step:
    x, residual = (random(2 * number + i, shape, "bfloat16") for i in range(2))
    gamma, beta = (random(i, shape[1:], "bfloat16") for i in range(2))
    layer = reference(x, gamma, EPSILON, quantisation=GROUPS, residual=residual, beta=beta, norm="layer")
    rms = reference(x, gamma, EPSILON)
    results = {"output": layer.output, "scales": layer.scales, "residual_output": layer.residual}
    results |= {"normed_output": layer.normed, "rms output": rms.output, "rms scales": rms.scales}
    return Step((x, residual), {name: each for name, each in results.items() if each is not None}, (gamma, beta))


def _launch(
    x: Array, residual: Array, gamma: Array, beta: Array, out: Mapping[str, Array], pdl_level: PDLLevel
) -> None:
    rmsnorm_fp8(
        x,
        gamma,
        epsilon=EPSILON,
        quantisation=GROUPS,
        residual=residual,
        beta=beta,
        norm="layer",
        output=out["output"],
        scales=out["scales"],
        residual_output=out["residual_output"],
        normed_output=out["normed_output"],
        pdl_level=pdl_level,
    )
    rmsnorm_fp8(x, gamma, epsilon=EPSILON, output=out["rms output"], scales=out["rms scales"], pdl_level=pdl_level)


def rows(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check norms of more rows than blocks, so that each block has several rows."""
    steps(run, functools.partial(_solved, shape=SHAPE), _launch, pdl, sm_count=MULTIPROCESSORS)


def few(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check norms of so few rows that a cluster holds each row."""
    steps(run, functools.partial(_solved, shape=FEW_SHAPE), _launch, pdl, sm_count=FEW_MULTIPROCESSORS)


@functools.lru_cache(maxsize=2 * STEPS)
def _solved_form(number: int, form: str) -> Step:
    columns = HEAD if form == "heads" else SHAPE[1]
    kind = "float32" if form in ("float32", "layer") else "bfloat16"
    x, residual = random(2 * number, SHAPE, "bfloat16"), random(2 * number + 1, SHAPE, kind)
    gamma = random(0, (columns,), kind)
    beta: dict[str, Any] = {"beta": gamma} if form == "layer" else {}
    found = reference(x, gamma, EPSILON, residual=residual, **beta, **_options(form))
    results = {"output": found.output, "scales": found.scales, "residual_output": found.residual}
    return Step((x, residual), {name: each for name, each in results.items() if each is not None}, (gamma,))


def _options(form: str) -> dict[str, Any]:
    return Problem("rmsnorm_fp8", 1, SHAPE, form=form).options


def forms(run: Run) -> None:
    """Check one of the forms of the fused ops, which the seed selects."""
    form = FORMS[run.seed % len(FORMS)]
    made = QUANTISATIONS.get(form)

    def launch(x: Array, residual: Array, gamma: Array, out: Mapping[str, Array], pdl_level: PDLLevel) -> None:
        given: dict[str, Any] = dict(out)
        if made is not None and made.dtype == dtypes.get(dtypes.FP4):  # the reference gives FP4 codes as bytes
            codes = out["output"]
            given["output"] = view(codes.ptr, codes.shape, made.dtype, codes.device, owner=codes)
        options = _options(form) | ({"beta": gamma} if form == "layer" else {})
        rmsnorm_fp8(x, gamma, epsilon=EPSILON, residual=residual, pdl_level=pdl_level, **options, **given)

    steps(run, functools.partial(_solved_form, form=form), launch, None, sm_count=MULTIPROCESSORS)
