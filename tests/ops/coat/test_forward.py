# SPDX-License-Identifier: Apache-2.0
"""The forward pass of RMSNorm: division of rows among blocks, the maximum, long rows, large offsets, bytes moved."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, Case, Strided, case, check_forward, place, same

import drvfuse as df
from drvfuse.errors import ArgumentError
from drvfuse.ops.call.planned import limits
from drvfuse.plans import coat_forward
from drvfuse.plans.coat_forward import MAX_COLUMNS, FewRows, HeldTiles, ManyRows, forward_plan
from drvfuse.reference import coat_rmsnorm


@pytest.fixture(autouse=True)
def no_tiles_in_registers(monkeypatch):
    """Disable the plan `HeldTiles`, so that the kernels for few and for many rows get every number of rows."""
    monkeypatch.setattr(HeldTiles, "pays", staticmethod(lambda rows, columns: False))


def many_rows(device: df.Device) -> int:
    """A number of rows for which the plan is `ManyRows`, and which is no multiple of a tile's rows."""
    return 8 * device.sm_count + 37


def altered(monkeypatch, **changes):
    """Set attributes of every `ManyRows` plan that is made from now on. Results do not depend on these attributes."""
    whole = ManyRows.__init__

    def init(self, *arguments):
        whole(self, *arguments)
        for name, value in changes.items():
            assert getattr(self, name) != value
            setattr(self, name, value)

    monkeypatch.setattr(ManyRows, "__init__", init)


@pytest.mark.parametrize(
    "columns,changes",
    [
        (512, {}),
        (512, {"resident_columns": 384}),
        (640, {"resident_columns": 128}),  # several blocks share the columns of a row, and tiles have another shape
        (512, {"resident_columns": 0}),
        (512, {"resident_columns": 0, "known": False}),
    ],
    ids=["all", "some", "some-shared", "scales", "nothing"],
)
def test_results_do_not_depend_on_how_many_columns_a_block_keeps(device, rng, monkeypatch, columns, changes):
    altered(monkeypatch, **changes)
    values = case(rng, (many_rows(device), columns))
    assert (forward_plan(limits(device), *values.x.shape, 16).parts > 1) == (columns == 640)
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


@pytest.mark.parametrize("changes", [{}, {"chunk_rows": 12}], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("columns", [3000, 4096])
def test_rows_shared_by_several_blocks_have_the_bits_of_the_reference(device, rng, monkeypatch, columns, changes):
    """Several blocks share the columns of a row and exchange its sums of squares. A block reduces its rows in
    chunks of `chunk_rows`. The largest |y| is in row 24: in the last chunk, and in the first batch that a warp loads.
    """
    altered(monkeypatch, **changes)
    values = case(rng, (many_rows(device), columns))
    values.s_x[24, 0] *= 64
    assert forward_plan(limits(device), *values.x.shape, 16).parts > 1
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


def test_nan_weights_in_the_columns_of_one_block_have_the_bits_of_the_reference(device, rng):
    """All y in the columns of one block are NaN. Every row also has finite y in other columns, so its maximum is not
    NaN.
    """
    values = case(rng, (many_rows(device), 3072))
    plan = forward_plan(limits(device), *values.x.shape, 16)
    assert plan.parts > 1
    values.w[: plan.part_columns] = np.nan
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


@pytest.mark.parametrize(
    "columns,QB,fp8,w",
    [
        (160, 64, "float8_e5m2", "float32"),
        (100, 128, "float8_e4m3fn", "bfloat16"),
    ],
)
def test_many_rows_of_other_types_and_groups_have_the_bits_of_the_reference(device, rng, columns, QB, fp8, w):
    values = case(rng, (many_rows(device), columns), QB, fp8, w)
    x, s_x, weight, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, weight, QB, 1e-5), QB)


@pytest.mark.emulated
@pytest.mark.parametrize("rows,columns,tile", [(70, 96, (8, 4)), (71, 272, (8, 8)), (70, 640, (16, 4))])
def test_tiles_of_every_size_have_the_bits_of_the_reference(monkeypatch, rng, rows, columns, tile):
    """Among the shapes are some for which every warp has at most one tile, and some for which warps have two."""
    monkeypatch.setattr(coat_forward, "_FEW_ROWS", 100)
    values = case(rng, (rows, columns))
    with df.emu.Machine(devices=1, sm_count=2) as machine:
        device = df.device(0, driver=machine)
        plan = forward_plan(limits(device), rows, columns, 16)
        assert isinstance(plan, FewRows) and (plan.tile_rows, plan.tile_columns) == tile
        x, s_x, w, _ = place(device, values)
        check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


