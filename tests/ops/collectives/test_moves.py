# SPDX-License-Identifier: Apache-2.0
"""All-gather, broadcast and all-to-all: every byte arrives as it was, by every algorithm, at any address and size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from collective_support import assert_bits, fill_late, garbage, place, private_array
from test_push import epochs, slots_are_empty

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.errors import ArgumentError
from drvfuse.ops.call.repeat import Repeat
from drvfuse.ops.collectives.move_kernels import ALGOS

ALL_ALGOS = (*ALGOS, "naive")
SEVERAL = 2 if os.environ.get("DRVFUSE_TEST_DRIVER") == "cuda" else 3
"""Ranks of most tests: on GPUs as many as most machines have."""


def words(rng: np.random.Generator, shape: int | Sequence[int], dtype: str = "uint8") -> np.ndarray:
    """Random bytes, of which every fourth word of four is 0xFFFFFFFF, as that of a slot which nothing has come to."""
    element = dtypes.get(dtype).numpy
    nbytes = int(np.prod(shape)) * element.itemsize
    found = rng.integers(0, 2**32, -(-nbytes // 4), np.uint32)
    found[rng.random(found.size) < 0.25] = 0xFFFFFFFF
    return found.view(np.uint8)[:nbytes].view(element).reshape(shape)


def off(rank: df.Rank, host: np.ndarray, by: int) -> df.Array:
    """The array at an address `by` bytes behind a multiple of 16."""
    memory = rank.array(np.zeros(host.nbytes + 16, np.uint8))
    array = df.view(memory.ptr + by, host.shape, dtypes.get(host.dtype), rank.device, owner=memory)
    array.copy_from(host)
    return array


@pytest.fixture
def several(open_group) -> df.Group:
    return open_group(SEVERAL, workspace_bytes=1 << 16)


def exchange_table(rng: np.random.Generator, n: int, most: int = 9) -> list[list[int]]:
    """Numbers of rows, of which some are none."""
    return (rng.integers(0, most, (n, n)) * (rng.random((n, n)) < 0.8)).tolist()


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_all_gather_of_every_dtype(several, rng, algo):
    group, n = several, SEVERAL
    for dtype in dtypes.NAMES:
        shape = (int(rng.integers(1, 5)), 3, 5)
        hosts = [words(rng, shape, dtype if dtype != "bool" else "uint8") for _ in range(n)]
        hosts = [host % 2 == 0 for host in hosts] if dtype == "bool" else hosts
        assert_bits(df.all_gather(group, place(group, hosts), algo=algo), reference.all_gather(hosts), dtype)


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_any_number_of_bytes_at_any_address(several, rng, algo):
    """Inputs, outputs and the parts of outputs begin anywhere; sizes end within a pack, a word and a warp's packs."""
    group, n = several, SEVERAL
    for nbytes in (1, 3, 16, 513, 1027, 4096 + 7):
        for source, target in ((0, 0), (1, 0), (0, 2), (4, 12), (7, 9)):
            hosts = [words(rng, nbytes) for _ in range(n)]
            xs = [off(rank, host, source) for rank, host in zip(group, hosts, strict=True)]
            ys = [off(rank, np.zeros(n * nbytes, np.uint8), target) for rank in group]
            assert df.all_gather(group, xs, ys, algo=algo) == ys
            assert_bits(ys, reference.all_gather(hosts), f"{nbytes} bytes, {source} to {target}")
            zs = [off(rank, np.zeros(nbytes, np.uint8), target) for rank in group]
            df.broadcast(group, xs, zs, root=n - 1, algo=algo)
            assert_bits(zs, hosts[-1], f"{nbytes} bytes, {source} to {target}")


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_ragged_splits(several, rng, algo):
    """Some ranks have no rows, or none for some others."""
    group, n = several, SEVERAL
    for columns in (1, 6, 8, 600):
        rows = [int(rng.integers(0, 6)) for _ in range(n)]
        rows[-1] = 0 if n > 1 else 3
        hosts = [words(rng, (count, columns), "bfloat16") for count in rows]
        ys = df.all_gather(group, place(group, hosts), splits=rows, algo=algo)
        assert_bits(ys, reference.all_gather(hosts), f"{rows} rows of {columns}")
        table = exchange_table(rng, n)
        hosts = [words(rng, (sum(of), columns), "int16") for of in table]
        ys = df.all_to_all(group, place(group, hosts), splits=table, algo=algo)
        for position, expected in enumerate(reference.all_to_all(hosts, table)):
            assert_bits([ys[position]], expected, f"{table} rows of {columns}, to {position}")


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_scales_travel_with_their_rows(several, rng, algo):
    group, n = several, SEVERAL
    for rows, columns, shape in (([2] * n, 256, ()), (list(range(3, 3 + n)), 40, (2,)), ([0, 5, 1][:n], 7, ())):
        hosts = [words(rng, (count, columns), "float8_e4m3fn") for count in rows]
        scales = [words(rng, (count, *shape), "float32") for count in rows]
        xs, factors = place(group, hosts), place(group, scales)
        found = df.all_gather(group, xs, splits=rows, scales=factors, algo=algo)
        assert_bits(found.output, reference.all_gather(hosts))
        assert_bits(found.scales, reference.all_gather(scales))
        into = garbage(group, (sum(rows), *shape), "float32")
        ys, zs = df.all_gather(group, xs, splits=rows, scales=factors, gathered_scales=into, algo=algo)
        assert zs == into
        assert_bits(ys, reference.all_gather(hosts))
        assert_bits(zs, reference.all_gather(scales))


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_in_place(new_group, rng, algo):
    group, n = new_group(SEVERAL, workspace_bytes=1 << 13), SEVERAL
    rows = [3 + i for i in range(n)]
    hosts = [words(rng, (count, 100), "float32") for count in rows]
    scales = [words(rng, (count, 3), "float32") for count in rows]
    ys = garbage(group, (sum(rows), 100), "float32")
    xs = [y[sum(rows[:i]) : sum(rows[: i + 1])] for i, y in enumerate(ys)]
    for x, host in zip(xs, hosts, strict=True):
        x.copy_from(host)
    found = df.all_gather(group, xs, ys, splits=rows, scales=place(group, scales), algo=algo)  # scales elsewhere
    assert_bits(ys, reference.all_gather(hosts))
    assert_bits(found.scales, reference.all_gather(scales))

    hosts = [words(rng, 5000) for _ in range(n)]
    xs = place(group, hosts)
    assert df.broadcast(group, xs, xs, root=n - 1, algo=algo) == xs
    assert_bits(xs, hosts[-1])

    hosts = [words(rng, (4 * n, 999)) for _ in range(n)]
    xs = place(group, hosts)
    assert df.all_to_all(group, xs, xs, algo=algo) == xs
    for x, expected in zip(xs, reference.all_to_all(hosts), strict=True):
        assert_bits([x], expected)
    xs = place(group, hosts)
    ys = [xs[0], *garbage(group, (4 * n, 999), "uint8")[1:]]  # on one rank alone
    df.all_to_all(group, xs, ys, algo=algo)
    for y, expected in zip(ys, reference.all_to_all(hosts), strict=True):
        assert_bits([y], expected)
    table = exchange_table(rng, n)
    table = [[table[min(i, j)][max(i, j)] for j in range(n)] for i in range(n)]
    hosts = [words(rng, (sum(of), 77)) for of in table]
    xs = place(group, hosts)
    df.all_to_all(group, xs, xs, splits=table, algo=algo)
    for x, expected in zip(xs, reference.all_to_all(hosts, table), strict=True):
        assert_bits([x], expected)


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_calls_larger_than_the_workspace(new_group, rng, algo):
    """By push they have several rounds, in which bytes may go one way alone; staged ones go in chunks."""
    group = new_group(SEVERAL, workspace_bytes=1 << 13)
    for size in (3000, 7001, 20_000):
        hosts = [words(rng, size) for _ in range(SEVERAL)]
        xs = [off(rank, host, 4) for rank, host in zip(group, hosts, strict=True)]
        assert_bits(df.all_gather(group, xs, algo=algo), reference.all_gather(hosts))
        assert_bits(df.broadcast(group, xs, root=1, algo=algo), hosts[1])
        table = [of[:SEVERAL] for of in ([0, size, 0], [5, 1, 0], [0, 0, 0])][:SEVERAL]
        hosts = [words(rng, sum(of)) for of in table]
        ys = df.all_to_all(group, place(group, hosts), splits=table, algo=algo)
        for y, expected in zip(ys, reference.all_to_all(hosts, table), strict=True):
            assert_bits([y], expected)
    if algo == "push":
        slots_are_empty(group)


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_one_rank(open_group, rng, algo):
    group = open_group(1, workspace_bytes=1 << 16)
    host, scales = words(rng, (5, 33)), words(rng, 5, "float32")
    x, factors = off(group[0], host, 3), group[0].array(scales)
    found = df.all_gather(group, x, scales=factors, algo=algo)
    assert_bits([found.output], host)
    assert_bits([found.scales], scales)
    assert_bits([df.broadcast(group, [x], algo=algo)[0]], host)
    assert_bits([df.all_to_all(group, x, splits=[[5]], algo=algo)], host)
    assert df.all_to_all(group, x, x, algo=algo) is x


