# SPDX-License-Identifier: Apache-2.0
"""`reduce_scatter`: each rank's rows of the all-reduce, bit for bit, however the rows are split and summed."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, garbage, place, private_array, random_inputs

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.errors import CaptureError, CompileError
from drvfuse.plans import sums as scatter

ALGOS = ("push", "pull", "naive")
UNEVEN = {1: [5], 2: [0, 5], 3: [0, 4, 1], 8: [0, 0, 3, 0, 1, 0, 1, 0]}


def assert_parts(arrays, expected, what=""):
    for rank, (array, part) in enumerate(zip(arrays, expected, strict=True)):
        assert_bits([array], part, f"{what} part {rank}")


def check(group, rng, shape, dtype="bfloat16", splits=None, algo="auto", **options):
    hosts = random_inputs(rng, len(group), shape, dtype)
    found = df.reduce_scatter(group, place(group, hosts), splits=splits, algo=algo, **options)
    assert_parts(found, reference.reduce_scatter(hosts, splits), f"{algo} {shape} {dtype} {splits}")


@pytest.mark.parametrize(
    ("n", "algo"),
    [
        pytest.param(n, algo, marks=pytest.mark.gpus(n))
        for n, algos in ((1, ALGOS[:1]), (2, ALGOS[:1]), (3, ALGOS), (8, ALGOS))
        for algo in algos
    ],
)
def test_bits_are_those_of_the_all_reduce(open_group, rng, n, algo):
    """Parts begin within a pack. They are empty, smaller than a pack, or larger than what a block sends in one step."""
    group = open_group(n)
    check(group, rng, (5, 7), splits=UNEVEN[n], algo=algo)
    for shape in ((37,), (3, 1045), (1, 5), (n, 3), (0, 4)):
        check(group, rng, shape, algo=algo)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_and_whole_packs_are_exact(open_group, rng, dtype):
    group = open_group(2)
    for shape in ((6, 4, 16), (2, 4096), (1, 8)):
        check(group, rng, shape, dtype)


def test_the_reference_splits_as_numpy_does(rng):
    hosts = random_inputs(rng, 3, (8, 5), "float32")
    total = reference.allreduce(hosts)
    for part, expected in zip(reference.reduce_scatter(hosts), np.array_split(total, 3), strict=True):
        assert (reference.bits(part) == reference.bits(expected)).all()


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALGOS)
def test_parts_larger_than_the_workspace_take_rounds_or_chunks(new_group, rng, algo):
    """Consecutive calls have odd and even numbers of rounds. In some rounds some ranks have no part left."""
    group = new_group(3, workspace_bytes=4096)
    for count, splits in ((2999, None), (901, [901, 0, 0]), (1701, [0, 1700, 1]), (5, None), (1500, [400, 700, 400])):
        check(group, rng, (count,), splits=splits, algo=algo)


@pytest.mark.gpus(3)
def test_large_parts_are_sent_ahead_of_the_sums(new_group, rng, monkeypatch):
    """With large parts a block sends two units before it waits for the first one. The test replaces `depth`, so that a
    block does this with small parts too. Calls take one round or several. After each call an `allreduce` and a call in
    place follow.
    """
    monkeypatch.setattr(scatter, "depth", lambda packs: 2)
    for workspace_bytes in (4096, 1 << 16):
        group = new_group(3, workspace_bytes=workspace_bytes, max_blocks=1)
        for count, splits in ((2999, None), (901, [901, 0, 0]), (4701, [0, 4700, 1]), (5, None)):
            check(group, rng, (count,), splits=splits, algo="push")
            hosts = random_inputs(rng, 3, (count,), "bfloat16")
            xs = place(group, hosts)
            assert_bits(df.allreduce(group, xs, algo="push_one_shot"), reference.allreduce(hosts))
            expected = reference.reduce_scatter(hosts)
            starts = np.cumsum([0, *map(len, expected)])
            ys = [x[starts[i] : starts[i + 1]] for i, x in enumerate(xs)]
            assert_parts(df.reduce_scatter(group, xs, ys, algo="push"), expected, f"in place {count}")


@pytest.mark.gpus(3)
def test_inputs_that_peers_cannot_read_are_staged(new_group, rng):
    group = new_group(3, workspace_bytes=4096)
    for count, splits in ((1999, None), (300, [0, 299, 1])):
        hosts = random_inputs(rng, 3, (count,), "bfloat16")
        kept = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
        call = df.reduce_scatter.prepare(group, [array for array, _ in kept], splits=splits, algo="pull")
        assert_parts(call.launch(), reference.reduce_scatter(hosts, splits), f"{count}")


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("shape", [(7, 3), (64, 129)])
def test_outputs_may_be_the_ranks_own_rows_of_the_inputs(open_group, rng, algo, shape):
    group = open_group(3)
    hosts = random_inputs(rng, 3, shape, "bfloat16")
    xs = place(group, hosts)
    expected = reference.reduce_scatter(hosts)
    starts = np.cumsum([0] + [len(part) for part in expected])
    ys = [x[starts[i] : starts[i + 1]] for i, x in enumerate(xs)]
    result = df.reduce_scatter(group, xs, ys, algo=algo)
    assert_parts(result, expected, algo)
    for i, (x, host) in enumerate(zip(xs, hosts, strict=True)):  # nothing else was written
        after = x.numpy()
        for other in {0, 1, 2} - {i}:
            rows = slice(starts[other], starts[other + 1])
            assert (reference.bits(after[rows]) == reference.bits(host[rows])).all()


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALGOS)
def test_the_epilogue_sees_indices_of_the_whole_tensor_and_parameters_of_the_owner(open_group, rng, algo):
    group = open_group(3)
    shape = (7, 5)  # parts begin within a pack
    hosts = random_inputs(rng, 3, shape, "bfloat16")
    bias = [rng.standard_normal(shape[1]).astype(np.float32) for _ in range(3)]
    parts = np.array_split(np.arange(35).reshape(shape), 3)
    # the buffer has room for the rank's own part only
    own = [rng.standard_normal(part.size).astype(np.float32) for part in parts]
    epilogue = df.Epilogue(
        "x + bias[col] + own[i - first] + row + rank",
        bias=place(group, bias),
        own=place(group, own),
        first=[df.int32(int(part.flat[0])) for part in parts],
    )
    total = reference.sum_ranks(hosts)
    call = df.reduce_scatter.prepare(group, place(group, hosts), algo=algo, epilogue=epilogue)
    for rank, (y, rows) in enumerate(zip(call.launch(), np.array_split(np.arange(7), 3), strict=True)):
        x = total[rows] + bias[rank]
        x = x + own[rank].reshape(x.shape) + np.float32(1) * rows[:, None].astype(np.float32) + np.float32(rank)
        assert_bits([y], reference.round_to(x, hosts[0].dtype), f"rank {rank}")
    with pytest.raises(CompileError, match="epilogue"):
        df.reduce_scatter(group, place(group, hosts), algo=algo, epilogue=df.Epilogue("x + "))


@pytest.mark.gpus(2)
def test_bad_input_is_refused_before_anything_is_written(open_group, rng, refused):
    group = open_group(2)
    xs = place(group, random_inputs(rng, 2, (6, 8), "bfloat16"))
    ys = garbage(group, (3, 8), "bfloat16")
    before = [y.numpy() for y in ys]

    def call(*arguments, **options):
        return lambda: df.reduce_scatter(group, *arguments, **options)

    refused(call(xs, ys, splits=[3, 4]), "splits", "the sum 6")
    refused(call(xs, ys, splits=[3]), "splits", "2 entries")
    refused(call(xs, ys, splits=[7, -1]), "splits[1]", "an integer of at least 0")
    refused(call(xs, ys, splits=[3.0, 3.0]), "splits[0]", "an integer of at least 0")
    refused(call(xs, ys, splits="33"), "splits", "a list of 2 numbers of rows")
    refused(call(xs, ys, splits=[2, 4]), "outputs[0]", "of shape (2, 8), the rows of its rank")
    refused(call(xs, ys, algo="one_stage"), "algo", "'push'")
    refused(call([rank.zeros((), "float32") for rank in group]), "inputs[0]", "at least one dimension")
    refused(call([rank.zeros(6, "int32") for rank in group]), "dtype of inputs[0]", "'float32'")
    refused(call(xs, [xs[0][:3], ys[1][:3]][::-1]), "outputs[0]", "on device")
    refused(call(xs, [xs[0][3:], ys[1]]), "outputs[0]", "overlapping inputs[0]")
    flat = [rank.zeros(9, "bfloat16") for rank in group]
    refused(call(xs, ys, epilogue="x"), "epilogue", "a drvfuse.Epilogue")
    odd = [df.view(array.ptr + 2, (3, 2), "bfloat16", array.device, owner=array) for array in flat]
    refused(call([rank.zeros((6, 2), "bfloat16") for rank in group], odd), "outputs[0]", "its rank's rows")
    assert all((reference.bits(y.numpy()) == reference.bits(host)).all() for y, host in zip(ys, before, strict=True))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_graph_replays_on_new_contents(open_group, rng, algo):
    group = open_group(2)
    xs = [rank.zeros((5, 7), "bfloat16") for rank in group]
    ys = [rank.zeros((rows, 7), "bfloat16") for rank, rows in zip(group, (3, 2), strict=True)]
    call = df.reduce_scatter.prepare(group, xs, ys, algo=algo)
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        with pytest.raises(CaptureError, match="outputs=None"):
            df.reduce_scatter(group, xs, algo=algo)
        call.launch()
    for _ in range(3):
        hosts = random_inputs(rng, 2, (5, 7), "bfloat16")
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        graph.launch(group[0].stream)
        group.synchronize()
        assert_parts(ys, reference.reduce_scatter(hosts))


@pytest.mark.gpus(2)
def test_calls_of_one_layout_are_repeated_with_other_addresses(open_group, rng):
    from drvfuse.ops.call.repeat import Repeats

    group = open_group(2)
    group.part(Repeats).clear()
    for _ in range(3):
        check(group, rng, (9, 24), splits=(2, 7))
    ((repeat,),) = [idle for idle in group.part(Repeats)._plans.values() if idle]
    assert repeat.note.op == "reduce_scatter"


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALGOS)
def test_moved_bytes_agree_with_the_formula(open_group, algo):
    group = open_group(2)
    xs = [rank.zeros((2, 64), "float32") for rank in group]
    local, remote = df.reduce_scatter.prepare(group, xs, algo=algo).traffic
    assert remote == 512
    assert local == {"push": 1024 + 1024, "pull": 512, "naive": 1536}[algo] + 512


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["push", "pull"])
def test_a_trace_has_a_section_for_each_rank(open_group, rng, algo):
    group = open_group(2)
    hosts = random_inputs(rng, 2, (64, 129), "bfloat16")
    trace = df.Trace(group)
    found = df.reduce_scatter(group, place(group, hosts), algo=algo, trace=trace)
    assert_parts(found, reference.reduce_scatter(hosts))
    kernel = {"push": "reduce_scatter_push_one_shot", "pull": "reduce_scatter_one_stage"}[algo]
    assert kernel in trace.summary()
    assert {int(rank) for rank in trace.records()["rank"]} == {0, 1}


def test_nan_results_are_canonical(open_group):
    group = open_group(1)
    element = dtypes.get("bfloat16").numpy
    words = np.array([0xFFFF, 0xFFC1, 0x7F81, 0x3F80], np.uint16).view(element)
    found = df.reduce_scatter(group, [group[0].array(words)])
    assert reference.bits(found[0].numpy()).tolist() == [0x7FFF, 0x7FFF, 0x7FFF, 0x3F80]
