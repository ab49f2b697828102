# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes that exchange by MPI. The ranks are processes of mpiexec, and use emulated GPUs of the test
process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

import drvfuse as df
from drvfuse import config, errors
from drvfuse.emu.serve.server import Server
from drvfuse.nodes.exchange import Member, Part, Piece, Pieces
from drvfuse.nodes.layout import Nodes
from drvfuse.nodes.mpi import Mpi

pytestmark = pytest.mark.emulated
ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"

RANK = textwrap.dedent("""
    import sys
    import numpy as np
    from ml_dtypes import bfloat16
    from mpi4py import MPI
    import drvfuse as df
    from drvfuse import errors, reference

    nodes, order, size = int(sys.argv[1]), sys.argv[2], MPI.COMM_WORLD.Get_size()
    store = MPI.COMM_WORLD if order == "fixed" else None
    options = {"driver": "emu", "workspace_bytes": 1 << 17, "max_blocks": 2}
    with df.Group.connect(store=store, nodes=nodes, node_order=order, exchange="mpi", **options) as group:
        rank = group[0]
        assert (group.nodes, group.node) == (nodes, rank.index // (size // nodes))
        rng = np.random.default_rng(5)
        for shape in ((1, 40), (9, 100), (3, 4096)):
            hosts = [rng.integers(-64, 64, shape).astype(bfloat16) for _ in range(size)]
            if order == "fixed":  # else sums are exact in any order
                hosts = [(host + rng.standard_normal(shape)).astype(bfloat16) for host in hosts]
            gamma, residual = rng.standard_normal((2, 1, *shape[1:])).astype(bfloat16)
            residual = np.broadcast_to(residual, shape).copy()
            x = rank.array(hosts[rank.index])
            y = df.allreduce(group, x)
            expected = reference.allreduce(hosts, nodes=nodes)
            assert (reference.bits(y.numpy()) == reference.bits(expected)).all(), shape
            added, weight = rank.array(residual), rank.array(gamma[0])
            found = df.allreduce_rmsnorm_fp8(group, x, weight, epsilon=1e-5, residuals=added)
            wanted = reference.allreduce_rmsnorm_fp8(hosts, gamma[0], 1e-5, residual=residual, nodes=nodes)
            for got, want in zip(found, wanted):
                assert (reference.bits(got.numpy()) == reference.bits(want)).all(), shape
        if size == 4:
            rows, splits = [3, 0, 5, 2], [[(i + j) % 3 for j in range(size)] for i in range(size)]
            hosts = [rng.integers(-64, 64, (sum(rows), 40)).astype(bfloat16) for _ in range(size)]
            own = rank.array(hosts[rank.index])
            found = df.reduce_scatter(group, own, splits=rows).numpy()
            wanted = reference.reduce_scatter(hosts, rows, nodes=nodes)[rank.index]
            assert (reference.bits(found) == reference.bits(wanted)).all()
            parts = [host[:count] for host, count in zip(hosts, rows)]
            found = df.all_gather(group, rank.array(parts[rank.index]), splits=rows).output.numpy()
            assert (found == reference.all_gather(parts)).all()
            blocks = [host[: sum(row)] for host, row in zip(hosts, splits)]
            found = df.all_to_all(group, rank.array(blocks[rank.index]), splits=splits).numpy()
            assert (found == reference.all_to_all(blocks, splits)[rank.index]).all()
            assert (df.broadcast(group, own, root=size - 1).numpy() == hosts[-1]).all()
            for y, wanted in zip(df.allreduce_many(group, [own, own[:1]]), (hosts, [host[:1] for host in hosts])):
                assert (y.numpy() == reference.allreduce(wanted)).all()  # exact in any order
        call = df.allreduce.prepare(group, x)
        try:
            with df.Graph.capture([rank.stream]):
                call.launch()
            raise SystemExit("it was captured")
        except errors.Unsupported as error:
            assert "MPI goes through the host" in str(error)
        group.reset()
        try:
            df.allreduce(group, rank.array(np.zeros((3 if group.node else 2, 64), np.float32)))
            raise SystemExit("sizes that differ between nodes were not noticed")
        except errors.ExchangeError as error:
            assert "on node 0, " in str(error) and " on node 1" in str(error)
        group.reset()
        try:
            df.all_gather(group, rank.array(np.zeros((3 if group.node else 2, 64), np.uint8)))
            raise SystemExit("pieces whose sizes differ between nodes were not noticed")
        except errors.ExchangeError as error:
            assert " bytes for " in str(error), error
        group.reset()
        df.allreduce(group, x)
        group.synchronize()
    print(f"done {rank.index}\\n", end="", flush=True)
""")


