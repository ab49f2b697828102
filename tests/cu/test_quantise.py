# SPDX-License-Identifier: Apache-2.0
"""cu/common/quantise.cuh in a kernel of its own: rules, codes and layouts have the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest

import drvfuse as df
from drvfuse import dtypes, reference
from drvfuse.ops.call.specialisation import CU

Q = df.Quantisation
FORMS = {
    "rows": (Q.per_row(scales="bfloat16", upper_bound=3.0), 8),
    "groups": (Q.per_group(64, "float8_e5m2", layout="column", upper_bound=100.0), 8),
    "e8m0": (Q.per_group(128, scales="float8_e8m0fnu", layout="tiles"), 4),
    "e8m0_e5m2": (Q.mxfp8("float8_e5m2", layout="column"), 8),
    "fp4": (Q.nvfp4(0.125, "tiles"), 8),
    "fp4_of_floats": (Q.nvfp4(0.125), 4),
}
SOURCE = """
#include "common/quantise.cuh"

// A warp has a row of 32 * W columns, whose groups are its lanes' packs; rows of one scale are one group.
template <typename Out, typename Scale, int GROUP, ScaleLayout LAYOUT, int W>
__device__ void quantise(const float* y, char* output, char* scales, int rows, float given) {
    const int row = blockIdx.x, lane = threadIdx.x, groups = 32 * W / GROUP;
    float v[W];
    u32 maximum = 0;
    for (int k = 0; k < W; ++k) {
        v[k] = y[(i64(row) * 32 + lane) * W + k];
        maximum = max(maximum, __float_as_uint(v[k]) & 0x7fffffffu);
    }
    const Quantisation q = quantisation<Out, Scale>(__uint_as_float(group_max<GROUP, W>(maximum)), given);
    for (int k = 0; k < W; ++k) v[k] = __fmul_rn(v[k], q.inverse);
    Pack<Out, W> pack;
    from_float(pack, v);
    store_pack(output + Bytes<Out>::of((i64(row) * 32 + lane) * W), pack);
    const int group = lane / (GROUP / W);
    Scale* scale = reinterpret_cast<Scale*>(scales) + scale_index<LAYOUT>(row, group, rows, groups);
    if (lane % (GROUP / W) == 0) store_scalar(scale, q.scale);
    clear_scale_padding<Scale, LAYOUT>(scales, rows, groups, row * 32 + lane, gridDim.x * 32);
}
"""


PADDING = """
extern "C" __global__ void tiles(char* scales, int rows, int groups) {
    clear_scale_padding<e4m3, ScaleLayout::tiles>(scales, rows, groups, threadIdx.x + 64 * blockIdx.x, 192);
}
extern "C" __global__ void column(char* scales, int rows, int groups) {
    clear_scale_padding<float, ScaleLayout::column>(scales, rows, groups, threadIdx.x + 64 * blockIdx.x, 192);
}
"""


def kernel_text(name: str) -> str:
    made, width = FORMS[name]
    given = dict(made.definitions(dtypes.get("float32")))
    layout = f"ScaleLayout({given['DRVFUSE_SCALES_LAYOUT']})"
    types = f"{given['DRVFUSE_OUT_DTYPE']}, {given['DRVFUSE_SCALES_DTYPE']}, {made.group or 32 * width}, {layout}"
    return (
        f'extern "C" __global__ void {name}(const float* y, char* output, char* scales, int rows, float given) {{\n'
        f"    quantise<{types}, {width}>(y, output, scales, rows, given);\n}}\n"
    )


@pytest.fixture(scope="module")
def module(driver):
    text = SOURCE + PADDING + "".join(map(kernel_text, FORMS))
    return df.compile(text, driver=driver, include=(str(CU),), options=("--fmad=false",))


def values(rng, rows, columns):
    """Rows of values of every magnitude, with zeros, ties of FP4, an infinity and a NaN."""
    y = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-140, 120, (rows, 1)))
    y[2] = 0
    # The largest value of each group below is 3. Divided by the scale that follows from it, the others are FP4 values,
    # ties between two FP4 values, and the next floats above and below.
    y[4:8] = rng.integers(-24, 25, (4, columns)) * 0.125
    y[5:7] = np.nextafter(y[5:7].astype(np.float32), np.float32([[9], [-9]]))
    y[4:8, ::16] = 3
    y[8:10] = rng.standard_normal((2, columns))
    y[8, 70], y[9, 33] = -np.inf, np.nan
    return y.astype(np.float32)


@pytest.mark.parametrize("name", FORMS)
def test_a_kernel_quantises_with_the_bits_of_the_reference(module, driver, rng, name):
    made, width = FORMS[name]
    device, rows = df.device(0, driver=driver), 37
    y = values(rng, rows, 32 * width)
    want = reference.quantise(y, made)
    output = device.array(np.full(want.output.shape, 0xA5, np.uint8))
    scales = device.array(np.full(want.scales.nbytes, 0xA5, np.uint8))
    module[name].prepare(rows, 32, device.array(y), output, scales, rows, made.given)(device.stream)
    assert output.numpy().tolist() == want.output.view(np.uint8).tolist()
    assert scales.numpy().tolist() == want.scales.reshape(-1).view(np.uint8).tolist()


LAYOUTS = {"tiles": Q.mxfp8(layout="tiles"), "column": Q.per_group(64, layout="column")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_without_a_scale_is_padding(module, driver, layout):
    made, device = LAYOUTS[layout], df.device(0, driver=driver)
    unsigned = np.dtype(f"u{made.scales.itemsize}")
    filled = 0xA5A5A5A5 >> (32 - 8 * unsigned.itemsize)
    for rows, groups in ((1, 1), (3, 4), (31, 7), (33, 64), (97, 2), (127, 12), (128, 5), (128, 8), (290, 65)):
        want = reference.quantised.arrange(np.full((rows, groups), filled, unsigned), made).reshape(-1)
        found = device.array(np.full(want.size, filled, unsigned))
        module[layout].prepare(3, 64, found, rows, groups)(device.stream)
        assert found.numpy().tolist() == want.tolist(), (rows, groups)


@pytest.mark.emulated
def test_the_padding_of_tiles_is_cleared_in_16_byte_stores():
    """The 128x4 tiles hold the scales of a single row of 512 groups; all else is padding."""
    with df.emu.Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        module = df.compile('#include "common/quantise.cuh"' + PADDING, driver=machine, include=(str(CU),))
        module["tiles"].prepare(3, 64, device.zeros(128 * 512, "uint8"), 1, 512)(device.stream)
        device.synchronize()
        total = machine.launches[-1].counters.total
    assert total.local_written == 127 * 512
    # A tile has 32 pieces of 16 bytes. One of them holds 4 scales of the row and 12 bytes of padding; the others are
    # padding.
    assert total.accesses == (31 + 3) * 128
