# SPDX-License-Identifier: Apache-2.0
"""The collectives give the same bits if each rank is a process. Here each process is simulated by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from collective_support import ALGOS, PULL, PUSH, assert_bits, random_inputs
from connected import Ranks, connected

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError, CaptureError, Unsupported

pytestmark = pytest.mark.emulated

SIZES = (2, 3, 8)


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """`ranks_of(n)`: n ranks that have connected, shared by the tests of this module."""
    with ExitStack() as stack:
        found: dict[int, Ranks] = {}

        def find(n: int) -> Ranks:
            if n not in found:
                found[n] = stack.enter_context(connected(n))
            return found[n]

        yield find


def allreduce(group: df.Group, hosts: list[np.ndarray], **options: Any) -> df.Array:
    return df.allreduce(group, group[0].array(hosts[group[0].index]), **options)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("algo", ALGOS)
def test_an_allreduce_has_the_bits_of_the_reference(ranks_of, rng, n, algo):
    """One tensor is small and ragged; the other is larger than the workspace and takes chunks or rounds."""
    for count in (1001, 48_000):
        hosts = random_inputs(rng, n, count, "bfloat16")
        results = ranks_of(n).each(lambda group, hosts=hosts: allreduce(group, hosts, algo=algo))
        assert_bits(results, reference.allreduce(hosts), f"{algo} of {count}")


@pytest.mark.parametrize("n,residual", [(2, True), (3, False), (3, True), (8, False)])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_fused_op_has_the_bits_of_the_reference(ranks_of, rng, n, algo, residual):
    hosts = random_inputs(rng, n, (9, 264), "bfloat16")
    gamma, added = (random_inputs(rng, 1, shape, "bfloat16")[0] for shape in (264, (9, 264)))

    def call(group: df.Group) -> Any:
        rank = group[0]
        return df.allreduce_rmsnorm_fp8(
            group,
            rank.array(hosts[rank.index]),
            rank.array(gamma),
            epsilon=1e-6,
            residuals=rank.array(added) if residual else None,
            algo=algo,
        )

    expected = reference.allreduce_rmsnorm_fp8(hosts, gamma, 1e-6, residual=added if residual else None)
    for result in ranks_of(n).each(call):
        assert_bits([result.output], expected.output)
        assert_bits([result.scales], expected.scales)
        if residual:
            assert_bits([result.residual], expected.residual)


@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_many_calls_of_changing_kinds_need_no_synchronisation(ranks_of, rng, algo):
    """Push and pull calls alternate in one workspace; some of them are in place."""
    rounds = [random_inputs(rng, 3, 257 + 16 * number, "float16") for number in range(12)]

    def calls(group: df.Group) -> list[df.Array]:
        rank, results = group[0], []
        for number, hosts in enumerate(rounds):
            x = rank.array(hosts[rank.index])
            chosen = algo if number % 2 else ALGOS[number % len(ALGOS)]
            results.append(df.allreduce(group, x, x if number % 3 == 0 else None, algo=chosen))
        group.synchronize()
        return results

    for results in ranks_of(3).each(calls):
        for hosts, result in zip(rounds, results, strict=True):
            assert_bits([result], reference.allreduce(hosts))


@pytest.mark.parametrize("algo", ALGOS)
def test_a_prepared_call_is_launched_again_with_new_contents_and_epilogue(ranks_of, rng, algo):
    rounds = [random_inputs(rng, 2, 512, "float32") for _ in range(3)]

    def calls(group: df.Group) -> list[np.ndarray]:
        rank = group[0]
        x, y, results = rank.empty(512, "float32"), rank.empty(512, "float32"), []
        epilogue = df.Epilogue("x * scale", scale=df.float32(1.0))
        prepared = df.allreduce.prepare(group, x, y, algo=algo, epilogue=epilogue)
        for number, hosts in enumerate(rounds):
            x.copy_from(hosts[rank.index])
            prepared.set(scale=df.float32(2.0**number))
            prepared.launch()
            results.append(y.numpy())
        return results

    for results in ranks_of(2).each(calls):
        for number, (hosts, result) in enumerate(zip(rounds, results, strict=True)):
            assert (result == reference.allreduce(hosts) * np.float32(2.0**number)).all()


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("level", [df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_a_graph_of_dependent_launches_replays(ranks_of, rng, algo, level):
    """Each rank captures and replays its own graph, whose calls may start before the previous call ends."""
    first, second = (random_inputs(rng, 2, 768, "bfloat16") for _ in range(2))

    def calls(group: df.Group) -> list[np.ndarray]:
        rank, results = group[0], []
        x, y = rank.array(first[rank.index]), rank.empty(768, "bfloat16")
        prepared = df.allreduce.prepare(group, x, y, algo=algo, pdl_level=level)
        again = df.allreduce.prepare(group, x, y, algo=algo, pdl_level=level)
        with group.capture() as graphs:
            prepared.launch()
            again.launch()
        for hosts in (first, second, first):
            x.copy_from(hosts[rank.index])
            graphs.launch()
            results.append(y.numpy())
        graphs.close()
        return results

    for results in ranks_of(2).each(calls):
        for hosts, result in zip((first, second, first), results, strict=True):
            assert (reference.bits(result) == reference.bits(reference.allreduce(hosts))).all()


@pytest.mark.parametrize("algo", [PULL[0], PUSH[0]])
def test_a_trace_has_the_launches_of_its_own_rank(ranks_of, rng, algo):
    hosts = random_inputs(rng, 2, 256, "float32")

    def call(group: df.Group) -> np.ndarray:
        trace = df.Trace(group)
        allreduce(group, hosts, algo=algo, trace=trace).numpy()
        return trace.records()

    for rank, records in enumerate(ranks_of(2).each(call)):
        assert records.size and set(records["rank"]) == {rank}
        assert set(records["peer"]) <= {-1, 0, 1}


@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_inputs_may_be_in_symmetric_memory_and_on_other_streams(ranks_of, rng, algo):
    hosts = random_inputs(rng, 3, 1024, "float32")

    def call(group: df.Group) -> np.ndarray:
        rank = group[0]
        with group.symmetric(1 << 16) as buffer, df.Stream(rank.device) as stream:
            assert len(buffer.ptrs) == 3 and buffer.devices == (rank.device,)
            (x,) = buffer.arrays(1024, "float32", offset=4096)
            assert x.ptr == buffer.ptrs[rank.index] + 4096
            x.copy_from(hosts[rank.index])
            result = df.allreduce(group, x, algo=algo, streams=[stream])
            stream.synchronize()
            found = result.numpy()
            group.synchronize()
            group.transport.board.vote("all ranks have done with the buffer", None)
        return found

    for result in ranks_of(3).each(call):
        assert (result == reference.allreduce(hosts)).all()


def test_kernels_of_one_rank_write_into_symmetric_memory_of_another(ranks_of):
    source = 'extern "C" __global__ void put(int* to, int value) { *to = value; }'

    def call(group: df.Group) -> int:
        rank, board = group[0], group.transport.board
        with group.symmetric(4096) as buffer:
            kernel = df.compile(source, driver=group.driver, arch=rank.device.arch)["put"]
            kernel.prepare(1, 1, buffer.ptrs[(rank.index + 1) % 3], 100 + rank.index, device=rank.device)(rank.stream)
            rank.synchronize()
            board.vote("all have written", None)
            found = int(buffer.arrays(1, "int32")[0].numpy()[0])
            board.vote("all have read", None)
        return found

    assert ranks_of(3).each(call) == [102, 100, 101]


def test_naive_is_refused_unless_all_ranks_are_in_one_process(ranks_of, rng):
    hosts = random_inputs(rng, 2, 16, "float32")

    def call(group: df.Group) -> None:
        with pytest.raises(Unsupported, match="needs all of them in one process"):
            allreduce(group, hosts, algo="naive")

    ranks_of(2).each(call)


def test_wrong_arguments_and_captures_are_refused_as_in_one_process(ranks_of):
    def call(group: df.Group) -> None:
        rank = group[0]
        x = rank.zeros(64, "float32")
        with pytest.raises(ArgumentError, match="1 array, one per local rank"):
            df.allreduce(group, [x, x])
        assert isinstance(df.allreduce.prepare(group, [x])._result, list)
        with pytest.raises(ArgumentError, match=rf"one of \[{rank.index}\]"):
            df.allreduce.prepare(group, x).launch(rank=1 - rank.index)
        with pytest.raises(CaptureError), group.capture():
            df.allreduce(group, x)
        rank.synchronize()

    ranks_of(2).each(call)
    assert_bits(ranks_of(2).each(lambda group: allreduce(group, [np.ones(4, np.float32)] * 2)), np.full(4, 2, "f4"))


def test_a_call_says_how_many_ranks_take_part(ranks_of, rng):
    hosts = random_inputs(rng, 4, 64, "float32")

    def call(group: df.Group) -> tuple[str, tuple[int, int]]:
        prepared = df.allreduce.prepare(group, group[0].array(hosts[group[0].index]), algo="one_stage")
        return prepared.describe(), prepared.traffic

    assert set(ranks_of(4).each(call)) == {("allreduce one_stage of 4 x (64,) float32", (4096, 3072))}


def test_repeated_calls_exchange_nothing_through_the_board(ranks_of, rng, counted_calls, monkeypatch):
    """A call queries the capture state and launches; it asks the other ranks for nothing."""
    hosts = random_inputs(rng, 2, 256, "float32")
    ranks = ranks_of(2)
    state = ranks.each(lambda group: _arrays(group, hosts))
    made = counted_calls(ranks.groups[0].driver, lambda: _no_steps(ranks, state, monkeypatch))
    assert (
        sorted(name for name in made if "Current" not in name) == ["cuLaunchKernelEx"] * 5 + ["cuStreamIsCapturing"] * 5
    )


def _arrays(group: df.Group, hosts: list[np.ndarray]) -> tuple[df.Array, df.Array]:
    x, y = group[0].array(hosts[group[0].index]), group[0].empty(256, "float32")
    for _ in range(3):
        df.allreduce(group, x, y)
    group.synchronize()
    return x, y


def _no_steps(ranks: Ranks, state: list[tuple[df.Array, df.Array]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a call of an op used the board")

    def calls(group: df.Group) -> None:
        for _ in range(5):
            df.allreduce(group, *state[group[0].index])

    with monkeypatch.context() as patch:
        for group in ranks.groups:
            patch.setattr(group.transport.board, "_step", refuse)
        ranks.each(calls)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_race_detector_finds_nothing(rng, algo):
    rounds = [random_inputs(rng, 2, 300, "float32") for _ in range(3)]
    with connected(2, machine={"race": True, "seed": 3}) as ranks:
        for hosts in rounds:
            results = ranks.each(lambda group, hosts=hosts: allreduce(group, hosts, algo=algo))
            assert_bits(results, reference.allreduce(hosts))
        assert not ranks.machine.reports
