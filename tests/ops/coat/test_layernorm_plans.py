# SPDX-License-Identifier: Apache-2.0
"""LayerNorm's forward by the two kernels that it shares with RMSNorm: fp8_norm_forward_tiles, which holds x in
registers, and fp8_norm_forward_rows, which keeps rows in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import Case, case
from test_layernorm import AFFINE, E4M3, E5M2, SPECIAL, Forward, bias_of, special

import drvfuse as df
from drvfuse.ops.coat import layernorm
from drvfuse.plans.coat_forward import HeldTiles, ManyRows, layernorm_plan
from drvfuse.plans.limits import Limits
from drvfuse.reference import coat_layernorm, coat_rmsnorm

EPSILON = 1e-5
H200 = Limits(132, 227 << 10, (9, 0))
TILES = {f"tiles-{rows}-{split}": (rows, split) for rows, split in ((4, 2), (4, 1), (8, 1))}
ROWS = {
    "rows": {},
    "rows-some-kept": {"resident_columns": 128},
    "rows-none-kept": {"resident_columns": 0},
    "rows-in-chunks": {"chunk_rows": 12},
}


def use(monkeypatch, name: str, **changes) -> None:
    """Make all calls use the plan of that name. Results do not depend on the plan."""

    def plan(limits, rows, columns, QB, affine):
        if name in TILES:
            return HeldTiles(limits, rows, columns, *TILES[name])
        plan = ManyRows(limits, rows, columns, QB, layer=True, affine=affine)
        vars(plan).update(ROWS[name] | changes)
        return plan

    monkeypatch.setattr(layernorm, "layernorm_plan", plan)


@pytest.mark.parametrize(
    ("name", "affine"), [*((name, True) for name in (*TILES, *ROWS)), ("tiles-4-1", False), ("rows", False)]
)
def test_every_plan_gives_the_same_bits(device, rng, monkeypatch, name, affine):
    """The tensor has several strips and segments; the last ones are incomplete."""
    use(monkeypatch, name)
    Forward(device, case(rng, (133, 1200)), affine, eps=1e-6).check()


@pytest.mark.parametrize(
    "name,shape,QB,fp8,w",
    [
        ("tiles-4-1", (128, 1024), 16, E4M3, "bfloat16"),
        ("tiles-4-1", (37, 100), 16, E5M2, "float32"),
        ("tiles-4-1", (65, 640), 128, E5M2, "bfloat16"),
        ("rows-some-kept", (128, 1024), 16, E4M3, "bfloat16"),
        ("rows-some-kept", (37, 100), 128, E5M2, "float32"),
    ],
)
def test_whole_tiles_unaligned_rows_and_wide_groups_have_the_bits_of_the_reference(
    device, rng, monkeypatch, name, shape, QB, fp8, w
):
    use(monkeypatch, name)
    Forward(device, case(rng, shape, QB, fp8, w), True, QB).check()


def test_rows_are_read_again_where_statistics_do_not_fit(device, rng, monkeypatch):
    use(monkeypatch, "rows-none-kept", known=False)
    Forward(device, case(rng, (133, 512)), True).check()


@AFFINE
@pytest.mark.parametrize("special_name", SPECIAL)
@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_special_values_have_the_bits_of_the_reference(device, rng, monkeypatch, name, special_name, affine):
    use(monkeypatch, name)
    Forward(device, special(special_name, case(rng, (33, 1040))), affine).check()


@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_a_row_without_variance_is_nan_if_epsilon_is_zero(device, rng, monkeypatch, name):
    """Every y of a row without variance is NaN: 0 times an infinite rstd."""
    use(monkeypatch, name)
    values = case(rng, (33, 640))
    values.x[7], values.s_x[7] = 2, 0.5
    found = Forward(device, values, False, eps=0.0)
    assert np.isnan(float(found.s_y.numpy()))
    found.check()


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_batches_have_the_bits_of_the_reference(device, rng, monkeypatch, name, flag):
    use(monkeypatch, name)
    Forward(device, case(rng, (3, 25, 544)), True, flag=flag).check()


@AFFINE
def test_the_plan_follows_from_rows_columns_and_parameters(affine):
    assert layernorm_plan(H200, 256, 4096, 16, affine) is None
    assert isinstance(layernorm_plan(H200, 2048, 4096, 16, affine), HeldTiles)
    assert isinstance(layernorm_plan(H200, 8192, 4096, 16, affine), ManyRows)
    assert isinstance(layernorm_plan(H200, 8192, 8192, 16, affine), type(None) if affine else ManyRows)


@pytest.mark.emulated
@AFFINE
@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_launches_have_no_race(rng, monkeypatch, name, affine):
    use(monkeypatch, name)
    with df.emu.Machine(devices=1, race=True, seed=3) as machine:
        device = df.device(0, driver=machine)
        values: Case = case(rng, (33, 1040))
        Forward(device, values, affine).check()
        assert machine.reports == []


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_x_is_read_once(rng, monkeypatch, name):
    """The scales are read once for each 16 columns. qy, qy_t, mean and rstd are written."""
    use(monkeypatch, name)
    rows, columns = 33, 1040
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        Forward(device, case(rng, (rows, columns)), affine=False)
        device.synchronize()
        counters = list(machine.launches)[-1].counters
    waits = ("sync/grid_words.cuh", "sync/scratch.cuh", "ptx/ordered.cuh")
    lines = [count for (file, _), count in counters.lines.items() if not file.endswith(waits)]
    assert sum(count.local_read for count in lines) == rows * columns + rows * columns // 8
    assert sum(count.local_written for count in lines) == 2 * rows * columns + 8 * rows + 2


def at_a_border(values: Case, by: float, factor: float) -> tuple[Case, np.ndarray]:
    """Weights and a bias that make the largest |y| equal to (1 + `by`) times a border, at which the rounded scale
    changes. Before the bias is added, this element is `factor` times the border.
    """
    bias, weights = bias_of(values), values.w.copy()
    mean = coat_layernorm.row_mean(values.x, values.s_x, 16)
    rstd = coat_layernorm.row_rstd(values.x, values.s_x, 16, EPSILON, mean)
    normed = (coat_rmsnorm.dequantise(values.x, values.s_x, 16) - mean[:, None]) * rstd[:, None]
    row, column = np.unravel_index(np.abs(normed).argmax(), normed.shape)
    border = np.float32(448 * (1 + 2.0**-8))  # the largest |y| whose scale lies halfway between two bfloat16 numbers
    weights[column] = np.float32(factor) * border / normed[row, column]
    bias[column] = border * np.float32(1 + by) - normed[row, column] * weights[column]
    return values._replace(w=weights), bias


def guess_is_off(values: Case) -> float:
    """The relative error of the kernel's guess at rstd, in units of 2^-24. Rows have at most two segments, so the sum
    of squares for the guess does not depend on the order of the warps' additions."""
    x, columns = values.x.astype(np.float32), values.x.shape[1]
    packs = coat_rmsnorm.packs_of(x)
    scales = coat_rmsnorm.pack_scales(values.s_x, 16, columns, packs.shape[1])
    squares = coat_rmsnorm.segment_tree(coat_rmsnorm.in_order(packs * packs) * scales * scales)
    mean = coat_layernorm.row_mean(values.x, values.s_x, 16)
    variance = np.maximum(squares / np.float32(columns) - mean * mean, np.float32(0))
    guess = np.float32(1) / np.sqrt(variance + np.float32(EPSILON))
    rstd = coat_layernorm.row_rstd(values.x, values.s_x, 16, EPSILON, mean)
    return float(abs(guess - rstd)[0] / rstd[0]) * 2.0**24


