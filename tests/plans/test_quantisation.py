# SPDX-License-Identifier: Apache-2.0
"""The description of a quantisation: what it refuses, and the shapes that follow from it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import drvfuse as df
from drvfuse import dtypes

BF16, F32 = dtypes.get("bfloat16"), dtypes.get("float32")
Q = df.Quantisation


@pytest.mark.parametrize(
    ("made", "rows", "columns", "scales", "output"),
    [
        (Q.per_row(), (3, 5), 256, (3, 5), (3, 5, 256)),
        (Q.static(0.5), (3, 5), 256, None, (3, 5, 256)),
        (Q.none(), (3, 5), 256, None, (3, 5, 256)),
        (Q.per_group(), (3, 5), 384, (3, 5, 3), (3, 5, 384)),
        (Q.per_group(64, layout="column"), (3, 5), 384, (6, 16), (3, 5, 384)),
        (Q.per_group(64, scales="float8_e8m0fnu", layout="tiles"), (129,), 384, (256 * 8,), (129, 384)),
        (Q.mxfp8(), (), 96, (3,), (96,)),
        (Q.nvfp4(0.25, "tiles"), (128,), 64, (128 * 4,), (128, 32)),
        (Q.nvfp4(0.25, "column"), (0,), 64, (4, 0), (0, 32)),
    ],
    ids=str,
)
def test_shapes_of_codes_and_scales_follow_from_the_rows(made, rows, columns, scales, output):
    made.check(columns, BF16)
    assert made.scales_shape(rows, columns) == scales
    assert made.output_shape((*rows, columns)) == output
    assert made.row_bytes(columns, BF16) == output[-1] * (2 if made.kind == "none" else 1)


def test_bytes_of_scales_are_those_of_a_row_without_padding():
    assert [Q.per_row(scales="bfloat16").row_scale_bytes(256), Q.per_group(64).row_scale_bytes(256)] == [2, 16]
    assert [Q.mxfp8(layout="tiles").row_scale_bytes(96), Q.static(1.0).row_scale_bytes(96)] == [3, 0]


def test_quantisations_with_equal_fields_compare_equal():
    assert Q.per_group(128, upper_bound=2) == Q.per_group(upper_bound=2.0) != Q.per_group()
    assert len({Q.nvfp4(0.5), Q.nvfp4(0.5), Q.nvfp4(0.25)}) == 2
    assert str(Q.per_group(layout="column")) != str(Q.per_group()) != str(Q.per_group(64))
    assert [Q.nvfp4(0.5).given, Q.static(0.25).given, Q.per_row(upper_bound=3).given] == [0.5, 0.25, 3.0]
    assert math.copysign(1, Q.mxfp8().upper_bound) == 1 == math.copysign(1, Q.per_group(upper_bound=-0.0).upper_bound)


def test_kernels_are_compiled_for_the_kind_of_quantisation():
    found = dict(Q.nvfp4(0.5, "tiles").definitions(BF16))
    wanted = {"QUANT": 3, "GROUP": 16, "OUT_DTYPE": "e2m1x2", "SCALES_DTYPE": "e4m3", "SCALES_LAYOUT": 2}
    assert found == {f"DRVFUSE_{name}": value for name, value in wanted.items()}
    assert dict(Q.none().definitions(BF16))["DRVFUSE_OUT_DTYPE"] == "bf16"


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, 1e-60, 1e60, None, "1", True])
def test_a_given_scale_is_a_positive_finite_number(refused, scale):
    refused(lambda: Q.static(scale), "scale", "a number above 0, finite in float32")
    refused(lambda: Q.nvfp4(scale), "tensor_scale", "a number above 0, finite in float32")


@pytest.mark.parametrize(
    ("make", "argument", "text"),
    [
        (lambda: Q.per_row("bfloat16"), "dtype", "float8_e4m3fn"),
        (lambda: Q.per_row(dtypes.FP4), "dtype", "float8_e4m3fn"),
        (lambda: Q.per_row(None), "dtype", "float8_e4m3fn or float8_e5m2"),
        (lambda: Q.per_row("fp8"), "dtype", "float8_e4m3fn or float8_e5m2"),
        (lambda: Q.per_row(scales="float16"), "scales", "float32 or bfloat16"),
        (lambda: Q.per_row(scales="float8_e8m0fnu"), "scales", "bfloat16"),
        (lambda: Q.per_row(upper_bound=-1), "upper_bound", "at least 0"),
        (lambda: Q.per_row(upper_bound=math.nan), "upper_bound", "nan"),
        (lambda: Q.per_group(32), "columns", "64 or 128"),
        (lambda: Q.per_group(np.array([64, 128])), "columns", "64 or 128"),
        (lambda: Q.per_group(layout=np.array(["row", "tiles"])), "layout", "'tiles'"),
        (lambda: Q.per_group(scales="bfloat16"), "scales", "float8_e8m0fnu"),
        (lambda: Q.per_group(layout="rows"), "layout", "'tiles'"),
        (lambda: Q.per_group(layout="tiles"), "layout", "tiles hold bytes"),
        (lambda: Q.per_group(64).check(96, BF16), "quantisation", "a multiple of 64 columns"),
        (lambda: Q.nvfp4(1.0).check(33, BF16), "quantisation", "a multiple of 16 columns"),
        (lambda: Q.per_row().check(33, dtypes.get("int32")), "quantisation", "bfloat16, float16 or float32"),
    ],
)
def test_wrong_arguments_of_a_quantisation_are_refused(refused, make, argument, text):
    refused(make, argument, text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Q("row"),
        lambda: Q("banana"),
        lambda: Q("group", dtypes.get("float8_e4m3fn"), 32, dtypes.get("float32")),
        lambda: Q("row", "float8_e4m3fn", scales="float32"),
        lambda: dataclasses.replace(Q.static(0.5), scale=0.0),
        lambda: dataclasses.replace(Q.nvfp4(0.5), scale=math.inf),
        lambda: dataclasses.replace(Q.per_row(), upper_bound=math.nan),
        lambda: dataclasses.replace(Q.per_group(), layout="tiles"),
        lambda: dataclasses.replace(Q.mxfp8(), layout="rows"),
    ],
)
def test_only_quantisations_that_the_class_methods_can_make_are_allowed(refused, make):
    refused(make, "quantisation", "made by Quantisation.per_row, static, per_group, mxfp8, nvfp4 or none")


@pytest.mark.parametrize("made", [Q.per_group(64, upper_bound=2.0), Q.nvfp4(0.1, "tiles"), Q.static(0.1), Q.none()])
def test_fields_can_be_replaced_if_the_result_is_valid(made):
    assert dataclasses.replace(made) == made
    assert dataclasses.replace(Q.static(0.5), scale=0.25) == Q.static(0.25)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Q.per_row(), "float8_e4m3fn per row, scales float32"),
        (Q.per_row(upper_bound=0.1), "float8_e4m3fn per row, scales float32, upper bound 0.1"),
        (Q.static(0.1), "float8_e4m3fn static, scale 0.1"),
        (Q.mxfp8(layout="tiles"), "float8_e4m3fn per 32 columns, scales float8_e8m0fnu, layout tiles"),
        (Q.nvfp4(0.1), "float4_e2m1fn_x2 per 16 columns, scales float8_e4m3fn, tensor scale 0.1"),
        (Q.none(), "none"),
    ],
)
def test_quantisations_have_a_readable_repr(made, text):
    assert str(made) == text
