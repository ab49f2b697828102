# SPDX-License-Identifier: Apache-2.0
"""LayerNorm's forward, with and without weights and bias: against the reference bit for bit, and the reference against
float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fp8_support import BF16, Case, Strided, case, guarded, place, same
from group_support import arithmetic, near

import drvfuse as df
from drvfuse.errors import CaptureError
from drvfuse.reference import coat_layernorm, coat_rmsnorm

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
AFFINE = pytest.mark.parametrize("affine", [True, False], ids=["param", "noparam"])
SHAPES = [
    ((1, 16), 16, E4M3, "bfloat16"),
    ((33, 96), 16, E4M3, "bfloat16"),
    ((5, 100), 16, E5M2, "float32"),
    ((5, 8), 32, E4M3, "bfloat16"),
    ((9, 1040), 64, E4M3, "float32"),
    ((133, 144), 128, E5M2, "bfloat16"),
    ((3, 4624), 32, E4M3, "bfloat16"),
    ((0, 32), 16, E4M3, "bfloat16"),
]


def bias_of(values: Case) -> np.ndarray:
    """Random biases of the dtype of the case's weights."""
    return (values.w[::-1].astype(np.float32) - 1).astype(values.w.dtype)


class Forward:
    """A call of the forward pass, with or without weights and bias, and its results."""

    def __init__(
        self, device, values: Case, affine: bool, QB=16, eps=1e-5, flag=False, arrays=None, bias=None, **rest: Any
    ):
        self.device, self.values, self.QB, self.eps, self.flag = device, values, QB, eps, flag
        self.pair = (values.w, bias_of(values) if bias is None else bias) if affine else (None, None)
        x, s_x = arrays or (device.array(values.x), device.array(values.s_x))
        if affine:
            pair = [device.array(host) for host in self.pair]
            results = df.coat.fp8_layernorm_param_forward(x, s_x, *pair, QB, eps, flag, **rest)
            assert all(given is returned for given, returned in zip(pair, results[3], strict=False))
        else:
            results = df.coat.fp8_layernorm_noparam_forward(x, s_x, QB, eps, flag, **rest)
        self.qy, self.s_y, self.qy_t, (*_, self.mean, self.rstd, warps) = results
        assert warps == 8

    def check(self, values: Case | None = None) -> None:
        """Compare all outputs with the reference, bit for bit. On a GPU mean and rstd may differ by 4 ulp; the other
        outputs must be those that follow from this mean and rstd."""
        x, s_x, *_ = values or self.values
        mean = near(self.device, self.mean.numpy(), coat_layernorm.row_mean(x, s_x, self.QB))
        own = coat_layernorm.row_rstd(x, s_x, self.QB, self.eps, mean)
        rstd = near(self.device, self.rstd.numpy(), own)
        inverse = arithmetic(self.device).reciprocal(self.s_y.numpy().astype(np.float32))
        expected = coat_layernorm.fp8_layernorm_forward(
            x, s_x, *self.pair, self.QB, self.eps, self.flag, mean=mean, rstd=rstd, reciprocal=inverse
        )
        same(self.s_y, expected.s_y, "s_y")
        same(self.qy, expected.qy, "qy")
        same(self.qy_t, expected.qy_t, "qy_t")


@pytest.mark.parametrize("shape,QB,fp8,w", SHAPES)
def test_with_weight_and_bias_the_bits_are_those_of_the_reference(device, rng, shape, QB, fp8, w):
    Forward(device, case(rng, shape, QB, fp8, w), True, QB, 1e-6).check()


@pytest.mark.parametrize("shape,QB,fp8,w", SHAPES[1:6:4])
def test_without_weight_and_bias_the_bits_are_those_of_the_reference(device, rng, shape, QB, fp8, w):
    Forward(device, case(rng, shape, QB, fp8, w), False, QB, 1e-6).check()


@AFFINE
@pytest.mark.parametrize("flag", [False, True])
def test_batches_have_the_bits_of_the_reference(device, rng, affine, flag):
    found = Forward(device, case(rng, (3, 11, 96)), affine, flag=flag)
    assert found.qy_t.shape == ((96, 33) if flag else (3, 96, 11))
    found.check()


