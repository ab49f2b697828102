# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatters and many tensors as ptxas compiles them for sm_90a: registers, no stack, no spill."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

import drvfuse as df
from drvfuse.ops.collectives.shared import plan

pytestmark = pytest.mark.emulated

FILE, STEP = 65536, 8  # registers of an sm_90a multiprocessor; those of a thread are a multiple of STEP


class Chosen(Exception):
    """Raised in place of a launch, with the specialisation that the launch needs and the threads of a block."""


@pytest.fixture(scope="module")
def group():
    """A group of eight devices as large as an H200, on which nothing runs. It has eight ranks because the kernels for
    eight ranks need the most registers.
    """
    with df.emu.Machine(devices=8, sm_count=132) as machine, df.Group.local(8, driver=machine, max_blocks=16) as found:
        yield found


def scatter(group, shape):
    df.reduce_scatter.prepare(group, [rank.empty(shape, "bfloat16") for rank in group], algo="push")


def fused(group, shape):
    xs = [rank.empty(shape, "bfloat16") for rank in group]
    gammas = [rank.empty(shape[-1], "bfloat16") for rank in group]
    own = [rank.empty((shape[0] // 8, shape[1]), "bfloat16") for rank in group]
    df.reduce_scatter_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1.0, residuals=own, algo="push")


def many(group, shape):
    df.allreduce_many.prepare(group, [[rank.empty(shape, "bfloat16")] * 2 for rank in group], algo="push_two_shot")


@pytest.mark.parametrize(
    ("prepare", "shape", "resident"),
    [
        (scatter, (4099,), 8),
        (scatter, (1 << 24,), 2),
        (fused, (8, 8192), 3),
        (fused, (512, 8192), 1),
        (many, (4099,), 8),
    ],
)
def test_kernels_spill_nothing_and_enough_blocks_fit_a_multiprocessor(group, monkeypatch, prepare, shape, resident):
    def planned(device, spec, blocks, threads, *rest, **options):
        raise Chosen(spec, threads)

    monkeypatch.setattr(plan, "load", lambda device, spec: SimpleNamespace(occupancy=lambda *arguments: 1))
    monkeypatch.setattr(plan, "Planned", planned)
    with pytest.raises(Chosen) as caught:
        prepare(group, shape)
    spec, threads = caught.value.args
    image = spec.compile("sm_90a", ("--ptxas-options=-v",))
    stack = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", image.log)
    assert stack == [("0", "0", "0")]
    (registers,) = re.findall(r"Used (\d+) registers", image.log)
    assert FILE // (-(-int(registers) // STEP) * STEP * threads) >= resident
