# SPDX-License-Identifier: Apache-2.0
"""The norms of the reference: LayerNorm against float64, beta, residuals in float32, rows of heads, what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from drvfuse import reference
from drvfuse.errors import ArgumentError
from drvfuse.reference import bits

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def rows(rng):
    return (3 + rng.standard_normal((5, 264))).astype(np.float32)


def test_layer_norm_is_within_bounds_of_float64(rows, rng):
    gamma, beta = rng.standard_normal((2, 264)).astype(np.float32)
    y = reference.normalise(rows, "bfloat16", gamma, 1e-5, 0.5, "layer", beta).y
    exact = rows.astype(np.float64)
    exact -= exact.mean(axis=1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.abs(y - (exact * (gamma + 0.5) + beta)).max() < 1e-5


def test_layer_norm_of_centred_rows_is_the_rms_norm(rng):
    half = rng.integers(-8, 9, (3, 64)).astype(np.float32)  # small whole numbers, whose sums are exact
    rows = np.concatenate([half, -half], axis=1)
    gamma = rng.standard_normal(128).astype(np.float32)
    rms, layer = (reference.normalise(rows, "float16", gamma, 1e-5, norm=norm) for norm in ("rms", "layer"))
    assert (bits(rms.y) == bits(layer.y)).all() and (bits(rms.maxima) == bits(layer.maxima)).all()


def test_the_scale_follows_from_the_result_with_and_without_beta(rows, rng):
    gamma, beta = rng.standard_normal((2, 264)).astype(np.float32)
    for options in ({}, {"norm": "layer"}, {"norm": "layer", "beta": beta}):
        found = reference.normalise(rows, "float16", gamma, 1e-5, **options)
        assert (bits(found.maxima) == bits(np.abs(found.y).max(axis=1))).all()


def test_a_float32_residual_keeps_its_precision(rng):
    inputs = [rng.standard_normal((4, 24)).astype(BF16) for _ in range(3)]
    residual = rng.standard_normal((4, 24)).astype(np.float32)
    found = reference.allreduce_rmsnorm_fp8(inputs, np.ones(24, np.float32), 1e-5, residual=residual)
    total = reference.sum_ranks(inputs) + residual
    assert found.residual.dtype == np.float32 and (bits(found.residual) == bits(total)).all()
    plain = reference.allreduce_rmsnorm_fp8([total], np.ones(24, np.float32), 1e-5)
    assert np.allclose(found.scales, plain.scales)  # float32 packs have fewer elements, so sums have another order


def test_each_head_is_normalised_like_a_row(rng):
    inputs = [rng.standard_normal((2, 3, 96)).astype(np.float16) for _ in range(2)]
    gamma = rng.standard_normal(24).astype(np.float16)
    heads = reference.allreduce_rmsnorm_fp8(inputs, gamma, 1e-5, head_columns=24)
    rows = reference.allreduce_rmsnorm_fp8([each.reshape(2, 3, 4, 24) for each in inputs], gamma, 1e-5)
    assert heads.scales.shape == (2, 3, 4) and (heads.scales == rows.scales).all()
    assert heads.output.shape == (2, 3, 96) and (bits(heads.output).ravel() == bits(rows.output).ravel()).all()


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("norm", {"norm": "batch"}),
        ("beta", {"beta": np.ones(24)}),
        ("beta", {"norm": "layer", "beta": np.ones(23)}),
        ("head_columns", {"head_columns": 5}),
        ("head_columns", {"head_columns": 0}),
        ("gamma", {"head_columns": 12}),
        ("residual", {"residual": np.zeros((2, 24), np.float16)}),
    ],
)
def test_wrong_arguments_are_argument_errors(argument, options):
    with pytest.raises(ArgumentError) as caught:
        reference.allreduce_rmsnorm_fp8([np.zeros((2, 24), BF16)], np.ones(24, BF16), 1e-5, **options)
    assert caught.value.argument == argument
