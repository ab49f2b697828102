# SPDX-License-Identifier: Apache-2.0
"""Instructions that are not emulated are refused by name, and only for the kernels that use them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine

pytestmark = pytest.mark.emulated

HEAD = """.version 8.8
.target {target}
.address_size 64
.global .texref picture;
"""
KERNEL = """.visible .entry {name}(.param .u64 p) {{
    .reg .pred p0; .reg .b16 h; .reg .b32 a, b, c, d, e, f, g, i; .reg .b64 l, m, n; .reg .f32 x, y; .reg .f64 u, v;
    .shared .align 128 .b8 s[256];
    {body}
    ret;
}}
"""
REFUSED = {
    "wgmma.fence.sync.aligned;": "wgmma",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {x, y, x, y}, l, m, p0, 1, 1, 0, 0;": "wgmma",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [a], 32;": "tcgen05",
    "tcgen05.mma.cta_group::1.kind::f16 [a], l, m, b, p0;": "tcgen05",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [a], [l, {b, c}], [d];": "tensor",
    "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [l, {a}], [b];": "tensor",
    "tensormap.replace.tile.global_address.global.b1024.b64 [l], m;": "tensor",
    "tex.2d.v4.f32.f32 {x, y, x, y}, [picture, {x, y}];": "textures",
    "suld.b.1d.b32.trap a, [l, {b}];": "textures",
    "sust.b.2d.b32.trap [l, {a, b}], c;": "textures",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {u, v}, {u}, {v}, {u, v};": "fp64",
    "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {a, b}, {c}, {d}, {a, b};": "4-bit",
    "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {a, b}, {c}, {d}, {a, b};": "1-bit",
    "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {x, y, x, y}, {a, b}, {c, d}, {x, y, x, y}, e, 0;": "sparse",
    "wmma.load.a.sync.aligned.row.m8n8k4.f64 {u}, [l];": "fp64",
}
FINE = "ld.param.u64 l, [p]; st.global.b32 [l], 5;"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine(devices=1, arch="sm_100a", sm_count=2) as made:
        ok(made.driver.cuInit(0))
        primary(made.driver)
        yield made


def load(machine: Machine, *bodies: str) -> tuple[Any, ...]:
    text = HEAD.format(target="sm_100a" if any("tcgen05" in b for b in bodies) else "sm_90")
    text += "".join(KERNEL.format(name=f"k{i}", body=body) for i, body in enumerate(bodies))
    machine.reports.clear()
    return machine.driver.cuModuleLoadData(text.encode() + b"\0")


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.split()[0].rstrip(";"))
def test_a_module_of_refused_kernels_is_refused_by_name(machine: Machine, body: str) -> None:
    assert code(load(machine, body)) == R.CUDA_ERROR_NOT_SUPPORTED
    (report,) = machine.reports
    opcode = body.split()[0].rstrip(";")
    assert report.kind == "unsupported" and report.kernel == "k0" and report.line
    assert REFUSED[body] in report.message and opcode in report.message


def test_other_kernels_of_a_module_with_refused_ones_run(machine: Machine) -> None:
    cuda = machine.driver
    module = ok(load(machine, FINE, "wgmma.fence.sync.aligned;", FINE))
    assert not machine.reports
    memory = ok(cuda.cuMemAlloc(4))
    for name, expected in ((b"k0", R.CUDA_SUCCESS), (b"k1", R.CUDA_ERROR_NOT_SUPPORTED), (b"k2", R.CUDA_SUCCESS)):
        kernel = ok(cuda.cuModuleGetFunction(module, name))
        arguments = ((int(memory),), (ctypes.c_uint64,))
        assert code(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)) == expected
    ok(cuda.cuCtxSynchronize())
    (report,) = machine.reports
    assert report.kind == "unsupported" and report.kernel == "k1" and "wgmma" in report.message


def test_a_kernel_that_calls_a_function_with_a_refused_instruction_is_refused(machine: Machine) -> None:
    text = HEAD.format(target="sm_90") + ".func inner() { wgmma.wait_group.sync.aligned 0; ret; }\n"
    text += ".func outer() { call inner; ret; }\n"
    text += KERNEL.format(name="k0", body="call outer;") + KERNEL.format(name="k1", body=FINE)
    machine.reports.clear()
    module = ok(machine.driver.cuModuleLoadData(text.encode() + b"\0"))
    kernel = ok(machine.driver.cuModuleGetFunction(module, b"k0"))
    launched = machine.driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((0,), (ctypes.c_uint64,)), 0)
    assert code(launched) == R.CUDA_ERROR_NOT_SUPPORTED
    assert "wgmma.wait_group" in machine.reports[0].message


def test_an_unknown_instruction_is_invalid_ptx(machine: Machine) -> None:
    assert code(load(machine, "frobnicate.b32 a, b;", FINE)) == R.CUDA_ERROR_INVALID_PTX
