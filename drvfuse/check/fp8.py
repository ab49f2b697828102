# SPDX-License-Identifier: Apache-2.0
"""FP8 RMSNorm and quantisation as a training step runs them: launch after launch on one stream and one workspace."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes, reference_fp8
from ..ops.fp8_division import fp8_division_transpose
from ..ops.fp8_rmsnorm import fp8_rmsnorm_forward
from ..ops.fp8_rmsnorm_backward import backward_shape, fp8_rmsnorm_backward
from ..ops.options import PDLLevel
from ..runtime.array import Array
from ..runtime.device import device as open_device
from .run import Run

Host = npt.NDArray[Any]

EPSILON = 1e-6
GROUP = 16
SHAPE = (13, 272)
STEPS = 2


class Step(NamedTuple):
    """What one step reads, and `results`: what it must give."""

    x: Host
    scales: Host
    weight: Host
    gradient: Host
    results: tuple[Host, ...]


@functools.lru_cache(maxsize=16)
def solved(number: int) -> Step:
    random = np.random.default_rng([8, number])
    bf16, fp8 = dtypes.get("bfloat16").numpy, dtypes.get("float8_e4m3fn").numpy
    rows, columns = SHAPE
    x = (64 * random.standard_normal(SHAPE, np.float32)).astype(fp8)
    scales = (0.01 + random.random((rows, -(-columns // GROUP)), np.float32)).astype(bf16)
    weight = random.standard_normal(columns, np.float32).astype(bf16)
    gradient = random.standard_normal(SHAPE, np.float32).astype(bf16)
    forward = reference_fp8.fp8_rmsnorm_forward(x, scales, weight, GROUP, EPSILON)
    _, team_warps, teams = backward_shape(columns)
    warps = teams * team_warps
    backward = reference_fp8.fp8_rmsnorm_backward(x, scales, gradient, weight, forward.rstd, GROUP, teams, warps)
    divided, scale = reference_fp8.fp8_division(gradient, "float8_e4m3fn")
    return Step(x, scales, weight, gradient, (*forward, *backward, divided, scale, divided.T))


def steps(run: Run) -> None:
    """Forward, backward and division with transpose, twice; a kernel writes the inputs directly before each."""
    with run.machine(1) as machine:
        device = open_device(0, driver=machine)
        copy = run.kernel(device.driver, "copy")
        pdl = run.choice((PDLLevel.OFF, PDLLevel.ON, PDLLevel.OVERLAP_AT_BEGINNING))
        first = solved(0)
        x, scales, gradient = (device.array(host) for host in (first.x, first.scales, first.gradient))
        weight = device.array(first.weight)
        results: list[tuple[Array, ...]] = []
        for number in range(STEPS):
            step = solved(number)
            hosts = (step.x, step.scales, step.weight, step.gradient)
            for host, target in zip(hosts, (x, scales, weight, gradient), strict=True):
                copy.prepare(1, 128, device.array(host), target, host.nbytes, pdl=bool(pdl))(device.stream)
            qy, s_y, qy_t, (_, rstd, _) = fp8_rmsnorm_forward(x, scales, weight, GROUP, EPSILON, pdl_level=pdl)
            dx, dw = fp8_rmsnorm_backward(x, scales, gradient, weight, rstd, GROUP, pdl_level=pdl)
            divided = fp8_division_transpose(gradient, GROUP, "float8_e4m3fn", pdl_level=pdl)
            results.append((qy, s_y, qy_t, rstd, dx, dw, *divided))
        device.synchronize()
        for number, found in enumerate(results):
            names = ("qy", "s_y", "qy_t", "rstd", "dx", "dw", "y", "s_y of y", "y_t")
            for name, array, expected in zip(names, found, solved(number).results, strict=True):
                run.compare(f"step {number}, {name}", array.numpy(), expected)
