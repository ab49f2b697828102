# SPDX-License-Identifier: Apache-2.0
"""Small situations on the emulated driver, each of which goes wrong if one line of the collectives is missing.

A scenario raises AssertionError, and nothing else, if the collective breaks its contract.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
from collective_support import PUSH, assert_bits, fill_late, garbage, place, private_array, random_inputs
from multimem_support import exact_inputs

import drvfuse as df
from drvfuse import config, dtypes, reference
from drvfuse.comm import workspace
from drvfuse.errors import DriverError
from drvfuse.runtime.pinned import PinnedBuffer

BF16 = dtypes.get("bfloat16").numpy
MULTIMEM = "multimem_"
GARBAGE = np.full(2, 0xA5, np.uint8).view(BF16)[0]
OPS = ("allreduce", "allreduce_rmsnorm_fp8")

SPY = r"""
// Writes 1 + *word before it waits for the preceding kernel.
extern "C" __global__ void spy(const unsigned long long* word, unsigned long long* seen) {
    *(volatile unsigned long long*)seen = 1 + *(volatile const unsigned long long*)word;
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""


@contextlib.contextmanager
def opened(n: int, seed: int = 0, **options: Any) -> Iterator[tuple[df.emu.Machine, df.Group]]:
    """A machine of n devices, and a group on it whose calls have one block. A kernel's fault raises AssertionError."""
    try:
        with (
            df.emu.Machine(devices=n, seed=seed) as machine,
            df.Group.local(n, driver=machine, **{"max_blocks": 1, "workspace_bytes": 1 << 16, **options}) as group,
        ):
            yield machine, group
    except DriverError as error:
        raise AssertionError("a kernel had a fault") from error


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng([2, seed])


def _prepare(group: df.Group, op: str, xs: list[Any], *, algo: str, **options: Any) -> Any:
    """A call of `op` on inputs [rows, columns], with outputs that hold garbage. `algo` may begin with MULTIMEM."""
    options |= {"algo": algo.removeprefix(MULTIMEM), "use_multimem": algo.startswith(MULTIMEM)}
    outputs = garbage(group, xs[0].shape, "bfloat16")
    if op == "allreduce":
        return df.allreduce.prepare(group, xs, outputs, **options)
    gammas = [rank.array(np.ones(xs[0].shape[-1], np.float32).astype(BF16)) for rank in group]
    return df.allreduce_rmsnorm_fp8.prepare(
        group, xs, gammas, epsilon=1e-6, quantisation=df.Quantisation.none(), outputs=outputs, **options
    )


def _hosts(seed: int, n: int, shape: tuple[int, int], algo: str) -> list[np.ndarray]:
    """Inputs of n ranks. Multimem adds more than two in an unspecified order, so its inputs have exact sums."""
    make = exact_inputs if algo.startswith(MULTIMEM) and n > 2 else random_inputs
    return make(_random(seed), n, shape, "bfloat16")


def _expected(op: str, hosts: list[np.ndarray], algo: str) -> np.ndarray:
    multimem = algo.startswith(MULTIMEM)
    if op == "allreduce":
        return reference.allreduce(hosts, multimem=multimem)
    gamma = np.ones(hosts[0].shape[-1], np.float32).astype(BF16)
    made = df.Quantisation.none()
    return reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, quantisation=made, multimem=multimem).output


def _outputs(result: Any) -> list[Any]:
    return result if isinstance(result, list) else result.output


def results_are_right(op: str, algo: str, private: bool = False) -> None:
    """Results are right although some of the eight warps of a block run far ahead of the others. If `private` is true,
    peers cannot read the inputs.
    """
    for seed in (1, 2, 3, 4):
        with opened(2, seed) as (_, group):
            for number in range(3):
                hosts = _hosts(10 * seed + number, 2, (8, 2048), algo)
                xs = place(group, hosts)
                if private:
                    xs = [private_array(rank.device, host)[0] for rank, host in zip(group, hosts, strict=True)]
                result = _prepare(group, op, xs, algo=algo).launch()
                assert_bits(_outputs(result), _expected(op, hosts, algo))


def inputs_are_free_afterwards(op: str, algo: str) -> None:
    """Each rank's input is overwritten as soon as its kernel is complete, even if slow warps of other ranks still have
    to read."""
    for seed in (1, 2, 3, 4):
        with opened(2, seed) as (_, group):
            hosts = _hosts(seed, 2, (4, 2048), algo)
            for _ in range(3):
                xs = place(group, hosts)
                call = _prepare(group, op, xs, algo=algo)
                for position, rank in enumerate(group):
                    result = call.launch(rank=position)
                    with rank.device.use():
                        rank.device.driver.cuMemsetD8Async(xs[position].ptr, 0, xs[position].nbytes, rank.stream.handle)
                assert_bits(_outputs(result), _expected(op, hosts, algo))


class Spy:
    """A dependent kernel that is launched after rank 0's call. Before its wait the kernel reads the epoch, or the value
    at `address`."""

    def __init__(self, group: df.Group, address: int = 0) -> None:
        self.rank = group.ranks[0]
        self.seen = PinnedBuffer(group.driver, 8)
        self.view = self.seen.view("uint64")
        address = address or group.workspace.pointers[0] + workspace.EPOCH_OFFSET
        kernel = df.compile(SPY, driver=group.driver)["spy"]
        kernel.load(self.rank.device)
        self.launch = kernel.prepare(1, 1, address, self.seen.ptr, device=self.rank.device, pdl=True)

    def queue(self) -> None:
        self.view[0] = 0
        self.launch(self.rank.stream)

    @property
    def started(self) -> bool:
        """Whether the dependent kernel has started once no kernel makes progress."""
        for _ in range(50):
            self.rank.stream.query()
        return bool(self.view[0])


