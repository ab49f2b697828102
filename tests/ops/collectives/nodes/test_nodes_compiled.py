# SPDX-License-Identifier: Apache-2.0
"""The kernels of calls over several nodes as ptxas compiles them for sm_90a: no stack, no spill, accesses of 128 bits.

A launch has one block on each multiprocessor of its budget, so a block with the most threads must fit in the registers
of one multiprocessor.
"""

from __future__ import annotations

import re

import pytest

from drvfuse import dtypes
from drvfuse.ops.collectives.nodes.sums import NodeSumsKernel
from drvfuse.ops.collectives.rows.kernel import RowsKernel
from drvfuse.ops.collectives.sums.kernel import SumsKernel

BF16 = dtypes.get("bfloat16")
FILE, STEP = 65536, 8  # registers of a multiprocessor, and the granularity of allocation per thread


def image_of(kind, **options):
    kernel = kind(**{"algo": "two_stage", "dtype": BF16, "out_dtype": BF16, **options})
    return kernel.specialisation.compile("sm_90a", ("--ptxas-options=-v",))


def fits(image, threads=512):
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", image.log)
    assert found == [("0", "0", "0")]
    assert ".local" not in image.ptx
    (registers,) = re.findall(r"Used (\d+) registers", image.log)
    assert int(registers) <= FILE // threads // STEP * STEP
    assert "ld.global.v4" in image.ptx
    assert "griddepcontrol.wait" in image.ptx and "griddepcontrol.launch_dependents" in image.ptx


@pytest.mark.parametrize("ranks,staged", [(1, False), (1, True), (2, False), (4, True), (8, False), (8, True)])
def test_kernels_that_add_the_sums_of_nodes_have_no_stack_and_no_spill(ranks, staged):
    fits(image_of(NodeSumsKernel, op="node_sums", ranks=ranks, packs=min(4, 8 // ranks), staged=staged))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_reduce_kernels_after_the_exchange_have_no_stack_and_no_spill(ranks):
    fits(image_of(SumsKernel, op="allreduce", ranks=ranks, packs=min(4, 8 // ranks), nodes=True))


@pytest.mark.parametrize(
    "ranks,residual,packs",
    [(1, False, 1), (1, True, 2), (1, True, 4), (4, True, 2), (8, False, 2), (8, True, 1), (8, False, 4), (8, True, 4)],
)
def test_fused_kernels_after_the_exchange_have_no_stack_and_no_spill(ranks, residual, packs):
    out = dtypes.get("float8_e4m3fn")
    options = {"out_dtype": out, "gamma_dtype": BF16, "residual": residual, "packs": packs}
    fits(image_of(RowsKernel, op="allreduce_rmsnorm_fp8", ranks=ranks, nodes=True, **options))


def test_reduce_scatters_after_the_exchange_have_no_stack_and_no_spill():
    options = {"algo": "one_stage", "dtype": BF16, "ranks": 1, "nodes": True, "local": True}
    plain = SumsKernel(op="reduce_scatter", out_dtype=BF16, packs=4, **options)
    fits(plain.specialisation.compile("sm_90a", ("--ptxas-options=-v",)))
    out = dtypes.get("float8_e4m3fn")
    fused = RowsKernel(op="reduce_scatter_rmsnorm_fp8", out_dtype=out, gamma_dtype=BF16, residual=True, **options)
    fits(fused.specialisation.compile("sm_90a", ("--ptxas-options=-v",)))
