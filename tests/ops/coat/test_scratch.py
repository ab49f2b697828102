# SPDX-License-Identifier: Apache-2.0
"""A block that is missing, and two launches at once in one workspace, are reported by the next call; later calls
work."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import case, check_backward, check_forward, place, same

import drvfuse as df
from drvfuse import config
from drvfuse.errors import BarrierTimeout, CaptureError, GridTimeout
from drvfuse.ops.call import faults
from drvfuse.ops.call.scratch import Scratch
from drvfuse.ops.call.specialisation import CU
from drvfuse.plans import scratch as plan
from drvfuse.reference import coat_rmsnorm

SHAPE = (33, 96)
ABSENT, NO_SUMS = "block-1-absent", "block-1-leaves-no-sums"


def test_the_host_and_the_kernels_agree_on_the_size_of_the_workspace(device):
    sizes = {
        "sizeof(GridWords)": plan.WORDS_BYTES,
        "sizeof(GridWorkspace)": plan.GRID_BYTES,
        "MAX_WORD_BLOCKS": plan.MAX_WORD_BLOCKS,
        "MAX_WORD_ROWS": plan.MAX_WORD_ROWS,
        "MAX_WORD_SUMS": plan.MAX_WORD_SUMS,
    }
    same_sizes = "".join(f'static_assert({name} == {size}, "{name}");\n' for name, size in sizes.items())
    headers = '#include "sync/grid_barrier.cuh"\n#include "sync/grid_words.cuh"\n'
    source = f'{headers}{same_sizes}extern "C" __global__ void nothing() {{}}\n'
    df.compile(source, driver=device.driver, include=[CU])


@pytest.fixture
def values(rng):
    return case(rng, SHAPE)


@pytest.fixture
def space(device):
    return device.zeros(df.coat.fp8_workspace_bytes(SHAPE[1]), "uint8")


class Op:
    """An op with operands: `run` queues a call, `check` compares its results with the reference."""

    def __init__(self, name, device, values) -> None:
        # With so many copies of the rows, blocks wait for one another.
        copies = {"forward": 5, "backward": 16, "division": 1}[name]
        values = values._replace(**{part: np.tile(getattr(values, part), (copies, 1)) for part in ("x", "s_x", "g")})
        self.name, self.values, self.device = name, values, device
        self.x, self.s_x, self.w, self.g = place(device, values)
        self.rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
        self.v = device.array(self.rstd)
        self.tall_host = np.tile(values.g, (16, 1))
        self.tall = device.array(self.tall_host)

    def run(self, **options):
        if self.name == "forward":
            return df.coat.fp8_rmsnorm_forward(self.x, self.s_x, self.w, 16, 1e-5, **options)
        if self.name == "backward":
            return df.coat.fp8_rmsnorm_backward(self.x, self.s_x, self.g, self.w, self.v, 16, **options)
        return df.coat.fp8_division(self.tall, 16, "E4M3", **options)

    def give_up(self, **options):
        """Launch with one block that skips its part, so that the launch ends by its time-out."""
        with config.override(spin_timeout=0.05), faults.in_kernels(ABSENT):
            self.run(**options)
        self.device.synchronize()

    def check(self, results) -> None:
        if self.name == "forward":
            check_forward(self.device, self.values, results)
        elif self.name == "backward":
            check_backward(self.values, self.rstd, results)
        else:
            same(results[1], coat_rmsnorm.fp8_division(self.tall_host, "float8_e4m3fn")[1])


@pytest.fixture(params=["forward", "backward", "division"])
def op(request, device, values):
    return Op(request.param, device, values)


@pytest.fixture
def backward(device, values):
    return Op("backward", device, values)


def test_an_absent_block_is_an_error_once_and_the_next_call_works(op):
    op.check(op.run())
    op.give_up()
    with pytest.raises(BarrierTimeout, match=r"block \d+ of a kernel gave up waiting for block 1") as caught:
        op.run()
    assert isinstance(caught.value, GridTimeout)
    assert (caught.value.peer, caught.value.device) == (1, op.device.index)
    assert caught.value.seen != caught.value.expected
    for _ in range(2):
        op.check(op.run())
    df.check_device(op.device)


@pytest.mark.emulated
def test_a_block_that_writes_no_column_sums_is_the_only_finding(rng):
    """The launch after the time-out does not wait for the missing sums, and reads no uninitialised words."""
    values = case(rng, (261, 656))
    with df.emu.Machine(devices=1, sm_count=4) as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, _ = place(device, values)
        with config.override(spin_timeout=0.05), faults.in_kernels(NO_SUMS):
            for _ in range(2):
                df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
        device.synchronize()
        with pytest.raises(GridTimeout, match="gave up waiting for block"):
            df.check_device(device)
        check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5))
        assert not machine.reports


def test_launch_numbers_may_wrap_around(op, space):
    host = np.zeros(space.nbytes, np.uint8)
    host[:4] = 255  # the number of the previous launch
    space.copy_from(host)
    for _ in range(2):
        op.check(op.run(workspace=space))


def test_a_workspace_of_the_caller_must_be_zeroed(op, space):
    op.give_up(workspace=space)
    with pytest.raises(GridTimeout):
        op.run(workspace=space)
    op.check(op.run())  # uses a workspace of drvfuse's own, not `space`
    op.run(workspace=space)
    op.device.synchronize()
    with pytest.raises(GridTimeout, match="not zeroed"):
        op.run(workspace=space)
    space.copy_from(np.zeros(space.shape, np.uint8))
    op.check(op.run(workspace=space))
    df.check_device(op.device)


def test_check_device_raises_the_error_without_another_call(backward, device, space):
    df.check_device(device)
    backward.give_up(workspace=space)
    with pytest.raises(GridTimeout):
        df.check_device(device)
    df.check_device(device)


def test_launches_after_the_time_out_do_not_wait(backward, space):
    backward.run(workspace=space)
    with config.override(spin_timeout=0.05), faults.in_kernels(ABSENT):
        for _ in range(3):  # these launches are queued before the host has read the report
            _, dw = backward.run(workspace=space)
        backward.device.synchronize()
    with pytest.raises(GridTimeout):
        df.check_device(backward.device)
    df.check_device(backward.device)


def test_a_graph_launch_raises_the_error_and_the_next_one_works(backward, device):
    backward.run()
    outputs = device.empty(backward.values.g.shape, "bfloat16"), device.empty(SHAPE[1], "bfloat16")
    with df.Graph.capture(device.stream) as graph:
        backward.run(outputs=outputs)
    backward.give_up()
    with pytest.raises(GridTimeout):
        graph.launch(device.stream)
    with pytest.raises(CaptureError), df.Graph.capture(device.stream):
        backward.run(outputs=outputs)
    graph.launch(device.stream)
    backward.check(outputs)
    graph.close()


def test_two_launches_in_one_workspace_at_once_are_an_error(op, space):
    words = np.zeros(space.shape, np.uint8)
    words[12:16].view(np.uint32)[0] = 1  # `users`, as if another launch were running
    space.copy_from(words)
    op.run(workspace=space)
    op.device.synchronize()
    with pytest.raises(GridTimeout, match="two launches used one workspace at the same time"):
        op.run(workspace=space)


@pytest.mark.emulated
def test_launches_on_two_streams_may_overlap_except_in_one_workspace(rng):
    """Both launches read the same arrays. Neither launch uses the stream that the arrays belong to."""
    values = case(rng, (528, 96))
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    found = []
    for shared in (True, False):
        with df.emu.Machine(devices=1, sm_count=4) as machine:
            device = df.device(0, driver=machine)
            x, s_x, w, g = place(device, values)
            v, streams = device.array(rstd), [df.Stream(device) for _ in range(2)]
            space = device.zeros(df.coat.fp8_workspace_bytes(96), "uint8") if shared else None
            device.synchronize()
            for _ in range(2):
                results = [
                    df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, 16, workspace=space, stream=stream)
                    for stream in streams
                ]
            device.synchronize()
            try:
                df.check_device(device)
                for result in results:
                    check_backward(values, rstd, result)
            except GridTimeout as error:
                found.append((shared, "two launches used one workspace" in str(error)))
    assert found == [(True, True)]


def test_a_new_stream_with_a_reused_handle_waits_for_the_work_of_the_old_stream(backward, device, counted_calls):
    """A workspace is kept for each stream handle, and a driver may reuse the handle of a destroyed stream."""
    earlier = df.Stream(device)
    backward.run(stream=earlier)
    earlier.close()
    outputs = device.empty(backward.values.g.shape, "bfloat16"), device.empty(SHAPE[1], "bfloat16")
    own = device.part(Scratch).own
    own[device.stream.handle, ""] = own.pop((earlier.handle, ""))
    for waits in (1, 0):
        made = counted_calls(device.driver, lambda: backward.run(outputs=outputs))
        assert made.count("cuStreamWaitEvent") == waits
        backward.check(outputs)


def test_workspaces_are_kept_for_the_most_recently_used_streams(backward, device):
    streams = [df.Stream(device) for _ in range(40)]
    results = [backward.run(stream=stream) for stream in [*streams, streams[0]]]
    device.synchronize()
    for result in (results[0], results[-2], results[-1]):
        backward.check(result)
    kept = [handle for handle, kind in device.part(Scratch).own if kind == ""]
    assert kept == [stream.handle for stream in (*streams[9:], streams[0])]
