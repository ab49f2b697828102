# SPDX-License-Identifier: Apache-2.0
"""The kernels that move bytes as ptxas compiles them for sm_90a: registers, no stack, no spill."""

from __future__ import annotations

import re

import pytest

from drvfuse.ops.collectives.moves.kernel import MoveKernel


@pytest.mark.parametrize(
    "kernel",
    [
        MoveKernel("push", 2, same=True),
        MoveKernel("push", 2, same=False),
        MoveKernel("relay", 8, same=False),
        MoveKernel("put", 8, same=False),
        MoveKernel("pull", 8, same=False, staged=True, arranged=True),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_spill_nothing_and_two_blocks_of_256_threads_fit_a_multiprocessor(kernel):
    """For two ranks the launch bounds of push demand four blocks, so those kernels have at most 64 registers."""
    log = kernel.specialisation.compile("sm_90a", ("--ptxas-options=-v",)).log
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0"] * 3
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) <= 128
