# SPDX-License-Identifier: Apache-2.0
"""Whatever the text of a module, the driver's calls give a CUresult, within seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_helpers import R, code, primary

SCRIPT = Path(__file__).parents[1] / "fuzz_ptx.py"
CASES = 400
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
KERNEL = ".visible .entry k(PARAMETERS) DIRECTIVES {{ .reg .b64 %rd<4>; .reg .b32 %r<4>; {body} ret; }}"


def kernel(body: str = "", parameters: str = "", directives: str = "") -> str:
    return HEAD + KERNEL.format(body=body).replace("PARAMETERS", parameters).replace("DIRECTIVES", directives)


CALLED = ".func (.param .b32 result) f() { st.param.b32 [result], 1; ret; }\n"
CALL = "{{ .param .b32 retval0; call (retval0), f; ld.param.b32 %r1, [retval0{offset}]; }}"


def calling(offset: str) -> str:
    return kernel(CALL.format(offset=offset)).replace(HEAD, HEAD + CALLED)


@pytest.mark.parametrize(
    "ptx, words",
    [
        (kernel(".reg .b64 %x<4294967296>;"), "more than 262144 registers"),
        (kernel("".join(f".reg .b64 %x{i}<99999>;" for i in range(9))), "more than 262144 registers"),
        (kernel(directives=".maxntid 999999999,99999,99999"), ".maxntid 999999999, 99999, 99999 is no number"),
        (kernel(directives=".maxntid 0"), ".maxntid 0 is no number of threads from 1 to 1024"),
        (kernel(directives=".reqntid 32, 33"), ".reqntid 32, 33 is no number of threads from 1 to 1024"),
        (kernel(directives=".minnctapersm 99999999999"), "above 2147483647"),
        (kernel(directives=".maxntid " + "9" * 5000), "unreadable"),
        (kernel(parameters=".param .b8 p[1<<62]"), "unsupported declaration"),
        (kernel(parameters=f".param .b8 p[{1 << 62}]"), "above the limit 65536"),
        (kernel(parameters=".param .b8 p[20000], .param .b8 q[20000]"), "40000 bytes, above the limit 32764"),
        (kernel(parameters=".param .align 3 .b8 p[8]"), "an alignment of 3"),
        (kernel(parameters=f".param .align {1 << 40} .b8 p[8]"), "an alignment of 1099511627776"),
        (kernel(".local .align 0 .b8 x[8];"), "an alignment of 0"),
        (kernel(".local .b8 x[99999999999999999999];"), "above the limit"),
        (kernel("mov.b64 %rd1, " + "(" * 5000 + ")" * 5000 + ";"), ""),
        (kernel("mov.b64 %rd1, " + "-" * 5000 + "%rd2;"), ""),
        (kernel("mov.b64 %rd1, " + "!" * 5000 + "%rd2;"), ""),
        (kernel("{" * 5000 + "}" * 5000), "scopes inside one another"),
        (kernel("mov.b64 %rd1, " + "9" * 5000 + ";"), ""),
        (kernel("add.f32 %r1, %r2;"), ""),
        (calling("+1e9"), "the offset 1e9 is no integer of 64 bits"),
        (calling(f"+{1 << 63}"), "is no integer of 64 bits"),
        (HEAD.replace("sm_90", "sm_" + "9" * 5000) + "\n", ""),
        (HEAD.replace("8.0", "9" * 5000 + ".0") + "\n", ""),
        (HEAD + f".global .b8 x[{1 << 62}];", ""),
        (HEAD + ".section .debug_info {", "unreadable"),
    ],
)  # fmt: skip
def test_absurd_numbers_sizes_and_nesting_are_refused(cuda: Any, machine: Any, ptx: str, words: str) -> None:
    primary(cuda)
    assert code(cuda.cuModuleLoadData(ptx.encode())) != R.CUDA_SUCCESS
    assert words in (machine.reports[-1].message if words else "")


@pytest.mark.parametrize("offset", ["", "+4", "+4096"])
def test_a_call_beside_them_is_loaded(cuda: Any, offset: str) -> None:
    primary(cuda)
    assert code(cuda.cuModuleLoadData(calling(offset).encode())) == R.CUDA_SUCCESS


def test_a_huge_variable_with_an_initial_value_is_loaded_and_zero(cuda: Any) -> None:
    primary(cuda)
    ptx = HEAD + f".global .align 4 .u32 table[{1 << 31}] = {{1, 2, 3}};" + kernel().removeprefix(HEAD)
    result = cuda.cuModuleLoadData(ptx.encode())
    assert code(result) == R.CUDA_SUCCESS
    _, address, nbytes = cuda.cuModuleGetGlobal(result[1], b"table")
    last = bytearray(b"xxxx")
    assert nbytes == 8 << 30 and code(cuda.cuMemcpyDtoH(last, int(address) + nbytes - 4, 4)) == R.CUDA_SUCCESS
    assert last == bytes(4)


def test_a_loop_with_accesses_to_local_memory_alone_ends(cuda: Any, machine: Any, monkeypatch: Any) -> None:
    primary(cuda)
    machine.engine._state.loop_limit = 10_000
    body = ".local .b32 x; loop: st.local.u32 [x], 1; bra loop;"
    function = cuda.cuModuleGetFunction(cuda.cuModuleLoadData(kernel(body).encode())[1], b"k")[1]
    assert code(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)) == R.CUDA_SUCCESS
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    assert [report.kind for report in machine.reports] == ["endless"]


def test_mutated_modules_give_a_result_and_harm_nothing() -> None:
    """In a process of its own, as a fault of native code would end it."""
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SCRIPT), "0", str(CASES)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    assert run.stdout.split()[-1] == str(CASES - 1)
