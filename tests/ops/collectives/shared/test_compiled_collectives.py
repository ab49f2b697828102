# SPDX-License-Identifier: Apache-2.0
"""The collectives as ptxas compiles them for sm_90a: registers, no stack, no spill, and accesses of 128 bits.

A push launch has as many blocks as the multiprocessors of its budget hold, so registers decide how much of the work is
in flight at once. RESIDENT has the least number of resident blocks per multiprocessor. With the default budget of 64
multiprocessors:
    64 K packs of a plain call on up to 4 ranks take 1024 blocks of 64 threads, 16 on each multiprocessor;
    32 rows of 8192 columns take 256 blocks of 128 threads in clusters of 8, so 5 on a multiprocessor leave some room;
    many rows by two shots take blocks of 512 threads, two on each multiprocessor, so that one runs while one waits;
    large messages take blocks of 256 threads, as many as the launch bounds of the kernels allow.
A pull launch has one block on each multiprocessor, whatever its registers.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from collective_support import PULL, PUSH

import drvfuse as df
from drvfuse.ops.collectives.shared import plan

pytestmark = pytest.mark.emulated

FUSED = "allreduce_rmsnorm_fp8"
SHAPES = [  # op, shape, and whether there is a residual
    ("allreduce", (4096,), False),
    ("allreduce", (1 << 19,), False),
    ("allreduce", (1 << 24,), False),
    (FUSED, (1, 4096), False),
    (FUSED, (1, 8192), True),
    (FUSED, (128, 8192), False),
    (FUSED, (2048, 8192), False),
    (FUSED, (2048, 8192), True),
]
RANKS = (2, 4, 8)
BETWEEN = (1, 2, 7)  # the indices of the SHAPES that are compiled for 4 ranks; FORMS are compiled for 4 ranks too
Q = df.Quantisation
FORMS = [
    ("push_one_shot", (1, 8192), {"quantisation": Q.nvfp4(1.0, "tiles")}),
    ("push_one_shot", (1, 8192), {"norm": "layer", "betas": (8192,), "normed_outputs": (1, 8192)}),
    ("push_two_shot", (128, 8192), {"quantisation": Q.per_group()}),
    ("push_two_shot", (128, 8192), {"quantisation": Q.nvfp4(1.0, "tiles")}),
]
# By op, algorithm and threads of a block: the least number of resident blocks per multiprocessor on 2, 4, 8 ranks.
RESIDENT = {
    ("allreduce", "push_one_shot", 64): (16, 16, 12),
    ("allreduce", "push_two_shot", 64): (16, 16, 10),  # 10 blocks: 88 to 96 registers per thread
    ("allreduce", "push_one_shot", 256): (5, 4, 2),
    ("allreduce", "push_two_shot", 256): (4, 3, 2),
    (FUSED, "push_one_shot", 64): (10, 10, 10),
    (FUSED, "push_two_shot", 64): (10, 10, 10),
    (FUSED, "push_one_shot", 128): (5, 5, 5),
    (FUSED, "push_two_shot", 128): (5, 5, 5),
    (FUSED, "push_one_shot", 512): (1, 1, 1),
    (FUSED, "push_two_shot", 512): (2, 2, 1),
}
FILE, STEP = 65536, 8  # registers of a multiprocessor of sm_90a, and the granularity of allocation per thread


class Chosen(Exception):
    """Raised in place of a launch, with the specialisation that the launch needs and the threads of a block."""


@pytest.fixture(scope="module")
def groups():
    """Groups of devices as large as an H200, on which nothing runs."""
    with df.emu.Machine(devices=8, sm_count=132) as machine:
        found = {n: df.Group.local(n, driver=machine, max_blocks=16) for n in RANKS}
        yield found
        for group in found.values():
            group.close()


@pytest.fixture
def compiled(groups, monkeypatch):
    """`compiled(n, algo, op, shape, residual, **form)` returns the compiled kernel of a call on n ranks, and its
    threads per block. For an option in `form` whose value is a shape, the call gets arrays of this shape.
    """

    def planned(device, spec, blocks, threads, *rest, **options):
        raise Chosen(spec, threads)

    def compile_call(n, algo, op, shape, residual, **form):
        group = groups[n]
        xs = [rank.empty(shape, "bfloat16") for rank in group]
        with pytest.raises(Chosen) as caught:
            if op == "allreduce":
                df.allreduce.prepare(group, xs, algo=algo)
            else:
                gammas = [rank.empty(shape[-1], "bfloat16") for rank in group]
                form = {
                    name: [rank.empty(given, "bfloat16") for rank in group] if isinstance(given, tuple) else given
                    for name, given in form.items()
                }
                residuals = xs if residual else None
                df.allreduce_rmsnorm_fp8.prepare(group, xs, gammas, epsilon=1.0, residuals=residuals, algo=algo, **form)
        spec, threads = caught.value.args
        return spec.compile("sm_90a", ("--ptxas-options=-v",)), threads

    monkeypatch.setattr(plan, "load", lambda device, spec: SimpleNamespace(occupancy=lambda *arguments: 1))
    monkeypatch.setattr(plan, "Planned", planned)
    return compile_call


def registers_of(image):
    """The number of registers of the only kernel of an image. Fails if the kernel has a stack or spills."""
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", image.log) == [
        ("0", "0", "0")
    ]
    assert ".local" not in image.ptx
    (registers,) = re.findall(r"Used (\d+) registers", image.log)
    return int(registers)


@pytest.mark.parametrize(
    ("n", "op", "shape", "residual"),
    [(n, *SHAPES[case]) for n in RANKS for case in (BETWEEN if n == 4 else range(len(SHAPES)))],
)
@pytest.mark.parametrize("algo", PUSH)
def test_push_kernels_leave_room_for_the_blocks_that_plans_count_on(compiled, n, algo, op, shape, residual):
    image, threads = compiled(n, algo, op, shape, residual)
    resident = RESIDENT[op, algo, threads][RANKS.index(n)]
    assert registers_of(image) <= FILE // (threads * resident) // STEP * STEP
    assert "ld.relaxed.sys.global.v4.u32" in image.ptx and "st.relaxed.sys.global.v4.u32" in image.ptx
    assert "ld.global.nc" not in image.ptx
    assert not re.search(r"(?:ld|st)\.global\.u(?:8|16)\b", image.ptx)  # no access is of a single element


@pytest.mark.parametrize(("algo", "shape", "form"), FORMS)
def test_other_forms_of_the_fused_op_need_no_more_registers(compiled, algo, shape, form):
    image, threads = compiled(4, algo, FUSED, shape, False, **form)
    resident = RESIDENT[FUSED, algo, threads][RANKS.index(4)]
    assert registers_of(image) <= FILE // (threads * resident) // STEP * STEP


@pytest.mark.parametrize(
    ("n", "op", "shape", "residual"),
    [(n, *SHAPES[case]) for n in RANKS for case in (BETWEEN[1:] if n == 4 else (0, 2, 3, 6, 7))],
)
@pytest.mark.parametrize("algo", PULL)
def test_any_block_of_a_pull_kernel_fits_a_multiprocessor(compiled, n, algo, op, shape, residual):
    image, threads = compiled(n, algo, op, shape, residual)
    assert registers_of(image) <= FILE // threads // STEP * STEP
    assert "ld.global.v4" in image.ptx
