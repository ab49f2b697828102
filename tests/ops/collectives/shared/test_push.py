# SPDX-License-Identifier: Apache-2.0
"""The push algorithms: rounds, greetings between ranks, data with the bits of the word that means "not here yet", and
calls that follow one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collective_support import (
    PUSH,
    assert_bits,
    codes_per_row,
    epochs,
    fill_late,
    garbage,
    place,
    private_array,
    random_inputs,
    replicate,
    slots_are_empty,
)

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.errors import ArgumentError
from drvfuse.ops.call import faults
from drvfuse.plans.push import rows_shape, sums_shape
from drvfuse.plans.rows import RowsWork
from drvfuse.plans.shared import Work

BF16 = dtypes.get("bfloat16").numpy
SMALL = 16 << 10  # bytes of a workspace whose slots hold only a part of what the tests send


def gamma_of(columns: int, dtype: Any = BF16) -> np.ndarray:
    return np.linspace(-2, 2, columns).astype(np.float32).astype(dtype)


def fused(group: df.Group, hosts: list[np.ndarray], algo: str, **options: Any) -> Any:
    """A prepared call, which allocates its outputs, and the results that it must have."""
    columns = hosts[0].shape[-1]
    gamma = gamma_of(columns, hosts[0].dtype)
    residual = options.pop("residual", None)
    if residual is not None:
        options["residuals"] = replicate(group, residual)
    call = df.allreduce_rmsnorm_fp8.prepare(
        group, place(group, hosts), replicate(group, gamma), epsilon=1e-6, algo=algo, **options
    )
    return call, reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=residual)


def assert_norm(result: Any, expected: Any, what: str = "") -> None:
    for arrays, wanted in zip(result, expected, strict=True):
        if wanted is not None:
            assert_bits(arrays, wanted, what)


@pytest.mark.gpus(3)
@pytest.mark.parametrize("algo", PUSH)
def test_calls_after_an_odd_and_an_even_number_of_rounds_are_exact(new_group, rng, algo):
    """An odd number of rounds advances the epoch by one, an even number leaves it unchanged. In both cases the next
    call uses the right half of the slots.
    """
    group = new_group(3, workspace_bytes=SMALL)
    step = 3 * 64 if algo == "push_two_shot" else 1
    packs = (group.workspace.half_bytes - 128) // (2 * step * 16 if step == 1 else 2 * 64 * 32) * step
    expected = 0
    for rounds in (2, 1, 3, 2, 2, 4, 1):
        count = 8 * packs * rounds - 5
        hosts = random_inputs(rng, 3, count, "bfloat16")
        ys = garbage(group, count, "bfloat16")
        df.allreduce(group, place(group, hosts), ys, algo=algo)
        assert_bits(ys, reference.allreduce(hosts), f"{rounds} rounds")
        expected += rounds % 2
        assert epochs(group) == [expected] * 3
    slots_are_empty(group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("algo", PUSH)
def test_fused_calls_of_an_odd_and_an_even_number_of_rounds_are_exact(new_group, rng, algo, residual):
    group = new_group(2, workspace_bytes=4096)
    seen = []
    for rows in (1, 2, 4, 6, 7, 9, 2):
        hosts = random_inputs(rng, 2, (rows, 264), "bfloat16")
        added = random_inputs(rng, 1, (rows, 264), "bfloat16")[0] if residual else None
        before = epochs(group)
        call, expected = fused(group, hosts, algo, residual=added)
        assert_norm(call.launch(), expected, f"{rows} rows")
        seen.append(epochs(group)[0] - before[0])
    assert set(seen) == {0, 1}
    slots_are_empty(group)


@pytest.mark.gpus(4)
@pytest.mark.parametrize("residual", [False, True])
def test_ranks_without_rows_take_part(new_group, rng, residual):
    """Only some ranks own rows of a two-shot call of 1 to 3 rows; the others still signal every peer."""
    group = new_group(4, workspace_bytes=1 << 16)
    calls = []
    for rows in (1, 2, 3, 1, 4, 1, 1):
        hosts = random_inputs(rng, 4, (rows, 264), "bfloat16")
        added = random_inputs(rng, 1, (rows, 264), "bfloat16")[0] if residual else None
        calls.append(fused(group, hosts, "push_two_shot", residual=added))
    results = [call.launch() for call, _ in calls]
    for result, (_, expected) in zip(results, calls, strict=True):
        assert_norm(result, expected)
    slots_are_empty(group)
    for count in (1, 8 * 64, 8 * 64 + 1, 8 * 64 * 3 + 8, 8 * 64 * 4):  # 1 to 4 units of 64 packs each
        hosts = random_inputs(rng, 4, count, "bfloat16")
        assert_bits(df.allreduce(group, place(group, hosts), algo="push_two_shot"), reference.allreduce(hosts))
    slots_are_empty(group)


@pytest.mark.parametrize("algo", PUSH)
def test_a_group_of_one_rank_is_exact(new_group, rng, algo):
    group = new_group(1, workspace_bytes=4096)
    for count in (1, 5000):
        (host,) = random_inputs(rng, 1, count, "bfloat16")
        assert_bits([df.allreduce(group, group[0].array(host), algo=algo)], reference.allreduce([host]))
    hosts = random_inputs(rng, 1, (30, 264), "bfloat16")
    call, expected = fused(group, hosts, algo)
    assert_norm(call.launch(), expected)
    assert epochs(group) == [3]


WORDS = {
    "bfloat16": [0xFFFF, 0x7FFF, 0xFFC0, 0x7F81, 0x7FC0, 0x3F80],
    "float16": [0xFFFF, 0x7FFF, 0xFE00, 0x7C01, 0x7E00, 0x3C00],
    "float32": [0xFFFFFFFF, 0x7FFFFFFF, 0xFFC00000, 0x7F800001, 0x7FFF7FFF, 0x3F800000],
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("algo", PUSH)
def test_inputs_with_the_bits_of_the_sentinel_arrive(open_group, rng, algo, dtype):
    """Inputs are 0xFFFFFFFF only, or mixed with numbers and other NaNs: NaN results are canonical and numbers exact."""
    group, kind = open_group(2), dtypes.get(dtype).numpy
    bits = np.array(WORDS[dtype], f"uint{8 * kind.itemsize}")
    full = np.full(1029, bits[0]).view(kind)
    mixed = [rng.choice(bits, 1029).view(kind) for _ in range(2)]
    numbers = random_inputs(rng, 2, 1029, dtype)
    with np.errstate(invalid="ignore"):
        for hosts in ([full, full], [numbers[0], full], mixed, numbers, [full, numbers[1]]):
            assert_bits(df.allreduce(group, place(group, hosts), algo=algo), reference.allreduce(hosts))
            rows = [host[:1024].reshape(4, 256) for host in hosts]
            call, expected = fused(group, rows, algo, residual=numbers[0][:1024].reshape(4, 256))
            assert_norm(call.launch(), expected)
            call, expected = fused(group, rows, algo)
            assert_norm(call.launch(), expected)
    group.synchronize()


@pytest.mark.gpus(3)
def test_calls_of_any_kind_in_any_order_need_no_synchronisation(new_group, rng, driver):
    """Calls of different extents and dtypes use the same slots, which each call leaves empty for the next one."""
    group = new_group(3, workspace_bytes=SMALL)
    calls: list[tuple[Any, Any, Any]] = []
    for number, (count, dtype) in enumerate(((40, "bfloat16"), (4099, "bfloat16"), (1200, "float32"), (9, "float32"))):
        hosts = random_inputs(rng, 3, count, dtype)
        for algo in (*PUSH, "two_stage" if number % 2 else "one_stage"):
            xs, ys = place(group, hosts), garbage(group, count, dtype)
            calls.append((df.allreduce.prepare(group, xs, ys, algo=algo), [ys], [reference.allreduce(hosts)]))
    for rows, dtype, out in ((1, "bfloat16", "float8_e4m3fn"), (7, "bfloat16", "bfloat16"), (5, "float32", "float32")):
        hosts, gamma = random_inputs(rng, 3, (rows, 256), dtype), None
        gamma = gamma_of(256, hosts[0].dtype)
        made = codes_per_row(dtype, out)
        for algo in PUSH:
            arrays = garbage(group, (rows, 256), out)
            call = df.allreduce_rmsnorm_fp8.prepare(
                group,
                place(group, hosts),
                replicate(group, gamma),
                epsilon=1e-6,
                quantisation=made,
                outputs=arrays,
                algo=algo,
            )
            expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, quantisation=made).output
            calls.append((call, [arrays], [expected]))
    for _ in range(100 if driver == "cuda" else 2):
        for index in rng.permutation(len(calls)):
            calls[index][0].launch()
    for call, arrays, expected in calls:
        for of_ranks, wanted in zip(arrays, expected, strict=True):
            assert_bits(of_ranks, wanted, repr(call))
    slots_are_empty(group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", PUSH)
def test_private_inputs_are_not_staged(open_group, rng, algo):
    """Peers read no input by push, so a private input is not copied to the workspace."""
    group = open_group(2)
    hosts = random_inputs(rng, 2, (4, 256), "bfloat16")
    xs = [private_array(rank.device, host)[0] for rank, host in zip(group, hosts, strict=True)]
    gammas = replicate(group, gamma_of(256))
    plain = df.allreduce.prepare(group, xs, algo=algo)
    norm = df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1e-6, algo=algo)
    pooled = df.allreduce.prepare(group, place(group, hosts), algo=algo)
    assert plain.traffic == pooled.traffic
    assert_bits(plain.launch(), reference.allreduce(hosts))
    assert_norm(norm.launch(), reference.allreduce_rmsnorm_fp8(hosts, gamma_of(256), 1e-6))
    group.synchronize()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", PUSH)
def test_the_error_for_a_small_workspace_says_what_is_enough(new_group, rng, algo):
    hosts = random_inputs(rng, 2, (3, 8192), "bfloat16")
    tried = [4096, 4099]
    for given in tried:
        with pytest.raises(ArgumentError) as caught:
            fused(new_group(2, workspace_bytes=given), hosts, algo)
        assert (caught.value.argument, caught.value.got) == ("workspace_bytes", given)
        needed = int(str(caught.value).split("at least ")[1].split()[0])
        if needed - 1 not in tried:
            tried.append(needed - 1)
    call, expected = fused(new_group(2, workspace_bytes=needed), hosts, algo)
    assert_norm(call.launch(), expected)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("algo", PUSH)
def test_few_blocks_loop_over_the_work(open_group, rng, algo, blocks):
    group = open_group(2)
    hosts = random_inputs(rng, 2, 8 * 64 * 40 + 24, "bfloat16")
    xs, residual = place(group, hosts), random_inputs(rng, 1, (40, 264), "bfloat16")[0]
    ys = df.allreduce(group, xs, xs, algo=algo, max_num_blocks=blocks)
    assert_bits(ys, reference.allreduce(hosts))
    rows = [host[: 40 * 264].reshape(40, 264) for host in hosts]
    call, expected = fused(group, rows, algo, residual=residual, max_num_blocks=blocks)
    assert_norm(call.launch(), expected)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("rows", [520, 2 * 512 + 1])
def test_blocks_that_send_rows_ahead_are_exact(open_group, rng, rows):
    """With many rows, a cluster sends one row ahead of the row that it sums."""
    group = open_group(2, workspace_bytes=1 << 17)
    hosts = random_inputs(rng, 2, (rows, 64), "bfloat16")
    work = RowsWork("push_two_shot", 2, 2, 1)
    assert rows_shape(work, rows, 64, 1 << 17, clusters=True).depth == 1
    for residual in (None, hosts[0]):
        call, expected = fused(group, hosts, "push_two_shot", residual=residual)
        assert_norm(call.launch(), expected)


@pytest.mark.gpus(2)
def test_blocks_that_send_packs_ahead_are_exact(open_group, rng):
    """For half a million packs, a block sends two units before it waits for the first. The last pack is not whole, and
    the call takes several rounds."""
    group = open_group(2, workspace_bytes=6 << 20, max_blocks=16)
    hosts = random_inputs(rng, 2, (1 << 22) + 8 * 300 + 3, "bfloat16")
    shape = sums_shape(Work("push_two_shot", 2, 2, 2), hosts[0].size, 6 << 20)
    assert shape.depth == 2 and shape.rounds > 1 and not shape.exact
    assert_bits(df.allreduce(group, place(group, hosts), algo="push_two_shot"), reference.allreduce(hosts))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", PUSH)
def test_two_groups_on_the_same_devices_work_at_once(new_group, rng, algo):
    groups = [new_group(2), new_group([1, 0])]
    hosts = random_inputs(rng, 2, 3000, "bfloat16")
    results = [df.allreduce(group, place(group, hosts), algo=algo) for _ in range(3) for group in groups]
    for group in groups:
        group.synchronize()
    for ys in results:
        assert_bits(ys, reference.allreduce(hosts))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", PUSH)
def test_graph_replays_between_eager_calls_are_exact(new_group, rng, algo):
    """The graph holds calls of one and of two rounds, and replays follow an even and an odd number of calls."""
    group = new_group(2, workspace_bytes=4096)
    counts = (800, 2000)
    xs = [[rank.empty(count, "bfloat16") for rank in group] for count in counts]
    ys = [garbage(group, count, "bfloat16") for count in counts]
    calls = [df.allreduce.prepare(group, x, y, algo=algo) for x, y in zip(xs, ys, strict=True)]
    streams = [rank.stream for rank in group]
    with df.Graph.capture(streams) as graph:
        for call in (*calls, calls[0]):
            call.launch()
    for eager in (0, 1, 2, 3):
        hosts = [random_inputs(rng, 2, count, "bfloat16") for count in counts]
        for arrays, of_ranks in zip(xs, hosts, strict=True):
            for array, host in zip(arrays, of_ranks, strict=True):
                array.copy_from(host)
        for _ in range(eager):
            calls[0].launch()
        graph.launch(streams[0])
        calls[1].launch()
        graph.launch(streams[0])
        group.synchronize()
        for arrays, of_ranks in zip(ys, hosts, strict=True):
            assert_bits(arrays, reference.allreduce(of_ranks))
    slots_are_empty(group)
    graph.close()


@pytest.mark.gpus(2)
def test_the_first_use_of_the_slots_may_be_in_a_capture(new_group, rng):
    """The slots are initialised outside of the capture. A larger call that follows initialises more of them, possibly
    during a replay.
    """
    group = new_group(2)
    small, large = (random_inputs(rng, 2, count, "bfloat16") for count in (1000, 200_000))
    xs, ys = place(group, small), garbage(group, 1000, "bfloat16")
    streams = [rank.stream for rank in group]
    assert group.workspace._filled == 0
    with df.Graph.capture(streams) as graph:
        df.allreduce(group, xs, ys, algo="push_one_shot")
    filled = group.workspace._filled
    assert filled > 0
    graph.launch(streams[0])
    zs = df.allreduce(group, place(group, large), algo="push_one_shot")
    assert group.workspace._filled > filled
    graph.launch(streams[0])
    group.synchronize()
    assert_bits(ys, reference.allreduce(small))
    assert_bits(zs, reference.allreduce(large))
    slots_are_empty(group)
    graph.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("level", [df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
@pytest.mark.parametrize("algo", PUSH)
def test_a_chain_of_dependent_launches_waits_for_a_late_producer(driver, algo, level):
    """The second call begins while the first runs, and reads the epoch and its input only after the first has ended."""
    one = 0x3F80
    for seed in (0, 1, 3) if driver == "emu" else (0,):
        with df.emu.Machine(devices=2, seed=seed, race="strict") if driver == "emu" else _Opened(driver) as machine:
            group = df.Group.local(2, driver=machine, max_blocks=4, workspace_bytes=SMALL)
            xs, ys, zs = (garbage(group, 2000, "bfloat16") for _ in range(3))
            calls = [df.allreduce.prepare(group, *pair, algo=algo, pdl_level=level) for pair in ((xs, ys), (ys, zs))]
            produce = [fill_late(group, x, one) for x in xs]
            group.synchronize()
            for position, rank in enumerate(group):
                produce[position](rank.stream)
            for call in calls:
                call.launch()
            group.synchronize()
            assert_bits(zs, np.full(2000, 4, np.float32).astype(BF16))
            group.close()
        assert driver != "emu" or machine.reports == []


class _Opened:
    """A context manager that gives the name of a driver, for use where a test otherwise opens a `Machine`."""

    def __init__(self, driver: str) -> None:
        self.driver = driver

    def __enter__(self) -> str:
        return self.driver

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.emulated
@pytest.mark.parametrize("fault", ["", "no-fence-before-last-results"])
@pytest.mark.parametrize("first", ["allreduce", "allreduce_rmsnorm_fp8"])
def test_slots_are_cleared_before_a_later_call_of_another_kind_uses_them(first, fault):
    """A rank must not send to a peer before the peer has cleared its slots. In a two-shot call of several rounds, a
    rank may learn this only from the results of a third rank.
    """
    large, small = (random_inputs(np.random.default_rng(11), 3, (9, 520), kind) for kind in ("float32", "bfloat16"))
    with (
        faults.in_kernels(fault),
        df.emu.Machine(devices=3, seed=1, race="strict") as machine,
        df.Group.local(3, driver=machine, workspace_bytes=26 << 10, max_blocks=4) as group,
    ):
        plain_first = first == "allreduce"
        summed, rows = (large, small) if plain_first else (small, large)
        algos = PUSH[::-1] if plain_first else PUSH
        plain = df.allreduce.prepare(group, place(group, summed), algo=algos[0])
        norm, expected = fused(group, rows, algos[1])
        results = {call: call.launch() for call in ((plain, norm) if plain_first else (norm, plain))}
        group.synchronize()
        assert_bits(results[plain], reference.allreduce(summed))
        assert_norm(results[norm], expected)
    assert {report.kind for report in machine.reports} == ({"race"} if fault else set())


@pytest.mark.emulated
def test_a_scale_that_is_not_cleared_is_found_in_the_slots():
    """A later call may mistake a stale scale for its own, but only if words arrive out of order. So the slots are
    checked, not the results.
    """
    for fault in ("", "scale-not-cleared"):
        with df.emu.Machine(devices=2) as machine, df.Group.local(2, driver=machine, workspace_bytes=SMALL) as group:
            with faults.in_kernels(fault):
                hosts = random_inputs(np.random.default_rng(5), 2, (4, 264), "bfloat16")
                call, expected = fused(group, hosts, "push_two_shot")
                assert_norm(call.launch(), expected)
            if fault:
                with pytest.raises(AssertionError):
                    slots_are_empty(group)
            else:
                slots_are_empty(group)


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["allreduce", "allreduce_rmsnorm_fp8"])
@pytest.mark.parametrize("algo", PUSH)
def test_a_call_after_one_with_a_partial_last_round_is_exact(algo, op):
    """The next call begins in the half of the slots that the last round but one used. From the words of the last round
    a rank learns that its peers have cleared that half, even if this round is partial.
    """
    with (
        df.emu.Machine(devices=2, seed=1, race="strict") as machine,
        df.Group.local(2, driver=machine, workspace_bytes=4096, max_blocks=2) as group,
    ):
        hosts = random_inputs(np.random.default_rng(7), 2, (5, 264), "bfloat16")
        if op == "allreduce":
            calls = [df.allreduce.prepare(group, place(group, hosts), algo=algo) for _ in range(3)]
        else:
            calls = [fused(group, hosts, algo)[0] for _ in range(3)]
        for call in calls:
            call.launch()
        group.synchronize()
    assert machine.reports == []
