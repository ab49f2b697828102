# SPDX-License-Identifier: Apache-2.0
"""Accesses to parameters: those of kernels, and arguments and results of device functions, have exact bounds."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
KERNEL = """.visible .entry k(.param .u64 out, .param .align 8 .b8 p[24]) {
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    BODY
    st.global.u32 [%rd1], %r2;
    ret;
}"""
FUNCTION = """.func (.param .align 8 .b8 result[8]) f(.param .align 8 .b8 argument[12]) {
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<9>;
    BODY
    ret;
}
"""
CALL = """{ .param .align 8 .b8 result0[8]; .param .align 8 .b8 argument0[12];
    st.param.b32 [argument0], 1; st.param.b32 [argument0+4], 2; st.param.b32 [argument0+8], 3;
    call (result0), f, (argument0);
    ld.param.b32 %r2, [result0]; AFTER }"""


def run(machine: Machine, ptx: str) -> tuple[Any, int]:
    """The CUresult of a launch of `k` with one thread, and what it has stored."""
    cuda = machine.driver
    primary(cuda)
    kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(ptx.encode())), b"k"))
    out = ok(cuda.cuMemAlloc(4))
    block = np.arange(10, 16, dtype=np.uint32)
    values = np.array([int(out)], np.uint64)
    pointers = np.array([values.ctypes.data, block.ctypes.data], np.uint64)
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, pointers.ctypes.data, 0))
    status = code(cuda.cuCtxSynchronize())
    stored = bytearray(4)
    if status == R.CUDA_SUCCESS:
        ok(cuda.cuMemcpyDtoH(stored, out, 4))
    return status, struct.unpack("<I", stored)[0]


@pytest.mark.parametrize(
    "body, stored",
    [
        ("ld.param.u32 %r2, [p];", 10),
        ("ld.param.u32 %r2, [p+20];", 15),
        ("ld.param.v2.u32 {%r3, %r2}, [p+16];", 15),
        ("mov.b64 %rd2, p; ld.param.u32 %r2, [%rd2+20];", 15),
        ("setp.eq.u32 %p1, %r1, 7; mov.u32 %r2, 3; @%p1 ld.param.u32 %r2, [p+4096];", 3),
    ],
)
def test_accesses_inside_a_parameter_are_made(machine: Machine, body: str, stored: int) -> None:
    assert run(machine, HEAD + KERNEL.replace("BODY", body)) == (R.CUDA_SUCCESS, stored)
    assert not machine.reports


@pytest.mark.parametrize(
    "body, kind, message",
    [
        ("ld.param.u64 %rd2, [p+4096];", "out_of_bounds", "read of 8 bytes at offset 4096 of a parameter of 24 bytes"),
        ("ld.param.u64 %rd2, [out+8];", "out_of_bounds", "read of 8 bytes at offset 8 of a parameter of 8 bytes"),
        ("ld.param.u32 %r2, [p+24];", "out_of_bounds", "read of 4 bytes at offset 24 of a parameter of 24 bytes"),
        ("ld.param.v4.u32 {%r2,%r3,%r4,%r5}, [p+16];", "out_of_bounds", "read of 16 bytes at offset 16 of a parameter"),
        ("ld.param.u32 %r2, [p-4];", "out_of_bounds", "read of 4 bytes at offset -4 of a parameter of 24 bytes"),
        ("ld.param.v4.u32 {%r2,%r3,%r4,%r5}, [p];", "misaligned", "at offset 0 of a parameter of 24 bytes"),
        (
            "ld.param.u32 %r2, [p+2];",
            "misaligned",
            "at offset 2 of a parameter of 24 bytes: the offset is no multiple of 4",
        ),
        (
            "st.param.u32 [p+65536], %r1;",
            "out_of_bounds",
            "write of 4 bytes at offset 65536 of a parameter of 24 bytes",
        ),
        ("st.param.u32 [p], %r1;", "read_only", "write of 4 bytes"),
        ("ld.param.u32 %r2, [4];", "out_of_bounds", "a null pointer, or close to one"),
        ("st.param.u32 [8], %r1;", "out_of_bounds", "a null pointer, or close to one"),
        ("mov.b64 %rd2, p; ld.param.u32 %r2, [%rd2+24];", "out_of_bounds", "32 bytes of parameters"),
    ],
)
def test_an_access_outside_a_kernels_parameter_is_a_fault(machine: Machine, body: str, kind: str, message: str) -> None:
    status, _ = run(machine, HEAD + KERNEL.replace("BODY", body))
    expected = R.CUDA_ERROR_MISALIGNED_ADDRESS if kind == "misaligned" else R.CUDA_ERROR_ILLEGAL_ADDRESS
    assert status == expected
    (report,) = machine.reports
    assert report.kind == kind and message in report.message and report.kernel == "k"


INSIDE = "ld.param.u32 %r1, [argument+8]; st.param.b32 [result], %r1; st.param.b32 [result+4], %r1;"


@pytest.mark.parametrize(
    "body, after, message",
    [
        (INSIDE, "", ""),
        ("ld.param.u32 %r1, [argument+12];", "", "read of 4 bytes at offset 12 of a parameter of 12 bytes"),
        ("ld.param.u64 %rd1, [argument+8];", "", "read of 8 bytes at offset 8 of a parameter of 12 bytes"),
        ("st.param.b32 [result+8], 1;", "", "write of 4 bytes at offset 8 of a parameter of 8 bytes"),
        (INSIDE, "ld.param.b32 %r3, [result0+8];", "read of 4 bytes at offset 8 of a parameter of 8 bytes"),
        (INSIDE, "st.param.b32 [argument0+1000000], 1;", "write of 4 bytes at offset 1000000 of a parameter of 12"),
    ],
)
@pytest.mark.parametrize("inlined", [False, True])
def test_arguments_and_results_of_functions_have_exact_bounds(
    machine: Machine, body: str, after: str, message: str, inlined: bool
) -> None:
    """A function with a barrier is inlined in its caller."""
    function = FUNCTION.replace("BODY", "bar.sync 0; " * inlined + body)
    status, stored = run(machine, HEAD + function + KERNEL.replace("BODY", CALL.replace("AFTER", after)))
    if not message:
        assert (status, stored) == (R.CUDA_SUCCESS, 3) and not machine.reports
        return
    assert status == R.CUDA_ERROR_ILLEGAL_ADDRESS
    (report,) = machine.reports
    assert report.kind == "out_of_bounds" and message in report.message


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize(
    "call, words",
    [
        ("call (small), f, (argument0);", "result of f has 8 bytes, and the call gives 4"),
        ("call (result0), f, (small);", "argument of f has 12 bytes, and the call gives 4"),
        ("call (result0), f, (argument0, argument0);", "arguments"),
        ("call f, (argument0);", "results"),
    ],
)
def test_a_call_with_too_small_or_other_arguments_is_refused(
    machine: Machine, call: str, words: str, inlined: bool
) -> None:
    cuda = machine.driver
    primary(cuda)
    function = FUNCTION.replace("BODY", "bar.sync 0; " * inlined + INSIDE)
    body = CALL.replace("AFTER", "").replace("call (result0), f, (argument0);", ".param .b32 small; " + call)
    ptx = HEAD + function + KERNEL.replace("BODY", body)
    assert code(cuda.cuModuleLoadData(ptx.encode())) == R.CUDA_ERROR_INVALID_PTX
    if not inlined:
        assert words in machine.reports[-1].message
