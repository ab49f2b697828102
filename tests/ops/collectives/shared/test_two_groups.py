# SPDX-License-Identifier: Apache-2.0
"""Groups that share devices: launches that trigger early, or fill a device, do so only while their group is alone."""

from __future__ import annotations

import gc

import pytest
from collective_support import ALGOS, PUSH, assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import config, reference
from drvfuse.comm import budget
from drvfuse.errors import ArgumentError, CaptureError, DriverError

EARLY = df.PDLLevel.OVERLAP_AT_BEGINNING


@pytest.fixture
def machine():
    with df.emu.Machine(devices=3, race="strict") as machine:
        yield machine
    assert machine.reports == []


def opened(machine, devices):
    return df.Group.local(devices, driver=machine, max_blocks=4, workspace_bytes=1 << 16)


def call_of(group, hosts, algo="push_one_shot", level=EARLY):
    ys = garbage(group, hosts[0].shape, "bfloat16")
    return df.allreduce.prepare(group, place(group, hosts), ys, algo=algo, pdl_level=level), ys


def triggers(call):
    """Whether the launches of a call trigger their dependents early, which must be the same on all ranks."""
    (found,) = {ready.parameters.call.early_trigger for ready in call._ready}
    return bool(found)


@pytest.mark.emulated
@pytest.mark.parametrize("algo", [*ALGOS, "naive"])
def test_prepared_calls_trigger_at_their_end_while_another_group_is_open(machine, rng, algo):
    hosts = random_inputs(rng, 2, 1000, "bfloat16")
    first = opened(machine, [0, 1])
    call, ys = call_of(first, hosts, algo)
    late, _ = call_of(first, hosts, algo, df.PDLLevel.ON)
    assert triggers(call) and not triggers(late)
    apart = opened(machine, [2])
    assert triggers(call)
    second = opened(machine, [1, 2])
    other, zs = call_of(second, hosts, algo)
    naive = algo == "naive"  # the kernel waits for no peer
    assert triggers(call) is triggers(other) is naive
    for _ in range(3):
        call.launch()
        other.launch()
    for group, arrays in ((first, ys), (second, zs)):
        group.synchronize()
        assert_bits(arrays, reference.allreduce(hosts))
    first.close()
    assert triggers(other) is naive  # the group `apart` is still open
    apart.close()
    assert triggers(other) and not triggers(late)
    other.launch()
    second.synchronize()
    second.close()


@pytest.mark.emulated
def test_repeated_plain_calls_trigger_at_their_end_while_another_group_is_open(machine, rng):
    hosts = random_inputs(rng, 2, 1000, "bfloat16")
    group = opened(machine, 2)
    xs, ys = place(group, hosts), garbage(group, 1000, "bfloat16")

    def trigger():
        df.allreduce(group, xs, ys, algo="push_one_shot", pdl_level=EARLY)
        group.synchronize()
        (found,) = {launch.parameters.call.early_trigger for launch in group.alone._launches}
        return bool(found)

    assert trigger() and trigger()
    other = opened(machine, 2)
    assert not trigger()
    del other  # a garbage-collected group counts as closed once its memory is freed
    gc.collect()
    group[0].zeros(8, "uint8")
    assert trigger()
    group.close()


@pytest.mark.emulated
def test_opening_a_group_waits_for_the_early_launches_of_other_groups(machine, rng):
    hosts = random_inputs(rng, 2, 1000, "bfloat16")
    first = opened(machine, [0, 1])
    call, ys = call_of(first, hosts)
    streams = [df.Stream(rank.device) for rank in first]
    for _ in range(5):
        call.launch(streams)
    ended = len(machine.launches)
    second = opened(machine, [1, 2])
    assert len(machine.launches) - ended == 10  # `second` was opened only after these launches had ended
    call.launch(streams)
    third = opened(machine, [0, 1])  # opened without a wait, as the last call triggers late
    for group in (first, second, third):
        group.synchronize()
        group.close()
    assert_bits(ys, reference.allreduce(hosts))


