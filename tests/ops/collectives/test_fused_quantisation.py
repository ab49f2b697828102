# SPDX-License-Identifier: Apache-2.0
"""Quantisations of the fused op by every algorithm, bit for bit: static, groups, MXFP8 and NVFP4, layouts of scales."""

from __future__ import annotations

import pytest
from collective_support import ALL_ALGOS, assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference

Q = df.Quantisation
KINDS = {
    "groups": Q.per_group(128, upper_bound=3.0),
    "mxfp8": Q.mxfp8("float8_e5m2", layout="tiles"),
    "nvfp4": Q.nvfp4(0.01, layout="column"),
}
COLUMNS = 384


def check(group, rng, rows, algo, quantisation, *, dtype="bfloat16", residual=False, hosts=None, **options):
    shape = (rows, COLUMNS)
    hosts = random_inputs(rng, group.size, shape, dtype) if hosts is None else hosts
    gamma = random_inputs(rng, 1, COLUMNS, dtype)[0]
    added = random_inputs(rng, 1, shape, dtype)[0] if residual else None
    xs = options.pop("xs", None) or place(group, hosts)
    scales_shape = quantisation.scales_shape(shape[:-1], COLUMNS)
    result = df.allreduce_rmsnorm_fp8(
        group,
        xs,
        replicate(group, gamma),
        epsilon=1e-5,
        residuals=replicate(group, added) if residual else None,
        quantisation=quantisation,
        outputs=garbage(group, quantisation.output_shape(shape), quantisation.dtype.name),
        scales=None if scales_shape is None else garbage(group, scales_shape, quantisation.scales.name),
        algo=algo,
        **options,
    )
    kinds = {"multimem": options.get("use_multimem", False), "nodes": group.nodes}
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, residual=added, quantisation=quantisation, **kinds)
    what = f"{algo} {dtype} {quantisation} of {rows} rows"
    assert_bits(result.output, expected.output, what)
    assert (result.scales is None) == (expected.scales is None)
    if expected.scales is not None:
        assert_bits(result.scales, expected.scales, "scales of " + what)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_every_algorithm_in_few_and_many_rows_and_chunks(open_group, rng, algo, kind):
    group = open_group(3)
    for rows in (1, 5, 130):
        check(group, rng, rows, algo, KINDS[kind])
    check(open_group(3, workspace_bytes=16384), rng, 29, algo, KINDS[kind])