def with_a_guess_off(rng: np.random.Generator, least: float, most: float) -> Case:
    """Five equal rows whose mean is so far from 0 that the kernel's guess at rstd has a relative error of `least` to
    `most` times 2^-24."""
    values = case(rng, (1, 640), w="float32")
    values = values._replace(s_x=np.ones_like(values.s_x))
    while not least <= guess_is_off(values) <= most:
        x = rng.uniform(100, 400) + rng.uniform(20, 60) * rng.standard_normal(values.x.shape)
        values = values._replace(x=x.clip(-448, 448).astype(np.float32).astype(values.x.dtype))
    return values._replace(x=values.x.repeat(5, 0), s_x=values.s_x.repeat(5, 0))


@pytest.mark.parametrize(
    ("name", "off", "factor"),
    [
        ("tiles-4-1", (1, 16), 2.5),
        ("rows", (1, 16), 2.5),
        pytest.param("rows", (13, 16), 3.9, id="as far off as an estimate may be"),
        pytest.param("rows", (36, 60), 3.9, id="a guess that is too far off"),
        pytest.param("rows", (13, 16), 20, id="a bias that is too large"),
        pytest.param("rows", (1, 16), 1000, id="a bias that is far too large"),
    ],
)
def test_maxima_that_an_estimate_does_not_decide_have_the_bits_of_the_reference(
    device, rng, monkeypatch, name, off, factor
):
    """The largest |y| is so close to a value at which the rounded scale changes that an estimate of |y| may lie on the
    other side of this value.
    """
    use(monkeypatch, name)
    for _ in range(2):
        values = with_a_guess_off(rng, *off)
        for by in (0, 1, 2, 3, 5, 8, 16, 256):
            for sign in (1, -1):
                changed, bias = at_a_border(values, sign * by * 2.0**-24, factor)
                Forward(device, changed, True, bias=bias).check()


@pytest.mark.emulated
def test_lanes_without_a_row_do_not_prevent_an_estimate(rng, monkeypatch):
    """The kernel reads x once more only if a weight is too large for an estimate. Lanes without a row do not cause
    this.
    """
    use(monkeypatch, "rows")
    rows, columns = 37, 512
    values = case(rng, (rows, columns))
    reads = []
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        for weight in (1, 2**21):
            values.w[0] = weight
            Forward(device, values, True).check()
            reads.append(sum(count.local_read for count in list(machine.launches)[-1].counters.lines.values()))
    assert reads[1] - reads[0] >= rows * columns


@pytest.mark.parametrize("name", ["tiles-4-1", "rows"])
def test_a_large_weight_of_an_underflowing_value_has_the_bits_of_the_reference(device, rng, monkeypatch, name):
    use(monkeypatch, name)
    values = case(rng, (5, 640), w="float32")
    values.w[3] = 2.0**30
    Forward(device, values, True).check()
