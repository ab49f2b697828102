# SPDX-License-Identifier: Apache-2.0
"""Helpers of the FP8 RMSNorm's tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import drvfuse as df
from drvfuse import dtypes
from drvfuse.reference import bits, coat_rmsnorm

BF16 = dtypes.get("bfloat16").numpy
GUARD = 0xA5


class Case(NamedTuple):
    x: np.ndarray
    s_x: np.ndarray
    w: np.ndarray
    g: np.ndarray


def case(rng: np.random.Generator, shape: tuple[int, ...], QB=16, fp8="float8_e4m3fn", w="bfloat16") -> Case:
    """Random operands of a call. x and s_x look like the results of a quantisation by groups, with scales of several
    magnitudes."""
    columns = shape[-1]
    groups = -(-columns // QB)
    x = (rng.standard_normal(shape).astype(np.float32) * 100).clip(-440, 440).astype(dtypes.get(fp8).numpy)
    s_x = (np.exp2(rng.integers(-9, -4, (*shape[:-1], groups))) * rng.uniform(1, 2, (*shape[:-1], groups))).astype(BF16)
    weight = (1 + 0.3 * rng.standard_normal(columns)).astype(np.float32).astype(dtypes.get(w).numpy)
    return Case(x, s_x, weight, rng.standard_normal(shape).astype(np.float32).astype(BF16))


def place(device: df.Device, values: Case) -> tuple[df.Array, ...]:
    return tuple(device.array(value) for value in values)


def same(actual: Any, expected: np.ndarray, what: str = "") -> None:
    """Assert that `actual` has the bits, shape and dtype of `expected`."""
    host = actual if isinstance(actual, np.ndarray) else actual.numpy()
    assert (host.shape, host.dtype) == (expected.shape, expected.dtype), what
    wrong = np.flatnonzero(bits(host).reshape(-1) != bits(expected).reshape(-1))
    assert not wrong.size, f"{what}: {wrong.size} of {host.size} differ, first at {wrong[0]}"


_RCP = """
extern "C" __global__ void rcp(const unsigned short* s, float* out) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(*out) : "f"(__uint_as_float((unsigned)*s << 16)));
}
"""


def check_forward(device: df.Device, values: Case, results: Any, QB=16, eps=1e-5, transpose_output_2d=False) -> None:
    """Compare all outputs of the forward pass with the reference, bit for bit. On a GPU rstd is computed by approximate
    instructions and may differ by 4 ulp; the other outputs are then compared with those that follow from this rstd."""
    qy, s_y, qy_t, (_, rstd, warps) = results
    own = coat_rmsnorm.row_rstd(values.x, values.s_x, QB, eps)
    given, inverse = None, None
    if device.driver.name == "cuda":
        given = rstd.numpy()
        finite = np.isfinite(own)
        assert np.abs(bits(given).astype(np.int64) - bits(own))[finite].max(initial=0) <= 4
        out = device.empty((), "float32")
        df.compile(_RCP, driver=device.driver)["rcp"].prepare(1, 1, s_y, out)(device.stream)
        inverse = out.numpy()
    expected = coat_rmsnorm.fp8_rmsnorm_forward(
        values.x, values.s_x, values.w, QB, eps, transpose_output_2d, rstd=given, reciprocal=inverse
    )
    same(s_y, expected.s_y, "s_y")
    same(qy, expected.qy, "qy")
    same(qy_t, expected.qy_t, "qy_t")
    if given is None:
        finite = ~np.isnan(own)
        same(rstd.numpy()[finite], own[finite], "rstd")
        assert np.isnan(rstd.numpy()[~finite]).all()
    assert warps == 8


def check_outputs_that_begin_at(shift: int, device: df.Device, values: Case) -> None:
    """Check the results of a forward pass whose qy_t begins `shift` bytes after a multiple of 16, and that no byte
    outside the outputs is written."""
    shape = rows, columns = values.x.shape
    x, s_x, w, _ = place(device, values)
    made = [guarded(device, *one) for one in ((shape, "float8_e4m3fn"), ((), "bfloat16"), ((rows,), "float32"))]
    qy, s_y, rstd = (array for array, _ in made)
    room = device.zeros(columns * rows + 16, "uint8")
    qy_t = df.view(room.ptr + shift, (columns, rows), "float8_e4m3fn", device, owner=room)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=(qy, s_y, qy_t, rstd))
    check_forward(device, values, results)
    for _, untouched in made:
        untouched()
    host = room.numpy()
    assert not host[:shift].any() and not host[shift + columns * rows :].any()


def check_backward(values: Case, v: np.ndarray, results: Any, QB=16) -> None:
    """Compare dx and dw with the reference, bit for bit. `v` is the rstd that the call got."""
    dx, dw = coat_rmsnorm.fp8_rmsnorm_backward(values.x, values.s_x, values.g, values.w, v, QB)
    same(results[0], dx, "dx")
    same(results[1], dw, "dw")


def guarded(device: df.Device, shape: tuple[int, ...], dtype: str) -> tuple[df.Array, Any]:
    """An output with 64 guard bytes before and after it, and a function that asserts that the guard bytes are
    unchanged."""
    element = dtypes.get(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    around = device.array(np.full(nbytes + 128, GUARD, np.uint8))
    inner = df.view(around.ptr + 64, shape, dtype, device, owner=around)

    def untouched() -> None:
        host = around.numpy()
        assert (host[:64] == GUARD).all() and (host[64 + nbytes :] == GUARD).all()

    return inner, untouched


class Strided:
    """A foreign array of any shape and strides in the memory of `array`. Strides and `offset` are in elements."""

    def __init__(self, array: df.Array, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> None:
        self.array, self.dtype = array, str(array.dtype)
        size = array.dtype.itemsize
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__,
            "shape": shape,
            "strides": tuple(step * size for step in strides),
            "data": (array.ptr + offset * size, False),
        }
