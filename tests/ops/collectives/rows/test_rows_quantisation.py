# SPDX-License-Identifier: Apache-2.0
"""Quantisations of the fused op by every algorithm, bit for bit: static, groups, MXFP8 and NVFP4, layouts of scales."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, garbage, place, random_inputs, replicate
from multimem_support import Arrays, exact_inputs

import drvfuse as df
from drvfuse import reference

Q = df.Quantisation
KINDS = {
    "groups": Q.per_group(128, upper_bound=3.0),
    "mxfp8": Q.mxfp8("float8_e5m2", layout="tiles"),
    "nvfp4": Q.nvfp4(0.01, layout="column"),
}
COLUMNS = 384
# Algorithms in which one rank quantises a row for all ranks are tested with all KINDS. The other algorithms share most
# of their code, so one or two kinds are enough.
PAIRS = [(algo, kind) for algo in ("two_stage", "push_two_shot") for kind in KINDS]
PAIRS += [("one_stage", "groups"), ("one_stage", "nvfp4"), ("push_one_shot", "mxfp8"), ("naive", "mxfp8")]


def check(
    group, rng, rows, algo, quantisation, *, dtype="bfloat16", residual=False, normed=False, beta=None, **options
):
    """Run the op, compare all results with the reference, and return those of the op."""
    hosts = options.pop("hosts", None) or random_inputs(rng, group.size, (rows, COLUMNS), dtype)
    shape = hosts[0].shape
    columns = options.get("head_columns", shape[1])
    rows_shape = (rows, shape[1] // columns) if "head_columns" in options else (rows,)
    gamma = options.pop("gamma", None)
    gamma = random_inputs(rng, 1, columns, dtype)[0] if gamma is None else gamma
    shifts = random_inputs(rng, 1, columns, dtype)[0] if beta else None
    added = random_inputs(rng, 1, shape, dtype)[0] if residual else None
    xs = options.pop("xs", None) or place(group, hosts)
    scales_shape = quantisation.scales_shape(rows_shape, columns)
    normed_outputs = garbage(group, shape, dtype) if normed else None
    result = df.allreduce_rmsnorm_fp8(
        group,
        xs,
        replicate(group, gamma),
        epsilon=1e-5,
        residuals=replicate(group, added) if residual else None,
        betas=replicate(group, shifts) if beta else None,
        normed_outputs=normed_outputs,
        quantisation=quantisation,
        outputs=garbage(group, quantisation.output_shape(shape), quantisation.dtype.name),
        scales=None if scales_shape is None else garbage(group, scales_shape, quantisation.scales.name),
        algo=algo,
        **options,
    )
    group.synchronize()  # raises after a time-out, in which case the bits may still be right by chance
    kinds = {name: options[name] for name in ("norm", "head_columns") if name in options}
    kinds |= {"residual": added, "beta": shifts, "multimem": "use_multimem" in options, "nodes": group.nodes}
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, quantisation=quantisation, **kinds)
    what = f"{algo} {dtype} {quantisation} of {rows} rows"
    assert_bits(result.output, expected.output, what)
    assert (result.scales is None) == (expected.scales is None)
    if expected.scales is not None:
        assert_bits(result.scales, expected.scales, "scales of " + what)
    if normed:
        unquantised = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, quantisation=Q.none(), **kinds)
        assert_bits(normed_outputs, unquantised.output, "normed rows of " + what)
    return result


@pytest.mark.gpus(3)
@pytest.mark.parametrize(("algo", "kind"), PAIRS)
def test_every_algorithm_is_exact_for_few_rows_many_rows_and_chunks(open_group, rng, algo, kind):
    group = open_group(3)
    for rows in (1, 5, 40):
        check(group, rng, rows, algo, KINDS[kind])
    check(open_group(3, workspace_bytes=16384), rng, 29, algo, KINDS[kind])


@pytest.mark.gpus(3)
def test_fp4_codes_with_the_bits_of_the_sentinel_arrive(open_group, rng):
    """Eight codes of -6 form a word of ones, which is the sentinel for a word that has not arrived. The last row has
    words that allow only one of the nine possible keys.
    """
    signs = np.where(rng.random((7, COLUMNS // 8)) < 0.6, -1.0, 1.0).repeat(8, axis=1)
    signs[6] = -1
    signs[6, ::8] = np.resize([-1, -4 / 6, -3 / 6, -2 / 6, -1.5 / 6, -1 / 6, -0.5 / 6, -1e-4], COLUMNS // 8)
    hosts = [(scale * signs).astype(np.float32).astype(df.dtypes.get("bfloat16").numpy) for scale in (2, -1, 0.5)]
    hosts[0][3, 70], hosts[1][4, :20], hosts[2][5, 100] = np.nan, 0, np.inf
    gamma = np.ones(COLUMNS, hosts[0].dtype)
    result = check(open_group(3), rng, 7, "push_two_shot", KINDS["nvfp4"], hosts=hosts, gamma=gamma)
    words = result.output[0].numpy().view(np.uint32)
    assert (words == 0xFFFFFFFF).any() and (words == 0x77777777).any()
    assert (~words[6] == np.resize(np.arange(8), COLUMNS // 8)).all()


@pytest.mark.gpus(3)
def test_scales_of_rows_with_a_nan_arrive(open_group, rng):
    """All scales of a row with a NaN are NaN, 0xFF. Four of them form a word with the bits of the sentinel."""
    hosts = random_inputs(rng, 3, (7, COLUMNS), "bfloat16")
    hosts[1][4, 70] = hosts[0][6, 0] = np.nan
    result = check(open_group(3), rng, 7, "push_two_shot", KINDS["mxfp8"], hosts=hosts)
    assert (result.scales[0].numpy().view(np.uint8) == 0xFF).sum() >= 2 * COLUMNS // 32


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["two_stage", "push_two_shot"])
def test_packs_of_float32_inputs_give_half_words_of_codes(open_group, rng, algo):
    check(open_group(2), rng, 5, algo, KINDS["nvfp4"], dtype="float32")


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("algo", "kind"), [("push_two_shot", "nvfp4"), ("two_stage", "groups")])
def test_residuals_are_exact(open_group, rng, algo, kind):
    check(open_group(2), rng, 5, algo, KINDS[kind], residual=True)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["push_two_shot", "two_stage"])
def test_static_scales_are_given_and_not_written(open_group, rng, algo):
    for scale in (0.125, 2e-39):  # 1 / 2e-39 overflows to infinity, which the op replaces by 0
        check(open_group(2), rng, 5, algo, Q.static(scale, "float8_e5m2"))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["push_two_shot", "naive"])
def test_groups_within_heads_work_with_all_other_options(open_group, rng, algo):
    options = {"norm": "layer", "beta": "bfloat16", "normed": True, "head_columns": 128}
    check(open_group(2), rng, 5, algo, Q.per_group(64, scales="float8_e8m0fnu", layout="column"), **options)


@pytest.mark.emulated
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["staged", "direct"])
def test_multicast_memory_gives_the_same_bits(rng, where, kind):
    with df.emu.Machine(devices=2, race=True) as machine:
        for nbytes in (1 << 18, 16384):
            with df.Group.local(2, driver=machine, max_blocks=4, workspace_bytes=nbytes) as group:
                hosts = exact_inputs(rng, 2, (19, COLUMNS), "bfloat16")
                xs = Arrays(group, hosts, where).inputs
                check(group, rng, 19, "auto", KINDS[kind], hosts=hosts, xs=xs, use_multimem=True)
        assert not machine.reports


@pytest.mark.emulated
def test_heads_of_rows_staged_in_multicast_memory_are_exact(rng):
    """Results overwrite the staged row, and the results of one warp overwrite packs that another warp loads."""
    options = {"max_blocks": 4, "workspace_bytes": 1 << 18}
    with df.emu.Machine(devices=2, seed=1) as machine, df.Group.local(2, driver=machine, **options) as group:
        hosts = exact_inputs(rng, 2, (3, 4096), "bfloat16")
        xs = Arrays(group, hosts, "staged").inputs
        check(group, rng, 3, "auto", KINDS["groups"], hosts=hosts, xs=xs, use_multimem=True, head_columns=128)


@pytest.mark.emulated
def test_groups_over_several_nodes_give_the_same_bits(rng):
    with df.emu.Machine(devices=4, race=True) as machine:
        for nbytes in (1 << 18, 16384):
            with df.Group.local(4, driver=machine, nodes=2, max_blocks=4, workspace_bytes=nbytes) as group:
                check(group, rng, 19, "auto", KINDS["mxfp8"])
        assert not machine.reports


def test_bad_input_is_an_argument_error(open_group, refused):
    group = open_group(1)
    rank = group.ranks[0]
    x, gamma = rank.zeros((4, 96), "float16"), rank.zeros(96, "float16")

    def call(quantisation, **changes):
        options = {"epsilon": 1e-5, "quantisation": quantisation, **changes}
        return lambda: df.allreduce_rmsnorm_fp8(group, x, gamma, **options)

    refused(call("mxfp8"), "quantisation", "a drvfuse.Quantisation")
    refused(call(Q.per_group(64)), "quantisation", "a multiple of 64 columns")
    refused(call(Q.static(2.0), scales=rank.zeros(4, "float32")), "scales", "the scale is given")
    refused(call(Q.none(), scales=rank.zeros(4, "float32")), "scales", "not quantised")
    refused(call(Q.none(), normed_outputs=rank.zeros((4, 96), "float16")), "normed_outputs", "not quantised")
    refused(call(Q.mxfp8(), scales=rank.zeros((4, 4), "float8_e8m0fnu")), "scales", "(4, 3)")
    refused(call(Q.mxfp8(layout="tiles"), scales=rank.zeros(511, "float8_e8m0fnu")), "scales", "(512,)")
    wide = rank.zeros(520, "float8_e8m0fnu")
    odd = df.view(wide.ptr + 8, (512,), wide.dtype, rank.device, owner=wide)
    refused(call(Q.mxfp8(layout="tiles"), scales=odd), "scales", "aligned to 16 bytes")
    refused(call(Q.mxfp8(), scales=rank.zeros((4, 3), "float32")), "scales", "float8_e8m0fnu")
    refused(call(Q.nvfp4(1.0), outputs=rank.zeros((4, 96), "float8_e4m3fn")), "outputs", "(4, 48)")
