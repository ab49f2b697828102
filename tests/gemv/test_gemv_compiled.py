# SPDX-License-Identifier: Apache-2.0
"""The kernel of the product with partial norm as it is compiled: loads, registers, PDL, no trace."""

from __future__ import annotations

import ctypes
import re
from functools import cache

import pytest

from drvfuse import dtypes
from drvfuse.ops.gemv_partial_norm import GemvParams
from drvfuse.ops.gemv_plan import Shape, Shares, groups_of_row
from drvfuse.ops.kernels import CU
from drvfuse.runtime.nvrtc import Image, compile_source

SHAPES = [
    (1, 7168, "bfloat16"),
    (1, 8192, "bfloat16"),
    (1, 1024, "bfloat16"),
    (1, 16384, "bfloat16"),
    (8, 7168, "bfloat16"),
]
SHAPES += [(1, 7168, "float32"), (1, 7168, "float8_e4m3fn")]


@cache
def compiled(m: int, k: int, weight: str, dependent: int = 0) -> Image:
    element = dtypes.get(weight)
    shape = Shape.of(m, groups_of_row(k, element.itemsize), 16)
    types = {"ACT": "bf16", "WEIGHT": element.cxx, "GAMMA": "bf16", "OUT": "bf16"}
    defines = {f"DRVFUSE_{name}_DTYPE": value for name, value in types.items()}
    defines |= {
        "DRVFUSE_M": m,
        "DRVFUSE_WARPS_A_ROW": shape.warps_a_row,
        "DRVFUSE_TEAMS": shape.teams,
        "DRVFUSE_PACKS": shape.packs,
        "DRVFUSE_SLOTS": shape.slots,
        "DRVFUSE_NORM_WARPS": shape.norm_warps(m),
        "DRVFUSE_SUM_LANES": shape.sum_lanes,
        "DRVFUSE_ACCESS": 16,
        "DRVFUSE_CHUNKED": int(shape.chunks > 1),
        "DRVFUSE_DEPENDENT": dependent,
        "DRVFUSE_ACT_ALIGNED": 1,
        "DRVFUSE_NORM_ALIGNED": 1,
        "DRVFUSE_SCALES": "none",
    }
    return compile_source(
        '#include "gemv_partial_norm.cu"\n',
        name="gemv_partial_norm_kernel.cu",
        arch="sm_90a",
        defines=defines,
        options=("--fmad=false", "--ptxas-options=-v"),
        include=(str(CU),),
    )


@pytest.mark.parametrize(("m", "k", "weight"), SHAPES)
def test_it_spills_nothing_and_has_the_hosts_parameters(m, k, weight):
    image = compiled(m, k, weight)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    info = image.kernels["gemv_partial_norm"]
    assert info.param_bytes == ctypes.sizeof(GemvParams)
    assert info.has_pdl_wait and info.has_pdl_trigger


@pytest.mark.parametrize(("m", "k", "weight"), SHAPES)
def test_only_weights_are_read_before_the_wait_of_a_dependent_launch(m, k, weight):
    ptx = compiled(m, k, weight, dependent=1).ptx
    before, wait, after = ptx.partition("griddepcontrol.wait")
    element = dtypes.get(weight)
    shape = Shape.of(m, groups_of_row(k, element.itemsize), 16)
    assert wait and len(re.findall(r"\bld\.global\.nc", before)) == shape.slots * shape.packs
    assert not re.search(r"\bld\.(?!global\.nc|param)\S*global|\batom|\bred\.|\bst\.\S*global", before)
    assert "ld.global.nc.L1::no_allocate.v4.u32" in after


def test_untraced_it_reads_no_clock():
    ptx = compiled(1, 7168, "bfloat16").ptx
    assert "clock64" not in ptx and "smid" not in ptx
    assert "globaltimer" in ptx  # the bounded wait


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 28, 31, 32, 33, 56, 64, 65, 128, 129, 500])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_every_group_has_a_warp(m, groups):
    shape = Shape.of(m, groups, 16)
    assert shape.warps_a_row * shape.packs * shape.chunks >= groups
    assert max(m, 1) <= shape.warps <= 32
    assert m * shape.norm_warps(m) <= shape.warps
    assert shape.sum_lanes >= min(32, groups)


@pytest.mark.parametrize("n", [1, 2, 5, 131, 132, 133, 500, 2112, 40000])
@pytest.mark.parametrize("part", [0, 1, 3, 4])
@pytest.mark.parametrize("step", [1, 4, 32])
def test_blocks_have_all_rows_and_nearly_as_many_each(n, part, step):
    n_normed = n * part // 4
    shares = Shares.of(n, n_normed, 132, step)
    assert 1 <= shares.grid <= min(132, n)
    normed = shares.normed_blocks * shares.normed_share + shares.normed_more + shares.last_normed
    unnormed = shares.unnormed_blocks * shares.unnormed_share + shares.unnormed_more + shares.last_unnormed
    assert (normed, unnormed) == (n_normed, n - n_normed)
    counts = []
    for block in range(shares.blocks):
        back = shares.blocks - 1 - block
        counts.append(
            (block < shares.normed_blocks) * (shares.normed_share + (block < shares.normed_more))
            + (back < shares.unnormed_blocks) * (shares.unnormed_share + (back < shares.unnormed_more))
        )
    assert max(counts, default=0) <= shares.most_rows
    if n > 132 * step:
        assert max(counts) - min(counts) <= 1
