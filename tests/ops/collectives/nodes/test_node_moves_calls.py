# SPDX-License-Identifier: Apache-2.0
"""All-gather, broadcast and all-to-all over several nodes, all in one process: every byte arrives as it was."""

from __future__ import annotations

import pytest
from collective_support import assert_bits, garbage, place, private_array
from moves_support import LAYOUTS, exchange_table, off, on_ranks, quantised, words

import drvfuse as df
from drvfuse import errors, reference
from drvfuse.nodes.in_process import InProcess
from drvfuse.ops.collectives.moves import over_nodes

pytestmark = pytest.mark.emulated
FORMS = [(4, 2), (3, 3)]  # ranks, nodes


class Watched(InProcess):
    """An exchange engine for which the group must enforce its time limit, as for one whose exchanges might never
    end."""

    watched = True


@pytest.fixture(scope="module")
def machine():
    with df.emu.Machine(devices=6, race=True) as machine:
        yield machine
        assert not machine.reports


@pytest.fixture
def open_nodes(machine):
    groups = []

    def make(n=4, nodes=2, **options):
        options = {"max_blocks": 4, "workspace_bytes": 1 << 16, **options}
        groups.append(df.Group.local(n, driver=machine, nodes=nodes, **options))
        return groups[-1]

    yield make
    for group in reversed(groups):
        group.synchronize()
        assert (group.link.words["sending"] == group.link.words["received"]).all()
        group.close()


def check_gather(group, rng, splits, row=(3, 8), **options):
    hosts = [words(rng, (rows, *row)) for rows in splits]
    outputs = garbage(group, (sum(splits), *row), "uint8")
    df.all_gather(group, place(group, hosts), outputs, splits=splits, **options)
    assert_bits(outputs, reference.all_gather(hosts), f"{splits}")


def check_exchange(group, rng, splits, row=(3, 8), **options):
    hosts = [words(rng, (sum(of_rank), *row)) for of_rank in splits]
    found = df.all_to_all(group, place(group, hosts), splits=splits, **options)
    for array, expected in zip(found, reference.all_to_all(hosts, splits), strict=True):
        assert_bits([array], expected, f"{splits}")


def check_broadcast(group, rng, root, shape, **options):
    hosts = [words(rng, shape) for _ in range(group.size)]
    outputs = garbage(group, shape, "uint8")
    df.broadcast(group, place(group, hosts), outputs, root=root, **options)
    assert_bits(outputs, hosts[root], f"{shape} from {root}")


@pytest.mark.parametrize("n,nodes", FORMS)
def test_bytes_arrive_for_several_numbers_of_ranks_and_nodes(open_nodes, rng, n, nodes):
    group = open_nodes(n, nodes)
    check_gather(group, rng, [4] * n)
    check_gather(group, rng, rng.integers(0, 5, n).tolist(), (5,))
    check_exchange(group, rng, [[2] * n] * n)
    check_exchange(group, rng, exchange_table(rng, n), (5,))
    check_broadcast(group, rng, n - 1, (900,))
    check_broadcast(group, rng, 1, (3,))


@pytest.mark.parametrize("algo", ["push", "put", "pull"])
def test_bytes_arrive_by_every_algorithm_within_the_nodes(open_nodes, rng, algo):
    group = open_nodes()
    for row in ((3, 16), (5,)):
        check_gather(group, rng, [7, 0, 3, 11], row, algo=algo)
        check_exchange(group, rng, exchange_table(rng, 4), row, algo=algo)
        check_broadcast(group, rng, 2, (70, *row), algo=algo)


def test_a_broadcast_by_relays_arrives(open_nodes, rng):
    group = open_nodes(6, 2)
    for nbytes in (16, 5000):
        check_broadcast(group, rng, 4, (nbytes,), algo="relay")


def test_scales_travel_with_their_rows(open_nodes, rng):
    group, splits = open_nodes(), [3, 0, 5, 1]
    hosts = [words(rng, (rows, 64), "float8_e4m3fn") for rows in splits]
    scales = [words(rng, (rows, 3), "float32") for rows in splits]
    found = df.all_gather(group, place(group, hosts), splits=splits, scales=place(group, scales))
    assert_bits(found.output, reference.all_gather(hosts))
    assert_bits(found.scales, reference.all_gather(scales))


def test_calls_larger_than_the_workspace_take_rounds_and_chunks(open_nodes, rng):
    group = open_nodes(workspace_bytes=4096)
    for row in ((40, 16), (333,)):
        check_exchange(group, rng, exchange_table(rng, 4, 12), row)
        check_gather(group, rng, [9, 1, 0, 30], row)
        check_broadcast(group, rng, 3, (31, *row))


