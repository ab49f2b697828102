# SPDX-License-Identifier: Apache-2.0
"""Calls that move bytes: the algorithm that is taken, graphs, repeats, epochs, dependent launches and counted bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collective_support import assert_bits, epochs, fill_late, garbage, place, slots_are_empty
from moves_support import ALL_ALGOS, SEVERAL, off, words

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError
from drvfuse.ops.call.repeat import Repeat
from drvfuse.ops.collectives.moves.kernel import ALGOS


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
def test_prepared_calls_replay_alone_and_in_a_graph(new_group, rng, algo):
    """Calls take odd and even numbers of rounds, between calls of other kinds; a replay reads new contents."""
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
def test_plain_calls_of_one_layout_reuse_a_plan(open_group, rng, monkeypatch, algo):
    """Later calls of a layout only write addresses, those of peers included, into the launches of the first call."""
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
    for _ in range(3):  # in place: inputs are parts of the outputs; all calls have one layout
        ys = [rank.zeros((6, 64), "uint8") for rank in group]
        xs = [y[2 * i : 2 * i + 2] for i, y in enumerate(ys)]
        for x, row in zip(xs, rows, strict=True):
            x.copy_from(row)
        kept.append((xs, ys, df.all_gather(group, xs, ys, algo=algo).output))
        assert_bits(ys, reference.all_gather(rows))
    assert len(repeated) == 4
    with pytest.raises(ArgumentError, match="overlapping"):
        df.all_gather(group, [y[i : i + 2] for i, y in enumerate(ys)], ys, algo=algo)


@pytest.mark.gpus(3)
def test_a_call_without_bytes_launches_nothing(open_group):
    group = open_group(3, workspace_bytes=1 << 16)
    for call in (
        df.all_gather.prepare(group, [rank.zeros((0, 4), "float32") for rank in group]),
        df.broadcast.prepare(group, [rank.zeros((3, 0), "int8") for rank in group]),
        df.all_to_all.prepare(group, [rank.zeros((0,), "int8") for rank in group], splits=np.zeros((3, 3), int)),
    ):
        assert [list(of) for of in call.launches] == [[]] * 3
        call.launch()
    group.synchronize()


@pytest.mark.gpus(SEVERAL)
def test_push_calls_of_one_and_several_rounds_leave_the_epochs_consistent(new_group, rng):
    group = new_group(SEVERAL, workspace_bytes=1 << 12)
    expected = 0
    for size in (100, 4000, 100, 9000, 100):
        hosts = [words(rng, size) for _ in range(SEVERAL)]
        before = epochs(group)
        assert_bits(df.all_gather(group, place(group, hosts), algo="push").output, reference.all_gather(hosts))
        after = epochs(group)
        assert len(set(after)) == 1 and after[0] - before[0] in (0, 1)
        expected += after[0] - before[0]
    assert 0 < expected < 5
    slots_are_empty(group)


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALGOS)
def test_a_dependent_launch_reads_nothing_before_its_producer_has_ended(algo):
    for seed in (0, 1, 3):
        with (
            df.emu.Machine(devices=3, seed=seed, race="strict") as machine,
            df.Group.local(3, driver=machine, max_blocks=4, workspace_bytes=1 << 14) as group,
        ):
            xs, ys = garbage(group, 640, "uint16"), garbage(group, 1920, "uint16")
            zs = garbage(group, 1920, "uint16")
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
                assert_bits([z], np.full(1920, 0xFFFF - position, np.uint16))
        assert machine.reports == []


def _moved(group: df.Group, op: str, algo: str) -> Any:
    if op == "broadcast":
        return df.broadcast.prepare(group, [rank.zeros(64 * 64, "uint8") for rank in group], algo=algo)
    call = df.all_gather if op == "all_gather" else df.all_to_all
    return call.prepare(group, [rank.zeros((len(group), 1024), "uint8") for rank in group], algo=algo)


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALGOS)
def test_remote_bytes_agree_with_the_formula(algo):
    """With `put` and `pull` only the moved bytes travel; with `push` also a key of 4 bytes for each 512 bytes."""
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
                assert nbytes <= written < nbytes + 2000 and read == 0  # up to 2000 bytes are flags of barriers
            else:
                assert nbytes == read and written < 2000


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALGOS)
def test_bytes_at_odd_addresses_take_few_more_accesses_and_no_other_bytes_are_accessed(algo, rng):
    """At an odd address, 512 bytes of a warp take 31 accesses of 16 bytes and 16 accesses of one byte, not 512 accesses
    of one byte. If outputs are the inputs, no thread accesses a byte that another warp writes.
    """
    with df.emu.Machine(devices=3, race="strict") as machine, df.Group.local(3, driver=machine, max_blocks=4) as group:
        accesses = []
        for by in (0, 5):
            hosts = [words(rng, 16384) for _ in range(3)]
            own, far = (by, 0) if algo != "pull" else (0, by)
            xs = [off(rank, host, own) for rank, host in zip(group, hosts, strict=True)]
            ys = [off(rank, np.zeros(3 * 16384, np.uint8), far) for rank in group]
            group.synchronize()
            ended = len(machine.launches)
            df.all_gather(group, xs, ys, algo=algo)
            assert_bits(ys, reference.all_gather(hosts))
            copies = ("bytes.cuh", "moves.cuh", "memory.cuh")
            counted = [record.counters.lines for record in list(machine.launches)[ended:]]
            accesses.append(sum(n.accesses for of in counted for (file, _), n in of.items() if file.endswith(copies)))
        assert accesses[0] < accesses[1] < 1.5 * accesses[0]
        hosts = [words(rng, (3 * 5, 333)) for _ in range(3)]
        xs = place(group, hosts)
        df.all_to_all(group, xs, xs, algo=algo)
        for x, expected in zip(xs, reference.all_to_all(hosts), strict=True):
            assert_bits([x], expected)
    assert machine.reports == []