def dependent_starts_at_once_if_it_may(op: str, algo: str, level: df.PDLLevel) -> None:
    """Rank 0 waits for rank 1, which has not been launched: rank 0's dependent starts only with
    OVERLAP_AT_BEGINNING.
    """
    with opened(2, 1) as (_, group):
        hosts = _hosts(0, 2, (4, 256), algo)
        call = _prepare(group, op, place(group, hosts), algo=algo, pdl_level=level)
        spy = Spy(group)
        call.launch(rank=0)
        spy.queue()
        assert spy.started == (level is df.PDLLevel.OVERLAP_AT_BEGINNING)
        assert_bits(_outputs(call.launch(rank=1)), _expected(op, hosts, algo))


def dependent_starts_before_the_end(op: str, algo: str, level: df.PDLLevel, seeds: range | None = None) -> range:
    """Checks that a dependent kernel can start while slow warps of a call's last block are at their last instructions.

    The dependent, a `Spy`, reads the epoch: an early start is shown by an epoch that the call has not advanced yet. The
    fused push kernels advance the epoch before they wait for peers, so there the `Spy` reads an output that the last
    warp may not have stored yet. Returns the seeds up to the first one that shows an early start.
    """
    early, by_output = 0, op != "allreduce" and algo in PUSH
    before = 0xA5A5A5A5A5A5A5A5 if by_output else 0  # least value that an early spy reads; it stores the value plus one
    for seed in seeds or range(1, 40 if by_output else 120, 2):
        with opened(2, seed, workspace_bytes=1 << 18) as (_, group):
            hosts = _hosts(0, 2, (1, 16384) if by_output else (4, 2048), algo)
            call = _prepare(group, op, place(group, hosts), algo=algo, pdl_level=level)
            output = _outputs(call._result)[0]
            spy = Spy(group, output.ptr + output.nbytes - 8 if by_output else 0)
            call.launch(rank=0)
            spy.queue()
            call.launch(rank=1)
            group.synchronize()
            early += before < int(spy.view[0]) <= before + workspace.EPOCH_UNIT
            spy.queue()
            group.synchronize()
            assert not before < int(spy.view[0]) <= before + workspace.EPOCH_UNIT
        if early:
            return range(1, seed + 1, 2)
    raise AssertionError("the dependent never starts before the call has ended")


def one_timeout_ends_all(op: str, algo: str) -> None:
    """Ranks 0 and 1 wait for rank 2. Rank 0 has a short time-out; when it gives up, the wait of rank 1, whose time-out
    is long, ends too.

    Rank 2 starts afterwards. It finds that the abort words are set, and ends without waiting. All ranks do the same in
    a second call. In the first call rank 2 writes no output, in the second call no rank does.
    """
    with opened(3) as (machine, group):
        hosts = _hosts(0, 3, (4, 256), algo)
        xs = place(group, hosts)
        with config.override(spin_timeout=0.01):
            hasty = _prepare(group, op, xs, algo=algo)
        with config.override(spin_timeout=1000.0):
            patient, second = (_prepare(group, op, xs, algo=algo) for _ in range(2))
        patient._sequence.launches[0] = hasty._sequence.launches[0]  # so only rank 0's launch has the short time-out
        patient.launch(rank=0)
        patient.launch(rank=1)
        for early in (0, 1):
            group.ranks[2].stream.wait(group.ranks[early].stream.record())
        patient.launch(rank=2)
        second.launch()
        for rank in group:
            rank.stream.synchronize()
        assert machine.clock() < 100_000_000_000
        assert list(group.workspace.reports["magic"]) == [workspace.REPORT_MAGIC, 0, 0]
        for pointer, rank in zip(group.workspace.pointers, group, strict=True):
            assert df.view(pointer + workspace.ABORT_OFFSET, 1, "uint64", rank.device).numpy()[0] == 1
        untouched = np.full((4, 256), GARBAGE, BF16)
        for call in (patient, second):
            assert_bits(_outputs(call._result)[2:], untouched)
        assert_bits(_outputs(second._result), untouched)
        group.reset()
        assert_bits(_outputs(_prepare(group, op, xs, algo=algo).launch()), _expected(op, hosts, algo))


def a_freed_input_is_not_reused_early() -> None:
    """The call runs late, after its input was freed, and not on the stream on which the input was allocated."""
    with opened(2) as (_, group):
        hosts = random_inputs(_random(0), 2, (4, 256), "bfloat16")
        streams = [df.Stream(rank.device) for rank in group]
        unrelated = [rank.empty(1, "bfloat16") for rank in group]
        xs = place(group, hosts)
        group.synchronize()
        for stream, array in zip(streams, unrelated, strict=True):
            fill_late(group, array, 0)(stream)
        ys = df.allreduce(group, xs, streams=streams)
        del xs
        gc.collect()
        others = place(group, [np.zeros_like(host) for host in hosts])
        for stream in streams:
            stream.synchronize()
        assert_bits(ys, reference.allreduce(hosts))
        del others


def foreign_memory_is_read_in_place() -> None:
    """cuMemAlloc memory: peers read it where it lies, without a copy to the workspace."""
    with opened(2) as (_, group):
        hosts = random_inputs(_random(0), 2, (4, 256), "bfloat16")
        xs = []
        for rank, host in zip(group, hosts, strict=True):
            with rank.device.use():
                pointer = int(group.driver.cuMemAlloc(host.nbytes))
            xs.append(df.view(pointer, host.shape, "bfloat16", rank.device))
            xs[-1].copy_from(host)
        pooled = df.allreduce.prepare(group, place(group, hosts), algo="one_stage")
        call = df.allreduce.prepare(group, xs, algo="one_stage")
        assert call.traffic == pooled.traffic
        assert_bits(call.launch(), reference.allreduce(hosts))
