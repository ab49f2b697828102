# SPDX-License-Identifier: Apache-2.0
"""The collectives with stores that reach other blocks and devices as late as releases and fences allow."""

from __future__ import annotations

import numpy as np
import pytest
from collective_support import ALL_ALGOS, PUSH, assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference
from drvfuse.ops.call import faults

NONE = df.Quantisation.none()


def _check(op: str, algo: str, seed: int) -> None:
    """Check the results of three consecutive calls on three devices, the last one with different inputs."""
    with (
        df.emu.Machine(devices=3, seed=seed, delay_stores=True) as machine,
        df.Group.local(3, driver=machine, max_blocks=3, workspace_bytes=1 << 16) as group,
    ):
        rng = np.random.default_rng([5, seed])
        runs = []
        for hosts in (random_inputs(rng, 3, (8, 264), "bfloat16") for _ in range(2)):
            xs, outputs = place(group, hosts), garbage(group, (8, 264), "bfloat16")
            if op == "allreduce":
                call = df.allreduce.prepare(group, xs, outputs, algo=algo)
                expected = reference.allreduce(hosts)
            else:
                gamma = np.linspace(-2, 2, 264).astype(np.float32).astype(hosts[0].dtype)
                call = df.allreduce_rmsnorm_fp8.prepare(
                    group, xs, replicate(group, gamma), epsilon=1e-6, quantisation=NONE, outputs=outputs, algo=algo
                )
                expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, quantisation=NONE).output
            runs.append((call, outputs, expected))
        for call, _, _ in (runs[0], *runs):
            call.launch()
        group.synchronize()
        for _, outputs, expected in runs:
            assert_bits(outputs, expected)
        assert machine.reports == []


@pytest.mark.emulated
@pytest.mark.parametrize("algo", ALL_ALGOS)
@pytest.mark.parametrize("op", ["allreduce", "allreduce_rmsnorm_fp8"])
def test_results_do_not_depend_on_when_stores_arrive(op: str, algo: str) -> None:
    for seed in range(4 if algo in PUSH else 20):  # polling for late words takes time
        _check(op, algo, seed)


@pytest.mark.emulated
@pytest.mark.parametrize("fault", ["relaxed-flag-store", "gpu-scope-release", "no-block-barrier-before-release"])
def test_a_weaker_flag_store_gives_a_wrong_result(fault: str) -> None:
    with faults.in_kernels(fault), pytest.raises(AssertionError):
        for seed in range(20):
            _check("allreduce", "two_stage", seed)
