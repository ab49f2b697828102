# SPDX-License-Identifier: Apache-2.0
"""Vector loads with unused elements, which compilers make where they know that the whole vector is allocated."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine

pytestmark = pytest.mark.emulated

KERNEL = """.version 8.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 out) {{
    .shared .align 16 .b8 s[16]; .reg .b32 t, a, b, c, d; .reg .b16 e, f, g, h; .reg .b64 o; .reg .pred p;
    ld.param.u64 o, [out]; mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p st.shared.v2.b32 [s], {{7, 8}};
    @p st.shared.b8 [s+8], 9;
    bar.sync 0;
    setp.eq.u32 p, t, 40;
    @p st.shared.b32 [s+12], t;
    {load}
    setp.eq.u32 p, t, 0; @p st.global.b32 [o], a;
    ret;
}}
"""
VECTOR = "ld.shared.v4.b32 {{a, b, {}, {}}}, [s]; add.u32 a, a, b;"


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (VECTOR.format("c", "d"), None),
        (VECTOR.format("_", "_"), None),
        (VECTOR.format("c", "d") + "add.u32 a, a, c;", "uninitialised"),
        (VECTOR.format("c", "d") + "@p add.u32 a, a, d;", "uninitialised"),
        ("ld.shared.v4.u8 {e, f, g, h}, [s+8]; cvt.u32.u16 a, e;", None),
        ("ld.shared.v4.u8 {e, f, g, h}, [s+8]; cvt.u32.u16 a, f;", "uninitialised"),
        ("ld.shared.v2.b32 {a, b}, [s+12];", "misaligned"),
        ("ld.shared.b32 a, [s+12];", "uninitialised"),
    ],
)
def test_only_the_elements_of_a_vector_load_that_are_used_must_be_initialised(load: str, found: str | None) -> None:
    with Machine(devices=1, race=True, sm_count=1) as machine:
        ended_well = _run(machine, load) == R.CUDA_SUCCESS
        assert ended_well == (found is None)
        kinds = [report.kind for report in machine.reports]
        assert found in kinds if found else not kinds  # the unused elements must not race


def _run(machine: Machine, load: str) -> Any:
    cuda = machine.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    module = ok(cuda.cuModuleLoadData(KERNEL.format(load=load.replace("{{", "{").replace("}}", "}")).encode() + b"\0"))
    kernel, out = ok(cuda.cuModuleGetFunction(module, b"k")), int(ok(cuda.cuMemAlloc(4)))
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, ((out,), (ctypes.c_uint64,)), 0))
    return code(cuda.cuCtxSynchronize())
