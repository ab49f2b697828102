# SPDX-License-Identifier: Apache-2.0
"""mma, ldmatrix and stmatrix in kernels: a product, and the faults for wrong lanes and wrong addresses of rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from driver_helpers import function, ok, primary
from engine_harness import Rig, line_of

from drvfuse.emu import Machine
from drvfuse.emu.findings.faults import Fault

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
# `row` is the address of a lane's 16 bytes in 512 bytes of shared memory. A test that reads these bytes adds FILL.
ENTRY = """.visible .entry k(.param .u64 out) {
.reg .b64 %to; .reg .b32 %lane, %row, %base, %r<8>; .reg .pred %p; .shared .align 16 .b8 rows[512];
ld.param.u64 %to, [out]; mov.u32 %lane, %laneid; mad.wide.u32 %to, %lane, 16, %to;
mov.u32 %base, rows; mad.lo.u32 %row, %lane, 16, %base; mov.b32 %r0, 0; mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0;
"""
FILL = "st.shared.v4.b32 [%row], {%lane, %lane, %lane, %lane}; bar.warp.sync 0xFFFFFFFF;\n"
END = "st.global.v4.b32 [%to], {%r0, %r1, %r2, %r3}; ret; }"
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%row]; // here\n"
STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%row], {%r0, %r1, %r2, %r3}; // here\n"
MOVE = "movmatrix.sync.aligned.m8n8.trans.b16 %r0, %lane; // here\n"
MULTIPLY = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r0, %r1}, {%lane}, {%lane}, {%r2, %r3}; // here\n"


def fault_of(rig: Rig, body: str, kind: str, block: int = 32) -> Fault:
    source = HEAD + ENTRY + body + END
    launch = rig.launch(source, rig.empty(512), block=block)
    assert rig.finish(launch)
    fault = launch.fault
    assert fault is not None and (fault.kind, fault.file, fault.line) == (kind, None, line_of(source, "here"))
    return fault


# A matrix product ---------------------------------------------------------------------------------------------------
# One warp computes C = A * B in fp16, in steps of a 16x16 tile of A and a 16x8 tile of B, and stores C by stmatrix.
GEMM = """
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
KERNEL k(const uint4* a, const uint4* b, uint4* c, int steps) {
    __shared__ alignas(16) unsigned short sa[16][16], sb[16][8], sc[16][8];
    unsigned l = threadIdx.x, d[2] = {0, 0};
    for (int i = 0; i < steps; i++) {
        ((uint4*)sa)[l] = a[32 * i + l];
        if (l < 16) ((uint4*)sb)[l] = b[16 * i + l];
        __syncwarp();
        unsigned x[4], y[2];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at(&sa[l % 16][l / 16 * 8])));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%0, %1}, [%2];"
            : "=r"(y[0]), "=r"(y[1]) : "r"(at(&sb[l % 16][0])));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
            : "+r"(d[0]), "+r"(d[1]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        __syncwarp();
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
        :: "r"(at(&sc[l % 16][0])), "r"(d[0]), "r"(d[1]));
    __syncwarp();
    if (l < 16) c[l] = ((uint4*)sc)[l];
}"""


def test_a_product_of_small_integers_is_exact(rig: Rig, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 48), (48, 8)))
    blocks = np.ascontiguousarray(a.reshape(16, 3, 16).swapaxes(0, 1))
    out = rig.empty(256)
    rig.run(GEMM, rig.array(blocks), rig.array(b), out, 3)
    found = rig.read(out, np.float16, 128).reshape(16, 8)
    np.testing.assert_array_equal(found, (a.astype(np.int32) @ b.astype(np.int32)).astype(np.float16))


@pytest.mark.parametrize("taken", [True, False])
def test_matrix_instructions_work_under_a_predicate_and_in_a_function(rig: Rig, taken: bool) -> None:
    callee = """.func (.param .b32 d) turned(.param .b32 a) { .reg .b32 %x, %y;
ld.param.b32 %x, [a]; movmatrix.sync.aligned.m8n8.trans.b16 %y, %x; st.param.b32 [d], %y; ret; }
"""
    call = """{ .param .b32 a; .param .b32 d; st.param.b32 [a], %r0; call (d), turned, (a); ld.param.b32 %r1, [d]; }