@pytest.mark.gpus(3)
def test_a_broadcast_by_relays(new_group, rng):
    """Of every size and root, at odd addresses, in one round and in several, and between sums in the same slots."""
    group = new_group(3, workspace_bytes=1 << 13)
    ones = [np.full(520, rank, np.float32) for rank in range(3)]
    for root in range(3):
        for nbytes in (1, 1027, 5000, 16 * 640, 33_333):
            hosts = [words(rng, nbytes) for _ in range(3)]
            xs = [off(rank, host, 7) for rank, host in zip(group, hosts, strict=True)]
            ys = df.broadcast(group, xs, root=root, algo="relay")
            sums = df.allreduce(group, place(group, ones), algo="push_one_shot")
            df.broadcast(group, xs, xs, root=root, algo="relay")
            for found in (ys, xs):
                assert_bits(found, hosts[root], f"{nbytes} bytes of rank {root}")
            assert_bits(sums, np.full(520, 3, np.float32))
    slots_are_empty(group)


@pytest.mark.gpus(8)
def test_eight_ranks(open_group, rng):
    group = open_group(8, workspace_bytes=1 << 16)
    hosts = [words(rng, (2, 333)) for _ in range(8)]
    assert_bits(df.all_gather(group, place(group, hosts)), reference.all_gather(hosts))
    table = exchange_table(rng, 8)
    hosts = [words(rng, (sum(of), 50)) for of in table]
    ys = df.all_to_all(group, place(group, hosts), splits=table)
    for y, expected in zip(ys, reference.all_to_all(hosts, table), strict=True):
        assert_bits([y], expected)