@AFFINE
@pytest.mark.parametrize("columns", [80, 96, 100, 160, 1536])
def test_lanes_beyond_the_last_column_do_not_change_the_statistics(device, rng, affine, columns):
    """Rows have a mean far from 0, and lengths that are no powers of two. Their statistics are compared with those that
    numpy computes in float64."""
    values = case(rng, (33, columns))
    x = (values.x.astype(np.float32) / 8 + 100).astype(values.x.dtype)
    s_x = np.full(values.s_x.shape, 0.25, BF16)
    found = Forward(device, values._replace(x=x, s_x=s_x), affine)
    exact = x.astype(np.float64) * 0.25
    away = exact - exact.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((away**2).mean(1) + 1e-5)
    np.testing.assert_allclose(found.mean.numpy(), exact.mean(1), rtol=1e-6)
    np.testing.assert_allclose(found.rstd.numpy(), rstd, rtol=1e-5)
    y = away * rstd[:, None]
    if affine:
        y = y * values.w.astype(np.float64) + bias_of(values).astype(np.float64)
    scale = float(found.s_y.numpy())
    np.testing.assert_allclose(scale, np.abs(y).max() / 448, rtol=2**-8)
    real = found.qy.numpy().astype(np.float64) * scale
    np.testing.assert_allclose(
        real, y, rtol=2**-4 + 1e-4, atol=scale * 2**-10 + 1e-4
    )  # rounding to e4m3 changes a value by at most half a step


@AFFINE
def test_slices_of_wider_arrays_have_the_bits_of_the_reference(device, rng, affine):
    wide = case(rng, (33, 192))
    x, s_x, *_ = place(device, wide)
    with df.config.override(driver=device.driver):
        for first in (48, 40):  # rows begin at multiples of 16 bytes, or of 8 bytes
            arrays = Strided(x, (33, 96), (192, 1), first), Strided(s_x, (33, 6), (12, 1), 3)
            cut = Case(wide.x[:, first : first + 96], wide.s_x[:, 3:9], wide.w[48:144], wide.g)
            Forward(device, cut, affine, arrays=arrays).check()


def special(name: str, values: Case) -> Case:
    x, s_x, w, g = (host.copy() for host in values)
    if name == "zero tensor":
        x[:] = 0
    elif name == "equal elements":
        x[4] = 3
        s_x[4] = 0.5
    elif name == "NaN in x":
        x.view(np.uint8)[5, 9] = 0x7F
    elif name == "NaN in w":
        w[7] = np.nan
    elif name == "all w NaN":
        w[:] = np.nan
    elif name == "infinite w":
        w[7] = np.inf
    elif name == "overflowing row":
        s_x[2] = 1e20
    elif name == "infinite scale":
        s_x[2, 1] = np.inf
        x[2, 16:32] = 1
    elif name == "negative scales and zeros":
        s_x[::2] = -s_x[::2]
        x[1] = -0.0
    return Case(x, s_x, w, g)


SPECIAL = [
    "zero tensor",
    "equal elements",
    "NaN in x",
    "NaN in w",
    "all w NaN",
    "infinite w",
    "overflowing row",
    "infinite scale",
    "negative scales and zeros",
]


@AFFINE
@pytest.mark.parametrize("columns", [96, 1040])  # one warp holds a row, or several warps do
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_have_the_bits_of_the_reference(device, rng, affine, name, columns):
    found = Forward(device, special(name, case(rng, (33, columns))), affine)
    found.check()
    s_y = float(found.s_y.numpy())
    nan = ("NaN in x", "infinite scale", *(("all w NaN",) if affine else ()))
    assert np.isnan(s_y) == (name in nan)
    assert np.isinf(s_y) == (affine and name == "infinite w")
    if name == "zero tensor" and not affine:
        same(found.s_y, coat_rmsnorm.scale_of(0.0, E4M3))


def output_shapes(rows: int, columns: int):
    floats = ((rows,), "float32"), ((rows,), "float32")
    return ((rows, columns), E4M3), ((), "bfloat16"), ((columns, rows), E4M3), *floats


@AFFINE
def test_given_outputs_are_written_and_nothing_outside_them(device, rng, affine):
    values = case(rng, (33, 96))
    made = [guarded(device, *wanted) for wanted in output_shapes(33, 96)]
    arrays = [array for array, _ in made]
    found = Forward(device, values, affine, outputs=arrays)
    assert [found.qy, found.s_y, found.qy_t, found.mean, found.rstd] == arrays
    found.check()
    for _, untouched in made:
        untouched()


