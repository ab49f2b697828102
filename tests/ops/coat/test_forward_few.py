# SPDX-License-Identifier: Apache-2.0
"""The forward pass of RMSNorm of few rows, which one block or one cluster holds in registers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fp8_support import BF16, Strided, case, check_forward, check_outputs_that_begin_at, place
from hypothesis import given
from hypothesis import strategies as st

import drvfuse as df
from drvfuse.ops.call import faults
from drvfuse.ops.call.planned import limits
from drvfuse.ops.call.specialisation import FP8_CAPABILITY, Specialisation
from drvfuse.plans.coat_forward import FewRows, HeldRows, forward_plan
from drvfuse.plans.definitions import defines
from drvfuse.plans.limits import Limits
from drvfuse.reference import coat_rmsnorm

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CLUSTER_SHAPE = (13, 1040)
H200 = Limits(132, 227 << 10, (9, 0))
PAYS = HeldRows.pays


@pytest.fixture(scope="module", autouse=True)
def any_number_of_rows():
    """Use the plan `HeldRows` for every number of rows that fits, also where another plan is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldRows, "pays", staticmethod(lambda rows: True))
        yield


def held(device: df.Device, shape: tuple[int, ...]) -> HeldRows:
    plan = forward_plan(limits(device), int(np.prod(shape[:-1])), shape[-1], 16)
    assert isinstance(plan, HeldRows)
    return plan


def run(device, values, QB=16, eps=1e-5, flag=False):
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, QB, eps, flag)
    check_forward(device, values, results, QB, eps, flag)
    return results


def test_the_plan_is_chosen_for_rows_that_fit_the_registers_of_a_cluster():
    for shape in ((1, 16384), (4, 16384), (8, 8192), (16, 4096), (16, 16)):
        assert isinstance(forward_plan(H200, *shape, 16), HeldRows)
    for shape in ((0, 96), (1, 16385), (5, 8193), (11, 5121), (17, 96)):
        assert isinstance(forward_plan(H200, *shape, 16), FewRows)
    assert isinstance(forward_plan(Limits(132, 99 << 10, (8, 9)), 1, 2048, 16), FewRows)
    assert [forward_plan(H200, *shape, 16).cluster for shape in ((1, 2048), (4, 1024), (16, 4096))] == [1, 1, 8]


def test_the_plan_is_chosen_for_one_row_or_a_multiple_of_four():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldRows, "pays", staticmethod(PAYS))
        kinds = [type(forward_plan(H200, rows, 2048, 16)) for rows in range(1, 17)]
    assert [rows for rows, kind in enumerate(kinds, 1) if kind is HeldRows] == [1, 4, 8, 12, 16]


@given(rows=st.integers(1, 20), columns=st.integers(1, 20000))
def test_a_plan_covers_every_element_and_has_a_slot_for_every_partial_sum(rows, columns):
    plan = forward_plan(H200, rows, columns, 16)
    if not isinstance(plan, HeldRows):
        return
    groups = plan.block_rows // plan.tile_rows
    assert rows <= plan.block_rows < rows + 4 and plan.warps % groups == 0
    assert plan.cluster * (plan.warps // groups) * 512 >= columns
    assert plan.block_rows * -(-columns // 512) <= 128
    assert plan.grid == plan.cluster in (1, 2, 4, 8) and plan.threads <= 256
    assert not plan.waits


SHAPES = [(1, 1), (1, 2048), (1, 16384), (2, 48), (4, 8192), (5, 3000), (12, 1040), (16, 1024), (16, 4096), (13, 273)]


@pytest.mark.emulated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_race_and_the_same_bits_under_every_schedule(rng, driver, shape):
    for seed in range(3):
        with df.emu.Machine(devices=1, sm_count=16, seed=seed, race="strict", delay_stores=True) as machine:
            device = df.device(0, driver=machine)
            held(device, shape)
            for _ in range(2):
                run(device, case(rng, shape))
            assert not machine.reports


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(1, 2048), (2, 4096), (3, 96), CLUSTER_SHAPE], ids=str)
def test_devices_without_clusters_give_the_same_bits(rng, driver, shape):
    with df.emu.Machine(devices=1, sm_count=16, arch="sm_89", race="strict") as machine:
        device = df.device(0, driver=machine)
        assert isinstance(forward_plan(limits(device), *shape, 16), FewRows)
        run(device, case(rng, shape))
        assert not machine.reports


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows_has_the_bits_of_the_reference(device, rng, rows):
    for columns in (80, 1040) if rows in (13, 16) else (80,):
        held(device, (rows, columns))
        run(device, case(rng, (rows, columns)))