def test_in_place_calls_keep_the_bytes(open_nodes, rng):
    group = open_nodes(workspace_bytes=4096)
    hosts = [words(rng, (8, 600)) for _ in range(4)]
    xs = place(group, hosts)
    df.all_to_all(group, xs, xs)
    for x, expected in zip(xs, reference.all_to_all(hosts), strict=True):
        assert_bits([x], expected)
    outputs = garbage(group, (32, 600), "uint8")
    parts = [df.view(y.ptr + 4800 * i, (8, 600), "uint8", y.device, owner=y) for i, y in enumerate(outputs)]
    for part, host in zip(parts, hosts, strict=True):
        part.copy_from(host)
    df.all_gather(group, parts, outputs)
    assert_bits(outputs, reference.all_gather(hosts))
    df.broadcast(group, outputs, outputs, root=1)


def test_bytes_arrive_at_any_address_and_in_memory_that_peers_cannot_access(open_nodes, rng):
    group, hosts = open_nodes(), [words(rng, (6, 37)) for _ in range(4)]
    xs = [off(rank, host, 3) for rank, host in zip(group, hosts, strict=True)]
    pairs = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
    for inputs in (xs, [array for array, _ in pairs]):
        assert_bits(df.all_gather(group, inputs).output, reference.all_gather(hosts))
        assert_bits(df.broadcast(group, inputs, root=2), hosts[2])
        splits = [[2, 1, 3, 0]] * 4
        found = df.all_to_all(group, inputs, splits=splits)
        for array, expected in zip(found, reference.all_to_all(hosts, splits), strict=True):
            assert_bits([array], expected)
        group.synchronize()


def test_arrays_without_rows_are_accepted(open_nodes):
    group = open_nodes()
    xs = [rank.zeros((0, 8), "uint8") for rank in group]
    for found in (df.all_gather(group, xs).output, df.all_to_all(group, xs), df.broadcast(group, xs)):
        assert [array.shape for array in found] == [(0, 8)] * 4


@pytest.mark.parametrize("level", list(df.PDLLevel)[1:3])
def test_a_graph_replays_calls_of_a_watched_engine(open_nodes, rng, level):
    group = open_nodes(exchange=Watched(), workspace_bytes=4096)
    xs, ys = garbage(group, (8, 96), "uint8"), garbage(group, (32, 96), "uint8")
    zs, ws = garbage(group, (8, 96), "uint8"), garbage(group, (32, 96), "uint8")
    calls = [
        df.all_gather.prepare(group, xs, ys, pdl_level=level),
        df.all_to_all.prepare(group, xs, zs, pdl_level=level),
        df.broadcast.prepare(group, ys, ws, root=1, pdl_level=level),
    ]
    with df.Graph.capture([rank.stream for rank in group]) as graph:
        for call in calls:
            call.launch()
    for _ in range(2):
        hosts = [words(rng, (8, 96)) for _ in range(4)]
        for x, host in zip(xs, hosts, strict=True):
            x.copy_from(host)
        group.synchronize()
        graph.launch(group[0].stream)
        group.synchronize()
        assert_bits(ys, reference.all_gather(hosts))
        assert_bits(ws, reference.all_gather(hosts))
        for z, expected in zip(zs, reference.all_to_all(hosts), strict=True):
            assert_bits([z], expected)
    assert group.link.words["sending"].tolist() == [6] * 4


def test_the_error_for_an_unsupported_call_names_what_to_use(open_nodes, refused):
    group = open_nodes()
    xs = [rank.zeros(4, "uint8") for rank in group]
    for op in (df.all_gather, df.broadcast, df.all_to_all):
        refused(
            lambda op=op: op(group, xs, algo="naive"),
            "algo",
            'another algorithm, such as "auto"',
        )
        with pytest.raises(errors.Unsupported, match="launches all local ranks together"):
            op.prepare(group, xs).launch(rank=0)

    class SumsAlone(InProcess):
        all_to_all = property()

    for op in (df.all_gather, df.broadcast, df.all_to_all):
        with pytest.raises(errors.Unsupported, match=r"needs an engine with the method all_to_all .* group\.split"):
            op(open_nodes(exchange=SumsAlone()), xs)


def test_a_workspace_without_room_for_a_pack_of_every_pair_is_refused(open_nodes, refused, monkeypatch):
    group = open_nodes()
    monkeypatch.setattr(group.workspace, "payload_bytes", 31)
    xs = [rank.zeros((4, 8), "uint8") for rank in group]
    refused(lambda: df.all_to_all(group, xs), "workspace_bytes", "at least 32")


def test_a_workspace_too_small_for_push_slots_is_used_by_algorithms_with_barriers(open_nodes, rng, monkeypatch):
    group = open_nodes()
    monkeypatch.setattr(group.workspace, "payload_bytes", 1024)
    check_gather(group, rng, [7, 0, 3, 11], (16,))
    check_exchange(group, rng, exchange_table(rng, 4), (16,))
    check_broadcast(group, rng, 2, (70, 16))


def test_reported_traffic_counts_bytes_of_kernels_and_of_exchanges(open_nodes):
    group = open_nodes()
    xs = [rank.zeros((4, 1024), "uint8") for rank in group]
    gathered, exchanged = df.all_gather.prepare(group, xs), df.all_to_all.prepare(group, xs)
    assert gathered.traffic[1] == 4 * 3 * 4096  # each rank's rows once to each other rank
    # each rank sends 1 row within its node, 2 rows between the nodes, and 1 row to a relay within its node
    assert exchanged.traffic[1] == 4 * 1024 * (1 + 2 + 1)


