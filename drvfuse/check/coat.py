# SPDX-License-Identifier: Apache-2.0
"""Cases of the FP8 ops on one device, in sequences as in a training step. Results are compared with the references."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..ops.call.options import PDLLevel
from ..ops.coat.division import fp8_division, fp8_division_transpose
from ..ops.coat.group_scales import fp8_add_Ifp_Ifp_Ofp_Og16, fp8_add_rmsnorm_pg2pg_forward, fp8_rmsnorm_pg2pg_forward
from ..ops.coat.layernorm import (
    fp8_layernorm_noparam_backward,
    fp8_layernorm_noparam_forward,
    fp8_layernorm_param_backward,
    fp8_layernorm_param_forward,
)
from ..ops.coat.rmsnorm_backward import fp8_rmsnorm_backward, fp8_workspace_bytes
from ..ops.coat.rmsnorm_forward import fp8_rmsnorm_forward
from ..reference import coat_groups, coat_layernorm, coat_rmsnorm
from ..runtime.array import Array
from .run import Run
from .steps import STEPS, Host, Step, random, steps

Arrays = Mapping[str, Array]

EPSILON = 1e-6
GROUP = 16
E4M3 = "float8_e4m3fn"
NORM_SHAPE = (13, 272)
RMSNORM_SHAPE = (17, 272)  # a shape with more rows than one block or cluster holds
HELD_SHAPE = (12, 1040)  # a shape for a cluster of four blocks, of which one has no columns
TILES_SHAPE, TILES_MULTIPROCESSORS = (68, 656), 12  # a shape of two ranges of rows, each for several blocks
TALL_SHAPE = (514, 128)  # so many rows that blocks of the backward kernel wait for one another
ODD_SHAPE = (13, 273)  # an odd number of columns: db begins at an odd offset of the partial sums
SHARED_SHAPE, SHARED_MULTIPROCESSORS = (261, 656), 4  # a shape for two teams, whose blocks share the columns
DIVISION_SHAPE = (40, 656)  # a shape with tiles for two blocks


def _of(out: Arrays, names: Iterable[str], suffix: str = "") -> tuple[Array, ...]:
    return tuple(out[name + suffix] for name in names)


def _operands(number: int, shape: tuple[int, int]) -> tuple[Host, Host, Host]:
    """Return x, its scales, and the weights. The weights are equal in all steps, as kernels may read them before their
    wait for the previous kernel."""
    rows, columns = shape
    scales = np.abs(random(number, (rows, -(-columns // GROUP)), "bfloat16"))
    return random(number, shape, E4M3, 64), scales, _vector(0, columns)


def _vector(number: int, columns: int) -> Host:
    return random(number, (columns,), "bfloat16")


@functools.lru_cache(maxsize=STEPS)
def _norm(number: int) -> Step:
    x, scales, weight = _operands(number, RMSNORM_SHAPE)
    gradient = random(number, RMSNORM_SHAPE, "bfloat16")
    forward = coat_rmsnorm.fp8_rmsnorm_forward(x, scales, weight, GROUP, EPSILON)
    dx, dw = coat_rmsnorm.fp8_rmsnorm_backward(x, scales, gradient, weight, forward.rstd, GROUP)
    return Step((x, scales, gradient), {**forward._asdict(), "dx": dx, "dw": dw}, (weight,))


@functools.lru_cache(maxsize=STEPS)
def _tall(number: int) -> Step:
    x, scales, weight = _operands(number, TALL_SHAPE)
    gradient = random(number, TALL_SHAPE, "bfloat16")
    rstd = np.abs(random(number, TALL_SHAPE[:1], "float32"))
    dx, dw = coat_rmsnorm.fp8_rmsnorm_backward(x, scales, gradient, weight, rstd, GROUP)
    return Step((x, scales, gradient, rstd), {"dx": dx, "dw": dw}, (weight,))


def _launch_tall(
    x: Array, scales: Array, gradient: Array, rstd: Array, weight: Array, out: Arrays, **options: Any
) -> None:
    fp8_rmsnorm_backward(x, scales, gradient, weight, rstd, GROUP, outputs=(out["dx"], out["dw"]), **options)


def _launch_norm(x: Array, scales: Array, gradient: Array, weight: Array, out: Arrays, **options: Any) -> None:
    _launch_forward(x, scales, weight, out, **options)
    _launch_tall(x, scales, gradient, out["rstd"], weight, out, **options)


@functools.lru_cache(maxsize=2 * STEPS)
def _forward(number: int, shape: tuple[int, int]) -> Step:
    x, scales, weight = _operands(number, shape)
    forward = coat_rmsnorm.fp8_rmsnorm_forward(x, scales, weight, GROUP, EPSILON)
    return Step((x, scales), forward._asdict(), (weight,))


def _launch_forward(x: Array, scales: Array, weight: Array, out: Arrays, **options: Any) -> None:
    outputs = _of(out, coat_rmsnorm.Forward._fields)
    fp8_rmsnorm_forward(x, scales, weight, GROUP, EPSILON, outputs=outputs, **options)


@functools.lru_cache(maxsize=STEPS)
def _division(number: int) -> Step:
    x = random(number, DIVISION_SHAPE, "bfloat16")
    y, s_y = coat_rmsnorm.fp8_division(x, E4M3)
    y_t = np.ascontiguousarray(y.T)
    results = {"y": y, "s_y": s_y, "y of both": y, "s_y of both": s_y, "y_t of both": y_t, "y_t alone": y_t}
    return Step((x,), results)


def _launch_division(x: Array, out: Arrays, **options: Any) -> None:
    s_y = out["s_y"]
    fp8_division(x, GROUP, E4M3, outputs=(out["y"], s_y), **options)
    both = _of(out, ("y", "s_y", "y_t"), " of both")
    fp8_division_transpose(x, GROUP, E4M3, outputs=both, **options)
    fp8_division_transpose(x, GROUP, E4M3, s_y, only_transposed=True, outputs=(out["y_t alone"],), **options)


@functools.lru_cache(maxsize=STEPS)
def _groups(number: int) -> Step:
    x1, x2 = (random(2 * number + i, NORM_SHAPE, "bfloat16") for i in range(2))
    weight = _vector(0, NORM_SHAPE[1])
    add = coat_groups.fp8_add(x1, x2, E4M3, GROUP)
    norm = coat_groups.fp8_rmsnorm_pg2pg_forward(add.x, add.s_x, weight, GROUP, EPSILON)
    apart = {**add._asdict(), **norm._asdict()}
    return Step((x1, x2), {**apart, **{f"{name} of both": value for name, value in apart.items()}}, (weight,))


def _launch_groups(x1: Array, x2: Array, weight: Array, out: Arrays, **options: Any) -> None:
    add, norm = coat_groups.Sum._fields, coat_groups.Normalised._fields
    fp8_add_Ifp_Ifp_Ofp_Og16(x1, x2, E4M3, GROUP, outputs=_of(out, add), **options)
    fp8_rmsnorm_pg2pg_forward(out["x"], out["s_x"], weight, GROUP, EPSILON, outputs=_of(out, norm), **options)
    both = _of(out, (*add, *norm), " of both")
    fp8_add_rmsnorm_pg2pg_forward(x1, x2, E4M3, weight, GROUP, EPSILON, outputs=both, **options)


@functools.lru_cache(maxsize=STEPS)
def _layernorm(number: int) -> Step:
    x, scales, weight = _operands(number, NORM_SHAPE)
    bias = _vector(1, NORM_SHAPE[1])
    affine = coat_layernorm.fp8_layernorm_forward(x, scales, weight, bias, GROUP, EPSILON)
    plain = coat_layernorm.fp8_layernorm_forward(x, scales, None, None, GROUP, EPSILON)
    without = {f"{name} without parameters": value for name, value in plain._asdict().items()}
    return Step((x, scales), {**affine._asdict(), **without}, (weight, bias))


def _launch_layernorm(x: Array, scales: Array, weight: Array, bias: Array, out: Arrays, **options: Any) -> None:
    names = coat_layernorm.Forward._fields
    affine, plain = _of(out, names), _of(out, names, " without parameters")
    fp8_layernorm_param_forward(x, scales, weight, bias, GROUP, EPSILON, outputs=affine, **options)
    fp8_layernorm_noparam_forward(x, scales, GROUP, EPSILON, outputs=plain, **options)


@functools.lru_cache(maxsize=STEPS)
def _layernorm_gradient(number: int) -> Step:
    x, scales, weight = _operands(number, ODD_SHAPE)
    bias = _vector(1, ODD_SHAPE[1])
    gradients = [random(2 * number + i, ODD_SHAPE, "bfloat16") for i in range(2)]
    mean = coat_layernorm.row_mean(x, scales, GROUP)
    rstd = coat_layernorm.row_rstd(x, scales, GROUP, EPSILON, mean)

    def gradient(g: Any, w: Any) -> tuple[Any, ...]:
        return coat_layernorm.fp8_layernorm_backward(x, scales, g, w, mean, rstd, GROUP)

    results = dict(zip(("dx", "dw", "db"), gradient(gradients, weight), strict=True))
    (results["dx without parameters"],) = gradient(gradients[0], None)
    return Step((x, scales, *gradients, mean, rstd), results, (weight, bias))


def _launch_layernorm_gradient(
    x: Array, scales: Array, first: Array, second: Array, *rest: Any, workspace: Array, **options: Any
) -> None:
    mean, rstd, weight, bias, out = rest
    affine, plain = _of(out, ("dx", "dw", "db")), (out["dx without parameters"],)
    read = (x, scales, [first, second], GROUP, weight, bias, mean, rstd)
    fp8_layernorm_param_backward(*read, outputs=affine, workspace=workspace, **options)
    fp8_layernorm_noparam_backward(x, scales, first, GROUP, mean, rstd, outputs=plain, **options)


def rmsnorm(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the forward pass and the backward pass of RMSNorm."""
    steps(run, _norm, _launch_norm, pdl, fp8_workspace_bytes(RMSNORM_SHAPE[1]))


