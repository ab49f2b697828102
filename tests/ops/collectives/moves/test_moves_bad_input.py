# SPDX-License-Identifier: Apache-2.0
"""Bad input of all-gather, broadcast and all-to-all is refused before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import garbage

import drvfuse as df
from drvfuse.errors import CaptureError, Unsupported

pytestmark = pytest.mark.gpus(2)


@pytest.fixture
def group(open_group):
    return open_group(2)


def arrays(group, *shapes, dtype="int16"):
    return [rank.zeros(shape, dtype) for rank, shape in zip(group, shapes, strict=True)]


def test_splits_must_be_a_list_with_a_number_for_each_rank(group, refused):
    xs = arrays(group, (3, 2), (1, 2))
    for splits, argument, text in (
        (4, "splits", "a list of 2 numbers of rows"),
        ([3], "splits", "2 entries"),
        ([3, -1], "splits[1]", "at least 0"),
        ([3, 1.0], "splits[1]", "an integer"),
        ([3, True], "splits[1]", "an integer"),
    ):
        refused(lambda splits=splits: df.all_gather(group, xs, splits=splits), argument, text)
    refused(lambda: df.all_gather(group, xs, splits=[1, 3]), "inputs[0]", "of shape (1, 2), as splits say")
    refused(lambda: df.all_gather(group, xs), "inputs[1]", "(3, 2), that of inputs[0] where no splits are given")


def test_wrong_tables_of_splits_are_refused(group, refused):
    xs = arrays(group, (3, 2), (1, 2))
    for splits, argument, text in (
        (4, "splits", "a 2 x 2 table of row counts"),
        ([[1, 2]], "splits", "2 rows"),
        ([[1, 2], [1]], "splits[1]", "2 entries"),
        ([[1, 2], [1, -1]], "splits[1][1]", "at least 0"),
    ):
        refused(lambda splits=splits: df.all_to_all(group, xs, splits=splits), argument, text)
    refused(lambda: df.all_to_all(group, xs, splits=[[1, 2], [1, 1]]), "inputs[1]", "as splits say")
    refused(
        lambda: df.all_to_all(group, arrays(group, (3,), (3,))),
        "inputs[0]",
        "a multiple of 2 rows",
    )
    ys = arrays(group, (2, 2), (3, 2))
    refused(lambda: df.all_to_all(group, xs, ys, splits=[[1, 2], [1, 0]]), "outputs[1]", "of shape (2, 2)")


def test_shapes_and_dtypes_that_do_not_match_are_refused(group, refused):
    refused(lambda: df.all_gather(group, arrays(group, (), ())), "inputs[0]", "at least one dimension")
    refused(lambda: df.all_to_all(group, arrays(group, (), ())), "inputs[0]", "at least one dimension")
    mixed = [group[0].zeros((2, 2), "int16"), group[1].zeros((2, 2), "uint16")]
    for op in (df.all_gather, df.broadcast, df.all_to_all):
        refused(lambda op=op: op(group, mixed), "inputs[1]", "of dtype int16")
    xs = arrays(group, (2, 2), (2, 2))
    refused(lambda: df.all_gather(group, xs, arrays(group, (2, 2), (4, 2))), "outputs[0]", "of shape (4, 2)")
    refused(lambda: df.all_gather(group, xs, arrays(group, (4, 2), (4, 2), dtype="int32")), "outputs[0]", "int16")
    refused(lambda: df.broadcast(group, xs, arrays(group, (2, 2), (2, 3))), "outputs[1]", "of shape (2, 2)")
    refused(lambda: df.all_gather(group, xs[:1]), "inputs", "2 arrays")


def test_scales_must_have_one_row_for_each_row_of_values(group, refused):
    xs = arrays(group, (2, 4), (2, 4))
    refused(lambda: df.all_gather(group, xs, scales=arrays(group, (3,), (3,))), "scales[0]", "of shape (2,)")
    refused(lambda: df.all_gather(group, xs, gathered_scales=arrays(group, (4,), (4,))), "gathered_scales", "None")
    scales, wrong = arrays(group, (2,), (2,)), arrays(group, (4, 1), (4, 1))
    refused(
        lambda: df.all_gather(group, xs, scales=scales, gathered_scales=wrong), "gathered_scales[0]", "of shape (4,)"
    )


def test_the_root_must_be_a_rank(group, refused):
    xs = arrays(group, (2,), (2,))
    for root in (-1, 2, 0.0, True, None):
        refused(lambda root=root: df.broadcast(group, xs, root=root), "root", "0 to 1")


def test_wrong_options_are_refused(group, refused):
    xs = arrays(group, (2,), (2,))
    refused(lambda: df.all_gather(group, xs, algo="push_one_shot"), "algo", "'put'")
    refused(lambda: df.all_gather(group, xs, max_num_blocks=0), "max_num_blocks")
    refused(lambda: df.all_gather(group, xs, trace=3), "trace")


def test_overlapping_memory_is_refused(group, refused):
    """An input may overlap the output only if it is the rank's own part of the output, or the output itself."""
    ys = arrays(group, (4, 2), (4, 2))
    refused(lambda: df.all_gather(group, [y[1:3] for y in ys], ys), "outputs[0]", "overlapping inputs[0]")
    refused(lambda: df.all_gather(group, [y[:2] for y in ys], ys), "outputs[1]", "overlapping inputs[1]")
    refused(lambda: df.broadcast(group, [y[:2] for y in ys], [y[1:3] for y in ys]), "outputs[0]", "overlapping")


