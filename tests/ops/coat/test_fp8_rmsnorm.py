# SPDX-License-Identifier: Apache-2.0
"""RMSNorm's forward and backward against the reference, bit for bit: shapes, types, layouts, special values,
repeats."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import Case, Strided, bits, case, check_backward, check_forward, guarded, place, same

import drvfuse as df
from drvfuse.reference import coat_rmsnorm


@pytest.mark.parametrize("shape", [(1, 16), (2, 48), (15, 272), (33, 96), (133, 80), (4, 2048), (300, 16)])
def test_every_shape_has_the_bits_of_the_reference(device, rng, shape):
    values = case(rng, shape)
    x, s_x, w, g = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    check_forward(device, values, results)
    rstd = results[3][1]
    check_backward(values, rstd.numpy(), df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, 16))


@pytest.mark.parametrize(
    "shape,QB,fp8,w",
    [
        ((6, 100), 16, "float8_e5m2", "float32"),
        ((9, 160), 64, "float8_e4m3fn", "float32"),
        ((7, 272), 128, "float8_e5m2", "bfloat16"),
        ((5, 8), 32, "float8_e4m3fn", "bfloat16"),
    ],
)
def test_types_groups_and_columns_that_are_no_multiple_of_a_group_have_the_bits_of_the_reference(
    device, rng, shape, QB, fp8, w
):
    values = case(rng, shape, QB, fp8, w)
    x, s_x, weight, g = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, weight, QB, 1e-6)
    check_forward(device, values, results, QB, 1e-6)
    rstd = results[3][1]
    check_backward(values, rstd.numpy(), df.coat.fp8_rmsnorm_backward(x, s_x, g, weight, rstd, QB), QB)


@pytest.mark.parametrize("flag", [False, True])
def test_batches_have_the_bits_of_the_reference(device, rng, flag):
    values = case(rng, (3, 11, 96))
    x, s_x, w, g = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, flag)
    assert results[2].shape == ((96, 33) if flag else (3, 96, 11))
    check_forward(device, values, results, transpose_output_2d=flag)
    rstd = results[3][1]
    check_backward(values, rstd.numpy(), df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, 16))


def test_arrays_without_rows_give_empty_results(device, rng):
    values = case(rng, (0, 32))
    x, s_x, w, g = place(device, values)
    qy, s_y, qy_t, (_, rstd, _) = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    assert (qy.shape, qy_t.shape, rstd.shape) == ((0, 32), (32, 0), (0,))
    same(s_y, coat_rmsnorm.scale_of(0.0, "float8_e4m3fn"))
    dx, dw = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, 16)
    assert dx.shape == (0, 32) and not dw.numpy().astype(np.float32).any()


def test_slices_of_wider_arrays_have_the_bits_of_the_reference(device, rng):
    wide = case(rng, (33, 192))
    x, s_x, _, g = place(device, wide)
    cut = Case(wide.x[:, 48:144], wide.s_x[:, 3:9], wide.w[48:144], wide.g[:, 48:144])
    w = device.array(cut.w)
    foreign = [
        Strided(array, shape, (array.shape[1], 1), first)
        for array, shape, first in ((x, (33, 96), 48), (s_x, (33, 6), 3), (g, (33, 96), 48))
    ]
    with df.config.override(driver=device.driver):
        results = df.coat.fp8_rmsnorm_forward(foreign[0], foreign[1], w, 16, 1e-5)
        check_forward(device, cut, results)
        rstd = results[3][1]
        check_backward(cut, rstd.numpy(), df.coat.fp8_rmsnorm_backward(*foreign, w, rstd, 16))


def special(name: str, values: Case) -> Case:
    x, s_x, w, g = (a.copy() for a in values)
    if name == "zero tensor":
        x[:] = 0
    elif name == "zero row and one element":
        x[3] = 0
        x[4] = 0
        x[4, 17] = 1
    elif name == "NaN in x":
        bits(x)[5, 9] = 0x7F
        x = bits(x).view(x.dtype)
        x.view(np.uint8)[5, 9] = 0x7F
    elif name == "NaN in w":
        w[7] = np.nan
    elif name == "all w NaN":
        w[:] = np.nan
    elif name == "infinite w":
        w[7] = np.inf
    elif name == "zero w":
        w[:] = 0
    elif name == "overflowing row":
        s_x[2] = 1e20
    elif name == "underflowing row":
        s_x[2] = 1e-30
    elif name == "huge row":
        s_x[2] = 1e4
        w[5] = 100
    elif name == "infinite scale":
        s_x[2, 1] = np.inf
        x[2, 16:32] = 1
    elif name == "negative scales and zeros":
        s_x[::2] = -s_x[::2]
        x[1] = -0.0
    return Case(x, s_x, w, g)


SPECIAL = [
    "zero tensor",
    "zero row and one element",
    "NaN in x",
    "NaN in w",
    "all w NaN",
    "infinite w",
    "zero w",
    "overflowing row",
    "underflowing row",
    "huge row",
    "infinite scale",
    "negative scales and zeros",
]


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_have_the_bits_of_the_reference(device, rng, name):
    values = special(name, case(rng, (33, 96)))
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    check_forward(device, values, results)
    s_y = float(results[1].numpy())
    assert np.isnan(s_y) == (name in ("NaN in x", "all w NaN"))
    assert np.isinf(s_y) == (name == "infinite w")


def test_zero_rows_without_epsilon_make_the_scale_nan(device, rng):
    values = special("zero row and one element", case(rng, (33, 96)))
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 0.0)
    assert np.isnan(float(results[1].numpy())) and np.isnan(results[0].numpy().astype(np.float32)).all()


def test_dw_has_the_same_bits_in_every_run_and_on_every_grid(device, driver, rng):
    values = case(rng, (150, 64), w="float32")
    x, s_x, w, g = place(device, values)
    rstd = device.array(coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5))
    runs = 100 if driver == "cuda" else 5
    found = {df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, 16)[1].numpy().tobytes() for _ in range(runs)}
    if driver == "emu":
        for seed, count in ((1, 3), (2, 132)):
            with df.emu.Machine(devices=1, sm_count=count, seed=seed) as machine:
                other = df.device(0, driver=machine)
                arrays = [other.array(a.numpy()) for a in (x, s_x, g, w, rstd)]
                found.add(df.coat.fp8_rmsnorm_backward(*arrays, 16)[1].numpy().tobytes())
    assert len(found) == 1
    exact = (
        values.g.astype(np.float64) * coat_rmsnorm.dequantise(values.x, values.s_x, 16) * rstd.numpy()[:, None]
    ).sum(0)
    # All operations are fp32: the error is about sqrt(150) times 2^-24, and larger where terms cancel.
    assert np.linalg.norm(np.frombuffer(found.pop(), np.float32) - exact) <= 2e-6 * np.linalg.norm(exact)


def test_given_outputs_are_written_and_nothing_outside_them(device, rng):
    values = case(rng, (33, 96))
    x, s_x, w, g = place(device, values)
    made = [
        guarded(device, shape, dtype)
        for shape, dtype in (
            ((33, 96), "float8_e4m3fn"),
            ((), "bfloat16"),
            ((96, 33), "float8_e4m3fn"),
            ((33,), "float32"),
            ((33, 96), "bfloat16"),
            ((96,), "bfloat16"),
        )
    ]
    arrays = [array for array, _ in made]
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=arrays[:4])
    assert results[0] is arrays[0] and results[3][1] is arrays[3]
    check_forward(device, values, results)
    check_backward(
        values, arrays[3].numpy(), df.coat.fp8_rmsnorm_backward(x, s_x, g, w, arrays[3], 16, outputs=arrays[4:])
    )
    for _, untouched in made:
        untouched()