def test_plain_calls_of_one_layout_are_planned_once(open_nodes, rng, monkeypatch):
    """Later calls have other arrays and prepare nothing. Calls of all_to_all are in place."""
    prepared = []
    sequence = over_nodes.NodeMoveCall.sequence
    monkeypatch.setattr(
        over_nodes.NodeMoveCall, "sequence", lambda call: (prepared.append(call.common.op), sequence(call))[1]
    )
    group = open_nodes()
    splits = [[(i + 1) * (j + 1) % 5 for j in range(4)] for i in range(4)]
    kept = []  # so that no call gets the addresses of an earlier one
    for number in range(4):
        hosts = [words(rng, (sum(of_rank), 24)) for of_rank in splits]
        if number < 2:
            xs, ys = place(group, hosts), garbage(group, (sum(map(len, hosts)), 24), "uint8")
            scales = place(group, [host[:, :2] for host in hosts])
            root = place(group, [hosts[3]] * 4)
            exchanged = place(group, hosts)
        for arrays, values in ((xs, hosts), (scales, [host[:, :2] for host in hosts]), (root, [hosts[3]] * 4)):
            for array, value in zip(arrays, values, strict=True):
                array.copy_from(value)
        for array, value in zip(exchanged, hosts, strict=True):
            array.copy_from(value)
        rows = [len(host) for host in hosts]
        found = df.all_gather(group, xs, ys, splits=rows, scales=scales)
        assert_bits(found.output, reference.all_gather(hosts))
        assert_bits(found.scales, reference.all_gather([host[:, :2] for host in hosts]))
        assert_bits(df.broadcast(group, root, root=3), hosts[3])
        df.all_to_all(group, exchanged, exchanged, splits=splits)
        for array, expected in zip(exchanged, reference.all_to_all(hosts, splits), strict=True):
            assert_bits([array], expected)
        kept += [xs, ys, scales, root, exchanged]
        if number == 0:
            assert prepared == ["all_gather", "broadcast", "all_to_all"]
        assert len(prepared) == 3, f"call {number} prepared {prepared[3:]}"


def gather_quantised(group, rng, rows, columns, made, **options):
    codes, scales = quantised(rng, rows, columns, made)
    want, wanted = reference.all_gather(codes, scales, made)
    into = garbage(group, wanted.shape, made.scales)
    xs, factors = on_ranks(group, codes, made.dtype), on_ranks(group, scales, made.scales)
    found = df.all_gather(group, xs, splits=rows, scales=factors, gathered_scales=into, quantisation=made, **options)
    assert_bits(found.output, want.view(xs[0].numpy().dtype), f"{rows}")
    assert_bits(found.scales, wanted.view(into[0].numpy().dtype), f"scales of {rows} rows")


@pytest.mark.parametrize(
    "layout,algos",
    [
        ("FP8, columns of floats", ["auto", "pull"]),
        ("FP8, columns of E8M0", ["put"]),
        ("MXFP8, tiles", ["auto", "put"]),
        ("NVFP4, tiles", ["push", "pull"]),
    ],
)
def test_scales_by_column_or_tile_are_those_of_one_node(open_nodes, rng, layout, algos):
    """Every scale is in its place, and the padding is 0, whatever the padding of the inputs is."""
    group = open_nodes(6, 2)
    for algo in algos:
        for rows in ([5, 0, 130, 33, 96, 127], [0, 0, 0, 1, 0, 2]):
            gather_quantised(group, rng, rows, *reversed(LAYOUTS[layout]), algo=algo)


@pytest.mark.parametrize(
    "made,columns", [(df.Quantisation.nvfp4(2.0, layout="tiles"), 272), LAYOUTS["FP8, columns of floats"]]
)
def test_scales_larger_than_the_workspace_cross_in_chunks(open_nodes, rng, made, columns):
    gather_quantised(
        open_nodes(6, 2, workspace_bytes=1 << 13), rng, [150, 7, 0, 300, 259, 8], columns, made, algo="pull"
    )


def test_scales_by_column_or_tile_arrive_with_one_rank_per_node(open_nodes, rng):
    for rows in ([1, 200, 3], [0, 0, 5]):
        gather_quantised(open_nodes(3, 3), rng, rows, *reversed(LAYOUTS["MXFP8, tiles"]))


def test_a_workspace_without_room_for_a_column_of_scales_is_refused(open_nodes, refused):
    group, made = open_nodes(workspace_bytes=4096), df.Quantisation.per_group(64, layout="column")
    xs = [rank.zeros((1500, 64), "float8_e4m3fn") for rank in group]
    scales = [rank.zeros((1, 1500), "float32") for rank in group]
    refused(
        lambda: df.all_gather(group, xs, scales=scales, quantisation=made),
        "workspace_bytes",
        "at least 6000 in the group's constructor, to hold a column of scales",
    )
