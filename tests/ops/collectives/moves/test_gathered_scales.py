# SPDX-License-Identifier: Apache-2.0
"""All-gather of quantised rows: the gathered scales are laid out as those of one tensor with all rows, even if the
scales of a rank begin inside a tile."""

from __future__ import annotations

import pytest
from collective_support import assert_bits, garbage, place, random_inputs
from connected import connected
from moves_support import ALL_ALGOS, LAYOUTS, SEVERAL, on_ranks, quantised

import drvfuse as df
from drvfuse import reference

Q = df.Quantisation


ROWS = ([1, 2, 1], [5, 0, 130], [128, 256, 3], [33, 96, 127], [300, 4, 8])
"""Rows of the ranks: less than a tile and more, beginning at any row of a tile; one rank has none."""


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_gathered_scales_have_the_layout_of_all_rows(open_group, rng, algo, layout):
    """The padding of the inputs need not be 0, as scales of other libraries may have other padding."""
    group = open_group(SEVERAL, workspace_bytes=1 << 16)
    made, columns = LAYOUTS[layout]
    for rows in ROWS:
        counts = rows[:SEVERAL]
        codes, scales = quantised(rng, counts, columns, made)
        xs, factors = on_ranks(group, codes, made.dtype), on_ranks(group, scales, made.scales)
        want, wanted = reference.all_gather(codes, scales, made)
        into = garbage(group, wanted.shape, made.scales)
        found = df.all_gather(
            group, xs, splits=counts, scales=factors, gathered_scales=into, quantisation=made, algo=algo
        )
        assert isinstance(found, df.Gathered) and found.scales == into
        assert_bits(found.output, want.view(xs[0].numpy().dtype), f"rows {counts}")
        assert_bits(found.scales, wanted.view(into[0].numpy().dtype), f"scales of {counts} rows")


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_scales_larger_than_the_workspace_are_gathered_in_chunks(new_group, rng, algo):
    """Scales travel in chunks, most of which begin within a tile; rows have two leading dimensions."""
    group = new_group(SEVERAL, workspace_bytes=1 << 12)
    made, counts = Q.nvfp4(2.0, layout="tiles"), [3, 50, 7][:SEVERAL]
    codes, scales = quantised(rng, [5 * count for count in counts], 272, made)
    codes = [host.reshape(-1, 5, 136) for host in codes]
    want, wanted = reference.all_gather(codes, scales, made)
    xs, factors = on_ranks(group, codes, made.dtype), on_ranks(group, scales, made.scales)
    for _ in range(2):
        ys, found = df.all_gather(group, xs, splits=counts, scales=factors, quantisation=made, algo=algo)
        assert_bits(ys, want)
        assert_bits(found, wanted.view(found[0].numpy().dtype))


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ["auto", "naive"])
def test_a_fused_reduce_scatter_and_an_all_gather_give_the_scales_of_the_all_reduce(open_group, rng, algo):
    """The scales gathered after the reduce-scatter are those of the all-reduce."""
    group, columns = open_group(SEVERAL), 256
    made = Q.per_group(128, scales="float8_e8m0fnu", layout="tiles")
    hosts = random_inputs(rng, SEVERAL, (131, columns), "bfloat16")
    gamma = random_inputs(rng, 1, columns, "bfloat16")[0]
    xs, gammas = place(group, hosts), [rank.array(gamma) for rank in group]
    options = {"epsilon": 1e-6, "quantisation": made}
    whole = df.allreduce_rmsnorm_fp8(group, xs, gammas, **options)
    own = df.reduce_scatter_rmsnorm_fp8(group, xs, gammas, **options)
    counts = [y.shape[0] for y in own.output]
    rows, scales = df.all_gather(group, own.output, splits=counts, scales=own.scales, quantisation=made, algo=algo)
    assert_bits(rows, whole.output[0].numpy())
    assert_bits(scales, whole.scales[0].numpy())


