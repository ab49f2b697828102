# SPDX-License-Identifier: Apache-2.0
"""Multicast memory of groups with a process per rank: it is set up on all ranks or on none, and collectives use it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from connected import Ranks, connected, outcomes
from multicast_forms import BIND

import drvfuse as df
from drvfuse import reference
from drvfuse.comm import multicast
from drvfuse.errors import CaptureError, GroupError, MulticastError, Unsupported

pytestmark = pytest.mark.emulated

UNIT = 2 << 20
CALLS = {
    "cuMemCreate": 1,
    "cuMulticastCreate": 1,
    "cuMemExportToShareableHandle": 2,
    "cuMemImportFromShareableHandle": 2,
    "cuMulticastAddDevice": 1,
    BIND: 1,
    "cuMemMap": 4,
    "cuMemSetAccess": 4,
}
"""The driver calls of rank 0 in a set-up of three ranks."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with connected(3, devices=[2, 0, 1], workspace_bytes=1 << 18) as ranks:
        yield ranks


def inputs(rng: np.random.Generator, shape: Any) -> list[np.ndarray]:
    """Inputs whose sums are exact in any order of additions."""
    return [(np.round(rng.uniform(-8, 8, shape) * 64) / 64).astype(np.float32) for _ in range(3)]


def set_up(group: df.Group) -> df.SymmetricBuffer:
    return group.symmetric(UNIT, multicast=True)


@pytest.mark.parametrize("algo", ["one_stage", "two_stage"])
@pytest.mark.parametrize("where", ["staged", "direct"])
def test_multicast_sums_have_the_bits_of_the_reference(ranks, rng, algo, where):
    hosts = inputs(rng, 3001 if where == "staged" else 3000)

    def call(group: df.Group) -> np.ndarray:
        host = hosts[group[0].index]
        if where == "staged":
            return df.allreduce(group, group[0].array(host), algo=algo, use_multimem=True).numpy()
        with group.symmetric(host.nbytes, multicast=True) as buffer:
            (x,) = buffer.arrays(host.shape, "float32")
            x.copy_from(host)
            prepared = df.allreduce.prepare(group, x, algo=algo, use_multimem=True)
            assert prepared._sequence.launches[0][0].view(0, type(prepared._ready[0].parameters)).multimem.inputs
            result = prepared.launch().numpy()
            group.transport.board.vote("all have done with the buffer", None)
        return result

    for result in ranks.each(call):
        assert (result == reference.allreduce(hosts, multimem=True)).all()


def test_the_fused_op_by_multicast_memory_has_the_bits_of_the_reference(ranks, rng):
    hosts = [host.astype(np.float16) for host in inputs(rng, (5, 256))]
    gamma = np.ones(256, np.float16)

    def call(group: df.Group) -> Any:
        rank = group[0]
        x, weight = rank.array(hosts[rank.index]), rank.array(gamma)
        return df.allreduce_rmsnorm_fp8(group, x, weight, epsilon=1e-5, use_multimem=True)

    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-5, multimem=True)
    for result in ranks.each(call):
        assert (reference.bits(result.output.numpy()) == reference.bits(expected.output)).all()
        assert (result.scales.numpy() == expected.scales).all()


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_driver_call_of_rank_0_leaves_nothing_on_any_rank(ranks, function):
    gc.collect()
    before = ranks.machine.held()
    for place in range(CALLS[function]):
        rule = ranks.processes[0].inject(function, 401, after=place)
        found = outcomes([lambda group=group: set_up(group) for group in ranks.groups])
        assert not rule.left
        for error in found:
            assert isinstance(error, MulticastError) and (error.call, error.rank, error.code) == (function, 0, 401)
            assert str(error) == str(found[0]) and not getattr(error, "__notes__", [])
        del found, error
        gc.collect()
        assert ranks.machine.held() == before
    for buffer in ranks.each(set_up):
        buffer.close()


@pytest.mark.parametrize("function", [name for name in CALLS if name != "cuMulticastCreate"])
def test_a_failing_driver_call_of_another_rank_is_raised_on_all_ranks(ranks, function):
    before = ranks.machine.held()
    ranks.processes[2].inject(function, 2)
    for error in outcomes([lambda group=group: set_up(group) for group in ranks.groups]):
        assert isinstance(error, MulticastError) and (error.call, error.rank, error.code) == (function, 2, 2)
    gc.collect()
    assert ranks.machine.held() == before


def test_all_ranks_retry_a_set_up_if_one_was_not_ready(ranks, monkeypatch):
    monkeypatch.setattr(multicast, "PAUSE_SECONDS", 0.0)
    ranks.processes[1].inject(BIND, 802, times=2)
    buffers = ranks.each(set_up)
    assert all(buffer.multicast_ptr for buffer in buffers)
    assert len({len(buffer.ptrs) for buffer in buffers}) == 1
    for buffer in buffers:
        buffer.close()


def test_making_staging_memory_in_a_capture_is_refused_on_all_ranks(rng):
    with connected(2, workspace_bytes=1 << 16) as ranks:

        def call(group: df.Group) -> None:
            rank = group[0]
            x, y = rank.zeros(64, "float32"), rank.zeros(64, "float32")
            if rank.index:
                with pytest.raises(GroupError, match="CaptureError"):
                    df.allreduce.prepare(group, x, y, use_multimem=True)
            else:
                with group.capture() as graphs, pytest.raises(CaptureError):
                    df.allreduce(group, x, y, use_multimem=True)
                graphs.close()

        ranks.each(call)


def test_a_device_without_multicast_is_named_by_its_rank():
    with connected(2, machine={"arch": "sm_80"}) as ranks:
        for group in ranks.groups:
            with pytest.raises(Unsupported, match="have no multicast"):
                group.require_multicast()
        for error in outcomes([lambda group=group: set_up(group) for group in ranks.groups]):
            assert isinstance(error, Unsupported | GroupError)


@pytest.mark.parametrize("together", [True, False])
def test_staging_memory_is_freed_when_all_ranks_close_the_group(rng, together):
    """A rank that closes the group alone keeps its staging memory, as kernels of other ranks might still access it."""
    hosts = inputs(rng, 64)
    with connected(3) as ranks:

        def call(group: df.Group) -> np.ndarray:
            x = group[0].array(hosts[group[0].index])
            return df.allreduce(group, x, use_multimem=True).numpy()

        for result in ranks.each(call):
            assert (result == reference.allreduce(hosts, multimem=True)).all()
        if together:
            ranks.each(lambda group: group.close())
        else:
            ranks.groups[0].close()
        kept = [len(group.driver.abandoned) for group in ranks.groups]
        assert kept == ([0, 0, 0] if together else [1, 0, 0])