"""
    body = f"setp.{'lt' if taken else 'gt'}.u32 %p, %lane, 32; @%p {MOVE}{call}"
    out = rig.empty(512)
    rig.run(HEAD + callee + ENTRY + body + END, out)
    turned, back = rig.read(out, np.uint32, 128).reshape(32, 4).T[:2].copy()
    lanes = np.arange(32, dtype=np.uint32)
    matrix = lanes.view(np.uint16).reshape(8, 8)
    np.testing.assert_array_equal(turned.view(np.uint16).reshape(8, 8), matrix.T if taken else 0)
    np.testing.assert_array_equal(back, lanes if taken else 0)


# Lanes --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("instruction", [FILL + LOAD, STORE, MOVE, MULTIPLY], ids=["load", "store", "move", "multiply"])
def test_a_matrix_instruction_of_a_half_warp_is_reported(rig: Rig, instruction: str) -> None:
    fault = fault_of(rig, instruction, "matrix_lanes", block=16)
    assert fault.thread == (0, 0, 0) and "only lanes 0x0000ffff are there" in fault.message
    assert fault.message.startswith(instruction.splitlines()[-1].split(".")[0])


def test_a_matrix_instruction_without_exited_lanes_is_reported(rig: Rig) -> None:
    leave = "setp.lt.u32 %p, %lane, 4; @%p ret;\n"
    assert "only lanes 0xfffffff0 are there" in fault_of(rig, leave + MULTIPLY, "matrix_lanes").message


def test_lanes_at_different_matrix_instructions_are_reported(rig: Rig) -> None:
    other = MOVE.replace(" // here", "")
    apart = f"setp.ge.u32 %p, %lane, 16; @%p bra OTHER;\n{other}bra DONE;\nOTHER:\n{MOVE}DONE:\n"
    fault = fault_of(rig, apart, "warp_mismatch")
    assert fault.thread == (16, 0, 0) and "the other is at line" in fault.message


def test_lanes_that_wait_elsewhere_are_a_deadlock_that_names_the_instruction(rig: Rig) -> None:
    body = f"setp.lt.u32 %p, %lane, 16; @%p bra OTHER;\n{MOVE}bra DONE;\nOTHER: bar.sync 0;\nDONE:\n"
    launch = rig.launch(HEAD + ENTRY + body + END, rig.empty(512))
    assert not rig.finish(launch)
    statuses = {item.status for item in launch.blocked()}
    assert statuses == {"at barrier 0", "at movmatrix, which takes all 32 lanes of the warp"}


# Rows ---------------------------------------------------------------------------------------------------------------
def test_each_row_is_accessed_by_the_lane_that_has_its_address(rig: Rig) -> None:
    for setup, instruction, kind, lane, words in (
        ("setp.eq.u32 %p, %lane, 5; @%p add.u32 %row, %row, 4;", LOAD, "misaligned", 5, "no multiple of 16"),
        ("setp.eq.u32 %p, %lane, 9; @%p add.u32 %row, %base, 512;", LOAD, "foreign_shared", 9, "read of 16 bytes"),
        ("setp.eq.u32 %p, %lane, 30; @%p add.u32 %row, %base, 512;", STORE, "foreign_shared", 30, "write of 16 bytes"),
    ):
        fault = fault_of(rig, FILL + setup + instruction, kind)
        assert fault.thread == (lane, 0, 0) and words in fault.message


def test_an_uninitialised_row_is_found(rig: Rig) -> None:
    some = "setp.ne.u32 %p, %lane, 17; @%p st.shared.v4.b32 [%row], {%lane, %lane, %lane, %lane};\n"
    fault = fault_of(rig, some + "bar.warp.sync 0xFFFFFFFF;\n" + LOAD, "uninitialised")
    assert fault.thread == (17, 0, 0)


def test_addresses_of_lanes_without_a_row_are_ignored(rig: Rig) -> None:
    wild = "setp.gt.u32 %p, %lane, 7; @%p mov.b32 %row, 0x7FFFFFFF;\n"
    one = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%row];\n"
    out = rig.empty(512)
    rig.run(HEAD + ENTRY + FILL + wild + one + END, out)
    assert (rig.read(out, np.uint16, 256).reshape(32, 8)[:, 0] == np.arange(32) // 4 * np.array([1])).all()


def test_memory_written_by_stmatrix_is_initialised(rig: Rig) -> None:
    words = "mov.b32 %r0, %lane; mov.b32 %r1, %lane; mov.b32 %r2, %lane; mov.b32 %r3, %lane;\n"
    back = "bar.warp.sync 0xFFFFFFFF;\nld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%row];\n"
    out = rig.empty(512)
    rig.run(HEAD + ENTRY + words + STORE + back + END, out)
    rows = rig.read(out, np.uint32, 128).reshape(4, 8, 4)
    np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(32).reshape(8, 4), (4, 8, 4)))


# Races --------------------------------------------------------------------------------------------------------------
RACE = """
extern "C" __global__ void k(unsigned* out, int waits) {
    __shared__ alignas(16) uint4 rows[8];
    unsigned l = threadIdx.x, x, row = (unsigned)__cvta_generic_to_shared(&rows[l % 8]);
    if (l < 8) rows[l] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (l == 32 + 6) rows[6] = make_uint4(l, l, l, l);
    if (waits) __syncthreads();
    if (l < 32) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(row));
        out[l] = x;
    }
}"""


@pytest.mark.parametrize("waits", [False, True])
def test_the_race_detector_sees_each_row(waits: bool) -> None:
    with Machine(devices=1, race=True) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        out = ok(cuda.cuMemAlloc(128))
        kernel = function(cuda, RACE, "k")
        ok(
            cuda.cuLaunchKernel(
                kernel, 1, 1, 1, 64, 1, 1, 0, 0, ((int(out), int(waits)), (ctypes.c_uint64, ctypes.c_int32)), 0
            )
        )
        ok(cuda.cuCtxSynchronize())
        if waits:
            assert not machine.reports
            return
        (race,) = machine.reports
        assert (race.kind, race.line, race.thread) == (
            "race",
            RACE.count("\n", 0, RACE.index("ldmatrix")) + 1,
            (6, 0, 0),
        )
        assert "read of 16 bytes" in str(race) and "thread 38" in str(race)