@pytest.mark.gpus(SEVERAL)
def test_words_of_which_every_key_but_one_makes_one_absent(open_group, rng):
    """A warp's 128 words cancel the keys 0 to 127, or all small ones but one in the middle; in any order."""
    group = open_group(SEVERAL, workspace_bytes=1 << 16)
    every = ~np.arange(128, dtype=np.uint32)
    some = ~np.delete(np.arange(129, dtype=np.uint32), 70)
    for base in (every, some, np.repeat(every[:1], 128)):
        hosts = [rng.permutation(base) for _ in range(SEVERAL)]
        assert_bits(df.all_gather(group, place(group, hosts), algo="push"), reference.all_gather(hosts))
    slots_are_empty(group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ["put", "pull"])
def test_many_blocks_of_which_some_copy_what_stays(new_group, rng, algo):
    """Without what stays, in place, all of them move what does not."""
    group = new_group(2, max_blocks=17)
    hosts = [words(rng, (2, 40_000)) for _ in range(2)]
    xs = place(group, hosts)
    call = df.all_gather.prepare(group, xs, algo=algo)
    assert call.launches[0][0].grid[0] == 17
    assert_bits(call.launch(), reference.all_gather(hosts))
    for y, expected in zip(df.all_to_all(group, xs, algo=algo), reference.all_to_all(hosts), strict=True):
        assert_bits([y], expected)
    df.broadcast(group, xs, xs, algo=algo)
    assert_bits(xs, hosts[0])
    splits = [[1, 1], [0, 2]]  # more stays than moves
    ys = df.all_to_all(group, place(group, hosts), splits=splits, algo=algo)
    for y, expected in zip(ys, reference.all_to_all(hosts, splits), strict=True):
        assert_bits([y], expected)


