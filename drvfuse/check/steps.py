# SPDX-License-Identifier: Apache-2.0
"""Sequences of ops on one device: step after step on one stream, with a kernel directly before each step that writes
the step's inputs.

The host waits once, at the end. All memory is allocated at the beginning, since an allocation between two launches
would keep them from overlapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..ops.call.options import PDLLevel
from ..runtime.device import device as open_device
from .run import Run

Host = npt.NDArray[Any]

STEPS = 2
PDL = (PDLLevel.OFF, PDLLevel.ON, PDLLevel.OVERLAP_AT_BEGINNING)


class Step(NamedTuple):
    """The inputs of a step, its expected results by name, and its constants, which are arrays that no kernel writes and
    that all steps share.
    """

    inputs: tuple[Host, ...]
    results: dict[str, Host]
    constants: tuple[Host, ...] = ()


def random(number: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Host:
    """Return normally distributed numbers, the same for the same arguments."""
    generator = np.random.default_rng([number, *shape, *dtype.encode()])
    return (scale * generator.standard_normal(shape, np.float32)).astype(dtypes.get(dtype).numpy)


def steps(
    run: Run,
    solved: Callable[[int], Step],
    launch: Callable[..., None],
    pdl: PDLLevel | None,
    workspace_bytes: int = 0,
    **machine: Any,
) -> None:
    """Run steps 0 to STEPS - 1, each by `launch(*inputs, *constants, outputs, workspace=..., pdl_level=...)`.

    The PDL level is `pdl`; if that is None, the seed selects it. No workspace is passed if its size is 0. `outputs` has
    an array for each of `Step.results`. `machine` are options of the machine, which has one device.
    """
    with run.machine(1, **machine) as emulated:
        device = open_device(0, driver=emulated)
        copy = run.kernel(device.driver, "copy")
        level = run.choice(PDL) if pdl is None else pdl
        options: dict[str, Any] = {"pdl_level": level}
        if workspace_bytes:
            options["workspace"] = device.zeros(workspace_bytes, "uint8")
        todo = [solved(number) for number in range(STEPS)]
        sources = [[device.array(host) for host in step.inputs] for step in todo]
        inputs = [device.empty(source.shape, source.dtype) for source in sources[0]]
        constants = [device.array(host) for host in todo[0].constants]
        found = [{name: device.empty(a.shape, a.dtype) for name, a in step.results.items()} for step in todo]
        for of_step, outputs in zip(sources, found, strict=True):
            for source, target in zip(of_step, inputs, strict=True):
                copy.prepare(1, 128, source, target, source.nbytes, pdl=level is not PDLLevel.OFF)(device.stream)
            launch(*inputs, *constants, outputs, **options)
        device.synchronize()
        for number, (step, arrays) in enumerate(zip(todo, found, strict=True)):
            for name, expected in step.results.items():
                run.compare(f"step {number}, {name}", arrays[name].numpy(), expected)