@pytest.mark.parametrize("times,more,together", [(1, -3, 1), (2, -3, 2), (8, 5, 4)])
def test_blocks_of_one_two_or_four_rows_have_the_bits_of_the_reference(device, rng, monkeypatch, times, more, together):
    """A block reduces one, two or four rows at a time, several times if it has more rows. Some blocks write tiles of
    rows that another block has reduced.
    """
    monkeypatch.setattr(coat_forward, "_FEW_ROWS", 9)
    monkeypatch.setattr(coat_forward, "_HELD_ROWS", 0)
    rows, columns = times * device.sm_count + more, 272
    plan = forward_plan(limits(device), rows, columns, 16)
    assert isinstance(plan, FewRows) and plan.block_rows == together
    values = case(rng, (rows, columns))
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


def test_long_rows_have_the_bits_of_the_reference_and_longer_ones_are_refused(device, rng):
    values = case(rng, (2, 40000))
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))
    wide = device.zeros((1, MAX_COLUMNS + 128), "float8_e4m3fn")
    scales = device.zeros((1, wide.shape[1] // 128), "bfloat16")
    with pytest.raises(ArgumentError, match=str(MAX_COLUMNS)):
        df.coat.fp8_rmsnorm_forward(wide, scales, device.zeros(wide.shape[1], "bfloat16"), 128, 1e-5)


def test_rows_with_offsets_beyond_32_bits_have_the_bits_of_the_reference(device, rng):
    """The last row of x begins more than 2^32 bytes after the first."""
    values, stride = case(rng, (2, 96)), (1 << 32) + 16
    far = device.empty(stride + 96, "float8_e4m3fn")
    for row in range(2):
        df.view(far.ptr + row * stride, (96,), "float8_e4m3fn", device, owner=far).copy_from(values.x[row])
    _, s_x, w, _ = place(device, values)
    with df.config.override(driver=device.driver):
        results = df.coat.fp8_rmsnorm_forward(Strided(far, (2, 96), (stride, 1)), s_x, w, 16, 1e-5)
    check_forward(device, values, results)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_have_the_bits_of_smaller_calls(device, rng):
    block, repeats, columns = 1024, 513, 4096
    values = case(rng, (block, columns))
    x = device.array(np.tile(values.x.view(np.uint8), (repeats, 1)).view(values.x.dtype))
    s_x, w = device.array(np.tile(values.s_x, (repeats, 1))), device.array(values.w)
    qy, s_y, qy_t, (_, rstd, _) = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    small = df.coat.fp8_rmsnorm_forward(device.array(values.x), device.array(values.s_x), w, 16, 1e-5)
    check_forward(device, values, small)
    same(s_y, small[1].numpy())
    same(rstd, np.tile(small[3][1].numpy(), repeats))
    expected = small[0].numpy().view(np.uint8)
    assert (qy.numpy().view(np.uint8).reshape(repeats, block, columns) == expected).all()
    assert (qy_t.numpy().view(np.uint8).reshape(columns, repeats, block) == expected.T[:, None]).all()


def decided(rstd: np.ndarray, values: Case) -> bool:
    """Whether the kernel computes the scale from its estimate of the largest |y|, without the exact maximum."""
    products = np.abs(values.x.astype(np.float32) * np.repeat(values.s_x.astype(np.float32), 16, 1)) * np.abs(values.w)
    most = (products.max(1) * rstd).max()
    low, high = (coat_rmsnorm.scale_of(most * np.float32(1 + sign * 2**-21), values.x.dtype) for sign in (-1, 1))
    return bool(low == high)


def test_a_maximum_at_a_rounding_boundary_of_the_scale_is_exact(device, driver, rng):
    """From case to case the largest |y| grows by one ulp, across a value where the rounded scale changes. So close to
    this value an estimate does not decide the scale.
    """
    values = case(rng, (40, 96), w="float32")
    values.x[7, 5], values.s_x[7] = 384, values.s_x.max()
    values.x[7, 6:] = 0
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    # With this weight the scale lies halfway between 2 and the next larger bf16 number, where its rounding changes.
    weight = np.float32(448 * (2 + 2**-7) / (384 * np.float32(values.s_x[7, 0]) * np.float64(rstd[7])))
    found, undecided, steps = set(), 0, range(-5, 6)
    for step in steps:
        values.w[5] = weight + step * np.spacing(weight)
        x, s_x, w, _ = place(device, values)
        results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
        check_forward(device, values, results)
        found.add(float(results[1].numpy()))
        undecided += not decided(rstd, values)
    assert undecided == len(steps)
    assert driver == "cuda" or found == {2.0, 2 + 2**-6}


@pytest.mark.parametrize("weight", [1e30, 1e-30, 2.0**21])
def test_weights_outside_the_range_of_the_estimate_have_the_bits_of_the_reference(device, rng, weight):
    values = case(rng, (many_rows(device), 96))
    values = values._replace(w=(values.w.astype(np.float32) * np.float32(weight)).astype(BF16))
    x, s_x, w, _ = place(device, values)
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(30, 96), (37, 512), (37, 640)], ids=["few", "many", "shared"])
def test_blocks_exchange_their_values_without_a_race_under_many_schedules(rng, driver, shape):
    """No schedule has a race, and consecutive launches in one workspace do not confuse their words."""
    for seed in range(3):
        with df.emu.Machine(devices=1, sm_count=4, seed=seed, race="strict", delay_stores=True) as machine:
            device = df.device(0, driver=machine)
            for _ in range(2):
                values = case(rng, shape)
                x, s_x, w, _ = place(device, values)
                check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))
            assert not machine.reports


