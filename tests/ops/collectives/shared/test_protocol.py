# SPDX-License-Identifier: Apache-2.0
"""Barriers between ranks work under many schedules, with changing grids, after 2^32 barriers and for large tensors."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import (
    ALL_ALGOS,
    assert_bits,
    garbage,
    helper,
    place,
    private_array,
    random_inputs,
    replicate,
)

import drvfuse as df
from drvfuse import reference
from drvfuse.comm import workspace


@pytest.mark.emulated
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_results_are_right_under_many_schedules(rng, seed, private):
    """Calls of every algorithm follow one another directly; ranks are launched in another order each time.

    On each rank the input is written directly before the call and overwritten directly after it.
    """
    with (
        df.emu.Machine(devices=3, seed=seed) as machine,
        df.Group.local(3, driver=machine, max_blocks=3, workspace_bytes=8192) as group,
    ):
        hosts = random_inputs(rng, 3, (40, 136), "bfloat16")
        gamma = np.linspace(-2, 2, 136).astype(np.float32).astype(hosts[0].dtype)
        added = random_inputs(rng, 1, (40, 136), "bfloat16")[0]
        expected = {
            "sum": (reference.allreduce(hosts), None),
            "norm": reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6)[:2],
            "residual": reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)[:2],
        }
        source, zeros = place(group, hosts), replicate(group, np.zeros_like(added))
        gammas, residuals = replicate(group, gamma), replicate(group, added)
        copy = helper(group, "consume")
        runs = []
        for kind in ("sum", "norm", "residual", "sum", "residual", "norm", "norm", "sum"):
            for algo in ("one_stage", "two_stage"):
                xs = place(group, [np.zeros_like(added)] * 3)
                if private:
                    xs = [private_array(rank.device, np.zeros_like(added))[0] for rank in group]
                options = {"algo": algo, "pdl_level": df.PDLLevel(2 * (len(runs) // 2 % 2))}
                if kind == "sum":
                    call = df.allreduce.prepare(group, xs, **options)
                else:
                    call = df.allreduce_rmsnorm_fp8.prepare(
                        group, xs, gammas, epsilon=1e-6, residuals=residuals if kind == "residual" else None, **options
                    )
                before, after = (
                    [copy.prepare(1, 64, f, x, x.size) for f, x in zip(values, xs, strict=True)]
                    for values in (source, zeros)
                )
                runs.append((kind, before, call, after))
        results = []
        for number, (_, before, call, after) in enumerate(runs):
            for position in np.random.default_rng([seed, number]).permutation(3):
                stream = group.ranks[position].stream
                before[position](stream)
                result = call.launch(rank=int(position))
                after[position](stream)
            results.append(result)
        group.synchronize()
        for (kind, _, call, _), result in zip(runs, results, strict=True):
            output, scales = (result, None) if kind == "sum" else result[:2]
            assert_bits(output, expected[kind][0], f"{kind} {call.algo}")
            if scales is not None:
                assert_bits(scales, expected[kind][1], f"{kind} {call.algo}")
        assert machine.reports == []


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(4))
def test_staging_is_not_overwritten_by_the_next_call(rng, seed):
    """A rank that has finished a call must not fill its staging area while a peer still reads the data of that call."""
    with (
        df.emu.Machine(devices=3, seed=seed) as machine,
        df.Group.local(3, driver=machine, max_blocks=2, workspace_bytes=1 << 16) as group,
    ):
        gammas = replicate(group, np.ones(64, np.float32).astype(df.dtypes.get("bfloat16").numpy))
        calls = []
        for algo in ("one_stage", "two_stage"):
            for number in range(12):
                hosts = random_inputs(rng, 3, (30, 64), "bfloat16")
                xs = [private_array(rank.device, host)[0] for rank, host in zip(group, hosts, strict=True)]
                if number % 2:
                    calls.append((df.allreduce.prepare(group, xs, algo=algo), reference.allreduce(hosts)))
                else:
                    call = df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1e-6, algo=algo)
                    calls.append((call, reference.allreduce_rmsnorm_fp8(hosts, np.ones(64, np.float32), 1e-6).output))
        results = [call.launch() for call, _ in calls]
        group.synchronize()
        for result, (call, expected) in zip(results, calls, strict=True):
            assert_bits(result if isinstance(result, list) else result.output, expected, call.algo)


@pytest.mark.gpus(3)
def test_barrier_ordinals_may_exceed_32_bits(new_group, rng):
    group = new_group(3)
    group.synchronize()
    for pointer, rank in zip(group.workspace.pointers, group, strict=True):
        epoch = df.view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device)
        epoch.copy_from(np.array([(2**32 - 4) * workspace.EPOCH_UNIT], np.uint64))
    hosts = random_inputs(rng, 3, 500, "bfloat16")
    for _ in range(3):
        for algo in ALL_ALGOS:
            assert_bits(df.allreduce(group, place(group, hosts), algo=algo), reference.allreduce(hosts))
    group.synchronize()
    last = df.view(group.workspace.pointers[0] + workspace.EPOCH_OFFSET, 1, "uint64", group.ranks[0].device).numpy()
    steps = {"one_stage": 2, "two_stage": 2, "push_one_shot": 1, "push_two_shot": 1, "naive": 0}
    assert last[0] == (2**32 - 4 + 3 * sum(steps[algo] for algo in ALL_ALGOS)) * workspace.EPOCH_UNIT


@pytest.mark.gpus(2)
def test_grids_may_change_from_call_to_call(open_group, rng):
    group = open_group(2, max_blocks=16)
    hosts = random_inputs(rng, 2, 8 * 256 * 16, "bfloat16")
    xs, expected = place(group, hosts), reference.allreduce(hosts)
    for blocks in (16, 1, 7, 16, 2, 15):
        for algo in ("one_stage", "two_stage"):
            ys = garbage(group, hosts[0].shape, "bfloat16")
            df.allreduce(group, xs, ys, algo=algo, max_num_blocks=blocks)
            assert_bits(ys, expected)


@pytest.mark.gpus(2)
def test_two_groups_on_the_same_devices_work_at_once(new_group, rng):
    groups = [new_group(2), new_group([1, 0])]
    hosts = random_inputs(rng, 2, 3000, "bfloat16")
    expected = reference.allreduce(hosts)
    results = []
    for _ in range(3):
        for group in groups:
            results.append(df.allreduce(group, place(group, hosts), algo="two_stage"))
    for group in groups:
        group.synchronize()
    for ys in results:
        assert_bits(ys, expected)


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("algo", ALL_ALGOS)
def test_tensors_of_more_than_4_gib_are_exact(driver, algo):
    count = 2**31 + 24
    with df.Group.local(2, driver=driver) as group:
        xs, ys = [rank.zeros(count, "bfloat16") for rank in group], [rank.zeros(count, "bfloat16") for rank in group]
        places = [0, 2**30, 2**31 - 8, count - 16]
        bf16 = xs[0].dtype.numpy
        for number, x in enumerate(xs):
            for place_ in places:
                part = df.view(x.ptr + 2 * place_, 16, "bfloat16", x.device, owner=x)
                part.copy_from((np.arange(16) + 100 * number).astype(np.float32).astype(bf16))
        df.allreduce(group, xs, ys, algo=algo)
        group.synchronize()
        for y in ys:
            for place_ in places:
                part = df.view(y.ptr + 2 * place_, 16, "bfloat16", y.device, owner=y)
                assert_bits([part], (2 * np.arange(16) + 100).astype(np.float32).astype(bf16))