@pytest.mark.gpus(3)
def test_arrays_that_peers_cannot_access_and_odd_addresses_are_staged(open_group, rng):
    group = open_group(3, workspace_bytes=1 << 16)
    hosts = [words(rng, 640) for _ in range(3)]
    pooled = place(group, hosts)
    private = [private_array(rank.device, host)[0] for rank, host in zip(group, hosts, strict=True)]
    outputs = [private_array(rank.device, np.zeros(3 * 640, np.uint8))[0] for rank in group]
    direct = {algo: df.all_gather.prepare(group, pooled, algo=algo) for algo in ALGOS}
    for algo, xs, ys in (("pull", private, None), ("put", pooled, outputs), ("pull", pooled, outputs)):
        call = df.all_gather.prepare(group, xs, ys, algo=algo)
        staged = algo == "put" or xs is private
        assert (call.traffic == direct[algo].traffic) is not staged
        assert_bits(call.launch(), reference.all_gather(hosts))
    group.synchronize()


@pytest.mark.gpus(3)
def test_auto_pushes_small_calls_and_not_large_ones(open_group):
    group = open_group(3, workspace_bytes=1 << 16)
    small = [rank.zeros(1000, "uint8") for rank in group]
    assert df.all_gather.prepare(group, small).algo == "push"
    large = [rank.zeros(24 << 20, "uint8") for rank in group]
    assert df.broadcast.prepare(group, large, large).algo == "relay"
    assert df.all_to_all.prepare(group, large, [rank.empty(24 << 20, "uint8") for rank in group]).algo == "put"


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_a_prepared_call_and_a_graph_of_several(new_group, rng, algo):
    """Rounds of both numbers between calls of other kinds; a replay takes new contents."""
    group = new_group(SEVERAL, workspace_bytes=1 << 13)
    xs = [[rank.empty(size, "uint8") for rank in group] for size in (300, 5000)]
    ys = [garbage(group, SEVERAL * x[0].size, "uint8") for x in xs]
    calls = [df.all_gather.prepare(group, x, y, algo=algo) for x, y in zip(xs, ys, strict=True)]
    ones = place(group, [np.ones(64, np.float32)] * SEVERAL)
    total = df.allreduce.prepare(group, ones, garbage(group, 64, "float32"), algo="push_one_shot")
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        for call in (*calls, total, *calls):
            call.launch()
    for _ in range(2):
        hosts = [[words(rng, x.size) for x in of] for of in xs]
        for arrays, of in zip(xs, hosts, strict=True):
            for array, host in zip(arrays, of, strict=True):
                array.copy_from(host)
        graph.launch(streams[0])
        calls[1].launch()
        total.launch()
        graph.launch(streams[0])
        for arrays, of in zip(ys, hosts, strict=True):
            assert_bits(arrays, reference.all_gather(of))
    group.synchronize()
    graph.close()


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALGOS)
def test_plain_calls_of_one_layout_are_repeated(open_group, rng, monkeypatch, algo):
    """Later calls of a layout only write their addresses to the launches of the first, those of peers included."""
    repeated: list[Repeat] = []
    launch = Repeat.launch
    monkeypatch.setattr(Repeat, "launch", lambda repeat, *args: (repeated.append(repeat), launch(repeat, *args))[1])
    group, kept = open_group(3, workspace_bytes=1 << 16), []
    for _ in range(3):
        hosts = [words(rng, (2, 64), "float8_e4m3fn") for _ in range(3)]
        scales = [words(rng, 4, "float32").reshape(2, 2) for _ in range(3)]
        xs, factors = place(group, hosts), place(group, scales)
        found = df.all_gather(group, xs, scales=factors, algo=algo)
        kept.append((xs, factors, found))
        assert_bits(found.output, reference.all_gather(hosts))
        assert_bits(found.scales, reference.all_gather(scales))
    assert len(repeated) == 2
    rows = [words(rng, (2, 64)) for _ in range(3)]
    for _ in range(3):  # in place: parts of the outputs, in calls of one layout
        ys = [rank.zeros((6, 64), "uint8") for rank in group]
        xs = [y[2 * i : 2 * i + 2] for i, y in enumerate(ys)]
        for x, row in zip(xs, rows, strict=True):
            x.copy_from(row)
        kept.append((xs, ys, df.all_gather(group, xs, ys, algo=algo)))
        assert_bits(ys, reference.all_gather(rows))
    assert len(repeated) == 4
    with pytest.raises(ArgumentError, match="overlapping"):
        df.all_gather(group, [y[i : i + 2] for i, y in enumerate(ys)], ys, algo=algo)