@pytest.mark.emulated
def test_blocks_share_columns_only_if_the_workspace_holds_their_sums(driver):
    with df.emu.Machine(devices=1, sm_count=132) as machine:
        device = df.device(0, driver=machine)
        assert forward_plan(limits(device), 2048, 4096, 16).parts == 4
        assert isinstance(forward_plan(limits(device), 2048, 8192, 16), FewRows)
        assert forward_plan(limits(device), 8192, 8192, 16).parts == 1


@pytest.mark.emulated
def test_rows_too_long_to_keep_their_scales_are_not_shared(rng, driver):
    """A team has one block, because shared memory cannot hold the rstd of such long rows: several blocks of a team
    would have to exchange rstd through global memory.
    """
    values = case(rng, (17, 44544))
    with df.emu.Machine(devices=1, sm_count=2, arch="sm_89", race="strict") as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, _ = place(device, values)
        check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))
        assert not machine.reports
        plan = forward_plan(limits(device), *values.x.shape, 16)
        assert (plan.parts, plan.known) == (1, False)


@pytest.mark.emulated
def test_one_block_takes_rows_of_more_segments_than_it_can_keep_sums_of(rng, driver):
    with df.emu.Machine(devices=1, sm_count=1) as machine:
        device = df.device(0, driver=machine)
        values = case(rng, (20, 65536))
        x, s_x, w, _ = place(device, values)
        check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))


@pytest.mark.emulated
def test_rows_kept_by_blocks_are_read_and_written_once(rng, driver):
    """x, its scales, qy and qy_t are moved once. All other bytes are weights, the epoch that each thread reads, and the
    words that blocks exchange."""
    rows, columns = 512, 640
    with df.emu.Machine(devices=1, sm_count=16) as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, _ = place(device, case(rng, (rows, columns)))
        df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
        device.synchronize()
        counted = list(machine.launches)[-1].counters.total
        plan = forward_plan(limits(device), rows, columns, 16)
    elements = rows * columns
    assert (plan.parts, plan.resident_columns, plan.grid * plan.block_rows) == (1, columns, rows)
    # Weights are read twice. First the warps that reduce rows read them: half of these warps read 512 columns each, the
    # others 128. Then the lanes that write tiles, which are arranged in `row_lanes` rows, read the weights once for
    # each row of lanes.
    reducing = min(plan.warps, 2 * plan.block_rows // 4)
    weights = 2 * (reducing // 2 * columns + columns * plan.row_lanes)
    read = elements * 18 // 16 + plan.grid * (weights + 8 * plan.threads)
    assert read <= counted.local_read <= read + 512 * plan.grid
    assert 2 * elements + 4 * rows <= counted.local_written <= 2 * elements + 4 * rows + 64 * plan.grid
