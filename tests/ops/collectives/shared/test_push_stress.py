# SPDX-License-Identifier: Apache-2.0
"""Two groups make push calls of all kinds one after another, without a wait, directly and by replays of graphs.

Every call is checked on its own: the next kernel compares its results with the reference, counts the bytes that differ
under the number of the call, and overwrites the results, so that no later call passes with those of an earlier one.
The number of calls is DRVFUSE_STRESS_CALLS: 10,000 on GPUs and a few dozen on the emulated driver.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from collective_support import PUSH, place, random_inputs, ranks, replicate

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.comm import workspace
from drvfuse.ops.call import faults
from drvfuse.ops.collectives.moves.kernel import ALGOS

# The limit is high, as the number of calls can be set, and about fifty kernels are compiled first on a GPU.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("whole_devices")]

VERIFY = r"""
// Lets its dependents start at once and waits for the call: between two collectives it makes them a chain.
extern "C" __global__ void verify(unsigned char* got, const unsigned char* wanted, long long nbytes, unsigned* wrong,
                                  int call) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned found = 0;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < nbytes; i += gridDim.x * blockDim.x) {
    found += got[i] != wanted[i];
    got[i] = 0xA5;
  }
  if (found) atomicAdd(wrong + call, found);
}
"""

PLAIN = ("allreduce", "bfloat16", "bfloat16", False)
FLOAT = ("allreduce", "float32", "float32", False)
NORM = ("allreduce_rmsnorm_fp8", "bfloat16", "float8_e4m3fn", False)
ADDED = ("allreduce_rmsnorm_fp8", "bfloat16", "float8_e4m3fn", True)
FEW = (  # a form (op, dtype, result, residual), a shape and an algorithm
    (PLAIN, (40,), PUSH[0]),
    (PLAIN, (4099,), PUSH[1]),
    (PLAIN, (9000,), PUSH[0]),  # two rounds
    (FLOAT, (9,), PUSH[1]),
    (NORM, (1, 264), PUSH[0]),
    (NORM, (7, 264), PUSH[1]),
    (ADDED, (5, 264), PUSH[1]),
    (PLAIN, (1200,), "two_stage"),
)
MANY = (
    *FEW,
    *((kind, (count,), algo) for kind in (PLAIN, FLOAT) for count in (1, 30_000, 300_000, 3_000_000) for algo in PUSH),
    *((kind, (rows, 4096), algo) for kind in (NORM, ADDED) for rows in (1, 3, 40, 300) for algo in PUSH),
    (NORM, (2, 8192), PUSH[0]),
    (NORM, (600, 8192), PUSH[1]),
    (PLAIN, (50_000,), "one_stage"),
    *((("all_gather", "uint8", "uint8", False), (n,), algo) for n in (40, 70_001, 2_000_000) for algo in ALGOS),
    *((("broadcast", "uint8", "uint8", False), (n,), "relay") for n in (40, 70_001, 2_000_000)),
    *((("all_to_all", "uint8", "uint8", False), (n,), algo) for n in (80, 80_000, 2_000_000) for algo in ALGOS),
)
MOVES = MANY[-21:]


def special(rng: np.random.Generator, hosts: list[np.ndarray]) -> list[np.ndarray]:
    """The arrays `hosts`, changed in place: some rows get NaNs, some infinities, and some the bits of the word that
    means "not here yet"."""
    for host in hosts:
        rows = host.reshape(-1, host.shape[-1]) if host.ndim > 1 else host.reshape(1, -1)
        for row in rows[rng.random(len(rows)) < 0.4]:
            at = rng.integers(len(row), size=2)
            kind = rng.integers(3)
            row[at] = (np.nan, np.inf)[kind] if kind < 2 else row[at]
            if kind == 2:
                row.view(f"uint{8 * row.itemsize}")[at[0] & ~1 : (at[0] & ~1) + 2] = 2 ** (8 * row.itemsize) - 1
    return hosts


class Calls:
    """Prepared calls of several kinds on one group, each followed by a check. On each rank, `wrong` has the number of
    wrong bytes of each call, by the call's number."""

    def __init__(self, group: df.Group, rng: np.random.Generator, kinds: Any, numbers: int) -> None:
        self.group = group
        kernel = df.compile(VERIFY, driver=group.driver)["verify"]
        for rank in group:
            kernel.load(rank.device)
        self.streams = [df.Stream(rank.device) for rank in group]
        self.wrong = [rank.zeros(numbers, "uint32") for rank in group]
        self.calls: list[tuple[Any, list[list[df.Launch]]]] = []
        for (op, dtype, out, residual), shape, algo in kinds:
            moves = op in ("all_gather", "broadcast", "all_to_all")
            if moves:  # two of five words have the bits of the sentinel
                hosts = [rng.choice(np.array([0, 7, 255], np.uint8), shape, p=(0.1, 0.1, 0.8)) for _ in group]
            else:
                hosts = special(rng, random_inputs(rng, group.size, shape, dtype))
            level = (df.PDLLevel.OFF, df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING)[rng.integers(3)]
            options: dict[str, Any] = {"algo": algo, "pdl_level": level}
            if rng.random() < 0.3:
                options["max_num_blocks"] = int(rng.integers(1, group.max_blocks + 1))
            with np.errstate(all="ignore"):
                if moves:
                    found = getattr(reference, op)(hosts)
                    of_ranks = found if isinstance(found, list) else [found] * group.size
                    arrays = [[rank.empty(a.shape, out) for rank, a in zip(group, of_ranks, strict=True)]]
                    call = getattr(df, op).prepare(group, place(group, hosts), arrays[0], **options)
                    wanted = [of_ranks]
                elif op == "allreduce":
                    wanted = [[reference.allreduce(hosts)] * group.size]
                    arrays = [[rank.empty(shape, out) for rank in group]]
                    call = df.allreduce.prepare(group, place(group, hosts), arrays[0], **options)
                else:
                    gamma = random_inputs(rng, 1, shape[-1], dtype)[0]
                    added = random_inputs(rng, 1, shape, dtype)[0] if residual else None
                    found = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added)
                    wanted = [[array] * group.size for array in found if array is not None]
                    arrays = [[rank.empty(a[0].shape, dtypes.get(a[0].dtype)) for rank in group] for a in wanted]
                    options |= {"outputs": arrays[0], "scales": arrays[1]}
                    if added is not None:
                        options |= {"residuals": replicate(group, added), "residual_outputs": arrays[2]}
                    gammas = replicate(group, gamma)
                    call = df.allreduce_rmsnorm_fp8.prepare(group, place(group, hosts), gammas, epsilon=1e-6, **options)
            checks: list[list[df.Launch]] = [[] for _ in group]
            for of_ranks, expected in zip(arrays, wanted, strict=True):
                for position, rank in enumerate(group):
                    got, nbytes = of_ranks[position], expected[position].nbytes
                    blocks = 1 + nbytes // 4096 if nbytes < 1 << 18 else 64
                    arguments = (got, rank.array(expected[position]), nbytes, self.wrong[position], 0)
                    checks[position].append(kernel.prepare(blocks, 128, *arguments, device=rank.device, pdl=True))
            self.calls.append((call, checks))
        group.synchronize()

    def launch(self, kind: int, number: int) -> None:
        call, checks = self.calls[kind]
        call.launch(self.streams)
        for of_rank, stream in zip(checks, self.streams, strict=True):
            for check in of_rank:
                check.set(4, number)
                check(stream)

    def compare(self) -> None:
        self.group.synchronize()
        for rank, wrong in enumerate(self.wrong):
            found = np.flatnonzero(wrong.numpy())
            assert not found.size, f"rank {rank}: {found.size} calls were wrong, first number {found[0]}"