@pytest.mark.emulated
def test_no_group_is_opened_while_a_graph_holds_an_early_launch(machine, rng):
    hosts = random_inputs(rng, 2, 1000, "bfloat16")
    first = opened(machine, [0, 1])
    call, _ = call_of(first, hosts)
    streams = [rank.stream for rank in first]
    with df.Graph.capture(streams) as graph:
        call.launch()
        with pytest.raises((ArgumentError, CaptureError)):
            opened(machine, [1, 2])
    with pytest.raises(ArgumentError, match=r"open group of devices \[0, 1\], and a graph holds calls") as caught:
        opened(machine, [1, 2])
    assert caught.value.argument == "devices" and triggers(call)
    opened(machine, [2]).close()
    graph.launch(streams[0])
    graph.close()
    second = opened(machine, [1, 2])
    with df.Graph.capture(streams) as graph:  # the captured call triggers late, so groups can still be opened
        call.launch()
    opened(machine, [1]).close()
    second.close()
    assert triggers(call)
    opened(machine, [1]).close()
    graph.launch(streams[0])
    first.synchronize()
    graph.close()
    first.close()


@pytest.mark.emulated
def test_no_group_is_opened_while_some_ranks_are_still_to_be_launched(machine, rng):
    """Opening a group would wait for the early launch, which waits for the other rank until its time-out."""
    hosts = random_inputs(rng, 2, 100, "bfloat16")
    first = opened(machine, [0, 1])
    call, ys = call_of(first, hosts)
    call.launch(rank=0)
    with pytest.raises(
        ArgumentError,
        match=r"group of devices \[0, 1\], and allreduce push_one_shot .* on some ranks of that group only",
    ):
        opened(machine, [1, 2])
    assert triggers(call)
    call.launch(rank=1)
    opened(machine, [1, 2]).close()
    first.synchronize()
    assert_bits(ys, reference.allreduce(hosts))
    with config.override(spin_timeout=0.001):
        call, _ = call_of(first, hosts)
    call.launch(rank=1)
    first.reset()
    opened(machine, [1, 2]).close()
    first.close()


@pytest.mark.emulated
@pytest.mark.parametrize("failing", ["", "cuGraphInstantiate"])
def test_a_graph_whose_capture_failed_does_not_block_other_groups(machine, rng, failing):
    first = opened(machine, [0, 1])
    call, _ = call_of(first, random_inputs(rng, 2, 100, "bfloat16"))
    if failing:
        machine.inject(failing, df.emu.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with (
        pytest.raises(DriverError if failing else KeyError),
        df.Graph.capture([rank.stream for rank in first]) as graph,
    ):
        call.launch()
        if not failing:
            raise KeyError
    with pytest.raises(CaptureError, match="its capture failed"):
        graph.launch(first[0].stream)
    assert "capture failed" in repr(graph)
    opened(machine, [1, 2]).close()
    first.close()


@pytest.mark.emulated
def test_a_graph_of_another_library_with_an_early_launch_blocks_other_groups_for_good(machine, rng):
    first = opened(machine, [0, 1])
    call, _ = call_of(first, random_inputs(rng, 2, 100, "bfloat16"))
    first.alone.captured(None)
    with pytest.raises(ArgumentError, match="and a graph of another library holds calls"):
        opened(machine, [1])
    assert triggers(call)
    first.close()
    opened(machine, [1]).close()


@pytest.mark.gpus(2)
def test_two_groups_with_chains_of_early_calls_do_not_starve_each_other(new_group, rng):
    """Each group fills its budget with chains of dependent launches on its own streams. One group launches on device 0
    first, the other on device 1."""
    hosts = random_inputs(rng, 2, 60_000, "bfloat16")
    groups = [new_group([0, 1]), new_group([1, 0])]
    streams = [[df.Stream(rank.device) for rank in group] for group in groups]
    calls = [call_of(group, hosts, "push_two_shot") for group in groups]
    for _ in range(8):
        for (call, _), queues in zip(calls, streams, strict=True):
            call.launch(queues)
    for group, (_, ys) in zip(groups, calls, strict=True):
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts))


