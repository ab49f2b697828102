# SPDX-License-Identifier: Apache-2.0
"""The barrier protocol: many schedules, changing grids, large ordinals, large tensors."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import ALL_ALGOS, assert_bits, fill_late, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference
from drvfuse.comm import workspace


@pytest.mark.emu
@pytest.mark.parametrize("seed", range(6))
def test_schedules(rng, seed):
    """Every algorithm back to back, launches in another order each time, inputs overwritten right after each rank."""
    with (
        df.emu.Machine(devices=3, seed=seed) as machine,
        df.Group.local(3, driver=machine, max_blocks=3, workspace_bytes=8192) as group,
    ):
        hosts = random_inputs(rng, 3, (40, 136), "bfloat16")
        gamma = np.linspace(-2, 2, 136).astype(np.float32).astype(hosts[0].dtype)
        added = random_inputs(rng, 1, (40, 136), "bfloat16")[0]
        total = reference.allreduce(hosts)
        plain = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6)
        with_residual = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
        gammas, residuals = replicate(group, gamma), replicate(group, added)
        runs = []
        for algo in ("one_stage", "two_stage"):
            for level in (df.PDLLevel.OFF, df.PDLLevel.OVERLAP_AT_BEGINNING):
                options = {"algo": algo, "pdl_level": level}
                for _ in range(3):
                    runs.append([place(group, hosts)])
                inputs = [run[0] for run in runs[-3:]]
                fused = {"epsilon": 1e-6, **options}
                runs[-3].append(df.allreduce.prepare(group, inputs[0], **options))
                runs[-2].append(df.allreduce_rmsnorm_fp8.prepare(group, inputs[1], gammas, **fused))
                runs[-1].append(
                    df.allreduce_rmsnorm_fp8.prepare(group, inputs[2], gammas, residuals=residuals, **fused)
                )
        zero = [[fill_late(group, x, 0, ns=0) for x in xs] for xs, _ in runs]
        results = []
        for number, ((_, call), fills) in enumerate(zip(runs, zero, strict=True)):
            for position in np.random.default_rng([seed, number]).permutation(3):
                result = call.launch(rank=int(position))
                fills[position](group.ranks[position].stream)
            results.append(result)
        group.synchronize()
        for first in range(0, len(runs), 3):
            assert_bits(results[first], total)
            for offset, expected in ((1, plain), (2, with_residual)):
                result = results[first + offset]
                assert_bits(result.output, expected.output)
                assert_bits(result.scales, expected.scales)
        assert machine.reports == []


@pytest.mark.gpus(3)
def test_ordinals_beyond_32_bits(new_group, rng):
    group = new_group(3)
    group.synchronize()
    for pointer, rank in zip(group.workspace.pointers, group, strict=True):
        epoch = df.view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device)
        epoch.copy_from(np.array([2**32 - 4], np.uint64))
    hosts = random_inputs(rng, 3, 500, "bfloat16")
    for _ in range(3):
        for algo in ALL_ALGOS:
            assert_bits(df.allreduce(group, place(group, hosts), algo=algo), reference.allreduce(hosts))
    group.synchronize()
    last = df.view(group.workspace.pointers[0] + workspace.EPOCH_OFFSET, 1, "uint64", group.ranks[0].device).numpy()
    assert last[0] == 2**32 - 4 + 3 * (2 + 2)


@pytest.mark.gpus(2)
def test_grids_that_change_from_call_to_call(open_group, rng):
    group = open_group(2, max_blocks=16)
    hosts = random_inputs(rng, 2, 8 * 256 * 16, "bfloat16")
    xs, expected = place(group, hosts), reference.allreduce(hosts)
    for blocks in (16, 1, 7, 16, 2, 15):
        for algo in ("one_stage", "two_stage"):
            ys = garbage(group, hosts[0].shape, "bfloat16")
            df.allreduce(group, xs, ys, algo=algo, max_num_blocks=blocks)
            assert_bits(ys, expected)


@pytest.mark.gpus(2)
def test_two_groups_on_the_same_devices(new_group, rng):
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
def test_more_than_4_gib(driver, algo):
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