@AFFINE
@pytest.mark.parametrize("level", list(df.PDLLevel)[:3])
def test_a_graph_of_dependent_launches_has_the_bits_of_the_reference(device, rng, affine, level):
    values = case(rng, (33, 96))
    arrays = device.array(values.x), device.array(values.s_x)
    both = [[device.empty(*wanted) for wanted in output_shapes(33, 96)] for _ in range(2)]
    workspace = device.zeros(df.coat.fp8_workspace_bytes(96), "uint8")
    Forward(device, values, affine, arrays=arrays)  # the first call compiles
    if affine:
        pair = [device.array(host) for host in (values.w, bias_of(values))]

    def run(outputs):
        options = {"outputs": outputs, "workspace": workspace, "pdl_level": level}
        if affine:
            return df.coat.fp8_layernorm_param_forward(*arrays, *pair, 16, 1e-5, **options)
        return df.coat.fp8_layernorm_noparam_forward(*arrays, 16, 1e-5, **options)

    with df.Graph.capture(device.stream) as graph:
        for outputs in both:
            run(outputs)
        with pytest.raises(CaptureError):
            run(None)
    for again in (values, case(rng, (33, 96))):
        arrays[0].copy_from(again.x)
        arrays[1].copy_from(again.s_x)
        graph.launch(device.stream)
        device.synchronize()
        found = Forward(device, again._replace(w=values.w), affine)
        found.check()
        for outputs in both:
            for array, own in zip(outputs, (found.qy, found.s_y, found.qy_t, found.mean, found.rstd), strict=True):
                same(array, own.numpy())


@pytest.mark.emulated
def test_a_call_moves_the_expected_number_of_bytes(rng):
    """x is read in both phases. In the second phase its scales are read once for each 8 columns, and mean and rstd once
    for each tile of 32 columns.
    """
    rows, columns = 64, 640
    elements = rows * columns
    with df.emu.Machine(devices=1, sm_count=16) as machine:
        device = df.device(0, driver=machine)
        Forward(device, case(rng, (rows, columns)), affine=False)
        device.synchronize()
        record = list(machine.launches)[-1]
    barrier = ("sync/grid_barrier.cuh", "sync/scratch.cuh", "ptx/ordered.cuh")
    lines = [count for (file, _), count in record.counters.lines.items() if not file.endswith(barrier)]
    written, read = (sum(getattr(count, name) for count in lines) for name in ("local_written", "local_read"))
    assert written == 2 * elements + 8 * rows + 2
    assert read == elements + elements // 8 + elements + elements // 8 * 2 + columns // 32 * rows * 8


def test_arguments_that_do_not_match_are_refused(device, rng, refused):
    values = case(rng, (33, 96))
    x, s_x, w, g = place(device, values)
    good = [device.empty(*wanted) for wanted in output_shapes(33, 96)]

    def param(x=x, s_x=s_x, w=w, b=w, QB=16, eps=1e-5, *flag, **rest):
        return lambda: df.coat.fp8_layernorm_param_forward(x, s_x, w, b, QB, eps, *flag, **rest)

    def noparam(x=x, s_x=s_x, QB=16, eps=1e-5, *flag, **rest):
        return lambda: df.coat.fp8_layernorm_noparam_forward(x, s_x, QB, eps, *flag, **rest)

    for call in (param, noparam):
        refused(call(x=device.zeros(96, E4M3)), "x", "[M, N]")
        refused(call(x=g), "x.dtype", "float8_e4m3fn")
        refused(call(s_x=device.zeros((33, 5), "bfloat16")), "s_x", "(33, 6)")
        refused(call(QB=8), "QB", "16")
        refused(call(eps=-1.0), "eps")
        refused(call(transpose_output_2d=1), "transpose_output_2d")
        refused(call(outputs=good[:4]), "outputs", "rstd")
        refused(call(outputs=(x, *good[1:])), "outputs.qy", "overlapping x")
        refused(call(workspace=device.zeros(64, "uint8")), "workspace")
        refused(call(pdl_level=9), "pdl_level")
    refused(param(w=device.zeros(95, "bfloat16")), "w", "(96,)")
    refused(param(b=device.zeros(95, "bfloat16")), "b", "(96,)")
    refused(param(b=device.zeros(96, "float32")), "b.dtype", "as that of w")
    refused(param(w=device.zeros(96, "float16")), "w.dtype", "float32")
