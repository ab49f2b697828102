# SPDX-License-Identifier: Apache-2.0
"""Memory that peers cannot reach: private inputs are staged, and devices without peer access use algorithm "naive". The
numbers of bytes that are moved are checked too."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import (
    ALGOS,
    ALL_ALGOS,
    LEAST,
    PULL,
    assert_bits,
    garbage,
    place,
    private_array,
    random_inputs,
    replicate,
)

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError, Unsupported


@pytest.mark.gpus(3)
@pytest.mark.parametrize("workspace_bytes", ["least", 1 << 20])
@pytest.mark.parametrize("count", [2048, 2999])
@pytest.mark.parametrize("algo", ALGOS)
def test_inputs_that_peers_cannot_read_are_staged(open_group, rng, algo, count, workspace_bytes):
    group = open_group(3, workspace_bytes=LEAST[algo] if workspace_bytes == "least" else workspace_bytes)
    hosts = random_inputs(rng, 3, count, "bfloat16")
    private = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
    xs = [array for array, _ in private]
    ys = garbage(group, count, "bfloat16")
    df.allreduce(group, xs, ys, algo=algo)
    assert_bits(ys, reference.allreduce(hosts))
    mixed = [xs[0], *place(group, hosts)[1:]]
    df.allreduce(group, mixed, ys, algo=algo)
    assert_bits(ys, reference.allreduce(hosts))
    df.allreduce(group, xs, xs, algo=algo)
    assert_bits(xs, reference.allreduce(hosts))
    group.synchronize()


@pytest.mark.gpus(3)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_fused_inputs_that_peers_cannot_read_are_staged(open_group, rng, algo, residual):
    for workspace_bytes in (8192, 1 << 20):
        group = open_group(3, workspace_bytes=workspace_bytes)
        hosts = random_inputs(rng, 3, (23, 200), "bfloat16")
        gamma = np.linspace(-2, 2, 200).astype(np.float32).astype(hosts[0].dtype)
        added = random_inputs(rng, 1, (23, 200), "bfloat16")[0] if residual else None
        private = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
        result = df.allreduce_rmsnorm_fp8(
            group,
            [array for array, _ in private],
            replicate(group, gamma),
            epsilon=1e-6,
            residuals=replicate(group, added) if residual else None,
            algo=algo,
        )
        expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
        assert_bits(result.output, expected.output)
        assert_bits(result.scales, expected.scales)
        if residual:
            assert_bits(result.residual, expected.residual)
        group.synchronize()


@pytest.mark.gpus(2)
def test_naive_copies_inputs_that_only_their_own_device_can_access(open_group, rng):
    group = open_group(2, workspace_bytes=4096)
    hosts = random_inputs(rng, 2, 5000, "bfloat16")
    private = [private_array(rank.device, host) for rank, host in zip(group, hosts, strict=True)]
    xs, streams = [array for array, _ in private], [rank.stream for rank in group]
    assert_bits(df.allreduce(group, xs, algo="naive"), reference.allreduce(hosts))
    group.synchronize()
    ys, shared = garbage(group, 5000, "bfloat16"), place(group, hosts)
    with df.Graph.capture(streams) as graph:
        with pytest.raises(Unsupported, match=r"device 1 cannot access inputs\[0\]"):
            df.allreduce(group, xs, ys, algo="naive")
        df.allreduce(group, shared, ys, algo="naive")  # the capture is still valid
    graph.launch(streams[0])
    group.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    graph.close()


@pytest.fixture(scope="module")
def islands():
    """Three emulated devices, of which 0 and 1 are peers and 2 has no peer."""
    with df.emu.Machine(devices=3, peers=lambda a, b: {a, b} <= {0, 1}) as machine:
        group = df.Group.local(3, driver=machine, workspace_bytes=8192, max_blocks=4)
        yield group
        group.close()


@pytest.mark.emulated
def test_naive_is_chosen_where_devices_are_not_peers(islands, rng):
    assert not islands.peers_readable
    for count in (1, 100, 5000):
        hosts = random_inputs(rng, 3, count, "bfloat16")
        prepared = df.allreduce.prepare(islands, place(islands, hosts))
        assert prepared.algo == "naive"
        assert_bits(prepared.launch(), reference.allreduce(hosts))
        xs = place(islands, hosts)
        assert_bits(df.allreduce(islands, xs, xs), reference.allreduce(hosts))


@pytest.mark.emulated
@pytest.mark.parametrize("residual", [False, True])
def test_the_fused_op_works_where_devices_are_not_peers(islands, rng, residual):
    hosts = random_inputs(rng, 3, (20, 136), "bfloat16")
    gamma = np.linspace(-2, 2, 136).astype(np.float32).astype(hosts[0].dtype)
    added = random_inputs(rng, 1, (20, 136), "bfloat16")[0] if residual else None
    result = df.allreduce_rmsnorm_fp8(
        islands,
        place(islands, hosts),
        replicate(islands, gamma),
        epsilon=1e-6,
        residuals=replicate(islands, added) if residual else None,
    )
    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
    assert_bits(result.output, expected.output)
    assert_bits(result.scales, expected.scales)


@pytest.mark.emulated
def test_algorithms_that_need_peer_access_are_refused_without_it(islands):
    xs = [rank.zeros((2, 8), "bfloat16") for rank in islands]
    gammas = [rank.zeros(8, "bfloat16") for rank in islands]
    for algo in ALGOS:
        with pytest.raises(Unsupported, match=r"\(0, 2\)"):
            df.allreduce(islands, xs, algo=algo)
        with pytest.raises(Unsupported, match="naive"):
            df.allreduce_rmsnorm_fp8(islands, xs, gammas, epsilon=1e-6, algo=algo)
    with pytest.raises(Unsupported, match="peer access"):
        islands.symmetric(100)
    bias = islands.ranks[0].zeros(8, "float32")
    with pytest.raises(ArgumentError, match="Replicated"):
        df.allreduce(islands, xs, epilogue=df.Epilogue("x + b[col]", b=bias))
    copies = df.Replicated([rank.zeros(8, "float32") for rank in islands])
    df.allreduce(islands, xs, epilogue=df.Epilogue("x + b[col]", b=copies))
    islands.synchronize()


@pytest.fixture
def counted():
    """An emulated group, and a function that runs a call and returns its (local, remote) bytes."""
    with df.emu.Machine(devices=3) as machine, df.Group.local(3, driver=machine, max_blocks=4) as group:

        def count(prepared):
            group.synchronize()
            ended = len(machine.launches)
            prepared.launch()
            group.synchronize()
            totals = [record.counters.total for record in list(machine.launches)[ended:]]
            assert totals
            local = sum(total.local_read + total.local_written for total in totals)
            return local, sum(total.remote_read + total.remote_written for total in totals)

        yield group, count


def close_to(counted: int, expected: int, slack: int) -> bool:
    """Whether a count is `expected`, or up to `slack` bytes more: `traffic` leaves out barrier words and gamma."""
    return expected <= counted <= expected + slack


def is_expected(counts: tuple[int, int], prepared, slack: int) -> bool:
    """Whether counted (local, remote) bytes agree with `prepared.traffic`. Push algorithms poll an unknown number of
    times, so any number of local bytes above the expected one is accepted for them.
    """
    local, remote = prepared.traffic
    slack = slack if prepared.algo in PULL else counts[0]
    return close_to(counts[0], local, slack) and close_to(counts[1], remote, 2_000)


@pytest.mark.emulated
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_allreduce_moves_the_bytes_that_prepared_reports(counted, algo, staged):
    group, count = counted
    xs = [rank.zeros(24_000, "bfloat16") for rank in group]
    memory = []
    if staged:
        for position, rank in enumerate(group):
            xs[position], kept = private_array(rank.device, np.zeros(24_000, xs[0].dtype.numpy))
            memory.append(kept)
    prepared = df.allreduce.prepare(group, xs, algo=algo)
    assert is_expected(count(prepared), prepared, 30_000)


@pytest.mark.emulated
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_fused_op_moves_the_bytes_that_prepared_reports(counted, algo, residual):
    group, count = counted
    shape = (60, 512)
    prepared = df.allreduce_rmsnorm_fp8.prepare(
        group,
        [rank.zeros(shape, "bfloat16") for rank in group],
        [rank.zeros(512, "bfloat16") for rank in group],
        epsilon=1.0,
        residuals=[rank.zeros(shape, "bfloat16") for rank in group] if residual else None,
        algo=algo,
    )
    gamma = 3 * 60 * 512 * 2  # gamma is read again for every row
    assert is_expected(count(prepared), prepared, gamma + 6_000)


@pytest.mark.gpus(3)
def test_the_second_stage_of_two_stage_moves_fp8_values(open_group):
    group = open_group(3)
    rows, columns = 300, 1024
    prepared = df.allreduce_rmsnorm_fp8.prepare(
        group,
        [rank.zeros((rows, columns), "bfloat16") for rank in group],
        [rank.zeros(columns, "bfloat16") for rank in group],
        epsilon=1e-6,
        algo="two_stage",
    )
    assert prepared.traffic[1] == 2 * (rows * columns * 2 + rows * columns + rows * 4)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_nothing_outside_the_outputs_is_written(open_group, rng, algo):
    group = open_group(3)
    hosts = random_inputs(rng, 3, 1003, "bfloat16")
    around = garbage(group, 1003 + 16, "bfloat16")
    before = around[0].numpy()
    ys = [df.view(a.ptr + 16, 1003, "bfloat16", a.device, owner=a) for a in around]
    df.allreduce(group, place(group, hosts), ys, algo=algo)
    group.synchronize()
    expected = before.copy()
    expected[8:-8] = reference.allreduce(hosts)
    assert_bits(around, expected)