@pytest.mark.gpus(3)
def test_without_bytes_nothing_is_launched(open_group):
    group = open_group(3, workspace_bytes=1 << 16)
    for call in (
        df.all_gather.prepare(group, [rank.zeros((0, 4), "float32") for rank in group]),
        df.broadcast.prepare(group, [rank.zeros((3, 0), "int8") for rank in group]),
        df.all_to_all.prepare(group, [rank.zeros((0,), "int8") for rank in group], splits=np.zeros((3, 3), int)),
    ):
        assert [list(of) for of in call.launches] == [[]] * 3
        call.launch()
    group.synchronize()


@pytest.mark.gpus(2)
def test_push_calls_of_one_and_several_rounds_keep_the_epochs(new_group, rng):
    group = new_group(2, workspace_bytes=1 << 12)
    expected = 0
    for size in (100, 4000, 100, 9000, 100):
        hosts = [words(rng, size) for _ in range(2)]
        before = epochs(group)
        assert_bits(df.all_gather(group, place(group, hosts), algo="push"), reference.all_gather(hosts))
        after = epochs(group)
        assert after[0] == after[1] and after[0] - before[0] in (0, 1)
        expected += after[0] - before[0]
    assert 0 < expected < 5
    slots_are_empty(group)


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALGOS)
def test_a_dependent_launch_reads_nothing_before_its_producer_has_ended(algo):
    for seed in (0, 1, 3):
        with (
            df.emu.Machine(devices=2, seed=seed, race="strict") as machine,
            df.Group.local(2, driver=machine, max_blocks=4, workspace_bytes=1 << 14) as group,
        ):
            xs, ys = garbage(group, 640, "uint16"), garbage(group, 1280, "uint16")
            zs = garbage(group, 1280, "uint16")
            level = df.PDLLevel.OVERLAP_AT_BEGINNING
            calls = [
                df.all_gather.prepare(group, xs, ys, algo=algo, pdl_level=level),
                df.all_to_all.prepare(group, ys, zs, algo=algo, pdl_level=level),
            ]
            produce = [fill_late(group, x, 0xFFFF - position) for position, x in enumerate(xs)]
            group.synchronize()
            for position, rank in enumerate(group):
                produce[position](rank.stream)
            for call in calls:
                call.launch()
            group.synchronize()
            for position, z in enumerate(zs):
                assert_bits([z], np.full(1280, 0xFFFF - position, np.uint16))
        assert machine.reports == []


def _moved(group: df.Group, op: str, algo: str) -> Any:
    if op == "broadcast":
        return df.broadcast.prepare(group, [rank.zeros(64 * 64, "uint8") for rank in group], algo=algo)
    call = df.all_gather if op == "all_gather" else df.all_to_all
    return call.prepare(group, [rank.zeros((len(group), 1024), "uint8") for rank in group], algo=algo)


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALGOS)
def test_remote_bytes_are_those_of_the_formula(algo):
    """Nothing crosses that need not: the moves, and by push a key of 4 bytes for each 512."""
    with df.emu.Machine(devices=3) as machine, df.Group.local(3, driver=machine, max_blocks=4) as group:
        for op, nbytes in (("all_gather", 6 * 3072), ("all_to_all", 6 * 1024), ("broadcast", 2 * 4096)):
            call = _moved(group, op, algo)
            group.synchronize()
            ended = len(machine.launches)
            call.launch()
            group.synchronize()
            totals = [record.counters.total for record in list(machine.launches)[ended:]]
            written, read = sum(t.remote_written for t in totals), sum(t.remote_read for t in totals)
            assert call.traffic[1] == nbytes
            if algo == "push":
                packs = -(-(3072 if op == "all_gather" else 1024 if op == "all_to_all" else 4096) // 1024) * 64
                assert (written, read) == (nbytes + 6 * packs // 32 * 4, 0)
            elif algo == "put":
                assert nbytes <= written < nbytes + 2000 and read == 0  # and the barriers' flags
            else:
                assert nbytes == read and written < 2000
