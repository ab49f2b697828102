# SPDX-License-Identifier: Apache-2.0
"""Lines whose absence no ordinary result shows: each is taken out, and a scenario must then fail.

The emulated driver's seeds let warps of a block run ahead of one another, so that a missing block barrier, which most
schedules forgive, has its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import scenarios

from drvfuse import PDLLevel
from drvfuse.check.edits import Edit, HostEdit, SourceEdit, applied
from drvfuse.ops.collectives import kernels

pytestmark = pytest.mark.emu

Mutation = tuple[Edit, Callable[[], None]]
"""An edit, and the scenario that must notice it."""

PUBLISH, NO_PUBLISH = "if (!barrier.arrive_and_wait(true))", "if (!barrier.arrive_and_wait(false))"
STAGED = "trace.lap(TraceRole::stage);\n"
AT_ENTRY = "if (p.call.early_trigger) launch_dependents();"
AT_END = "if (!p.call.early_trigger) launch_dependents();"
FUSED = "allreduce_rmsnorm_fp8"


def unpublished(op: str, before: str, algo: str, private: bool = False, after: str = "") -> Mutation:
    """The barrier between these texts does not wait for the rest of the block before it releases."""
    scenario = partial(scenarios.results_are_right, op, algo, private)
    return SourceEdit(f"collectives/{op}.cu", before + PUBLISH + after, before + NO_PUBLISH + after), scenario


def abort(old: str, new: str = "") -> Mutation:
    return SourceEdit("sync/barrier.cuh", old, new), partial(scenarios.one_timeout_ends_all, "allreduce", "one_stage")


MUTATIONS: dict[str, Mutation] = {
    "block barrier before the release": (
        SourceEdit("sync/barrier.cuh", "if (publish) __syncthreads();", ""),
        partial(scenarios.results_are_right, "allreduce", "two_stage"),
    ),
    # In the fused one_stage this barrier cannot be missed: the reduction of a row, after all reads, has one.
    "one_stage: reads before the end barrier": (
        SourceEdit(
            "collectives/allreduce.cu", "#if !DRVFUSE_LOCAL\n    " + PUBLISH, "#if !DRVFUSE_LOCAL\n    " + NO_PUBLISH
        ),
        partial(scenarios.inputs_are_free_afterwards, "allreduce", "one_stage"),
    ),
    "two_stage: results": unpublished("allreduce", "        ", "two_stage", after=" return;\n        gather"),
    "one_stage: staging": unpublished("allreduce", STAGED + "        ", "one_stage", True),
    "two_stage: staging": unpublished("allreduce", STAGED + "            ", "two_stage", True),
    "fused two_stage: results": unpublished(FUSED, "        ", "two_stage", after=" return;\n        const int most"),
    "fused one_stage: staging": unpublished(FUSED, STAGED + "        ", "one_stage", True),
    "fused two_stage: staging": unpublished(FUSED, STAGED + "            ", "two_stage", True),
    "abort is polled": abort("if (polls % 32 == 0 && load_relaxed(abort_word(own)) != 0) return false;"),
    "abort is read at entry": abort("aborted_ = load_relaxed(abort_word(own)) != 0;"),
    "abort reaches the peers": abort(
        "for (int rank = 0; rank < Ranks; ++rank) store_relaxed(",
        "for (int rank = call_.rank; rank == call_.rank; ++rank) store_relaxed(",
    ),
}
for _op in scenarios.OPS:
    for _algo in kernels.ALGOS:
        _start = partial(scenarios.dependent_starts_at_once_if_it_may, _op, _algo)
        _end = partial(scenarios.dependent_starts_before_the_end, _op, _algo, PDLLevel.ON)
        MUTATIONS |= {
            f"{_op} {_algo}: trigger at entry": (
                SourceEdit(f"collectives/{_op}.cu", AT_ENTRY, "", times=2),
                partial(_start, PDLLevel.OVERLAP_AT_BEGINNING),
            ),
            f"{_op} {_algo}: no trigger at entry": (
                SourceEdit(f"collectives/{_op}.cu", AT_ENTRY, "launch_dependents();", times=2),
                partial(_start, PDLLevel.ON),
            ),
            f"{_op} {_algo}: trigger at the end": (SourceEdit(f"collectives/{_op}.cu", AT_END, "", times=2), _end),
        }
MUTATIONS |= {
    "arrays are freed after the call": (
        HostEdit("drvfuse.ops.call.order", "Route.tell", "mark_used(self.arrays, self.stream, event)", "pass"),
        scenarios.a_freed_input_is_not_reused_early,
    ),
    "peer access is enabled": (
        HostEdit("drvfuse.comm.transport", "LocalTransport.__init__", "device.enable_peer(peer)", "pass"),
        scenarios.foreign_memory_is_read_in_place,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name):
    edit, scenario = MUTATIONS[name]
    scenario()
    with applied([edit]), pytest.raises(AssertionError):
        scenario()
