# SPDX-License-Identifier: Apache-2.0
"""What the push algorithms send: no byte more than they must, by whole packs; and kernels without a stack."""

from __future__ import annotations

import re

import pytest
from collective_support import PUSH

import drvfuse as df
from drvfuse.ops.collectives import plan

pytestmark = pytest.mark.emu


def prepared(group, op, shape, algo, residual=False, make="zeros"):
    xs = [getattr(rank, make)(shape, "bfloat16") for rank in group]
    if op == "allreduce":
        return df.allreduce.prepare(group, xs, algo=algo)
    gammas = [getattr(rank, make)(shape[-1], "bfloat16") for rank in group]
    residuals = [getattr(rank, make)(shape, "bfloat16") for rank in group] if residual else None
    return df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1.0, residuals=residuals, algo=algo)


CASES = [  # with residual or not
    ("allreduce", (2048,), False),
    ("allreduce", (40_000,), False),
    ("allreduce_rmsnorm_fp8", (1, 4096), False),
    ("allreduce_rmsnorm_fp8", (9, 512), False),
    ("allreduce_rmsnorm_fp8", (9, 512), True),
]


@pytest.mark.parametrize(("op", "shape", "residual"), CASES)
@pytest.mark.parametrize("algo", PUSH)
@pytest.mark.parametrize("n", [2, 4])
def test_remote_bytes_are_those_of_the_formula(n, algo, op, shape, residual):
    """Of one shot (n - 1) S from each rank; of two 2 (n - 1) / n S, less where FP8 results are gathered."""
    with df.emu.Machine(devices=n) as machine, df.Group.local(n, driver=machine, max_blocks=4) as group:
        call = prepared(group, op, shape, algo, residual)
        group.synchronize()
        ended = len(machine.launches)
        call.launch()
        group.synchronize()
        records = list(machine.launches)[ended:]
    totals = [record.counters.total for record in records]
    nbytes, rows = 2, shape[0] if len(shape) > 1 else 0
    for size in shape:
        nbytes *= size
    sent = n * (n - 1) * nbytes
    if algo == "push_two_shot":
        fp8 = op != "allreduce" and not residual
        sent = (n - 1) * (nbytes + (nbytes // 2 + 4 * rows if fp8 else nbytes))
    units = rows or -(-shape[0] // 512)  # packs of 64 threads
    greetings = 4 * (n - 1) * max(n - units, 0) if algo == "push_two_shot" else 0
    assert call.traffic[1] == sent
    assert sum(total.remote_written for total in totals) == sent + greetings
    assert sum(total.remote_read for total in totals) == 0  # nobody asks a peer for anything


SHAPES = [
    ("allreduce", (4096,), False),
    ("allreduce", (1 << 24,), False),
    ("allreduce_rmsnorm_fp8", (1, 4096), False),
    ("allreduce_rmsnorm_fp8", (1, 8192), True),
    ("allreduce_rmsnorm_fp8", (128, 8192), False),
    ("allreduce_rmsnorm_fp8", (2048, 8192), False),
    ("allreduce_rmsnorm_fp8", (2048, 8192), True),
]


class Chosen(Exception):
    """What a call would be compiled for."""


@pytest.fixture(scope="module")
def groups():
    """Groups of devices as large as an H200, on which nothing runs."""
    with df.emu.Machine(devices=8, sm_count=132) as machine:
        found = {n: df.Group.local(n, driver=machine, max_blocks=16) for n in (2, 4, 8)}
        yield found
        for group in found.values():
            group.close()


@pytest.mark.parametrize(("op", "shape", "residual"), SHAPES)
@pytest.mark.parametrize("algo", PUSH)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_no_stack_and_accesses_of_128_bits(groups, monkeypatch, n, algo, op, shape, residual):
    def load(device, spec):
        raise Chosen(spec)

    monkeypatch.setattr(plan, "load", load)
    with pytest.raises(Chosen) as caught:
        prepared(groups[n], op, shape, algo, residual, "empty")
    image = caught.value.args[0].compile("sm_90a", ("--ptxas-options=-v",))
    assert set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log)) == {("0", "0")}
    assert ".local" not in image.ptx
    assert "ld.relaxed.sys.global.v4.u32" in image.ptx and "st.relaxed.sys.global.v4.u32" in image.ptx
    assert "ld.global.nc" not in image.ptx
    assert not re.search(r"(?:ld|st)\.global\.u(?:8|16)\b", image.ptx)  # element by element