@pytest.mark.gpus(3)
def test_an_in_place_exchange_needs_equal_splits_in_both_directions(open_group, refused):
    group = open_group(3)
    xs = [rank.zeros(4, "int16") for rank in group]
    round_trip = [[1, 2, 1], [1, 1, 2], [2, 1, 1]]
    refused(lambda: df.all_to_all(group, xs, xs, splits=round_trip), "outputs[0]", "overlapping inputs[0]")
    refused(lambda: df.all_to_all(group, xs, xs, splits=round_trip), "outputs[0]", "[0][1] and splits[1][0] differ")
    df.all_to_all(group, xs, [rank.zeros(4, "int16") for rank in group], splits=round_trip)
    group.synchronize()


def test_nothing_is_allocated_in_a_capture(group):
    xs = arrays(group, (2,), (2,))
    with pytest.raises(CaptureError, match="outputs=None allocates"), df.Graph.capture([r.stream for r in group]):
        df.all_gather(group, xs, algo="push")


@pytest.mark.emulated
def test_without_peer_access_only_the_copying_algorithm_is_allowed():
    with df.emu.Machine(devices=2, peers=False) as machine, df.Group.local(2, driver=machine) as group:
        hosts = [np.arange(6, dtype=np.int16) + 10 * i for i in range(2)]
        xs = [rank.array(host) for rank, host in zip(group, hosts, strict=True)]
        call = df.all_gather.prepare(group, xs)
        assert call.algo == "naive"
        for y in call.launch().output:
            assert np.array_equal(y.numpy(), np.concatenate(hosts))
        ys = df.all_to_all(group, xs, xs)  # copied through the workspaces
        assert np.array_equal(ys[0].numpy(), [0, 1, 2, 10, 11, 12])
        with pytest.raises(Unsupported, match="needs peer access"):
            df.all_gather(group, xs, algo="push")


def test_a_refused_call_leaves_the_outputs_as_they_were(group, refused):
    ys = garbage(group, 4, "int16")
    before = [y.numpy() for y in ys]
    refused(lambda: df.all_gather(group, arrays(group, (2,), (2,)), ys, splits=[1, 3]), "inputs[0]")
    for y, old in zip(ys, before, strict=True):
        assert np.array_equal(y.numpy(), old)
