# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: each level, with producers that are late and a consumer that is early."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, bits, case, place, same

import drvfuse as df
from drvfuse.reference import coat_rmsnorm

SHAPE = (33, 96)
LEVELS = [df.PDLLevel.OFF, df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING]

HELPERS = r"""
// Lets its dependents start at once, waits, then copies.
extern "C" __global__ void late(const unsigned char* from, unsigned char* to, int count, unsigned long long ns) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Waits for what is in front of it, then copies.
extern "C" __global__ void consume(const unsigned char* from, unsigned char* to, int count) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.fixture(scope="module", params=[0, 1], ids=["late", "early"])
def device(request, driver):
    """On the emulator, one whose dependent launches start as late as possible and one as early as allowed."""
    if driver == "cuda":
        yield df.device(0, driver=driver)
        return
    with df.emu.Machine(devices=1, sm_count=16, seed=request.param) as machine:
        yield df.device(0, driver=machine)
        assert not machine.reports


@pytest.fixture
def module(device):
    return df.compile(HELPERS, driver=device.driver)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["forward", "forward-rows", "backward", "gradients", "division"])
def test_a_late_producer_and_an_early_consumer(device, module, rng, name, level):
    shape = (8 * device.sm_count + 5, 96) if name == "forward-rows" else SHAPE  # so many have a kernel of their own
    forward = name.startswith("forward")
    values = case(rng, shape)
    right = place(device, values)
    wrong = [device.array(np.full(host.shape, 0.5, np.float32).astype(host.dtype)) for host in values]
    x, s_x, w, g = wrong
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    v, right_v = device.zeros(shape[0], "float32"), device.array(rstd)
    qy, qy_t = device.empty(shape, "float8_e4m3fn"), device.empty(shape[::-1], "float8_e4m3fn")
    s_y, out_v = device.empty((), "bfloat16"), device.empty(shape[0], "float32")
    dx, dw = device.empty(shape, "bfloat16"), device.empty(shape[1], "bfloat16")

    def run():
        if forward:
            df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=(qy, s_y, qy_t, out_v), pdl_level=level)
            return
        if name == "division":
            df.coat.fp8_division_transpose(g, 16, "E4M3", outputs=(qy, s_y, qy_t), pdl_level=level)
            return
        gradients = g if name == "backward" else [g, g]
        df.coat.fp8_rmsnorm_backward(x, s_x, gradients, w, v, 16, outputs=(dx, dw), pdl_level=level)

    run()  # compiled and loaded, with a workspace, on what is wrong
    device.synchronize()
    results = (dx, dw) if name in ("backward", "gradients") else (qy, qy_t)
    copies = [device.zeros(result.shape, result.dtype) for result in results]
    for source, target in zip((*right, right_v), (x, s_x, w, g, v), strict=True):
        module["late"].prepare(1, 64, source, target, source.nbytes, 50_000, pdl=True)(device.stream)
    run()
    for result, copy in zip(results, copies, strict=True):
        module["consume"].prepare(1, 64, result, copy, result.nbytes, pdl=True)(device.stream)
    device.synchronize()
    for result, copy in zip(results, copies, strict=True):
        assert (bits(result.numpy()) == bits(copy.numpy())).all()
    if forward or name == "division":
        if forward:
            same(s_y, coat_rmsnorm.fp8_rmsnorm_forward(values.x, values.s_x, values.w, 16, 1e-5, True).s_y)
        else:
            same(s_y, coat_rmsnorm.fp8_division(values.g, "float8_e4m3fn")[1])
        same(qy_t, np.ascontiguousarray(qy.numpy().T))
    else:
        total = values.g if name == "backward" else (2 * values.g.astype(np.float32)).astype(BF16)
        expected = coat_rmsnorm.fp8_rmsnorm_backward(values.x, values.s_x, total, values.w, rstd, 16)
        for array, host in zip(copies, expected, strict=True):
            same(array, host)
