# SPDX-License-Identifier: Apache-2.0
"""The machine code of the product with partial norm: loads, registers, PDL."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from unittest import mock

import numpy as np
import pytest

import drvfuse as df
from drvfuse.compiler.nvrtc import Image
from drvfuse.errors import ArgumentError
from drvfuse.ops.gemv import kernel
from drvfuse.ops.gemv.kernel import GemvParams
from drvfuse.plans import gemv as gemv_plan
from drvfuse.plans.gemv import Shape, Shares
from drvfuse.trace import layout

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
def compiled(m: int, k: int, weight: str, level: df.PDLLevel = df.PDLLevel.OFF, traced: bool = False) -> Image:
    """The image that the op compiles for 16 rows per block; it is not run."""
    with df.emu.Machine(devices=1, sm_count=1) as machine:
        device = df.device(0, driver=machine)
        act, gamma = device.zeros((m, k), "bfloat16"), device.zeros(8, "bfloat16")
        weights = device.zeros((16, k), weight)
        with mock.patch.object(kernel, "load", side_effect=Loading) as load, pytest.raises(Loading):
            trace = df.Trace(device) if traced else None
            df.gemv_partial_norm(act, weights, gamma, n_normed=8, epsilon=1e-6, pdl_level=level, trace=trace)
    return load.call_args.args[1].compile("sm_90a", ["--ptxas-options=-v"])


def model(m: int, act: str, *scaled: str, level: df.PDLLevel = df.PDLLevel.OFF) -> Image:
    """The image that the op compiles for the model's shape and an FP8 weight. The operands named in `scaled` have
    scales for groups of columns."""
    with df.emu.Machine(devices=1, sm_count=132) as machine:
        device = df.device(0, driver=machine)
        rows, gamma = device.empty((m, 7168), act), device.empty(1536, "bfloat16")
        weight = device.empty((2112, 7168), "float8_e4m3fn")
        rows_of = {"act": m, "weight": 2112}
        given = {f"{name}_scales": device.empty((rows_of[name], 56), "float32") for name in scaled}
        with mock.patch.object(kernel, "load", side_effect=Loading) as load, pytest.raises(Loading):
            df.gemv_partial_norm(rows, weight, gamma, n_normed=1536, epsilon=1e-6, pdl_level=level, **given)
    return load.call_args.args[1].compile("sm_90a", ["--ptxas-options=-v"])


@pytest.mark.parametrize(("m", "k", "weight"), [*SHAPES, (1, 7166, "bfloat16"), (3, 1001, "bfloat16")])
def test_kernels_spill_nothing_and_have_the_parameters_of_the_host(m, k, weight):
    image = compiled(m, k, weight)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    info = image.kernels["gemv_partial_norm"]
    assert info.param_bytes == ctypes.sizeof(GemvParams)
    assert info.has_pdl_wait and info.has_pdl_trigger


@pytest.mark.parametrize(
    ("m", "act", "scaled"),
    [(2, "bfloat16", ["weight"]), (8, "float32", []), (2, "float8_e4m3fn", ["weight", "act"])],
)
def test_several_rows_of_act_with_an_fp8_weight_of_the_model_spill_nothing(m, act, scaled):
    """The kernel is planned for the multiprocessors of an H200. Its last block keeps 1536 normed columns in
    registers."""
    log = model(m, act, *scaled).log
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")]


@pytest.mark.parametrize(("k", "weight"), [(256, "bfloat16"), (1024, "bfloat16"), (1024, "float8_e4m3fn")])
def test_kernels_with_a_warp_per_row_spill_nothing(monkeypatch, k, weight):
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)
    log = compiled.__wrapped__(1, k, weight).log
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")]


def test_the_longest_trace_of_a_block_fits_in_shared_memory():
    with mock.patch.object(layout, "LEAST_WORDS", layout.MOST_WORDS // kernel.TRACE_WRITERS):
        assert compiled.__wrapped__(1, 1024, "bfloat16", traced=True).kernels["gemv_partial_norm"]


def test_a_longer_trace_is_refused():
    with df.emu.Machine(devices=1, sm_count=1) as machine:
        device = df.device(0, driver=machine)
        act, weight, gamma = (device.zeros(shape, "bfloat16") for shape in (8, (9000, 8), 8))
        with pytest.raises(ArgumentError, match=r"phases a block; it must be of at most 2044"):
            df.gemv_partial_norm(act, weight, gamma, n_normed=8, epsilon=1e-6, trace=df.Trace(device))


@pytest.mark.parametrize(("m", "k", "weight"), SHAPES)
def test_only_what_no_kernel_writes_is_read_before_the_wait_of_a_dependent_launch(m, k, weight):
    """Checks each of the three kinds of warps from its first barrier on. Before the wait only weights are copied and
    gamma is loaded."""
    check_reads_before_the_wait(compiled(m, k, weight, df.PDLLevel.ON).ptx)


def test_an_fp8_act_and_its_scales_are_read_after_the_wait():
    for m in (1, 2):
        check_reads_before_the_wait(model(m, "float8_e4m3fn", "act", level=df.PDLLevel.ON).ptx)


def check_reads_before_the_wait(ptx: str) -> None:
    accesses = r"\b(?:ld\.(?!param|shared)\S*global|atom|red\.|st\.\S*global|cp\.async\.bulk)\S*"
    parts = [part.rpartition("bar.sync") for part in ptx.split("griddepcontrol.wait")[:-1]]
    assert not re.findall(accesses, parts[0][0])
    multiply, add, finish = sorted((re.findall(accesses, part[2]) for part in parts), key=lambda found: found[:1])
    assert not multiply
    assert add and all(access.startswith("cp.async.bulk") for access in add)
    assert finish and all(access.startswith(("ld.global.u32", "ld.global.v")) for access in finish)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 8), (16, 16), (16, 8), (125, 8)])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 28, 31, 32, 33, 56, 64, 65, 128, 129, 500])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_a_plan_has_a_warp_for_every_group_and_fits_the_limits_of_a_block(m, groups, width, rows, copied):
    shape = Shape.of(m, groups, width, rows, copied)
    direct = shape.sum_warps == 0
    assert shape.warps_a_row * shape.packs * shape.chunks >= groups
    assert shape.chunks == 1 or shape.warps_a_row * shape.packs % 32 == 0
    if direct:
        assert m == shape.chunks == shape.warps_a_row == 1 and not shape.copied
    else:
        assert shape.slots > shape.stages > 0 and not shape.slots % shape.teams
        assert not shape.slots % shape.sum_warps and not shape.stages % shape.sum_warps
    assert shape.threads(m) <= 1024 and shape.norm_warps(m) >= 1
    assert shape.sum_lanes >= min(32, groups)
    assert shape.shared_bytes(m) <= 220 << 10


@pytest.mark.parametrize("n", [1, 2, 5, 131, 132, 133, 500, 2112, 40000])
@pytest.mark.parametrize("part", [0, 1, 3, 4])
def test_rows_are_distributed_evenly_over_blocks(n, part):
    n_normed = n * part // 4
    shares = Shares.of(n, n_normed, 132)
    assert 1 <= shares.grid <= min(132, n)
    rows = [np.arange(block, n, shares.grid) for block in range(shares.grid)]
    assert [shares.rows_share + (block < shares.rows_more) for block in range(shares.grid)] == [r.size for r in rows]
    normed = [int((r < n_normed).sum()) for r in rows]
    assert [shares.normed_share + (block < shares.normed_more) for block in range(shares.grid)] == normed
    assert shares.most_rows == rows[0].size <= rows[-1].size + 1
    assert 0 <= shares.polled_from <= normed[-1]