def test_one_rank_and_arrays_without_rows_are_accepted(open_group, rng):
    group, made = open_group(1), Q.mxfp8(layout="tiles")
    codes, scales = quantised(rng, [9], 64, made)
    x, factors = on_ranks(group, codes, made.dtype)[0], on_ranks(group, scales, made.scales)[0]
    for algo in ("auto", "naive"):
        rows, found = df.all_gather(group, x, scales=factors, quantisation=made, algo=algo)
        assert_bits([rows], codes[0])
        assert_bits([found], reference.all_gather(codes, scales, made)[1])
    empty = group[0].zeros((0, 64), made.dtype)
    rows, found = df.all_gather(group, empty, scales=group[0].zeros(0, made.scales), quantisation=made)
    assert rows.shape == (0, 64) and found.shape == (0,)


@pytest.mark.emulated
def test_ranks_in_separate_processes_gather_the_scales_of_the_reference(rng):
    made = Q.per_group(64, layout="column")
    codes, scales = quantised(rng, [5, 9], 128, made)
    want = reference.all_gather(codes, scales, made)

    def call(group):
        i = group[0].index
        x, factors = group[0].array(codes[i]), group[0].array(scales[i])
        found = df.all_gather(group, x, splits=[5, 9], scales=factors, quantisation=made, algo="pull")
        group.synchronize()
        return found

    with connected(2) as ranks:
        for rows, factors in ranks.each(call):
            assert_bits([rows], want[0])
            assert_bits([factors], want[1])


def test_a_list_is_returned_without_scales_and_a_named_pair_with_scales(open_group):
    """The result is a list if no scales are given or the quantisation has none. With scales it is a named pair."""
    group = open_group(1)
    codes = [group[0].zeros((4, 64), "float8_e4m3fn")]
    for made in (None, Q.static(0.5), Q.none()):
        x = codes if made is None or made.dtype is not None else [group[0].zeros((4, 64), "bfloat16")]
        found = df.all_gather(group, x, quantisation=made).output
        assert type(found) is list and found[0].shape == (4, 64)
    found = df.all_gather(group, codes, scales=[group[0].zeros(4, "float32")], quantisation=Q.per_row())
    assert type(found) is df.Gathered and found._fields == ("output", "scales")
    assert [type(part) for part in found] == [list, list]


@pytest.mark.gpus(2)
def test_bad_input_is_an_argument_error(open_group, refused):
    group, made = open_group(2), Q.mxfp8(layout="tiles")
    codes = [rank.zeros((3, 64), "float8_e4m3fn") for rank in group]
    scales = [rank.zeros(512, made.scales) for rank in group]
    before = [rank.zeros(512, made.scales) for rank in group]

    def call(argument, text, xs=codes, quantisation=made, **more):
        options = {"scales": scales, "gathered_scales": before, "quantisation": quantisation, **more}
        refused(lambda: df.all_gather(group, xs, **options), argument, text)

    call("quantisation", "a drvfuse.Quantisation or None", quantisation="tiles")
    call("scales", "given, for float8_e4m3fn per 32 columns", scales=None, gathered_scales=None)
    call("scales", "None, for float8_e4m3fn static", quantisation=Q.static(1.0))
    call("inputs[0]", "of dtype float8_e5m2, as quantisation says", quantisation=Q.mxfp8("float8_e5m2", layout="tiles"))
    call("inputs[0]", "of rows and columns", xs=[rank.zeros(3, "float8_e4m3fn") for rank in group])
    odd = [rank.zeros((3, 48), "float8_e4m3fn") for rank in group]
    call("quantisation", "for rows of a multiple of 32 columns", xs=odd)
    call("scales[0]", "of shape (1024,)", xs=[rank.zeros((3, 160), "float8_e4m3fn") for rank in group])
    call("scales[0]", "of dtype float8_e8m0fnu", scales=[rank.zeros(512, "uint8") for rank in group])
    call("scales[0]", "of shape (2, 4)", quantisation=Q.mxfp8(layout="column"))
    call(
        "scales[0]",
        "of shape (3, 2)",
        scales=[rank.zeros((3, 1), made.scales) for rank in group],
        quantisation=Q.mxfp8(),
    )
    call("gathered_scales[0]", "of shape (512,)", gathered_scales=[rank.zeros(1024, made.scales) for rank in group])
    shifted = [rank.zeros(516, made.scales)[4:] for rank in group]
    call("scales[0]", "aligned to 16 bytes", scales=shifted)
    call("gathered_scales[0]", "aligned to 16 bytes", gathered_scales=shifted)
    call("gathered_scales[0]", "overlapping scales[0]", gathered_scales=scales)
