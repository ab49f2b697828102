# SPDX-License-Identifier: Apache-2.0
"""Kernels and host code that lack one line. Most of their results are right; each has a scenario in which it fails.

Without a block barrier, results are wrong only if some warps of a block run ahead of the others. The emulated driver's
seeds let them do so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import scenarios

from drvfuse import PDLLevel
from drvfuse.check.substitutions import Substitution, nothing
from drvfuse.ops.call import faults, order
from drvfuse.ops.collectives.shared import kernel as kernels
from drvfuse.ops.collectives.shared.multimem import NAMES
from drvfuse.runtime.device import Device

pytestmark = pytest.mark.emulated

Mutation = tuple[str | Substitution, Callable[[], None]]
"""A fault of the kernels or of the host, and the scenario that must notice it."""

FUSED = "allreduce_rmsnorm_fp8"


def unordered(op: str, algo: str, private: bool = False) -> Mutation:
    """The fault that, at every second barrier of a call, a block tells its peers that it has arrived before all of its
    threads have arrived; and the scenario that must notice the fault. With private inputs the second barrier follows
    staging, otherwise it follows the results.
    """
    return "no-block-barrier-before-even-releases", partial(scenarios.results_are_right, op, algo, private)


ONE_TIMEOUT = partial(scenarios.one_timeout_ends_all, "allreduce", "one_stage")
MUTATIONS: dict[str, Mutation] = {
    "block barrier before the release": (
        "no-block-barrier-before-release",
        partial(scenarios.results_are_right, "allreduce", "two_stage"),
    ),
    # In the fused one_stage this barrier is not needed: the reduction of a row, after all reads, contains one.
    "one_stage: reads before the end barrier": (
        "no-block-barrier-before-even-releases",
        partial(scenarios.inputs_are_free_afterwards, "allreduce", "one_stage"),
    ),
    "two_stage: results": unordered("allreduce", "two_stage"),
    "one_stage: staging": unordered("allreduce", "one_stage", True),
    "two_stage: staging": unordered("allreduce", "two_stage", True),
    "fused two_stage: results": unordered(FUSED, "two_stage"),
    "fused one_stage: staging": unordered(FUSED, "one_stage", True),
    "fused two_stage: staging": unordered(FUSED, "two_stage", True),
    "multimem one_stage: staging": unordered("allreduce", "multimem_one_stage"),
    "multimem two_stage: staging": unordered("allreduce", "multimem_two_stage"),
    "fused multimem: staging": unordered(FUSED, "multimem_two_stage"),
    "abort is polled": ("abort-not-polled", ONE_TIMEOUT),
    "abort is read at entry": ("abort-not-read-at-entry", ONE_TIMEOUT),
    "abort reaches the peers": ("abort-of-own-rank-only", ONE_TIMEOUT),
}
KERNELS = [
    (op, algo)
    for op in scenarios.OPS
    for algo in (*kernels.ALGOS, *(name for form, name in NAMES.items() if op == "allreduce" or form == "two_stage"))
]
for _op, _algo in KERNELS:
    _start = partial(scenarios.dependent_starts_at_once_if_it_may, _op, _algo)
    MUTATIONS |= {
        f"{_op} {_algo}: trigger at entry": ("no-trigger-at-entry", partial(_start, PDLLevel.OVERLAP_AT_BEGINNING)),
        f"{_op} {_algo}: no trigger at entry": ("trigger-always-at-entry", partial(_start, PDLLevel.ON)),
    }
MUTATIONS |= {
    "arrays are freed after the call": (
        Substitution(order, "mark_used", nothing),
        scenarios.a_freed_input_is_not_reused_early,
    ),
    "peer access is enabled": (Substitution(Device, "enable_peer", nothing), scenarios.foreign_memory_is_read_in_place),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_fails_its_scenario(name):
    fault, scenario = MUTATIONS[name]
    scenario()
    planted = fault.made() if isinstance(fault, Substitution) else faults.in_kernels(fault)
    with planted, pytest.raises(AssertionError):
        scenario()


@pytest.mark.parametrize(("op", "algo"), KERNELS)
def test_a_kernel_without_its_late_trigger_fails_its_scenario(op, algo):
    """The correct kernel runs under one seed after another until its dependent starts before the kernel's end. Then the
    mutant runs under the same seeds.
    """
    seeds = scenarios.dependent_starts_before_the_end(op, algo, PDLLevel.ON)
    with faults.in_kernels("no-trigger-at-end"), pytest.raises(AssertionError, match="the dependent never starts"):
        scenarios.dependent_starts_before_the_end(op, algo, PDLLevel.ON, seeds)
