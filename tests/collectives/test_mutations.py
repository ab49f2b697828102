# SPDX-License-Identifier: Apache-2.0
"""Lines whose absence no ordinary result shows: each is taken out, and a scenario must then fail.

The emulated driver's seeds let warps of a block run ahead of one another, so that a missing block barrier, which most
schedules forgive, has its effect.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scenarios

from drvfuse import PDLLevel, config
from drvfuse.comm.transport import LocalTransport
from drvfuse.ops import kernels
from drvfuse.ops.prepared import Prepared

pytestmark = pytest.mark.emu


@dataclass(frozen=True)
class Mutation:
    """`old` in a file of the kernels becomes `new`, and `scenario` must notice."""

    file: str
    old: str
    new: str
    scenario: Callable[[], None]


PUBLISH, NO_PUBLISH = "if (!barrier.arrive_and_wait(true))", "if (!barrier.arrive_and_wait(false))"
AT_ENTRY = "if (p.call.early_trigger) launch_dependents();"
AT_END = "if (!p.call.early_trigger) launch_dependents();"
FUSED = "allreduce_rmsnorm_fp8"


def unpublished(op: str, before: str, algo: str, private: bool = False, after: str = "") -> Mutation:
    """The barrier between these texts does not wait for the rest of the block before it releases."""
    scenario = partial(scenarios.results_are_right, op, algo, private)
    return Mutation(f"{op}.cu", before + PUBLISH + after, before + NO_PUBLISH + after, scenario)


def abort(old: str, new: str = "") -> Mutation:
    return Mutation("barrier.cuh", old, new, partial(scenarios.one_timeout_ends_all, "allreduce", "one_stage"))


MUTATIONS = {
    "block barrier before the release": Mutation(
        "barrier.cuh",
        "if (publish) __syncthreads();",
        "",
        partial(scenarios.results_are_right, "allreduce", "two_stage"),
    ),
    # In the fused one_stage this barrier cannot be missed: the reduction of a row, after all reads, has one.
    "one_stage: reads before the end barrier": Mutation(
        "allreduce.cu",
        "#if !DRVFUSE_LOCAL\n    " + PUBLISH,
        "#if !DRVFUSE_LOCAL\n    " + NO_PUBLISH,
        partial(scenarios.inputs_are_free_afterwards, "allreduce", "one_stage"),
    ),
    "two_stage: results": unpublished("allreduce", "        ", "two_stage", after=" return;\n        gather"),
    "one_stage: staging": unpublished("allreduce", "begin, count);\n        ", "one_stage", True),
    "two_stage: staging": unpublished("allreduce", "done, chunk));\n            ", "two_stage", True),
    "fused two_stage: results": unpublished(FUSED, "        ", "two_stage", after=" return;\n        const int most"),
    "fused one_stage: staging": unpublished(FUSED, "begin + j);\n        ", "one_stage", True),
    "fused two_stage: staging": unpublished(FUSED, "            }\n            ", "two_stage", True),
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
            f"{_op} {_algo}: trigger at entry": Mutation(
                f"{_op}.cu", AT_ENTRY, "", partial(_start, PDLLevel.OVERLAP_AT_BEGINNING)
            ),
            f"{_op} {_algo}: no trigger at entry": Mutation(
                f"{_op}.cu", AT_ENTRY, "launch_dependents();", partial(_start, PDLLevel.ON)
            ),
            f"{_op} {_algo}: trigger at the end": Mutation(f"{_op}.cu", AT_END, "", _end),
        }

HOST = {
    # name: (class, method, line taken out, scenario)
    "arrays are freed after the call": (
        Prepared,
        "_launched",
        "mark_used(arrays, stream, event)",
        scenarios.a_freed_input_is_not_reused_early,
    ),
    "peer access is enabled": (
        LocalTransport,
        "__init__",
        "device.enable_peer(peer)",
        scenarios.foreign_memory_is_read_in_place,
    ),
}


@pytest.fixture
def kernel_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`edit(mutation)`: from now on kernels come from a mutated copy of the sources."""

    def edit(mutation: Mutation) -> None:
        folder = tmp_path / "cu"
        shutil.copytree(kernels.CU, folder)
        text = (folder / mutation.file).read_text()
        assert mutation.old in text
        (folder / mutation.file).write_text(text.replace(mutation.old, mutation.new))
        monkeypatch.setattr(kernels, "CU", folder)
        kernels.request.cache_clear()

    yield edit
    kernels.request.cache_clear()


@pytest.mark.parametrize("name", MUTATIONS)
def test_kernels(kernel_source, tmp_path, name):
    mutation = MUTATIONS[name]
    mutation.scenario()
    kernel_source(mutation)
    with config.override(cache_dir=str(tmp_path / "cache")), pytest.raises(AssertionError):
        mutation.scenario()


def without_line(function: Callable[..., Any], line: str) -> Callable[..., Any]:
    """`function` compiled anew with `pass` in place of `line`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1
    names: dict[str, Any] = {}
    module = sys.modules[function.__module__]
    exec("from __future__ import annotations\n" + source.replace(line, "pass"), vars(module), names)
    return names[function.__name__]


@pytest.mark.parametrize("name", HOST)
def test_host(monkeypatch, name):
    owner, method, line, scenario = HOST[name]
    scenario()
    monkeypatch.setattr(owner, method, without_line(getattr(owner, method), line))
    with pytest.raises(AssertionError):
        scenario()