def rmsnorm_few(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the forward pass of RMSNorm for few rows, which one cluster holds."""
    steps(run, functools.partial(_forward, shape=HELD_SHAPE), _launch_forward, pdl, fp8_workspace_bytes(HELD_SHAPE[1]))


def rmsnorm_tiles(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the forward pass of RMSNorm for rows that fit into the registers of the grid."""
    workspace = fp8_workspace_bytes(TILES_SHAPE[1])
    solved = functools.partial(_forward, shape=TILES_SHAPE)
    steps(run, solved, _launch_forward, pdl, workspace, sm_count=TILES_MULTIPROCESSORS)


def rmsnorm_rows(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the forward pass of RMSNorm for many rows, whose columns several blocks share."""
    workspace = fp8_workspace_bytes(SHARED_SHAPE[1])
    solved = functools.partial(_forward, shape=SHARED_SHAPE)
    steps(run, solved, _launch_forward, pdl, workspace, sm_count=SHARED_MULTIPROCESSORS)


def rmsnorm_gradient(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the backward pass of RMSNorm for many rows."""
    steps(run, _tall, _launch_tall, pdl, fp8_workspace_bytes(TALL_SHAPE[1]))


def division(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the division by a scale, with rounding to FP8: without the transpose, with it, and with the transpose as
    the only output and the scale of the first division as an input."""
    steps(run, _division, _launch_division, pdl, fp8_workspace_bytes(DIVISION_SHAPE[1]))


def groups(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check residual add and RMSNorm with group scales, in two launches and in one."""
    steps(run, _groups, _launch_groups, pdl)


def layernorm(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the forward pass of LayerNorm, with parameters and without."""
    steps(run, _layernorm, _launch_layernorm, pdl, fp8_workspace_bytes(NORM_SHAPE[1]))


def layernorm_gradient(run: Run, pdl: PDLLevel | None = None) -> None:
    """Check the backward pass of LayerNorm with an odd number of columns: with parameters for the sum of two gradients,
    and without parameters for one gradient."""
    steps(run, _layernorm_gradient, _launch_layernorm_gradient, pdl, fp8_workspace_bytes(2 * ODD_SHAPE[1]))
