# SPDX-License-Identifier: Apache-2.0
"""`gemv_partial_norm` with FP8 activations, with a bias and with an epilogue."""

from __future__ import annotations

import numpy as np
import pytest
from gemv_support import EPS, case, check, expected, numbers, run

import drvfuse as df
from drvfuse.errors import ArgumentError, CompileError
from drvfuse.plans import gemv as gemv_plan
from drvfuse.reference import bits
from drvfuse.reference import gemv as gemv_reference

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.mark.parametrize(
    ("m", "k", "act", "weight", "scales", "act_scales"),
    [
        (None, 520, E4M3, "bfloat16", None, "row"),
        (None, 1024, E4M3, E4M3, "row", 64),  # act and its scales stay in registers
        (3, 1040, E5M2, E4M3, "group", 128),
        (2, 301, E4M3, "float32", None, 64),  # rows of act whose size is no multiple of a pack
        (8, 264, E5M2, "float16", None, "tensor"),
    ],
)
def test_every_dtype_and_scale_has_the_bits_of_the_reference(device, rng, m, k, act, weight, scales, act_scales):
    """Results are bfloat16 unless an output has another dtype."""
    values = case(rng, m, 43, k, 30, act, weight, scales=scales, act_scales=act_scales)
    check(run(device, values), expected(values))


def test_rows_of_a_single_warp_have_the_bits_of_the_reference(device, rng, monkeypatch):
    monkeypatch.setattr(gemv_plan, "COPIED_ROWS", 1 << 20)
    values = case(rng, 1, 24, 1000, 18, E4M3, E4M3, scales="tensor", act_scales=128)
    out = device.empty((1, 6), "float32")
    results = run(device, values, unnormed_output=out, pdl_level=df.PDLLevel.ON)
    check(results, expected(values, "float32"))


def test_without_scales_the_result_is_that_of_scales_of_one(device, rng):
    values = case(rng, None, 43, 520, 30, E4M3)
    results = run(device, values)
    check(results, expected(values._replace(act_scales=np.float32(1))))


def test_scales_of_groups_are_multiplied_by_sums_of_packs():
    """The values are such that scales applied elsewhere, to act or to the final sum, would change the last bits of the
    sums.
    """
    rng = np.random.default_rng(3)
    act, weight = numbers(rng, (2, 384), E4M3), numbers(rng, (5, 384), "bfloat16")
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    y = gemv_reference.row_products(act, weight, act_scales=scales)
    whole = np.zeros_like(y)
    for group in range(3):
        part = slice(128 * group, 128 * (group + 1))
        whole += gemv_reference.row_products(act[:, part], weight[:, part]) * scales[:, group, None]
    assert np.allclose(y, whole, rtol=1e-5) and (bits(y) != bits(whole)).any()


@pytest.fixture
def biased(rng):
    values = case(rng, 3, 43, 520, 30, E4M3, act_scales="row")
    return values, numbers(rng, (43,), "float16")


def test_bias_and_epilogue_come_before_the_norm(device, rng, biased):
    """The epilogue is applied to all columns of y: `i` is the index of an element, `row` its row of act, `col` its row
    of the weight.
    """
    values, bias = biased
    shift = numbers(rng, (43,), "bfloat16")
    epilogue = df.Epilogue(
        "(x > 0.0f ? x * scale : x) + shift[col] + row * 0.5f + i + rank",
        scale=df.float32(0.37),
        shift=device.array(shift),
    )

    def after(scale):
        def values_of(x):
            i = np.arange(x.size, dtype=np.float32).reshape(x.shape)
            row = np.arange(x.shape[0], dtype=np.float32)[:, None]
            return np.where(x > 0, x * np.float32(scale), x) + shift.astype(np.float32) + row * np.float32(0.5) + i

        return values_of

    given = {"weight": device.array(values.weight), "gamma": device.array(values.gamma), "bias": device.array(bias)}
    given |= {"act": device.array(values.act), "act_scales": device.array(values.act_scales), "epilogue": epilogue}
    prepared = df.gemv_partial_norm.prepare(**given, n_normed=30, epsilon=EPS)
    check(prepared.launch(), expected(values, bias=bias, epilogue=after(0.37)))
    traced = df.gemv_partial_norm(**given, n_normed=30, epsilon=EPS, trace=df.Trace(device))
    check(traced, expected(values, bias=bias, epilogue=after(0.37)))
    prepared.set(scale=df.float32(-3), shift=device.array(shift))
    check(prepared.launch(), expected(values, bias=bias, epilogue=after(-3)))
    with pytest.raises(ArgumentError, match="of the types that the epilogue was made with"):
        prepared.set(scale=df.int32(2))


def test_a_bias_without_a_norm_has_the_bits_of_the_reference(device, biased):
    values, bias = biased
    check(run(device, values, bias=device.array(bias)), expected(values, bias=bias))