@pytest.mark.parametrize("shape", [(3, 5, 1040), (2, 8, 272), (4, 4, 1040), (1, 16, 96), (16, 1, 96), (1, 1, 96)])
@pytest.mark.parametrize("flag", [False, True])
def test_batches_have_the_bits_of_the_reference(device, rng, shape, flag):
    held(device, shape)
    run(device, case(rng, shape), flag=flag)


@pytest.mark.parametrize(
    "shape,QB,fp8,w",
    [
        ((1, 1000), 16, E5M2, "float32"),
        ((1, 1000), 128, E4M3, "bfloat16"),
        ((7, 1100), 32, E5M2, "bfloat16"),
        ((16, 640), 128, E4M3, "bfloat16"),
    ],
)
def test_other_types_and_groups_have_the_bits_of_the_reference(device, rng, shape, QB, fp8, w):
    held(device, shape)
    run(device, case(rng, shape, QB, fp8, w), QB)


@pytest.mark.parametrize(
    "shape,shift",
    [
        *(((16, 1040), shift) for shift in (0, 1, 4, 8)),
        *(((13, 273), shift) for shift in (0, 1, 4, 8)),
        ((8, 96), 4),
        ((1, 1040), 1),
    ],
)
def test_outputs_may_begin_at_any_address_and_nothing_outside_them_is_written(device, rng, shape, shift):
    check_outputs_that_begin_at(shift, device, case(rng, shape))


def test_rows_of_wider_arrays_have_the_bits_of_the_reference(device, rng):
    wide = case(rng, (13, 2080))
    x, s_x, _, _ = place(device, wide)
    for first in (1, 16):
        columns = slice(first, first + 1040)
        cut = wide._replace(x=wide.x[:, columns], s_x=wide.s_x[:, 3:68], w=wide.w[columns])
        with df.config.override(driver=device.driver):
            rows, scales = Strided(x, (13, 1040), (2080, 1), first), Strided(s_x, (13, 65), (130, 1), 3)
            results = df.coat.fp8_rmsnorm_forward(rows, scales, device.array(cut.w), 16, 1e-5)
        check_forward(device, cut, results)


@pytest.mark.parametrize("shape", [CLUSTER_SHAPE, (8, 96), (1, 2048)])
def test_a_maximum_at_a_rounding_boundary_of_the_scale_is_exact(device, rng, shape):
    """From case to case the largest |y| grows by one ulp, across a value where the rounded scale changes. So close to
    this value an estimate does not decide the scale.
    """
    values, row, column = case(rng, shape, w="float32"), shape[0] - 1, shape[1] - 7
    values.x[row, column], values.s_x[row] = 384, values.s_x.max()
    values.x[row, :column] = values.x[row, :column].astype(np.float32) / 16
    values.x[row, column + 1 :] = 0
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    weight = np.float32(448 * (2 + 2**-7) / (384 * np.float32(values.s_x[row, 0]) * np.float64(rstd[row])))
    found = set()
    for step in range(-5, 6):
        values.w[column] = weight + step * np.spacing(weight)
        found.add(float(run(device, values)[1].numpy()))
    assert device.driver.name == "cuda" or found == {2.0, 2 + 2**-6}


@pytest.mark.parametrize("shape", [CLUSTER_SHAPE, (8, 96), (1, 2048)])
@pytest.mark.parametrize("weight", [1e30, 1e-30, 2.0**21, np.nan, np.inf])
def test_weights_outside_the_range_of_the_estimate_have_the_bits_of_the_reference(device, rng, shape, weight):
    """The weights of all columns are out of range, or those of the columns of one block."""
    for columns in (slice(None), slice(shape[1] - 16, None)):
        values = case(rng, shape)
        values.w[columns] = (values.w[columns].astype(np.float32) * np.float32(weight)).astype(BF16)
        run(device, values)


