# SPDX-License-Identifier: Apache-2.0
"""The rules of quantisation, compared with exact rational arithmetic and with literal bytes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.reference import bits

Q = df.Quantisation
E2M1 = [Fraction(each) for each in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def spread(rng, shape):
    """Values of every size, of which some are 0."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-140, 120, (*shape[:-1], 1)))
    values[rng.random(shape) < 0.05] = 0
    return values.astype(np.float32)


def nearest_e2m1(value):
    magnitude = abs(Fraction(float(value)))
    best = min(abs(each - magnitude) for each in E2M1)
    code = min((code for code, each in enumerate(E2M1) if abs(each - magnitude) == best), key=lambda code: code % 2)
    return code | (8 if np.signbit(value) else 0)


def test_fp4_codes_are_the_nearest_with_ties_to_even(rng):
    ties = [float(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)]
    around = [float(np.nextafter(np.float32(tie), np.float32(to))) for tie in ties for to in (0, 9)]
    values = np.array([0.0, *ties, *around, 7.0, 1e30, 1e-30, *rng.uniform(0, 7, 200)], np.float32)
    values = np.concatenate([values, -values])
    packed = reference.quantised.pack_fp4(values)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    assert codes.tolist() == [nearest_e2m1(value) for value in values]
    assert np.signbit(reference.quantised.unpack_fp4(packed)).tolist() == np.signbit(values).tolist()


def test_fp4_saturates_maps_nan_to_six_and_packs_the_first_code_in_the_low_bits():
    packed = reference.quantised.pack_fp4(np.array([np.nan, -np.inf, 0.5, -np.nan], np.float32))
    assert packed.tolist() == [0xF7, 0x71]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_e8m0_scales_are_the_least_power_of_two_that_does_not_saturate(rng, dtype):
    largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
    y = spread(rng, (400, 32))
    edges = [np.float32(largest * 2.0**k) for k in (-140, -127, -5, 0, 9)]
    y[: len(edges), 3] = edges
    y[5 : 5 + len(edges), 3] = [np.nextafter(edge, np.float32(np.inf)) for edge in edges]
    y[:10, :3], y[:10, 4:] = 0, 0
    scales = reference.quantise(y, Q.mxfp8(dtype)).scales
    for row, scale in zip(y, bits(scales)[:, 0].tolist(), strict=True):
        wanted = Fraction(float(np.abs(row).max())) / largest
        assert Fraction(2) ** (scale - 127) >= wanted
        assert scale == 0 or Fraction(2) ** (scale - 128) < wanted


def test_groups_with_zeros_infinities_and_nans_follow_the_rules():
    y = np.zeros((4, 64), np.float32)
    y[1, 5], y[2, 5], y[3, 5] = np.inf, np.nan, 1.0
    output, scales = reference.quantise(y, Q.per_group(64, scales="float8_e8m0fnu"))
    assert bits(scales)[:, 0].tolist() == [0, 247, 0xFF, 127 - 8]
    assert bits(output)[:, 5].tolist() == [0, 0x7E, 0x7F, 0x78]
    assert bits(output)[:, 6].tolist() == [0, 0, 0x7F, 0]
    output, scales = reference.quantise(y, Q.per_group(64))
    assert scales[0, 0] == 0 and np.isinf(scales[1, 0]) and np.isnan(scales[2, 0])
    assert bits(output)[:, 5].tolist() == [0, 0x7F, 0x7F, 0x7E]  # infinity times 0 is NaN
    output, scales = reference.quantise(y, Q.nvfp4(1.0))
    assert bits(scales)[:, 0].tolist() == [0, 0x7E, 0x7F, 0x23]  # 1 / 6 rounds to 0.171875
    assert output[:, 2].tolist() == [0, 0x70, 0x70, 0x70]


def test_rows_and_groups_have_the_same_rule(rng):
    y = spread(rng, (50, 128))
    of_rows, of_groups = (reference.quantise(y, made) for made in (Q.per_row(), Q.per_group()))
    assert bits(of_rows.output).tolist() == bits(of_groups.output).tolist()
    assert of_rows.scales.tolist() == of_groups.scales[:, 0].tolist()