def test_the_product_reads_the_outputs_of_the_fused_all_reduce(driver, rng):
    """The product takes the FP8 rows and their scales without a conversion, in a chain of dependent launches."""
    if driver == "cuda":
        group = df.Group.local(1, driver="cuda")
    else:
        machine = df.emu.Machine(devices=2, sm_count=4, seed=5)
        group = df.Group.local(2, driver=machine)
    ranks = len(group)
    with group:
        xs = [numbers(rng, (3, 512), "bfloat16") for _ in range(ranks)]
        gamma = numbers(rng, (512,), "bfloat16")
        weight, of_norm = numbers(rng, (20, 512), "bfloat16"), numbers(rng, (12,), "bfloat16")
        arrays = [[rank.array(x) for rank, x in zip(group, xs, strict=True)], [rank.array(gamma) for rank in group]]
        weights = [(rank.array(weight), rank.array(of_norm)) for rank in group]
        normed = df.allreduce_rmsnorm_fp8(group, *arrays, epsilon=EPS, pdl_level=df.PDLLevel.ON)
        found = [
            df.gemv_partial_norm(
                act, *given, n_normed=12, epsilon=EPS, act_scales=scales, pdl_level=df.PDLLevel.ON, stream=rank.stream
            )
            for rank, act, scales, given in zip(group, normed.output, normed.scales, weights, strict=True)
        ]
        group.synchronize()
        for act, scales, results in zip(normed.output, normed.scales, found, strict=True):
            assert act.dtype == E4M3 and scales.shape == (3,)
            wanted = gemv_reference.gemv_partial_norm(
                act.numpy(), weight, of_norm, n_normed=12, epsilon=EPS, act_scales=scales.numpy()
            )
            check(results, wanted)


@pytest.mark.parametrize("columns", [128, 64])
def test_the_product_reads_the_outputs_of_the_norm_on_one_device(device, rng, columns):
    """The rows have a scale for each group of columns, and the launches form a dependent chain."""
    x, norm = device.array(numbers(rng, (3, 512), "bfloat16")), device.array(numbers(rng, (512,), "bfloat16"))
    values = case(rng, 3, 20, 512, 12, weight=E4M3, scales="group")
    given = {"weight_scales": device.array(values.scales), "pdl_level": df.PDLLevel.ON}
    weight, gamma = device.array(values.weight), device.array(values.gamma)
    by_group = df.Quantisation.per_group(columns)
    normed = df.rmsnorm_fp8(x, norm, epsilon=EPS, quantisation=by_group, pdl_level=df.PDLLevel.ON)
    results = df.gemv_partial_norm(
        normed.output, weight, gamma, n_normed=12, epsilon=EPS, act_scales=normed.scales, **given
    )
    assert normed.scales.shape == (3, 512 // columns)
    check(results, expected(values._replace(act=normed.output.numpy(), act_scales=normed.scales.numpy())))


def test_arguments_that_do_not_match_are_refused(device, refused):
    m, n, k = 2, 20, 520
    arrays = {"act": device.zeros((m, k), E4M3), "weight": device.zeros((n, k), "bfloat16")}

    def op(**rest):
        return lambda: df.gemv_partial_norm(**arrays | {"gamma": None, "n_normed": 0, "epsilon": EPS} | rest)

    def floats(*shape):
        return device.zeros(shape, "float32")

    refused(
        op(act_scales=floats(1)), "act_scales", "of shape () or (2,) or, with a scale per group of columns, (2, 5) or"
    )
    refused(op(act_scales=floats(5, 2)), "act_scales", "(2, 9)")
    refused(
        op(act=device.zeros(k, E5M2), act_scales=floats(2)),
        "act_scales",
        "of shape () or, with a scale per group of columns, (5,) or",
    )
    refused(op(act_scales=device.zeros(m, "bfloat16")), "act_scales.dtype", "float32")
    refused(op(act=device.zeros((m, k), "bfloat16"), act_scales=floats(m)), "act_scales", "None for act of bfloat16")
    refused(op(normed_output=device.zeros((m, 0), E4M3)), "normed_output.dtype", "bfloat16")
    refused(op(bias=floats(n + 1)), "bias", "one for each row of weight")
    refused(op(bias=device.zeros(n, E4M3)), "bias.dtype", "float32")
    refused(op(epilogue="x + 1"), "epilogue", "drvfuse.Epilogue")
    refused(op(epilogue=df.Epilogue("x + b[col]", b=[floats(n)] * 2)), "epilogue parameter b", "a list of 2")
    with pytest.raises(CompileError, match="undefined") as caught:
        op(epilogue=df.Epilogue("x + nothing"))()
    assert "x + nothing\n" in str(caught.value)


def test_an_epilogue_that_reads_an_output_is_refused(device, refused, rng):
    values = case(rng, 2, 20, 256, 8)
    out = device.zeros((2, 8), "bfloat16")
    epilogue = df.Epilogue("x + b[col]", b=out)
    refused(lambda: run(device, values, normed_output=out, epilogue=epilogue), "normed_output", "overlapping")
