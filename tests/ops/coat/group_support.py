# SPDX-License-Identifier: Apache-2.0
"""The approximate instructions of the device under test as numpy functions, so that expected results are bit-exact."""

from __future__ import annotations

import numpy as np
from fp8_support import bits

import drvfuse as df
from drvfuse.reference.coat_groups import EXACT, Arithmetic

_SOURCE = """
extern "C" __global__ void divide(const float* a, const float* b, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("div.full.f32 %0, %1, %2;" : "=f"(out[i]) : "f"(a[i]), "f"(b[i]));
}
extern "C" __global__ void reciprocal(const float* a, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out[i]) : "f"(a[i]));
}
"""


def arithmetic(device: df.Device) -> Arithmetic:
    """`div.full` and `rcp.approx` as the device computes them. The emulated device rounds both correctly; a GPU is
    asked for each result by a small kernel."""
    if device.driver.name == "emu":
        return EXACT
    module = df.compile(_SOURCE, driver=device.driver)

    def run(name: str, *operands: np.ndarray) -> np.ndarray:
        hosts = np.broadcast_arrays(*(np.asarray(operand, np.float32) for operand in operands))
        if not hosts[0].size:
            return hosts[0].copy()
        out = device.empty(hosts[0].shape, "float32")
        count = np.uint32(hosts[0].size)
        arrays = [device.array(np.ascontiguousarray(host)) for host in hosts]
        module[name].prepare(-(-int(count) // 128), 128, *arrays, out, count)(device.stream)
        return out.numpy()

    return Arithmetic(lambda a, b: run("divide", a, b), lambda a: run("reciprocal", a))


def near(device: df.Device, found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Assert that `found` equals `expected`, on a GPU within 4 ulp, and is NaN where `expected` is. Returns `found`."""
    numbers = ~np.isnan(expected)
    apart = np.abs(bits(found).astype(np.int64) - bits(expected))[numbers].max(initial=0)
    assert apart <= (4 if device.driver.name == "cuda" else 0)
    assert np.isnan(found[~numbers]).all()
    return found
