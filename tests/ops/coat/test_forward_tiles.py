# SPDX-License-Identifier: Apache-2.0
"""The forward pass of RMSNorm by `HeldTiles`, a plan for tensors that fit in the registers of one grid."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import case, check_forward, check_outputs_that_begin_at, place
from hypothesis import given
from hypothesis import strategies as st

import drvfuse as df
from drvfuse.ops.call.planned import limits
from drvfuse.ops.coat import rmsnorm_forward
from drvfuse.plans.coat_forward import HeldTiles, forward_plan
from drvfuse.plans.limits import Limits

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
H200 = Limits(132, 227 << 10, (9, 0))
KINDS = [(4, 2), (4, 1), (8, 1)]  # rows per lane, blocks per segment


def of_kinds(*kinds):
    return pytest.mark.parametrize("kind", kinds, indirect=True, ids=str)


@pytest.fixture(params=KINDS, ids=str)
def kind(monkeypatch, request):
    """Make every plan of the test a `HeldTiles` with the given rows per lane and blocks per segment."""
    monkeypatch.setattr(
        rmsnorm_forward, "forward_plan", lambda limits, r, c, QB: HeldTiles(limits, r, c, *request.param)
    )
    return request.param


def run(device, values, QB=16, eps=1e-5, flag=False):
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, QB, eps, flag)
    check_forward(device, values, results, QB, eps, flag)
    return results


def test_the_plan_chooses_smaller_tiles_for_fewer_elements():
    chosen = {
        (16, 8192): (4, 2),
        (64, 4096): (4, 2),
        (1024, 1024): (4, 2),
        (256, 4096): (4, 1),
        (2048, 2048): (4, 1),
        (512, 8192): (8, 1),
        (2048, 4096): (8, 1),
    }
    for shape, tile in chosen.items():
        plan = forward_plan(H200, *shape, 16)
        assert isinstance(plan, HeldTiles) and (plan.tile_rows, plan.split) == tile
    for shape in ((17, 4096), (8192, 4096), (2048, 8192)):
        assert not isinstance(forward_plan(H200, *shape, 16), HeldTiles)


@given(rows=st.integers(0, 9000), columns=st.integers(1, 70000), multiprocessors=st.sampled_from([1, 16, 132]))
def test_a_plan_covers_every_pack_fits_the_device_and_has_a_slot_for_every_word(rows, columns, multiprocessors):
    plan = HeldTiles.best(Limits(multiprocessors, 227 << 10, (9, 0)), rows, columns)
    if plan is None:
        return
    segments = -(-columns // 512)
    assert plan.block_rows * plan.strips >= rows > plan.block_rows * (plan.strips - 1)
    assert plan.grid == plan.strips * segments * plan.split <= 256 and plan.warps * plan.split == 8
    assert -(-plan.grid // multiprocessors) * plan.threads <= 512
    assert plan.strips <= 128 and 2 * plan.strips * plan.pairs <= 1 << 15


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((KINDS[0], shape) for shape in ((32, 512), (64, 1024), (130, 1536), (33, 272), (70, 777))),
        (KINDS[0], (1, 1)),
        *((KINDS[1], shape) for shape in ((130, 1536), (70, 777))),
        *((KINDS[2], shape) for shape in ((64, 1024), (130, 1536), (70, 777), (1, 1))),
    ],
    indirect=["kind"],
    ids=str,
)
def test_no_race_and_the_same_bits_under_every_schedule(rng, driver, kind, shape):
    for seed in range(2):
        with df.emu.Machine(devices=1, sm_count=24, seed=seed, race="strict", delay_stores=True) as machine:
            device = df.device(0, driver=machine)
            for _ in range(2):
                run(device, case(rng, shape))
            assert not machine.reports


@of_kinds((4, 2), (8, 1))
@pytest.mark.parametrize(
    "shape,flag", [((4, 24, 528), False), ((3, 40, 272), True), ((2, 33, 96), False), ((96, 1, 96), False)]
)
def test_batches_have_the_bits_of_the_reference(device, rng, kind, shape, flag):
    run(device, case(rng, shape), flag=flag)


@pytest.mark.parametrize(
    ("kind", "shape", "QB", "fp8", "w"),
    [
        ((4, 2), (67, 1100), 16, E5M2, "float32"),
        ((4, 2), (67, 1100), 128, E4M3, "bfloat16"),
        ((8, 1), (64, 1024), 32, E5M2, "bfloat16"),
    ],
    indirect=["kind"],
)
def test_other_types_and_groups_have_the_bits_of_the_reference(device, rng, kind, shape, QB, fp8, w):
    run(device, case(rng, shape, QB, fp8, w), QB)


def test_nans_and_maxima_that_an_estimate_does_not_decide_have_the_bits_of_the_reference(device, rng, kind):
    """Blocks first estimate the largest |y|. If the estimate does not decide the scale, each block of a strip computes
    the exact maxima of a part of the strip's rows, and all blocks exchange these maxima.
    """
    values = case(rng, (130, 1040))
    values.w[3] = 1e30
    run(device, values)
    values.w[3] = np.nan
    run(device, values)
    values = case(rng, (130, 1040))
    values.x[77, 5] = np.nan
    run(device, values)


@of_kinds((4, 1), (8, 1))
@pytest.mark.parametrize("shift", [1, 4])
def test_outputs_may_begin_at_any_address_and_nothing_outside_them_is_written(device, rng, kind, shift):
    check_outputs_that_begin_at(shift, device, case(rng, (72, 528)))


@pytest.mark.emulated
def test_each_byte_is_read_and_written_once(rng, driver, kind):
    """Beyond x, its scales, weights and outputs, a launch moves the epoch and the words that blocks exchange."""
    rows, columns = 128, 1024
    with df.emu.Machine(devices=1, sm_count=32) as machine:
        device = df.device(0, driver=machine)
        run(device, case(rng, (rows, columns)))
        device.synchronize()
        counted = list(machine.launches)[-1].counters.total
        plan = HeldTiles(limits(device), rows, columns, *kind)
    elements = rows * columns
    weights = 2 * columns * rows // plan.tile_rows
    words = 16 * plan.strips * plan.pairs
    assert 2 * elements + 4 * rows <= counted.local_written <= 2 * elements + 4 * rows + words + 64 * plan.grid
    assert counted.local_read >= elements * 18 // 16 + weights + words * plan.grid // plan.strips
