# SPDX-License-Identifier: Apache-2.0
"""The backward pass of RMSNorm: added gradients, shapes of every plan, and the number of bytes that it moves."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, Strided, case, check_backward, place

import drvfuse as df
from drvfuse.errors import ArgumentError
from drvfuse.plans import coat_backward
from drvfuse.plans.coat_backward import BackwardShape
from drvfuse.reference import coat_rmsnorm

FEW, MANY = "few", "many"


@pytest.fixture
def few(request, monkeypatch):
    """Make every launch of the test use the kernel for few rows, or the kernel for many rows."""
    monkeypatch.setattr(coat_backward, "FEW_ROWS", {FEW: 1 << 20, MANY: 0}[request.param])


def saved(device, values, QB=16):
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, QB, 1e-5)
    return device.array(rstd), rstd


@pytest.mark.parametrize(
    "few,rows", [(FEW, 0), (FEW, 1), (FEW, 133), (MANY, 1), (MANY, 131), (MANY, 132), (MANY, 133)], indirect=["few"]
)
def test_any_number_of_rows_has_the_bits_of_the_reference(device, rng, few, rows):
    values = case(rng, (rows, 80))
    x, s_x, w, g = place(device, values)
    v, rstd = saved(device, values)
    results = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16)
    check_backward(values, rstd, results)


@pytest.mark.parametrize(
    "few,shape",
    [(FEW, (3, 4096)), (FEW, (140, 520)), (MANY, (140, 512)), (MANY, (135, 2304)), (MANY, (134, 2800))],
    indirect=["few"],
)
def test_any_number_of_columns_has_the_bits_of_the_reference(device, rng, few, shape):
    """The shapes result in teams of several warps, several packs per thread, and lanes without a pack."""
    values = case(rng, shape)
    x, s_x, w, g = place(device, values)
    v, rstd = saved(device, values)
    check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16))


@pytest.mark.parametrize("few,columns", [(MANY, 128), (FEW, 200)], indirect=["few"])
def test_groups_of_128_columns_have_the_bits_of_the_reference(device, rng, few, columns):
    values = case(rng, (140, columns), 128)
    x, s_x, w, g = place(device, values)
    v, rstd = saved(device, values, 128)
    check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 128), 128)


@pytest.mark.parametrize(
    "few,shape,count",
    [(MANY, (140, 96), 3), (FEW, (5, 100), 3), (FEW, (2, 3, 48), 3), (FEW, (3, 11, 96), 1)],
    indirect=["few"],
)
def test_gradients_are_added_to_the_given_one_with_the_bits_of_the_reference(device, rng, few, shape, count):
    """A call that adds several gradients has the results of a call with their rounded sum."""
    values = case(rng, shape)
    hosts = [values.g, *(rng.standard_normal(shape).astype(np.float32).astype(BF16) for _ in range(count - 1))]
    x, s_x, w, _ = place(device, values)
    v, rstd = saved(device, values)
    arrays = [device.array(host) for host in hosts]
    results = df.coat.fp8_rmsnorm_backward(x, s_x, arrays, w, v, 16)
    total = hosts[0]
    for more in hosts[1:]:
        total = (total.astype(np.float32) + more.astype(np.float32)).astype(BF16)
    check_backward(values._replace(g=total), rstd, results)


@pytest.mark.parametrize("few,rows,first", [(MANY, 140, 48), (FEW, 33, 51)], indirect=["few"])
def test_gradients_to_add_may_be_slices_of_wider_arrays(device, rng, few, rows, first):
    """The rows of the slices are aligned to 16 bytes, or only to an element."""
    values = case(rng, (rows, 96))
    wide = [rng.standard_normal((rows, 200)).astype(np.float32).astype(BF16) for _ in range(3)]
    x, s_x, w, _ = place(device, values)
    v, rstd = saved(device, values)
    with df.config.override(driver=device.driver):
        slices = [Strided(device.array(host), (rows, 96), (200, 1), first) for host in wide]
        results = df.coat.fp8_rmsnorm_backward(x, s_x, slices, w, v, 16)
    cut = [host[:, first : first + 96] for host in wide]
    check_backward(values._replace(g=coat_rmsnorm.add_gradients(cut)), rstd, results)


def test_gradients_of_a_wrong_dtype_or_shape_are_refused(device, rng):
    values = case(rng, (4, 32))
    x, s_x, w, g = place(device, values)
    v, _ = saved(device, values)
    for wrong, argument in (
        ([], "g"),
        ([g] * 4, "g"),
        ([g, device.zeros((4, 16), "bfloat16")], "g[1]"),
        ([g, g, x], "g[2].dtype"),
    ):
        with pytest.raises(ArgumentError) as caught:
            df.coat.fp8_rmsnorm_backward(x, s_x, wrong, w, v, 16)
        assert caught.value.argument == argument


@pytest.mark.emulated
@pytest.mark.parametrize("few", [MANY], indirect=True)
def test_a_device_without_bulk_copies_gives_the_same_bits(rng, few):
    values = case(rng, (150, 128))
    with df.emu.Machine(devices=1, sm_count=16, arch="sm_89") as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, g = place(device, values)
        v, rstd = saved(device, values)
        check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16))


def counted(rng, rows, columns, count, blocks):
    """The counters of a launch on an emulated device with `blocks` multiprocessors, and the number of bytes that the
    launch's polls read.
    """
    values = case(rng, (rows, columns))
    with df.emu.Machine(devices=1, sm_count=blocks) as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, g = place(device, values)
        v, _ = saved(device, values)
        df.coat.fp8_rmsnorm_backward(x, s_x, [g] * count, w, v, 16)
        device.synchronize()
        counters = list(machine.launches)[-1].counters
    polls = sum(
        lines.local_read
        for line, lines in counters.lines.items()
        if "ld.relaxed.gpu.global.v4.u32" in counters.opcodes[line]
    )
    assert counters.total.host_written == counters.total.host_read == 0
    return counters.total, polls


@pytest.mark.emulated
# Bulk copies read one scale for each 16 columns, and loads to registers one for each pack of 8.
@pytest.mark.parametrize("columns,count", [(640, 3), (656, 1)])
def test_the_backward_moves_the_expected_number_of_bytes(monkeypatch, rng, columns, count):
    """Each input is read once, and dx is written once. The words of the sums of segments are written once and cleared
    once."""
    monkeypatch.setattr(coat_backward, "FEW_ROWS", 0)
    rows, blocks = 150, 16
    total, polls = counted(rng, rows, columns, count, blocks)
    shape, elements = BackwardShape.of(rows, columns), rows * columns
    state = 2 * 4 + 4  # two updates of `users`, and a store of the epoch
    assert total.local_written == 2 * elements + (4 + 4) * shape.segments * columns + 2 * columns + state
    scale_per = 16 if columns % 128 == 0 else 8
    of_rows = rows * 4 * shape.team_warps + elements * (1 + 2 * count) + elements // scale_per * 2
    header = 8 * shape.threads * blocks + 2 * 4
    assert total.local_read - polls == of_rows + 2 * columns * blocks + header
    assert polls >= 4 * shape.segments * columns


@pytest.mark.emulated
def test_the_backward_of_few_rows_moves_the_expected_number_of_bytes(rng):
    """Rows are read once for dx and once for dw, and blocks exchange no partial sums."""
    rows, columns, blocks = 20, 640, 16
    total, polls = counted(rng, rows, columns, 1, blocks)
    shape, elements = BackwardShape.of(rows, columns), rows * columns
    assert total.local_written == 2 * elements + 2 * columns and not polls
    rstd = rows * 4 * 32 * shape.team_warps + rows * 4 * columns // 8  # every thread reads rstd of each of its rows
    assert total.local_read == 2 * (elements * (1 + 2) + elements // 8 * 2) + rstd + 2 * columns * blocks


def test_launches_of_different_shapes_can_share_a_workspace(monkeypatch, device, rng):
    """A launch clears the words that it used, so that a launch with another number of words can use the same memory."""
    monkeypatch.setattr(coat_backward, "FEW_ROWS", 0)
    space = device.zeros(df.coat.fp8_workspace_bytes(96), "uint8")
    for rows in (150, 1, 150, 1, 1, 150):
        values = case(rng, (rows, 96))
        x, s_x, w, g = place(device, values)
        v, rstd = saved(device, values)
        check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16, workspace=space))


@pytest.mark.emulated
@pytest.mark.parametrize("columns,teams,count,kept", [(128, 16, 1, 1), (640, 8, 2, 1), (640, 8, 1, 0)])
def test_rings_of_buffers_that_wrap_around_have_the_bits_of_the_reference(
    monkeypatch, rng, columns, teams, count, kept
):
    """Each slot of the ring is filled several times, for teams of one or two warps, under the race detector. A team
    stores the sums of a segment for other teams before it stores dx of the segment's last row, or of its last two rows.
    """
    for name, value in (("FEW_ROWS", 0), ("DW_SEGMENTS", 6), ("_MAX_RING", 2), ("_LONG", 1 if kept else 12)):
        monkeypatch.setattr(coat_backward, name, value)
    values = case(rng, (6 * teams * 4 + 7, columns))
    host = [values.g, rng.standard_normal(values.g.shape).astype(np.float32).astype(BF16)][:count]
    with df.emu.Machine(devices=1, sm_count=4, race="strict", seed=1) as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, _ = place(device, values)
        v, rstd = saved(device, values)
        results = df.coat.fp8_rmsnorm_backward(x, s_x, [device.array(g) for g in host], w, v, 16)
        check_backward(values._replace(g=coat_rmsnorm.add_gradients(host)), rstd, results)
        assert not machine.reports


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 2048), (333, 5120)])
def test_dw_has_the_same_bits_in_100_runs(device, rng, shape):
    values = case(rng, shape)
    x, s_x, w, g = place(device, values)
    v, rstd = saved(device, values)
    found = [df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16) for _ in range(100)]
    check_backward(values, rstd, found[0])
    assert len({dw.numpy().tobytes() for _, dw in found}) == 1