def test_values_above_an_upper_bound_saturate(rng):
    y = rng.standard_normal((4, 128)).astype(np.float32)
    for made in (Q.per_row(upper_bound=0.5), Q.per_group(upper_bound=0.5), Q.mxfp8()):
        output, scales = reference.quantise(y, made)
        values = reference.dequantise(output, scales, made)
        within = np.abs(y) <= 0.5
        assert np.abs(values - y)[within].max() < 0.1
        if made.upper_bound == 0.5:
            assert (np.abs(values)[~within] == 0.5).all()


def test_static_scales_divide_all_rows_by_the_same(rng):
    y = rng.standard_normal((4, 40)).astype(np.float32) * 100
    output, scales = reference.quantise(y, Q.static(0.25))
    assert scales is None
    wanted = reference.round_to(y * np.float32(4), "float8_e4m3fn")
    assert bits(output).tolist() == bits(wanted).tolist()


def test_nvfp4_has_e4m3_scales_of_groups_and_a_scale_of_the_tensor(rng):
    y = rng.standard_normal((8, 64)).astype(np.float32)
    made = Q.nvfp4(0.002)  # 6 * 448 * 0.002 exceeds every value
    output, scales = reference.quantise(y, made)
    assert output.shape == (8, 32) and scales.shape == (8, 4)
    values = reference.dequantise(output, scales, made)
    largest = np.abs(y.reshape(8, 4, 16)).max(axis=-1)
    error = np.abs(values - y).reshape(8, 4, 16).max(axis=-1)
    assert (error <= largest * (1 / 6 + 1 / 16)).all()


def test_tiles_of_scales_have_the_layout_of_cublaslt():
    """A tile of scales has 512 bytes: 32 rows of 16 bytes. Row r of a tile has the scales of 4 groups of each of the
    tensor's rows r, r + 32, r + 64 and r + 96.
    """
    made = Q.nvfp4(1.0, "tiles")
    rows, groups = 130, 5
    scales = np.arange(rows * groups).reshape(rows, groups) % 251 + 1
    stored = reference.quantised.arrange(scales.astype(np.uint8), made)
    assert stored.shape == (256 * 8,)
    wanted = np.zeros((256, 8), np.uint8)
    wanted[:rows, :groups] = scales
    tiles = wanted.reshape(2, 4, 32, 2, 4).transpose(0, 3, 2, 1, 4)
    assert stored.tolist() == tiles.reshape(-1).tolist()
    assert reference.scales_by_row(stored, made, (rows,), groups * 16).tolist() == scales.tolist()


def test_columns_of_scales_are_padded_to_four_rows():
    made = Q.per_group(64, layout="column")
    scales = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 2)
    stored = reference.quantised.arrange(scales, made)
    assert stored.tolist() == [[1, 3, 5, 7, 9, 11, 0, 0], [2, 4, 6, 8, 10, 12, 0, 0]]
    assert reference.scales_by_row(stored, made, (2, 3), 128).tolist() == scales.tolist()


def test_without_quantisation_values_are_rounded_to_the_inputs_dtype():
    y = np.array([[1 + 2.0**-9, math.nan]], np.float32)
    output, scales = reference.quantise(y, Q.none(), "bfloat16")
    assert scales is None and bits(output).tolist() == [[0x3F80, 0x7FFF]]


def test_scales_of_a_wrong_shape_or_dtype_are_refused(refused):
    codes = np.zeros((2, 32), np.uint8)
    refused(lambda: reference.dequantise(codes, None, Q.nvfp4(0.5)), "scales", "tensor scale 0.5")
    wrong = np.ones((2, 3), dtypes.get("float8_e4m3fn").numpy)
    refused(lambda: reference.dequantise(codes, wrong, Q.nvfp4(0.5)), "scales", "of shape (2, 4)")
    refused(lambda: reference.scales_by_row(wrong, Q.nvfp4(0.5, "tiles"), (2,), 64), "scales", "of shape (512,)")
    refused(lambda: reference.scales_by_row(wrong, Q.nvfp4(0.5, "tiles"), 2, 64), "rows_shape", "2")
