# SPDX-License-Identifier: Apache-2.0
"""Bits of the matrix-vector product with partial norm: shapes, types, order of sums, extreme values."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gemv_support import EPS, Case, case, check, expected, numbers, run

import drvfuse as df
from drvfuse import dtypes
from drvfuse.errors import Unsupported
from drvfuse.plans import gemv as gemv_plan
from drvfuse.reference import bits
from drvfuse.reference import gemv as gemv_reference

BF16 = dtypes.get("bfloat16").numpy


@pytest.mark.parametrize(
    ("n", "k", "n_normed"),
    [
        (1, 1, 1),  # a single row, column and group
        (1, 8, 0),
        (7, 256, 7),  # one group, only normed rows
        (40, 512, 0),  # no normed rows
        (40, 520, 40),  # the last group of 32 packs has only one
        (5, 1024, 3),  # fewer rows than multiprocessors
        (6, 1024, 5),
        (43, 1032, 30),  # normed and other rows in one step
        (200, 264, 131),  # several steps; the 131 normed columns end within a pack
        (31, 7168, 24),  # a row of 28 groups of 32 packs
        (13, 8448, 9),  # more groups than lanes
        (9, 33000, 5),  # a team loads a row in several steps
    ],
)
def test_every_shape_has_the_bits_of_the_reference(device, rng, n, k, n_normed):
    values = case(rng, None, n, k, n_normed)
    check(run(device, values), expected(values))


@pytest.mark.parametrize(("m", "n", "k"), [(None, 43, 1032), (None, 31, 7168), (1, 9, 33000), (3, 27, 1032)])
def test_rows_loaded_instead_of_copied_have_the_same_bits(device, rng, monkeypatch, m, n, k):
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)
    values = case(rng, m, n, k, 2 * n // 3)
    check(run(device, values), expected(values))


@pytest.mark.parametrize("level", [df.PDLLevel.OFF, df.PDLLevel.OVERLAP_AT_BEGINNING])
@pytest.mark.parametrize(
    ("n", "k", "n_normed", "weight"),
    [
        (24, 1024, 18, "bfloat16"),
        (130, 250, 101, "bfloat16"),  # a warp has several rows, two at a time
        (43, 520, 0, "float16"),  # a row of three groups of 32 packs
        (5, 301, 5, "float32"),
        (43, 1024, 30, "float8_e4m3fn"),
    ],
)
def test_rows_of_a_single_warp_have_the_bits_of_the_reference(device, rng, monkeypatch, n, k, n_normed, weight, level):
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)
    values = case(rng, None, n, k, n_normed, weight=weight)
    check(run(device, values, pdl_level=level), expected(values))


def test_the_norm_takes_more_columns_than_it_polls_at_a_time(device, rng):
    """Beyond 4096 columns the last block polls its words in several passes."""
    values = case(rng, 1, 4103, 8, 4100)
    check(run(device, values), expected(values))


def test_the_norm_takes_more_columns_than_shared_memory_holds(device, driver, rng):
    """Shared memory has no room for the values of all normed columns, so the last block, which computes the norm, reads
    the words of their sums twice from global memory. The emulated device has less shared memory than an H100, so that a
    kernel which needs the shared memory of an H100 would not start.
    """
    with contextlib.ExitStack() as stack:
        if driver == "emu":
            machine = stack.enter_context(df.emu.Machine(devices=1, sm_count=3, arch="sm_89"))
            device = df.device(0, driver=machine)
        most = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") // (8 * 4)
        for n_normed in (most, most - 96):  # normed sums leave no or too little shared memory for other data
            values = case(rng, 8, n_normed + 3, 8, n_normed)
            check(run(device, values), expected(values))


@pytest.mark.parametrize("n_normed", [201, 504])
def test_norms_with_several_packs_per_lane_have_the_bits_of_the_reference(device, rng, n_normed):
    values = case(rng, 8, n_normed + 3, 8, n_normed)
    check(run(device, values), expected(values))


@pytest.mark.emulated
def test_rows_are_loaded_where_shared_memory_is_too_small_for_copies(rng):
    """The device supports bulk copies and has 99 KiB of shared memory."""
    values = case(rng, 1, 12, 6144, 7, weight="float32")
    with df.emu.Machine(devices=1, sm_count=3, arch="sm_120a") as machine:
        check(run(df.device(0, driver=machine), values), expected(values))


@pytest.mark.emulated
def test_calls_without_fp8_run_on_older_devices(rng):
    values, fp8 = (case(rng, None, 20, 520, 11, weight=weight) for weight in ("bfloat16", "float8_e4m3fn"))
    with df.emu.Machine(devices=1, sm_count=6, arch="sm_80") as machine:
        device = df.device(0, driver=machine)
        check(run(device, values), expected(values))
        with pytest.raises(Unsupported, match="8.9"):
            run(device, fp8)


@pytest.mark.parametrize("k", [1, 3, 7, 30, 257, 1001, 1002, 1004])
def test_rows_that_are_not_aligned_to_16_bytes_have_the_bits_of_the_reference(device, rng, k):
    values = case(rng, 1, 21, k, 13)
    check(run(device, values), expected(values))


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_any_number_of_rows_of_act_has_the_bits_of_the_reference(device, rng, m):
    values = case(rng, m, 27, 1032, 18)
    check(run(device, values), expected(values))


TYPES = ["bfloat16", "float16", "float32"]


@pytest.mark.parametrize("weight", [*TYPES, "float8_e4m3fn"])
@pytest.mark.parametrize("act", TYPES)
def test_every_dtype_has_the_bits_of_the_reference(device, rng, act, weight):
    which = TYPES.index(act) + len(weight)
    out, gamma = TYPES[which % 3], TYPES[len(weight) % 3]
    m, k = ((None, 520), (2, 301))[which % 2]
    values = case(rng, m, 19, k, 12, act, weight, gamma)
    lead = () if m is None else (m,)
    results = run(device, values, normed_output=device.empty((*lead, 12), out))
    check(results, expected(values, out))


@pytest.mark.parametrize("scales", ["tensor", "row", "group"])
def test_scales_of_fp8_weights_have_the_bits_of_the_reference(device, rng, scales):
    for m, k in ((None, 1024), (3, 301)):
        values = case(rng, m, 23, k, 16, weight="float8_e4m3fn", scales=scales)
        check(run(device, values), expected(values))


def test_bits_depend_neither_on_the_grid_nor_on_other_rows(device, rng, driver):
    """The same rows are computed alone, among others, at other addresses and on other numbers of multiprocessors."""
    values = case(rng, None, 60, 1800, 0)
    whole = run(device, values)[1].numpy()
    for first, count in ((0, 1), (17, 5), (30, 30)):
        part = run(device, values._replace(weight=values.weight[first : first + count]))[1].numpy()
        assert (bits(part) == bits(whole[first : first + count])).all()
    eight = np.stack([values.act, *numbers(rng, (7, 1800), "bfloat16")])
    assert (bits(run(device, values._replace(act=eight))[1].numpy()[0]) == bits(whole)).all()
    if driver == "emu":
        with df.emu.Machine(devices=1, sm_count=1) as machine:
            other = run(df.device(0, driver=machine), values)[1].numpy()
        assert (bits(other) == bits(whole)).all()


def test_additions_have_the_documented_order():
    """The values are such that any other order of additions would give other sums."""
    act = np.ones((1, 1024), np.float32)
    weight = np.ones((1, 1024), np.float32)
    weight[0, 0] = 2**24  # 2^24 + 1 is a tie that rounds to 2^24, so the next three 1s of this pack are lost
    weight[0, 512] = -(2.0**24)  # -2^24 + 1 is exact, so the next three 1s of this pack are not lost
    assert gemv_reference.row_products(act, weight)[0, 0] == 1022 - 3


def test_fma_of_the_reference_is_exact():
    """The reference is compared with rational arithmetic at ties that a second rounding would break wrongly."""
    from fractions import Fraction

    rng = np.random.default_rng(5)
    a = numbers(rng, (4000,), "bfloat16").astype(np.float32)
    b = numbers(rng, (4000,), "bfloat16").astype(np.float32)
    exponents = rng.integers(-40, 41, 4000)
    c = (rng.integers(-(2**24), 2**24, 4000) * np.exp2(exponents.astype(np.float64))).astype(np.float32)
    found = gemv_reference.fma(a, b, c)
    for x, y, z, value in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        low, high = np.nextafter(value, np.float32(-np.inf)), np.nextafter(value, np.float32(np.inf))
        error = abs(exact - Fraction(float(value)))
        assert error <= abs(exact - Fraction(float(low))) and error <= abs(exact - Fraction(float(high)))


def test_results_are_close_to_exact_arithmetic(device, rng):
    values = case(rng, None, 30, 4096, 20, out := "float32", "bfloat16")
    y = values.weight.astype(np.float64) @ values.act.astype(np.float64)
    norm = y[:20] / np.sqrt((y[:20] ** 2).mean() + EPS) * values.gamma.astype(np.float64)
    normed, unnormed = (array.numpy() for array in run(device, values))
    assert normed.dtype == dtypes.get(out).numpy
    scale = np.abs(values.weight.astype(np.float64)) @ np.abs(values.act.astype(np.float64))
    assert (np.abs(unnormed - y[20:]) <= 1e-6 * scale[20:]).all()
    assert np.allclose(normed, norm, rtol=2e-4, atol=1e-4)


def test_the_norm_reads_unrounded_sums(device):
    """bfloat16 cannot hold the sums: the normed values are those of the float32 sums."""
    act = np.ones(8, BF16)
    weight = np.zeros((4, 8), BF16)
    weight[:, 0], weight[:, 1] = 256, [1, 0, 1, 0]
    values = Case(act, weight, np.ones(4, BF16))
    results = run(device, values, normed_output=device.empty(4, "float32"))
    check(results, expected(values, "float32"))
    normed = results[0].numpy()
    assert normed[0] / normed[1] == pytest.approx(257 / 256, rel=1e-6)


def test_sums_of_zeros_have_the_bits_of_the_reference_with_and_without_epsilon(device, rng):
    values = case(rng, None, 9, 512, 6)
    zeros = values._replace(act=np.zeros_like(values.act))
    for epsilon in (EPS, 0.0):
        arrays = (device.array(array) for array in zeros[:3])
        results = df.gemv_partial_norm(*arrays, n_normed=6, epsilon=epsilon)
        check(results, expected(zeros, epsilon=epsilon))
        assert np.isnan(results[0].numpy().astype(np.float32)).all() == (epsilon == 0)


def test_zero_and_negative_gammas_have_the_bits_of_the_reference(device, rng):
    values = case(rng, None, 9, 512, 6)
    values.gamma[:3], values.gamma[3:] = 0, -2
    check(run(device, values), expected(values))


def test_nans_and_infinities_have_the_bits_of_the_reference(device, rng):
    """A NaN or an infinity in a normed row of the weight makes all normed values NaN or zero; in another row it changes
    none of them. NaN results are canonical.
    """
    for place, value in ((2, np.nan), (2, np.inf), (8, np.nan), (8, -np.inf)):
        values = case(rng, None, 11, 520, 6)
        values.weight[place, 77] = value
        check(run(device, values), expected(values))
    values = case(rng, None, 11, 520, 6)
    values.act[519] = np.inf
    check(run(device, values), expected(values))


def test_overflow_underflow_and_denormals_have_the_bits_of_the_reference(device, rng):
    for act, weight, scale in (
        ("bfloat16", "bfloat16", 1e37),
        ("bfloat16", "bfloat16", 1e-39),
        ("float16", "float16", 6e-8),
    ):
        values = case(rng, None, 11, 520, 6, act, weight)
        kind = dtypes.get(act).numpy
        values = values._replace(act=(np.sign(values.act.astype(np.float32)) * np.float32(scale)).astype(kind))
        check(run(device, values), expected(values))


@pytest.mark.gpu
def test_the_shape_of_the_model_has_the_bits_of_the_reference(device, rng):
    for m, n, k, n_normed in ((None, 2112, 7168, 1536), (1, 512, 1024, 256), (8, 2112, 7168, 1536)):
        values = case(rng, m, n, k, n_normed)
        check(run(device, values), expected(values))


@pytest.mark.gpu
def test_a_thousand_launches_give_the_same_bits(device, rng):
    values = case(rng, None, 2112, 7168, 1536)
    act, weight, gamma = (device.array(array) for array in values[:3])
    wanted = expected(values)
    outputs = [(device.empty(1536, "bfloat16"), device.empty(576, "bfloat16")) for _ in range(50)]
    for _ in range(20):
        for normed, unnormed in outputs:
            df.gemv_partial_norm(
                act, weight, gamma, n_normed=1536, epsilon=EPS, normed_output=normed, unnormed_output=unnormed
            )
        for results in outputs:
            check(results, wanted)
