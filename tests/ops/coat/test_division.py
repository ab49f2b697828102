# SPDX-License-Identifier: Apache-2.0
"""`fp8_division` and `fp8_division_transpose`: types, shapes, layouts, special values and bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from fp8_support import BF16, Strided, bits, guarded, same

import drvfuse as df
from drvfuse.errors import ArgumentError
from drvfuse.ops.call.planned import PlanCache
from drvfuse.reference import coat_rmsnorm
from drvfuse.runtime.kernel import Kernel


def check(device, values, results, fp8="float8_e4m3fn", s_y=None) -> None:
    """Compare (y, s_y, y_t) with the reference, bit for bit. On a GPU y is not compared, since div.full may round an
    exact tie to the other neighbour; y_t must be its transpose."""
    expected, scale = coat_rmsnorm.fp8_division(values, fp8, s_y)
    y, out_scale, y_t = results
    same(out_scale, scale, "s_y")
    if device.driver.name == "emu":
        same(y, expected, "y")
    same(y_t, np.ascontiguousarray(y.numpy().reshape(-1, values.shape[-1]).T), "y_t")


@pytest.mark.parametrize(
    "shape,dtype,fp8",
    [
        ((1, 16), BF16, "E5M2"),
        ((2, 16), BF16, ml_dtypes.float8_e5m2),
        ((33, 100), np.float32, "float8_e4m3fn"),
        ((300, 256), np.float32, "float8_e5m2"),
    ],
)
def test_every_type_and_shape_has_the_bits_of_the_reference(device, rng, shape, dtype, fp8):
    values = (3 * rng.standard_normal(shape)).astype(np.float32).astype(dtype)
    x = device.array(values)
    check(device, values, df.coat.fp8_division_transpose(x, 16, fp8), fp8)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_given_scale_of_any_type_has_the_bits_of_the_reference(device, rng, dtype):
    values = rng.standard_normal((20, 48)).astype(np.float32).astype(BF16)
    s_y = np.array([0.021], df.dtypes.get(dtype).numpy)
    scale = device.array(s_y)
    y, out_scale, y_t = df.coat.fp8_division_transpose(device.array(values), 16, "E4M3", scale)
    assert out_scale is scale
    check(device, values, (y, scale, y_t), s_y=s_y)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_arrays_without_rows_give_empty_results(device, shape):
    y, s_y, y_t = df.coat.fp8_division_transpose(device.zeros(shape, "bfloat16"), 16, "E4M3")
    assert (y.shape, y_t.shape) == (shape, (32, 0))
    same(s_y, coat_rmsnorm.fp8_division(np.zeros(shape, BF16), "float8_e4m3fn")[1])


@pytest.mark.parametrize("first", [48, 51])
def test_slices_of_wider_arrays_have_the_bits_of_the_reference(device, rng, first):
    wide = rng.standard_normal((33, 200)).astype(np.float32).astype(BF16)
    x = device.array(wide)
    with df.config.override(driver=device.driver):
        results = df.coat.fp8_division_transpose(Strided(x, (33, 96), (200, 1), first), 16, "E4M3")
    check(device, np.ascontiguousarray(wide[:, first : first + 96]), results)


@pytest.mark.parametrize("name", ["NaN", "infinite", "zeros", "negative zeros"])
def test_special_values_have_the_bits_of_the_reference(device, rng, name):
    values = rng.standard_normal((33, 96)).astype(np.float32).astype(BF16)
    if name == "NaN":
        values[5, 7] = np.nan
    elif name == "infinite":
        values[5, 7] = -np.inf
    else:
        values[:] = -0.0 if name == "negative zeros" else 0.0
    y, s_y, y_t = df.coat.fp8_division_transpose(device.array(values), 16, "E4M3")
    expected, scale = coat_rmsnorm.fp8_division(values, "float8_e4m3fn")
    if name == "NaN":
        assert np.isnan(s_y.numpy().astype(np.float32)) and (bits(y.numpy()) & 0x7F == 0x7F).all()
    else:
        same(s_y, scale, "s_y")
        same(y, expected, "y")
    same(y_t, np.ascontiguousarray(y.numpy().T), "y_t")


def test_given_outputs_are_written_and_nothing_outside_them(device, rng):
    values = rng.standard_normal((33, 96)).astype(np.float32).astype(BF16)
    made = [
        guarded(device, shape, dtype)
        for shape, dtype in (((33, 96), "float8_e4m3fn"), ((), "bfloat16"), ((96, 33), "float8_e4m3fn"))
    ]
    arrays = [array for array, _ in made]
    check(device, values, df.coat.fp8_division_transpose(device.array(values), 16, "E4M3", outputs=arrays))
    for _, untouched in made:
        untouched()


@pytest.mark.parametrize("given", [False, True])
def test_batches_with_and_without_the_transpose_have_the_bits_of_the_reference(device, rng, given):
    values = rng.standard_normal((3, 11, 96)).astype(np.float32).astype(BF16)
    x = device.array(values)
    own = np.array(0.0137, BF16) if given else None
    given_scale = None if own is None else device.array(own)
    y, s_y, y_t = df.coat.fp8_division_transpose(x, 16, "E4M3", given_scale)
    assert (y.shape, y_t.shape) == ((3, 11, 96), (96, 33))
    check(device, values, (y, s_y, y_t), s_y=own)
    only, scale = df.coat.fp8_division_transpose(x, 16, "E4M3", given_scale, only_transposed=True)
    straight, same_scale = df.coat.fp8_division(x, 16, "float8_e4m3fn", given_scale)
    same(only, y_t.numpy())
    same(straight, y.numpy())
    same(scale, s_y.numpy())
    same(same_scale, s_y.numpy())


def test_wrong_arguments_are_refused(device):
    x = device.zeros((4, 32), "bfloat16")
    for call, argument in (
        (lambda: df.coat.fp8_division(x, 0, "E4M3"), "QB"),
        (lambda: df.coat.fp8_division(device.zeros(32, "bfloat16"), 16, "E4M3"), "x"),
        (lambda: df.coat.fp8_division(device.zeros((4, 32), "float16"), 16, "E4M3"), "x.dtype"),
        (lambda: df.coat.fp8_division_transpose(x, 16, "E4M3", outputs=(x,)), "outputs"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument


@pytest.mark.parametrize("given", [False, True])
def test_only_a_launch_whose_blocks_wait_is_cooperative(device, rng, monkeypatch, given):
    asked, configure = [], Kernel.configure

    def recorded(self, grid, *args, **options):
        asked.append((grid > 1, options["cooperative"]))
        return configure(self, grid, *args, **options)

    device.part(PlanCache).clear()  # a cached plan has configured launches, so `configure` would not be called
    monkeypatch.setattr(Kernel, "configure", recorded)
    x = device.array(rng.standard_normal((528, 96)).astype(np.float32).astype(BF16))
    df.coat.fp8_division(x, 16, "E4M3", device.array(np.array(0.5, BF16)) if given else None)
    assert asked == [(True, not given)]
