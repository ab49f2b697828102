# SPDX-License-Identifier: Apache-2.0
"""`allreduce_many`: the bits of `allreduce` of each tensor, in one launch per rank."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import TENSORS, assert_bits, hosts_of, placed, ranks

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import CaptureError
from drvfuse.ops.call.repeat import Repeats

PUSH = ("push_one_shot", "push_two_shot")


def assert_sums(found, hosts, what=""):
    for t, of_tensor in enumerate(hosts):
        assert_bits([of_rank[t] for of_rank in found], reference.allreduce(of_tensor), f"{what} tensor {t}")


@pytest.mark.parametrize("algo", PUSH)
@pytest.mark.parametrize("n", ranks(2, 3))
def test_bits_are_those_of_each_tensor_alone(open_group, rng, n, algo):
    group = open_group(n)
    hosts = hosts_of(rng, n, TENSORS)
    call = df.allreduce_many.prepare(group, placed(group, hosts), algo=algo)
    assert_sums(call.launch(), hosts, algo)
    assert [len(launches) for launches in call.launches] == [1] * n


@pytest.mark.gpus(2)
def test_many_tensors_of_whole_packs_have_the_bits_of_each_alone(open_group, rng):
    group = open_group(2)
    hosts = hosts_of(rng, 2, [(8 * (t % 5),) for t in range(64)])
    assert_sums(df.allreduce_many(group, placed(group, hosts)), hosts)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", PUSH)
def test_tensors_larger_than_the_workspace_take_several_rounds(new_group, rng, algo):
    group = new_group(3, workspace_bytes=8192)
    hosts = hosts_of(rng, 3, [(1001,), (3,), (2500,), (7, 5)])
    for _ in range(3):
        assert_sums(df.allreduce_many(group, placed(group, hosts), algo=algo), hosts, algo)


@pytest.mark.gpus(3)
def test_naive_has_a_launch_for_each_tensor(open_group, rng):
    group = open_group(3)
    hosts = hosts_of(rng, 3, [(5,), (0, 2), (300,)])
    call = df.allreduce_many.prepare(group, placed(group, hosts), algo="naive")
    assert_sums(call.launch(), hosts)
    assert [len(launches) for launches in call.launches] == [2] * 3


def test_one_rank_may_give_a_list_of_arrays(open_group, rng, refused):
    group = open_group(1)
    hosts = hosts_of(rng, 1, [(9,), (4, 4)])
    xs = [group[0].array(host) for (host,) in hosts]
    assert_sums([df.allreduce_many(group, xs)], hosts)
    assert_sums(df.allreduce_many(group, [xs]), hosts)
    refused(lambda: df.allreduce_many(group, [xs[0], np.zeros(3)]), "tensors[1]")


@pytest.mark.gpus(2)
def test_in_place_calls_replay_in_a_graph(open_group, rng):
    group = open_group(2)
    hosts = hosts_of(rng, 2, [(9,), (4, 4)])
    xs = placed(group, hosts)
    call = df.allreduce_many.prepare(group, xs, xs, algo="push_one_shot")
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        with pytest.raises(CaptureError, match="outputs=None"):
            df.allreduce_many(group, xs)
        call.launch()
    for _ in range(3):
        hosts = hosts_of(rng, 2, [(9,), (4, 4)])
        for t, of_tensor in enumerate(hosts):
            for of_rank, host in zip(xs, of_tensor, strict=True):
                of_rank[t].copy_from(host)
        graph.launch(group[0].stream)
        group.synchronize()
        assert_sums(xs, hosts)


@pytest.mark.gpus(2)
def test_calls_of_one_layout_are_repeated_with_other_addresses(open_group, rng):
    group = open_group(2)
    group.part(Repeats).clear()
    for _ in range(3):
        hosts = hosts_of(rng, 2, [(9,), (40,), (4, 4)])
        assert_sums(df.allreduce_many(group, placed(group, hosts), algo="push_one_shot"), hosts)
    (repeats,) = group.part(Repeats)._plans.values()
    assert [repeat.note.op for repeat in repeats] == ["allreduce_many"]
    hosts = hosts_of(rng, 2, [(9, 1), (40,), (16,)])
    assert_sums(df.allreduce_many(group, placed(group, hosts), algo="push_one_shot"), hosts)
    assert len(group.part(Repeats)) == 2


@pytest.mark.gpus(2)
def test_bad_input_is_an_argument_error(open_group, refused):
    group = open_group(2)

    def zeros(*shapes, dtype="bfloat16"):
        return [[rank.zeros(shape, dtype) for shape in shapes] for rank in group]

    def call(tensors, outputs=None, **options):
        return lambda: df.allreduce_many(group, tensors, outputs, **options)

    xs = zeros(5, 6)
    refused(call(xs[:1]), "tensors", "2 arrays")
    refused(call([xs[0], xs[1][:1]]), "tensors[1]", "2 arrays, as tensors[0] is")
    refused(call([[], []]), "tensors[0]", "1 to 64")
    refused(call(zeros(*range(65))), "tensors[0]", "65 arrays")
    refused(call([xs[0], xs[1][0]]), "tensors[1]", "a list of arrays")
    refused(call([xs[0], xs[1][::-1]]), "tensors[1][0]", "of shape (6,)")
    refused(
        call([[a, b] for a, (b,) in zip((x[0] for x in xs), zeros(6, dtype="float32"), strict=True)]), "tensors[0][1]"
    )
    refused(call(zeros(5, dtype="int32")), "dtype of tensors[0][0]", "'float32'")
    refused(call(xs, zeros(5)), "outputs", "1 array per rank")
    refused(call(xs, zeros(5, 7)), "outputs[0][1]", "that of tensors")
    refused(call(xs, [[x[0], x[0][:5]] for x in zeros(5, 6)]), "outputs[0][1]", "of shape (5,)")
    refused(call(xs, zeros(5, 6)[:1] * 2), "outputs[1][0]", "on device")
    shared = zeros(6)
    refused(call(zeros(6, 6), [[x[0], x[0]] for x in shared]), "outputs[0][1]", "overlapping")
    refused(call(xs, algo="one_stage"), "algo", "'push_one_shot'")