@pytest.fixture
def small(monkeypatch):
    """Devices of two multiprocessors, of which a group may fill one by default."""
    monkeypatch.setattr(budget, "DEFAULT_BLOCKS", 1)
    with df.emu.Machine(devices=2, sm_count=2, race="strict") as machine:
        yield machine
    assert machine.reports == []


def grid(call):
    """The number of blocks of a launch, which is the same for all launches of all ranks."""
    (found,) = {launch.grid[0] for of_rank in call.launches for launch in of_rank}
    return found


@pytest.mark.emulated
@pytest.mark.parametrize("algo", PUSH)
def test_a_group_without_a_budget_fills_its_devices_while_it_is_alone(small, rng, algo):
    hosts = random_inputs(rng, 2, 20_000, "bfloat16")
    rows = [host[: 60 * 256].reshape(60, 256) for host in hosts]
    gamma = random_inputs(rng, 1, 256, "bfloat16")[0]
    group = df.Group.local(2, driver=small)
    assert (group.max_blocks, group.max_blocks_alone) == (1, 2)
    plain, ys = call_of(group, hosts, algo, df.PDLLevel.OFF)
    norm = df.allreduce_rmsnorm_fp8.prepare(group, place(group, rows), replicate(group, gamma), epsilon=1e-6, algo=algo)
    expected = reference.allreduce_rmsnorm_fp8(rows, gamma, 1e-6)

    def check():
        """Make calls with both grids, one after another, on the same slots."""
        for _ in range(2):
            result = norm.launch()
            plain.launch()
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts))
        assert_bits(result.output, expected.output)
        assert_bits(result.scales, expected.scales)
        df.allreduce(group, place(group, hosts), ys, algo=algo)  # later checks reuse the plan of this call
        assert_bits(ys, reference.allreduce(hosts))

    wide = grid(plain), grid(norm)
    check()
    other = df.Group.local(2, driver=small)
    narrow = grid(plain), grid(norm)
    assert all(2 * few >= many > few for few, many in zip(narrow, wide, strict=True))
    check()
    del other
    gc.collect()
    group[0].zeros(8, "uint8")
    assert (grid(plain), grid(norm)) == wide
    check()
    bounded = df.allreduce.prepare(group, place(group, hosts), ys, algo=algo, max_num_blocks=1)
    traced = df.allreduce.prepare(group, place(group, hosts), ys, algo=algo, trace=df.Trace(group))
    assert grid(bounded) == grid(traced) == narrow[0]
    group.close()
    with df.Group.local(2, driver=small, max_blocks=1) as group:
        assert group.max_blocks_alone == 1
        assert grid(call_of(group, hosts, algo)[0]) == narrow[0]


@pytest.mark.emulated
def test_only_a_graph_with_a_larger_grid_blocks_other_groups(small, rng):
    group = df.Group.local(2, driver=small)
    streams = [rank.stream for rank in group]
    large, _ = call_of(group, random_inputs(rng, 2, 20_000, "bfloat16"), level=df.PDLLevel.ON)
    little, _ = call_of(group, random_inputs(rng, 2, 800, "bfloat16"), level=df.PDLLevel.ON)
    with df.Graph.capture(streams) as graph:
        little.launch()
    df.Group.local(2, driver=small).close()
    with df.Graph.capture(streams) as other:
        large.launch()
    with pytest.raises(ArgumentError, match="on more than 64 multiprocessors.*give that group a max_blocks"):
        df.Group.local(2, driver=small)
    other.close()
    df.Group.local(2, driver=small).close()
    graph.close()
    group.close()