def mpiexec(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    with df.emu.Machine(devices=size, race=True, served=True) as machine, Server(machine) as server:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DRVFUSE_EMU_MACHINE": server.address}
        result = subprocess.run(
            [MPIEXEC, "-n", str(size), sys.executable, "-c", RANK, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert not machine.reports
    return result


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(),
    reason="needs mpi4py and an mpiexec beside it (pip install mpi4py mpich)",
)
@pytest.mark.parametrize("size,nodes,order", [(6, 3, "fixed"), (4, 2, "engine")])
def test_processes_of_mpiexec_have_the_bits_of_the_reference(size, nodes, order):
    result = mpiexec(size, nodes, order)
    # lines of different ranks may be mixed
    assert result.returncode == 0 and result.stdout.count("done") == size, result.stderr


class MPIError(Exception):
    pass


class Stand:
    """A stand-in for COMM_WORLD. This process is rank 0, and no other rank ever answers."""

    def Get_rank(self):
        return 0

    def Get_group(self):
        return types.SimpleNamespace(Incl=lambda ranks: ranks)

    def Create_group(self, ranks, tag):
        return types.SimpleNamespace(
            Get_size=lambda: 2, Iallgather=self.begin, Ireduce=self.begin, Ibcast=self.begin, Ialltoall=self.begin
        )

    def begin(self, *arguments):
        return types.SimpleNamespace(Test=lambda: False)


@pytest.fixture
def engine(monkeypatch):
    """The engine on a stand-in for mpi4py, without any other rank."""
    names = {"FLOAT": "float", "INT64_T": "int64", "SUM": "sum", "IN_PLACE": "in place", "Exception": MPIError}
    mpi = types.SimpleNamespace(COMM_WORLD=Stand(), **names)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    return Mpi()


@pytest.fixture
def member():
    with df.emu.Machine(devices=1) as machine:
        yield Member(0, df.device(0, driver=machine), 0, 0)


def work(member, method):
    memory = member.device.array(np.zeros(16, np.float32))
    if method == "all_to_all":
        return Pieces(member, [Piece(1, memory.ptr, 8)], [Piece(1, memory.ptr + 8, 8)], member.device.stream), memory
    return Part(member, memory.ptr, 8, member.device.stream), memory


@pytest.mark.parametrize("method", ["all_gather", "all_reduce", "all_to_all"])
def test_a_rank_that_never_connects_is_an_error_within_the_time_out(engine, member, method):
    engine.open(Nodes((0, 1)), [member], lambda values: [b"0", b"1"], 1.0)
    part, _memory = work(member, method)
    text = "rank 0: the exchange between nodes by MPI did not end within 0.05 s"
    with config.override(spin_timeout=0.05), pytest.raises(errors.ExchangeError, match=text):
        getattr(engine, method)([part])
    engine.close()


@pytest.mark.parametrize("method", ["all_gather", "all_reduce", "all_to_all"])
def test_an_error_of_mpi_is_an_exchange_error(engine, member, method, monkeypatch):
    def broken(*arguments):
        raise MPIError("MPI_ERR_PROC_FAILED: process failed")

    engine.open(Nodes((0, 1)), [member], lambda values: [b"0", b"1"], 1.0)
    part, _memory = work(member, method)
    sizes_agree = types.SimpleNamespace(Test=lambda: True)
    monkeypatch.setattr(engine._rail, "Iallgather", lambda *arguments: sizes_agree)
    first = {"all_gather": "Iallgather", "all_reduce": "Ireduce", "all_to_all": "Ialltoall"}[method]
    monkeypatch.setattr(engine._rail, first, broken)
    with pytest.raises(errors.ExchangeError, match="rank 0: .* by MPI failed: MPI_ERR_PROC_FAILED"):
        getattr(engine, method)([part])
    monkeypatch.setattr(Stand, "Create_group", broken)
    with pytest.raises(errors.ExchangeError, match="by MPI failed: MPI_ERR_PROC_FAILED"):
        engine.open(Nodes((0, 1)), [member], lambda values: [b"0", b"1"], 1.0)


def test_ranks_of_different_communicators_are_refused(engine, member):
    with pytest.raises(errors.ExchangeError, match=r"its ranks are \[0, 0\]: start the processes with mpiexec"):
        engine.open(Nodes((0, 1)), [member], lambda values: [b"0", b"0"], 1.0)
    with pytest.raises(errors.Unsupported, match="one rank in each process; this process has 2"):
        engine.open(Nodes((0, 1)), [member, member], lambda values: values, 1.0)
