# SPDX-License-Identifier: Apache-2.0
"""All-gather, broadcast and all-to-all keep every byte, by every algorithm, at any address and size."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import assert_bits, garbage, place, private_array, slots_are_empty
from moves_support import ALL_ALGOS, SEVERAL, exchange_table, off, words

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.ops.collectives.moves.kernel import ALGOS


@pytest.fixture
def several(open_group) -> df.Group:
    return open_group(SEVERAL, workspace_bytes=1 << 16)


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_all_gather_keeps_the_bytes_of_every_dtype(several, rng, algo):
    group, n = several, SEVERAL
    for dtype in dtypes.NAMES:
        shape = (int(rng.integers(1, 5)), 3, 5)
        hosts = [words(rng, shape, dtype if dtype != "bool" else "uint8") for _ in range(n)]
        hosts = [host % 2 == 0 for host in hosts] if dtype == "bool" else hosts
        assert_bits(df.all_gather(group, place(group, hosts), algo=algo).output, reference.all_gather(hosts), dtype)


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_any_number_of_bytes_arrives_at_any_address(several, rng, algo):
    """Inputs, outputs and the parts of outputs begin at any address. Some sizes are no multiples of a word, of a pack,
    or of the packs of a warp.
    """
    group, n = several, SEVERAL
    for nbytes in (1, 3, 16, 513, 1027, 4096 + 7):
        for source, target in ((0, 0), (1, 0), (0, 2), (4, 12), (7, 9)):
            hosts = [words(rng, nbytes) for _ in range(n)]
            xs = [off(rank, host, source) for rank, host in zip(group, hosts, strict=True)]
            ys = [off(rank, np.zeros(n * nbytes, np.uint8), target) for rank in group]
            assert df.all_gather(group, xs, ys, algo=algo).output == ys
            assert_bits(ys, reference.all_gather(hosts), f"{nbytes} bytes, {source} to {target}")
            zs = [off(rank, np.zeros(nbytes, np.uint8), target) for rank in group]
            df.broadcast(group, xs, zs, root=n - 1, algo=algo)
            assert_bits(zs, hosts[-1], f"{nbytes} bytes, {source} to {target}")


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_rows_arrive_for_uneven_splits(several, rng, algo):
    """Some ranks have no rows, or no rows for some of the other ranks."""
    group, n = several, SEVERAL
    for columns in (1, 6, 8, 600):
        rows = [int(rng.integers(0, 6)) for _ in range(n)]
        rows[-1] = 0 if n > 1 else 3
        hosts = [words(rng, (count, columns), "bfloat16") for count in rows]
        ys = df.all_gather(group, place(group, hosts), splits=rows, algo=algo).output
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
def test_bytes_arrive_if_one_array_is_not_aligned_to_16_bytes(several, rng, algo):
    """All sizes, and all addresses but one, are multiples of 16 bytes."""
    group, n = several, SEVERAL
    hosts, scales = ([words(rng, (2, 16 * count)) for _ in range(n)] for count in (33, 1))
    for shifted in range(4):
        at = [4 if i == shifted else 0 for i in range(4)]
        xs, factors = (
            [off(*pair, by) for pair in zip(group, of, strict=True)]
            for of, by in zip((hosts, scales), at[:2], strict=True)
        )
        want = [reference.all_gather(of) for of in (hosts, scales)]
        ys, zs = ([off(rank, np.zeros_like(of), by) for rank in group] for of, by in zip(want, at[2:], strict=True))
        df.all_gather(group, xs, ys, scales=factors, gathered_scales=zs, algo=algo)
        for found, of in zip((ys, zs), want, strict=True):
            assert_bits(found, of, f"array {shifted} is off")


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_in_place_calls_keep_the_bytes(new_group, rng, algo):
    group, n = new_group(SEVERAL, workspace_bytes=1 << 13), SEVERAL
    rows = [3 + i for i in range(n)]
    hosts = [words(rng, (count, 100), "float32") for count in rows]
    scales = [words(rng, (count, 3), "float32") for count in rows]
    ys = garbage(group, (sum(rows), 100), "float32")
    xs = [y[sum(rows[:i]) : sum(rows[: i + 1])] for i, y in enumerate(ys)]
    for x, host in zip(xs, hosts, strict=True):
        x.copy_from(host)
    # the scales are separate arrays
    found = df.all_gather(group, xs, ys, splits=rows, scales=place(group, scales), algo=algo)
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
    ys = [xs[0], *garbage(group, (4 * n, 999), "uint8")[1:]]  # the call is in place on one rank only
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
def test_calls_larger_than_the_workspace_arrive_in_rounds(new_group, rng, algo):
    """Push calls take several rounds, in some of which bytes move in one direction only. Staged calls take chunks."""
    group = new_group(SEVERAL, workspace_bytes=1 << 13)
    for size in (3000, 7001, 20_000):
        hosts = [words(rng, size) for _ in range(SEVERAL)]
        xs = [off(rank, host, 4) for rank, host in zip(group, hosts, strict=True)]
        assert_bits(df.all_gather(group, xs, algo=algo).output, reference.all_gather(hosts))
        assert_bits(df.broadcast(group, xs, root=1, algo=algo), hosts[1])
        table = [of[:SEVERAL] for of in ([0, size, 0], [5, 1, 0], [0, 0, 0])][:SEVERAL]
        hosts = [words(rng, sum(of)) for of in table]
        ys = df.all_to_all(group, place(group, hosts), splits=table, algo=algo)
        for y, expected in zip(ys, reference.all_to_all(hosts, table), strict=True):
            assert_bits([y], expected)
    if algo == "push":
        slots_are_empty(group)


@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_a_group_of_one_rank_copies_its_own_bytes(open_group, rng, algo):
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
def test_a_broadcast_by_relays_arrives(new_group, rng):
    """Arrays of several sizes are broadcast from each root, at unaligned addresses, in one round or several.
    All-reduces that use the same slots run in between."""
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
def test_every_byte_arrives_on_eight_ranks(open_group, rng):
    group = open_group(8, workspace_bytes=1 << 16)
    hosts = [words(rng, (2, 333)) for _ in range(8)]
    assert_bits(df.all_gather(group, place(group, hosts)).output, reference.all_gather(hosts))
    table = exchange_table(rng, 8)
    hosts = [words(rng, (sum(of), 50)) for of in table]
    ys = df.all_to_all(group, place(group, hosts), splits=table)
    for y, expected in zip(ys, reference.all_to_all(hosts, table), strict=True):
        assert_bits([y], expected)


@pytest.mark.gpus(SEVERAL)
def test_words_that_allow_only_one_of_their_possible_keys_arrive(open_group, rng):
    """Push calls XOR the words of a warp with a key that is the complement of none of them. Of the keys 0 to 128, the
    words of this test leave only 128, or only 70, or all but 0.
    """
    group = open_group(SEVERAL, workspace_bytes=1 << 16)
    every = ~np.arange(128, dtype=np.uint32)
    some = ~np.delete(np.arange(129, dtype=np.uint32), 70)
    for base in (every, some, np.repeat(every[:1], 128)):
        hosts = [rng.permutation(base) for _ in range(SEVERAL)]
        assert_bits(df.all_gather(group, place(group, hosts), algo="push").output, reference.all_gather(hosts))
    slots_are_empty(group)


@pytest.mark.gpus(SEVERAL)
@pytest.mark.parametrize("algo", ["put", "pull"])
def test_some_blocks_copy_a_ranks_own_bytes_while_others_exchange_bytes(new_group, rng, algo):
    """In an in-place call, a rank does not copy its own bytes, so all of its blocks exchange bytes with peers."""
    group = new_group(SEVERAL, max_blocks=17)
    hosts = [words(rng, (SEVERAL, 40_000)) for _ in range(SEVERAL)]
    xs = place(group, hosts)
    call = df.all_gather.prepare(group, xs, algo=algo)
    assert call.launches[0][0].grid[0] == 17
    assert_bits(call.launch().output, reference.all_gather(hosts))
    for y, expected in zip(df.all_to_all(group, xs, algo=algo), reference.all_to_all(hosts), strict=True):
        assert_bits([y], expected)
    df.broadcast(group, xs, xs, algo=algo)
    assert_bits(xs, hosts[0])
    more_stays = {2: [[1, 1], [0, 2]], 3: [[2, 1, 0], [0, 3, 0], [0, 1, 2]]}[SEVERAL]
    ys = df.all_to_all(group, place(group, hosts), splits=more_stays, algo=algo)
    for y, expected in zip(ys, reference.all_to_all(hosts, more_stays), strict=True):
        assert_bits([y], expected)


@pytest.mark.gpus(3)
def test_arrays_that_peers_cannot_access_and_odd_addresses_are_staged(open_group, rng):
    group = open_group(3, workspace_bytes=1 << 16)
    hosts = [words(rng, 640) for _ in range(3)]
    pooled = place(group, hosts)
    private = [private_array(rank.device, host)[0] for rank, host in zip(group, hosts, strict=True)]
    outputs = [private_array(rank.device, np.zeros(3 * 640, np.uint8))[0] for rank in group]
    direct = {algo: df.all_gather.prepare(group, pooled, algo=algo) for algo in ALGOS}
    odd = [off(rank, host, 5) for rank, host in zip(group, hosts, strict=True)]
    for algo, xs, ys, staged in (
        ("pull", private, None, True),
        ("put", pooled, outputs, True),
        ("pull", pooled, outputs, False),
        ("pull", odd, None, True),
        ("put", odd, None, False),
    ):
        call = df.all_gather.prepare(group, xs, ys, algo=algo)
        assert (call.traffic == direct[algo].traffic) is not staged
        assert_bits(call.launch().output, reference.all_gather(hosts))
    group.synchronize()
