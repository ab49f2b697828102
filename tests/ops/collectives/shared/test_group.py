# SPDX-License-Identifier: Apache-2.0
"""Groups: their ranks, budgets and memory."""

from __future__ import annotations

import gc
import os
import traceback
import weakref

import numpy as np
import pytest
from collective_support import assert_bits, fill_late, garbage, place, random_inputs

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError, CaptureError, ClosedError, DriverError
from drvfuse.runtime import calls
from drvfuse.runtime.pinned import PinnedBuffer


@pytest.mark.gpus(3)
def test_ranks_are_in_the_order_of_the_devices(new_group):
    group = new_group([2, 0, 1])
    assert group.size == len(group) == 3
    assert [rank.index for rank in group] == [0, 1, 2]
    assert [rank.device.index for rank in group.ranks] == [2, 0, 1]
    assert group[1].device.index == 0
    assert group.peers_readable
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rank in group:
        array = rank.array(host)
        assert array.device is rank.device
        assert np.array_equal(array.numpy(), host)
        assert not rank.zeros((2, 2), "int32").numpy().any()
        assert rank.empty(5, "bfloat16").shape == (5,)
    group.synchronize()


def test_a_number_selects_the_first_devices(new_group):
    group = new_group(1)
    assert len(group) == 1


@pytest.mark.parametrize(
    "devices,text",
    [
        (0, "from 1 to 8"),
        ([], "from 1 to 8"),
        (9, "from 1 to 8"),
        (range(9), "from 1 to 8"),
        (-1, "integer from 1 to 8, or a list of device ids"),
        (None, "integer from 1 to 8, or a list of device ids"),
        ([0, 0], "distinct"),
        ([0, 99], "present"),
        ([0, -1], "at least 0"),
        ("2", "integer"),
        (1.0, "integer"),
        (True, "integer"),
    ],
)
def test_lists_of_devices_that_cannot_form_a_group_are_refused(driver, devices, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        df.Group.local(devices, driver=driver)
    assert caught.value.argument == "devices"


@pytest.mark.parametrize(
    "options,argument",
    [
        ({"workspace_bytes": 100}, "workspace_bytes"),
        ({"workspace_bytes": 1e6}, "workspace_bytes"),
        ({"max_blocks": 0}, "max_blocks"),
        ({"max_blocks": 257}, "max_blocks"),
        ({"driver": "opencl"}, "driver"),
    ],
)
def test_wrong_options_are_refused(driver, options, argument):
    with pytest.raises(ArgumentError) as caught:
        df.Group.local(1, **{"driver": driver, **options})
    assert caught.value.argument == argument


@pytest.mark.emulated
def test_block_budgets_of_open_groups_sum_to_the_multiprocessors():
    with df.emu.Machine(devices=2, sm_count=20) as machine:
        first = df.Group.local(2, driver=machine, max_blocks=12)
        assert first.max_blocks == 12
        with pytest.raises(ArgumentError, match="hold 12 of them; close a group") as caught:
            df.Group.local([1], driver=machine, max_blocks=9)
        assert caught.value.argument == "max_blocks"
        second = df.Group.local([1], driver=machine, max_blocks=8)
        first.close()
        third = df.Group.local(2, driver=machine, max_blocks=12)
        second.close()
        third.close()
        with df.Group.local(2, driver=machine) as group:
            assert group.max_blocks == 20


@pytest.mark.emulated
def test_a_garbage_collected_group_returns_its_block_budget():
    with df.emu.Machine(devices=1, sm_count=8) as machine:
        group = df.Group.local(1, driver=machine, max_blocks=8)
        array = group.ranks[0].array(np.ones(4, np.float32))
        del group
        gc.collect()
        with df.Group.local(1, driver=machine, max_blocks=8) as group:
            assert group.max_blocks == 8
        assert array.numpy().sum() == 4


@pytest.mark.emulated
def test_a_dropped_machine_with_an_open_group_is_garbage_collected():
    group = df.Group.local(2, driver=df.emu.Machine(devices=2))
    machine = weakref.ref(group.driver.machine)
    df.allreduce(group, [rank.zeros((2, 8), "float32") for rank in group])
    group.synchronize()
    del group
    gc.collect()
    assert machine() is None


@pytest.mark.gpus(2)
def test_symmetric_memory_has_an_address_on_every_rank(open_group):
    group = open_group(2)
    with group.symmetric(100) as buffer:
        assert len(set(buffer.ptrs)) == 2
        assert buffer.multicast_ptr is None
        views = [df.view(p, 25, "float32", rank.device) for p, rank in zip(buffer.ptrs, group, strict=True)]
        for number, view in enumerate(views):
            view.copy_from(np.full(25, number, np.float32))
        for number, view in enumerate(views):
            assert np.array_equal(view.numpy(), np.full(25, number, np.float32))
    with pytest.raises(ArgumentError):
        group.symmetric(0)


FREES = ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemFree", "cuGraphExecDestroy", "cuStreamSynchronize")


def frees() -> list[str]:
    """Names of the recorded driver calls that free memory or wait. Clears the record."""
    found = [entry[0] for entry in calls.ring if entry[0].startswith(FREES)]
    calls.ring.clear()
    return found


@pytest.mark.emulated
@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_capture_of_a_ranks_stream_keeps_the_workspace(rng, how):
    """The workspace is kept, as kernels of the group may still run and cannot be waited for during the capture."""
    with df.emu.Machine(devices=2) as machine:
        group = df.Group.local(2, driver=machine, max_blocks=4)
        hosts = random_inputs(rng, 2, 640, "bfloat16")
        xs, ys = place(group, hosts), garbage(group, 640, "bfloat16")
        call = df.allreduce.prepare(group, xs, ys)
        streams = [rank.stream for rank in group]
        late = fill_late(group, xs[1], 0x3F80, ns=2_000_000)
        late(streams[1])
        call.launch()
        del call
        if how == "close":
            with df.Graph.capture([streams[1]]):
                with pytest.raises(CaptureError, match="rank 1"):
                    group.close()
                assert not group.closed
            group.close()
            assert group.closed
        else:
            group.itself = group
            with df.Graph.capture(streams):
                del group
                gc.collect()
                machine_device = df.device(0, driver=machine)
                with df.Stream(machine_device) as other:
                    other.synchronize()
            streams[0].synchronize()
        hosts[1] = np.ones(640, np.float32).astype(hosts[1].dtype)
        assert_bits(ys, reference.allreduce(hosts))
        assert not machine.reports
        with df.Group.local(2, driver=machine, max_blocks=streams[0].device.sm_count):
            pass  # the block budget is available again


@pytest.mark.emulated
def test_a_workspace_that_cannot_be_drained_is_not_unmapped(monkeypatch):
    with df.emu.Machine(devices=2) as machine:
        group = df.Group.local(2, driver=machine, max_blocks=4)
        waited = []
        for rank in group:

            def fail(rank=rank):
                waited.append(rank.index)
                raise DriverError("cuStreamSynchronize", "", 719, "CUDA_ERROR_LAUNCH_FAILED", "", [])

            monkeypatch.setattr(rank, "drain", fail)
        frees()
        with pytest.raises(DriverError):
            group.close()
        assert waited == [0, 1]
        del group
        gc.collect()
        df.device(0, driver=machine).zeros(4, "float32")
        assert frees() == []


@pytest.mark.emulated
@pytest.mark.parametrize("what", ["group", "symmetric", "pinned", "graph", "array"])
def test_the_garbage_collector_frees_nothing_between_the_launches_of_two_ranks(rng, what):
    with df.emu.Machine(devices=2) as machine:
        group = df.Group.local(2, driver=machine, max_blocks=4)
        hosts = random_inputs(rng, 2, 640, "bfloat16")
        ys = garbage(group, 640, "bfloat16")
        call = df.allreduce.prepare(group, place(group, hosts), ys)
        if what == "group":
            dropped = df.Group.local(2, driver=machine, max_blocks=4)
        elif what == "symmetric":
            dropped = group.symmetric(100)
        elif what == "pinned":
            dropped = PinnedBuffer(group.driver, 100)
        elif what == "graph":
            with df.Stream(group[0].device) as stream, df.Graph.capture(stream) as dropped:
                pass
        else:
            dropped = group[0].zeros(100, "float32")
        cycle = [dropped]
        cycle.append(cycle)
        group.synchronize()
        call.launch(rank=0)
        frees()
        del dropped, cycle
        gc.collect()
        group[1].empty(10, "float32")  # an allocation between the launches frees nothing either
        assert frees() == []
        call.launch(rank=1)
        group.synchronize()
        assert_bits(ys, reference.allreduce(hosts))
        assert not machine.reports


@pytest.mark.emulated
def test_no_group_is_made_while_a_device_is_captured():
    with df.emu.Machine(devices=2) as machine:
        stream = df.device(1, driver=machine).stream
        with df.Graph.capture(stream) as graph, pytest.raises(CaptureError, match="rank 1"):
            df.Group.local(2, driver=machine)
        graph.launch(stream)
        with df.Group.local(2, driver=machine) as group:
            group.synchronize()


@pytest.mark.emulated
def test_use_of_a_group_in_a_forked_child_is_an_error(open_group):
    group = open_group(2)
    call = df.allreduce.prepare(group, garbage(group, 64, "bfloat16"), garbage(group, 64, "bfloat16"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in (group.check, group.synchronize, group.reset, call.launch):
                with pytest.raises(ClosedError, match="forked"):
                    use()
            group.close()  # close() has no effect in a forked process
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    group.check()


@pytest.mark.gpus(2)
def test_a_group_can_be_made_of_device_objects(new_group, driver):
    devices = [df.device(index, driver=driver) for index in (1, 0)]
    group = df.Group.local(devices, max_blocks=2, workspace_bytes=1 << 16)
    assert [rank.device for rank in group] == devices
    group.close()
    mixed = new_group([devices[0], 0])
    assert [rank.device.index for rank in mixed] == [1, 0]
    with pytest.raises(ArgumentError, match="distinct"):
        df.Group.local([devices[0], 1], driver=driver)


@pytest.mark.gpus(2)
def test_devices_of_several_drivers_are_refused(driver):
    with df.emu.Machine(devices=2) as machine:
        other, ours = df.device(0, driver=machine), df.device(0, driver=driver)
        for devices, chosen in (([other, df.device(1, driver=driver)], None), ([other], driver), ([ours], machine)):
            with pytest.raises(ArgumentError, match="devices is .*one driver"):
                df.Group.local(devices, driver=chosen)


def test_reprs_of_groups_and_ranks_are_informative(new_group):
    group = new_group(1)
    call = df.allreduce.prepare(group, group.ranks[0].zeros((2, 4), "bfloat16"), algo="one_stage")
    assert repr(call) == "<Prepared allreduce one_stage of (2, 4) bfloat16>"
    assert "size=1" in repr(group)
    buffer = group.symmetric(100)
    assert hex(buffer.ptrs[0]) in repr(buffer) and str(buffer.nbytes) in repr(buffer)
    buffer.close()
    assert "closed" in repr(buffer)