@pytest.mark.parametrize("shape", [CLUSTER_SHAPE, (3, 96), (1, 2048)])
def test_special_values_have_the_bits_of_the_reference(device, rng, shape):
    values = case(rng, shape, fp8=E5M2)
    row, column = shape[0] - 1, shape[1] - 9
    for byte in (0x7C, 0x7F):  # infinity and NaN
        values.x.view(np.uint8)[row, column] = byte
        run(device, values)
    values = case(rng, shape)
    values.s_x[row] = 1e30  # the sum of squares of this row overflows
    run(device, values)
    values.x[:] = 0
    run(device, values)
    assert np.isnan(run(device, values, eps=0.0)[1].numpy().astype(np.float32))


def test_a_captured_call_replays_and_leaves_its_workspace_unchanged(device, rng):
    values = case(rng, CLUSTER_SHAPE)
    rows, columns = CLUSTER_SHAPE
    x, s_x, w, _ = place(device, values)
    dirty = np.full(df.coat.fp8_workspace_bytes(columns), 0xA5, np.uint8)
    space = device.array(dirty)
    wanted = ((CLUSTER_SHAPE, E4M3), ((), "bfloat16"), ((columns, rows), E4M3), ((rows,), "float32"))
    out = tuple(device.empty(*one) for one in wanted)
    with df.Graph.capture(device.stream) as graph:
        df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=out, workspace=space)
    for again in (values, case(rng, CLUSTER_SHAPE)._replace(w=values.w)):
        x.copy_from(again.x)
        s_x.copy_from(again.s_x)
        graph.launch(device.stream)
        check_forward(device, again, (*out[:3], (w, out[3], 8)))
    graph.close()
    assert (space.numpy() == dirty).all()


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(1, 2048), (16, 4096)])
def test_each_byte_is_read_and_written_once(rng, driver, shape):
    """x and its scales are read once, weights once per warp; qy, qy_t, rstd and the scale are written once."""
    rows, columns = shape
    with df.emu.Machine(devices=1, sm_count=16) as machine:
        device = df.device(0, driver=machine)
        plan = held(device, shape)
        run(device, case(rng, shape))
        counted = list(machine.launches)[-1].counters.total
    elements = rows * columns
    assert counted.local_read == elements * 18 // 16 + 2 * columns * (plan.block_rows // plan.tile_rows)
    assert counted.local_written == 2 * elements + 4 * rows + 2


@pytest.mark.emulated
def test_a_missing_cluster_barrier_is_found(rng, driver):
    found = 0
    for seed in range(6):
        with df.emu.Machine(devices=1, sm_count=16, seed=seed, race="strict") as machine:
            device = df.device(0, driver=machine)
            x, s_x, w, _ = place(device, case(rng, CLUSTER_SHAPE))
            try:
                with faults.in_kernels("no-cluster-barrier"):
                    df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
                device.synchronize()
            except df.errors.DrvfuseError:
                found += 1
            else:
                found += bool(machine.reports)
    assert found


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(1, 2048), (4, 2048), (13, 273), (16, 4096)])
def test_kernels_use_no_stack_and_spill_nothing(shape):
    plan = forward_plan(H200, *shape, 16)
    aligned = shape[1] % 16 == 0
    kinds = defines(
        dtype=df.dtypes.get(E4M3),
        weight_dtype=df.dtypes.get("bfloat16"),
        group=16,
        aligned=aligned,
        layer=False,
        affine=False,
    )
    every = kinds + plan.defines(aligned) + defines(run=plan.run(shape[0], 0))
    image = Specialisation("coat", plan.kernel, every, capability=FP8_CAPABILITY).compile(
        "sm_90a", ("--ptxas-options=-v",)
    )
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", image.log) == ["0"] * 3
    assert "griddepcontrol.wait" in image.ptx and "griddepcontrol.launch_dependents" in image.ptx
