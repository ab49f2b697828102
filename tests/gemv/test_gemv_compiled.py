# SPDX-License-Identifier: Apache-2.0
"""The kernel of the product with partial norm as it is compiled: loads, registers, PDL."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from unittest import mock

import pytest

import drvfuse as df
from drvfuse import dtypes
from drvfuse.ops import launching
from drvfuse.ops.gemv_partial_norm import GemvParams
from drvfuse.ops.gemv_plan import Shape, Shares, groups_of_row
from drvfuse.runtime.nvrtc import Image

SHAPES = [
    (1, 7168, "bfloat16"),
    (1, 8192, "bfloat16"),
    (1, 1024, "bfloat16"),
    (1, 16384, "bfloat16"),
    (8, 7168, "bfloat16"),
]
SHAPES += [(1, 7168, "float32"), (1, 7168, "float8_e4m3fn")]


class Loading(Exception):
    pass


@cache
def compiled(m: int, k: int, weight: str, level: df.PDLLevel = df.PDLLevel.OFF) -> Image:
    """What the op compiles for 16 rows a block; it is not run."""
    with df.emu.Machine(devices=1, sm_count=1) as machine:
        device = df.device(0, driver=machine)
        act, gamma = device.zeros((m, k), "bfloat16"), device.zeros(8, "bfloat16")
        weights = device.zeros((16, k), weight)
        with mock.patch.object(launching, "load", side_effect=Loading) as load, pytest.raises(Loading):
            df.gemv_partial_norm(act, weights, gamma, n_normed=8, eps=1e-6, pdl_level=level)
    return launching.build(load.call_args.args[1], "sm_90a", ["--ptxas-options=-v"])


@pytest.mark.parametrize(("m", "k", "weight"), SHAPES)
def test_it_spills_nothing_and_has_the_hosts_parameters(m, k, weight):
    image = compiled(m, k, weight)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    info = image.kernels["gemv_partial_norm"]
    assert info.param_bytes == ctypes.sizeof(GemvParams)
    assert info.has_pdl_wait and info.has_pdl_trigger


@pytest.mark.parametrize(("m", "k", "weight"), SHAPES)
def test_only_weights_are_read_before_the_wait_of_a_dependent_launch(m, k, weight):
    ptx = compiled(m, k, weight, df.PDLLevel.ON).ptx
    before, wait, after = ptx.partition("griddepcontrol.wait")
    element = dtypes.get(weight)
    shape = Shape.of(m, groups_of_row(k, element.itemsize), 16)
    assert wait and len(re.findall(r"\bld\.global\.nc", before)) == shape.slots * shape.packs
    assert not re.search(r"\bld\.(?!global\.nc|param)\S*global|\batom|\bred\.|\bst\.\S*global", before)
    assert "ld.global.nc.L1::no_allocate.v4.u32" in after


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