def stress(driver: Any, n: int, rng: np.random.Generator, kinds: Any, number: int, fault: str = "") -> None:
    """Launch `number` calls of two groups, among them replays of a graph of six calls, with epochs that pass 2**32."""
    options = {"driver": driver, "workspace_bytes": 32 << 10 if kinds is FEW else 1 << 20, "max_blocks": 4}
    if kinds is MANY:
        # Each of the two groups takes 56 of the 132 multiprocessors of an H200; no shared group is open.
        options["max_blocks"] = df.device(0, driver=driver).sm_count * 14 // 33
    with (
        faults.in_kernels(fault),
        df.Group.local(n, **options) as first,
        df.Group.local(list(reversed(range(n))), **options) as second,
    ):
        both = [Calls(group, rng, kinds, number + 1) for group in (first, second)]
        for calls in both:
            for pointer, rank in zip(calls.group.workspace.pointers, calls.group, strict=True):
                word = df.view(pointer + workspace.EPOCH_OFFSET, 1, "uint64", rank.device)
                word.copy_from(np.array([(2**32 - number // 4) * workspace.EPOCH_UNIT], np.uint64))
            calls.group.synchronize()
        graphs = []
        for calls in both:
            with df.Graph.capture(calls.streams) as graph:
                for kind in rng.integers(len(kinds), size=6):
                    calls.launch(int(kind), number)  # all captured calls count wrong bytes under this number
            graphs.append(graph)
        for done in range(number):
            which = int(rng.integers(2))
            both[which].launch(int(rng.integers(len(kinds))), done)
            if done % 16 == 7:
                graphs[which].launch(both[which].streams[0])
                for calls, stream in ((both[which], s) for s in both[which].streams[1:]):
                    stream.follow(calls.streams[0])
        for calls in both:
            calls.compare()
        for graph in graphs:
            graph.close()


def calls_of(driver: str, emulated: int) -> int:
    return int(os.environ.get("DRVFUSE_STRESS_CALLS", 10_000 if driver == "cuda" else emulated))


@pytest.mark.parametrize("n", ranks(2, 4))
def test_calls_of_all_kinds_without_synchronisation_are_exact(driver, rng, n):
    stress(driver, n, rng, MANY if driver == "cuda" else FEW, calls_of(driver, 24))


@pytest.mark.parametrize("n", ranks(2, 4))
def test_calls_of_all_kinds_are_exact_if_warps_fall_behind_at_random(driver, rng, n):
    """Warps pause up to 4 us before they read the epoch, after they have sent, and before they clear their slots."""
    stress(driver, n, rng, MANY if driver == "cuda" else FEW[:6], calls_of(driver, 12), "warps-that-fall-behind")


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_calls_that_move_bytes_between_sums_are_exact(driver, rng):
    """Calls that move bytes of any values run between sums, in the same slots; warps pause at random."""
    stress(driver, 2, rng, (*FEW, *MOVES), calls_of(driver, 0) // 4, "warps-that-fall-behind")


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(2))
def test_calls_of_all_kinds_have_no_race(driver, rng, seed):
    with df.emu.Machine(devices=2, seed=seed, race="strict", delay_stores=seed % 2 == 1) as machine:
        stress(machine, 2, rng, FEW, calls_of(driver, 10))
        assert machine.reports == []


@pytest.mark.emulated
def test_a_wrong_call_is_reported_by_its_number(rng):
    """The planted fault makes a rank add its own values first, then those of the next ranks. This sometimes changes a
    bit, but not on rank 0."""
    with pytest.raises(AssertionError, match="rank 1: .* calls were wrong, first number"):
        stress("emu", 3, rng, ((FLOAT, (900,), PUSH[0]),), 4, "order-of-distance")
