# SPDX-License-Identifier: Apache-2.0
"""The numpy reference: bounds against float64, exact rounding rules, and the order of every sum."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from drvfuse import dtypes, reference
from drvfuse.errors import ArgumentError
from drvfuse.plans.quantisation import PER_ROW, Quantisation
from drvfuse.reference import bits

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NONE = Quantisation.none()
HALF_ULP = {BF16: 2.0**-8, np.float16: 2.0**-11, np.float32: 2.0**-24}
NAN_BITS = {BF16: 0x7FFF, np.float16: 0x7FFF, np.float32: 0x7FFFFFFF}


def random_inputs(seed, ranks, shape, dtype=BF16):
    rng = np.random.default_rng(seed)
    scales = np.exp2(rng.integers(-3, 4, shape))
    return [(rng.standard_normal(shape) * scales).astype(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_allreduce_is_within_bounds_of_float64(dtype, ranks):
    inputs = random_inputs(ranks, ranks, (40, 33), dtype)
    got = reference.allreduce(inputs)
    assert got.dtype == dtype and got.shape == (40, 33)
    exact = sum(x.astype(np.float64) for x in inputs)
    magnitude = sum(np.abs(x.astype(np.float64)) for x in inputs)
    bound = np.abs(exact) * HALF_ULP[dtype] + magnitude * ranks * 2.0**-24
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()


def test_allreduce_adds_in_rank_order():
    big, small = np.float32(2.0**24), np.float32(1.0)
    inputs = [np.full(4, v, np.float32) for v in (big, small, -big, small)]
    np.testing.assert_array_equal(reference.allreduce(inputs), np.float32(1))
    np.testing.assert_array_equal(reference.allreduce([inputs[i] for i in (0, 2, 1, 3)]), np.float32(2))


def test_allreduce_starts_at_positive_zero():
    for ranks in (1, 2):
        assert bits(reference.allreduce([np.full(3, -0.0, np.float32)] * ranks)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_nan_results_are_canonical(dtype):
    width = np.dtype(dtype).itemsize
    odd_nan = np.array([0xFF81 if width == 2 else 0xFF800001], f"u{width}").view(dtype)
    inf = np.array([np.inf], dtype)
    assert bits(reference.allreduce([odd_nan])).tolist() == [NAN_BITS[dtype]]
    assert bits(reference.allreduce([inf, -inf])).tolist() == [NAN_BITS[dtype]]


def test_allreduce_rounds_once_after_the_epilogue():
    x = np.array([1 + 2.0**-7], BF16)
    got = reference.allreduce([x, x], epilogue=lambda total: total * np.float32(0.75))
    assert got.astype(np.float32)[0] == np.float32(2 * (1 + 2.0**-7) * 0.75).astype(BF16)
    assert reference.allreduce([x], dtype="float32").dtype == np.float32


def test_overflow_gives_infinity_in_16_bits_and_saturates_in_fp8():
    values = np.array([3e38, -3e38, np.inf, 470.0, 448.0], np.float32)
    assert np.isinf(reference.round_to(np.array([3.4e38, -3.4e38]), BF16).astype(np.float32)).all()
    fp8 = reference.round_to(values, E4M3).astype(np.float32)
    assert fp8.tolist() == [448.0, -448.0, 448.0, 448.0, 448.0]
    assert reference.round_to(values[:3], E5M2).astype(np.float32).tolist() == [57344.0, -57344.0, 57344.0]
    nan = np.array([np.nan, -np.nan], np.float32)
    assert bits(reference.round_to(nan, E4M3)).tolist() == [0x7F, 0x7F] == bits(reference.round_to(nan, E5M2)).tolist()


def slow_row_sum(row, width):
    """The sum of a row in the order of the kernels, one addition at a time."""
    add = lambda a, b: np.float32(np.float32(a) + np.float32(b))  # noqa: E731
    packs = []
    for start in range(0, len(row), width):
        total = np.float32(0)
        for x in row[start : start + width]:
            total = add(total, np.float32(x) * np.float32(x))
        packs.append(total)

    def butterfly(lanes):
        lanes = list(lanes)
        for mask in (16, 8, 4, 2, 1):
            lanes = [add(lanes[i], lanes[i ^ mask]) for i in range(32)]
        assert len({x.tobytes() for x in lanes}) == 1
        return lanes[0]

    packs += [np.float32(0)] * (-len(packs) % 32)
    groups = [butterfly(packs[i : i + 32]) for i in range(0, len(packs), 32)]
    lanes = [np.float32(0)] * 32
    for i, group in enumerate(groups):
        lanes[i % 32] = add(lanes[i % 32], group)
    return butterfly(lanes)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(1, "float32"), (37, "bfloat16"), (4100, "float32"), (9000, "bfloat16")]
)
def test_row_sum_has_the_order_of_the_kernels(columns, dtype):
    rows = np.random.default_rng(columns).standard_normal((3, columns)).astype(np.float32)
    got = reference.row_sum_of_squares(rows, dtype)
    want = np.array([slow_row_sum(row, 8 if dtype == "bfloat16" else 4) for row in rows])
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_rmsnorm_is_within_bounds_of_float64(dtype, with_residual):
    inputs = random_inputs(5, 4, (9, 520), dtype)
    gamma, residual = random_inputs(6, 1, 520, dtype)[0], random_inputs(7, 1, (9, 520), dtype)[0]
    got = reference.allreduce_rmsnorm_fp8(
        inputs, gamma, 1e-5, 1.0, residual if with_residual else None, quantisation=NONE
    )
    x = sum(a.astype(np.float64) for a in inputs) + (residual.astype(np.float64) if with_residual else 0)
    if with_residual:
        assert np.abs(got.residual.astype(np.float64) - x).max() <= np.abs(x).max() * (HALF_ULP[dtype] + 4 * 2.0**-24)
        x = got.residual.astype(np.float64)
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * (gamma.astype(np.float64) + 1)
    assert got.scales is None and (got.residual is None) == (not with_residual)
    np.testing.assert_allclose(got.output.astype(np.float64), y, rtol=HALF_ULP[dtype] + 3e-6, atol=2e-5)


@pytest.mark.parametrize("scales_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantised_rows_use_the_whole_range_of_fp8(dtype, scales_dtype):
    inputs = random_inputs(11, 2, (6, 3, 264))
    gamma = random_inputs(12, 1, 264)[0]
    got = reference.allreduce_rmsnorm_fp8(inputs, gamma, 1e-6, quantisation=Quantisation.per_row(dtype, scales_dtype))
    plain = reference.allreduce_rmsnorm_fp8([x.astype(np.float32) for x in inputs], gamma, 1e-6, quantisation=NONE)
    assert got.scales.shape == (6, 3) and got.scales.dtype.name == scales_dtype
    q, scales = got.output.astype(np.float64), got.scales.astype(np.float64)[..., None]
    largest = float(ml_dtypes.finfo(dtype).max)
    assert (np.abs(q).max(axis=-1) >= largest * 0.87).all()
    step = 2.0**-4 if dtype is E4M3 else 2.0**-3
    bound = np.abs(plain.output) * step * 1.02 + scales * 2.0**-9
    # If a scale is rounded down to bfloat16, the row's largest values saturate, by less than half an ulp of bfloat16.
    assert (np.abs(q * scales - plain.output) <= bound).all()


def test_scales_follow_the_documented_rules():
    maxima = np.array([0.0, 448.0, 1000.0, np.nan, np.inf, 1e-44], np.float32)
    scales, inverse = reference.quantisation(maxima, 896.0, E4M3, "float32")
    assert scales[:3].tolist() == [0.0, 1.0, 2.0] and inverse[:3].tolist() == [0.0, 1.0, 0.5]
    assert bits(scales)[3] == 0x7FFFFFFF and inverse[3] == 0
    assert scales[4] == 2.0
    assert inverse[5] == 0  # the scale underflows to zero
    unbounded, _ = reference.quantisation(maxima[4:5], np.inf, E4M3, "bfloat16")
    assert unbounded[0] == np.inf


def test_zero_row_gives_zero_and_nan_row_gives_nan():
    row = np.zeros((3, 64), BF16)
    row[1, 5], row[2, 7] = 1, np.nan
    got = reference.allreduce_rmsnorm_fp8([row], np.ones(64, BF16), 1e-6)
    assert bits(got.output)[0].tolist() == [0] * 64 and got.scales[0] == 0
    assert got.output[1, 5].astype(np.float32) == 448
    assert bits(got.output)[2].tolist() == [0x7F] * 64 and bits(got.scales)[2] == 0x7FFFFFFF


def test_norm_reads_the_fp32_sum_without_residual_and_the_rounded_sum_with():
    a, b = np.full((1, 8), 1.0, BF16), np.full((1, 8), 2.0**-9, BF16)
    a[0, 0] = 3.0
    gamma = np.ones(8, BF16)
    plain = reference.allreduce_rmsnorm_fp8([a, b], gamma, 0.0)
    rounded = reference.allreduce_rmsnorm_fp8([a, b], gamma, 0.0, residual=np.zeros((1, 8), BF16))
    stored = rounded.residual
    again = reference.allreduce_rmsnorm_fp8([stored], gamma, 0.0)
    assert stored[0, 1] == 1.0
    np.testing.assert_array_equal(bits(rounded.scales), bits(again.scales))
    assert bits(plain.scales)[0] != bits(rounded.scales)[0]


@pytest.mark.parametrize("made", [PER_ROW, NONE])
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 600), (0, 1)])
def test_no_rows_give_empty_results(shape, made):
    inputs = [np.zeros(shape, BF16)] * 3
    found = reference.allreduce_rmsnorm_fp8(
        inputs, np.ones(shape[-1], BF16), 1e-6, residual=inputs[0], quantisation=made
    )
    assert found.output.shape == shape and found.output.dtype == made.output_dtype(dtypes.get("bfloat16")).numpy
    assert found.residual.shape == shape and found.residual.dtype == BF16
    if made.dtype is None:
        assert found.scales is None
    else:
        assert found.scales.shape == shape[:-1] and found.scales.dtype == np.float32
    assert reference.allreduce(inputs).shape == shape
    assert reference.row_sum_of_squares(np.zeros((0, shape[-1]), np.float32), "bfloat16").shape == (0,)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 0)])
def test_rows_without_columns_are_refused(shape):
    with pytest.raises(ArgumentError, match=r"inputs\[0\].*column"):
        reference.allreduce_rmsnorm_fp8([np.zeros(shape, BF16)] * 2, np.ones(0, BF16), 1e-6)


def test_wrong_arguments_are_argument_errors():
    x = np.zeros((2, 8), BF16)
    with pytest.raises(ArgumentError, match="inputs"):
        reference.allreduce([])
    with pytest.raises(ArgumentError, match=r"inputs\[1\].*shape"):
        reference.allreduce([x, x[:1]])
    with pytest.raises(ArgumentError, match="gamma.*shape"):
        reference.allreduce_rmsnorm_fp8([x], np.ones(1, BF16), 1e-6)
    with pytest.raises(ArgumentError, match="residual.*shape"):
        reference.allreduce_rmsnorm_fp8([x], np.ones(8, BF16), 1e-6, residual=x[:1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_allreduce_of_scalars_and_of_empty_arrays_keeps_their_shape(shape):
    found = reference.allreduce([np.full(shape, np.nan, BF16)] * 2)
    assert found.shape == shape and (bits(found) == 0x7FFF).all()


def test_splits_that_do_not_sum_to_the_rows_are_refused(refused):
    hosts = random_inputs(0, 2, (4, 2))
    for splits in ([[1, 2], [2, 2]], [[4], [4]], [[2, 2]], [[5, -1], [2, 2]]):
        refused(lambda splits=splits: reference.all_to_all(hosts, splits), "splits", "with the sums [4, 4]")
    refused(lambda: reference.all_to_all([host[:3] for host in hosts]), "inputs", "a multiple of 2 rows")
    refused(lambda: reference.broadcast(hosts, 2), "root", "0 to 1")
    refused(lambda: reference.broadcast(hosts, -1), "root", "0 to 1")
