# SPDX-License-Identifier: Apache-2.0
"""The backward pass of LayerNorm, with and without weights and bias: against the reference bit for bit, and against
float64."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, Case, Strided, case, guarded, place, same
from test_layernorm import AFFINE, SHAPES, bias_of

import drvfuse as df
from drvfuse.errors import CaptureError, Unsupported
from drvfuse.reference import coat_layernorm, coat_rmsnorm


def saved(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A random mean and rstd for each row."""
    return rng.standard_normal(rows, np.float32), (0.5 + rng.random(rows, np.float32)).astype(np.float32)


def backward(device, values: Case, affine: bool, saves, QB=16, g=None, arrays=None, **rest) -> tuple:
    x, s_x = arrays or (device.array(values.x), device.array(values.s_x))
    g = device.array(values.g) if g is None else g
    kept = [host if isinstance(host, df.Array) else device.array(host) for host in saves]
    if not affine:
        return (df.coat.fp8_layernorm_noparam_backward(x, s_x, g, QB, *kept, **rest),)
    pair = device.array(values.w), device.array(bias_of(values))
    return df.coat.fp8_layernorm_param_backward(x, s_x, g, QB, *pair, *kept, **rest)


def check(values: Case, affine: bool, saves, found, QB=16, g=None) -> None:
    """Compare dx, dw and db with the reference, bit for bit."""
    g = values.g if g is None else g
    w = values.w if affine else None
    expected = coat_layernorm.fp8_layernorm_backward(values.x, values.s_x, g, w, *saves, QB)
    for name, array, result in zip(("dx", "dw", "db"), found, expected, strict=False):
        same(array, result, name)
    assert len(found) == len(expected)


@pytest.mark.parametrize("shape,QB,fp8,w", [*SHAPES, ((300, 33), 16, "float8_e4m3fn", "bfloat16")])
def test_with_weight_and_bias_the_bits_are_those_of_the_reference(device, rng, shape, QB, fp8, w):
    values = case(rng, shape, QB, fp8, w)
    saves = saved(rng, shape[0])
    check(values, True, saves, backward(device, values, True, saves, QB), QB)


@pytest.mark.parametrize("shape,QB,fp8,w", [*SHAPES[1:6:4], ((0, 96), 16, "float8_e4m3fn", "bfloat16")])
def test_without_weight_and_bias_the_bits_are_those_of_the_reference(device, rng, shape, QB, fp8, w):
    values = case(rng, shape, QB, fp8, w)
    saves = saved(rng, shape[0])
    check(values, False, saves, backward(device, values, False, saves, QB), QB)


@AFFINE
def test_batches_and_added_gradients_have_the_bits_of_the_reference(device, rng, affine):
    values = case(rng, (3, 7, 96))
    hosts = [rng.standard_normal((3, 7, 96), np.float32).astype(BF16) for _ in range(3)]
    saves = saved(rng, 21)
    found = backward(device, values, affine, saves, g=[device.array(host) for host in hosts])
    assert found[0].shape == (3, 7, 96)
    check(values, affine, saves, found, g=hosts)


@AFFINE
@pytest.mark.parametrize("columns", [80, 160])
def test_the_gradient_agrees_with_the_forward_in_float64(device, rng, affine, columns):
    """Forward and backward run on rows with a mean far from 0 and lengths that are no powers of two."""
    values = case(rng, (33, columns))
    x = (values.x.astype(np.float32) / 8 + 100).astype(values.x.dtype)
    values = values._replace(x=x, s_x=np.full(values.s_x.shape, 0.25, BF16))
    *_, mean, rstd, _ = df.coat.fp8_layernorm_noparam_forward(device.array(x), device.array(values.s_x), 16, 1e-5)[3]
    found = backward(device, values, affine, (mean, rstd))
    exact = x.astype(np.float64) * 0.25
    away = exact - exact.mean(1, keepdims=True)
    inverse = 1 / np.sqrt((away**2).mean(1, keepdims=True) + 1e-5)
    xhat, g = away * inverse, values.g.astype(np.float64)
    wdy = g * values.w.astype(np.float64) if affine else g
    dx = (wdy - xhat * (xhat * wdy).mean(1, keepdims=True) - wdy.mean(1, keepdims=True)) * inverse
    expected = (dx, (g * xhat).sum(0), g.sum(0))
    for array, result in zip(found, expected, strict=False):
        apart = array.numpy().astype(np.float64) - result
        assert np.linalg.norm(apart) <= 2.5e-3 * np.linalg.norm(result)  # one rounding to bfloat16


@AFFINE
def test_slices_of_wider_arrays_have_the_bits_of_the_reference(device, rng, affine):
    wide = case(rng, (33, 192))
    x, s_x, _, g = place(device, wide)
    saves = saved(rng, 33)
    with df.config.override(driver=device.driver):
        for first in (48, 40):
            arrays = Strided(x, (33, 96), (192, 1), first), Strided(s_x, (33, 6), (12, 1), 3)
            columns = slice(first, first + 96)
            cut = Case(wide.x[:, columns], wide.s_x[:, 3:9], wide.w[48:144], wide.g[:, columns])
            gradient = Strided(g, (33, 96), (192, 1), first)
            check(cut, affine, saves, backward(device, cut, affine, saves, g=gradient, arrays=arrays))


def test_sums_have_the_same_bits_in_every_run_and_on_every_grid(device, driver, rng):
    values = case(rng, (150, 64), w="float32")
    saves = saved(rng, 150)
    runs = 50 if driver == "cuda" else 3
    results = [backward(device, values, True, saves) for _ in range(runs)]
    found = {dw.numpy().tobytes() + db.numpy().tobytes() for _, dw, db in results}
    if driver == "emu":
        for seed, count in ((1, 3), (2, 132)):
            with df.emu.Machine(devices=1, sm_count=count, seed=seed) as machine:
                _, dw, db = backward(df.device(0, driver=machine), values, True, saves)
                found.add(dw.numpy().tobytes() + db.numpy().tobytes())
    assert len(found) == 1
    both = np.frombuffer(found.pop(), np.float32).reshape(2, 64)
    xhat = coat_rmsnorm.dequantise(values.x, values.s_x, 16).astype(np.float64)
    xhat = (xhat - saves[0][:, None]) * saves[1][:, None]
    g = values.g.astype(np.float64)
    for sums, exact in zip(both, ((g * xhat).sum(0), g.sum(0)), strict=True):
        assert np.linalg.norm(sums - exact) <= 2e-6 * np.linalg.norm(exact)  # all operations are fp32


@AFFINE
@pytest.mark.parametrize("what", ["x", "scale", "g", "mean", "rstd", "w"])
def test_nans_have_the_bits_of_the_reference(device, rng, affine, what):
    values = case(rng, (33, 96))
    x, s_x, w, g = (host.copy() for host in values)
    mean, rstd = saved(rng, 33)
    if what == "x":
        x.view(np.uint8)[5, 9] = 0x7F
    elif what == "scale":
        s_x[5, 1] = np.nan
    elif what == "g":
        g[5, 9] = np.nan
    elif what == "w":
        w[9] = np.nan
    else:
        (mean if what == "mean" else rstd)[5] = np.nan
    values = Case(x, s_x, w, g)
    found = backward(device, values, affine, (mean, rstd))
    check(values, affine, (mean, rstd), found)
    nan = np.isnan(found[0].numpy().astype(np.float32))
    assert nan.all() if what == "w" and affine else nan.any(axis=1).sum() == (0 if what == "w" else 1)


# The sums of db begin at an even column of the workspace, also if the number of columns is odd.
@AFFINE
@pytest.mark.parametrize("columns", [96, 97])
def test_given_outputs_are_written_and_nothing_outside_them(device, rng, affine, columns):
    values = case(rng, (33, columns))
    saves = saved(rng, 33)
    wanted = [((33, columns), "bfloat16"), *([((columns,), "bfloat16")] * (2 if affine else 0))]
    made = [guarded(device, *one) for one in wanted]
    arrays = [array for array, _ in made]
    space = {}
    if affine:
        nbytes = df.coat.fp8_workspace_bytes(2 * columns)
        space["workspace"], around = guarded(device, (nbytes,), "uint8")
        space["workspace"].copy_from(np.zeros(nbytes, np.uint8))
        made.append((space["workspace"], around))
    found = backward(device, values, affine, saves, outputs=arrays, **space)
    assert list(found) == arrays
    check(values, affine, saves, found)
    for _, untouched in made:
        untouched()


@AFFINE
@pytest.mark.parametrize("level", [df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_a_graph_of_dependent_launches_has_the_bits_of_the_reference(device, rng, affine, level):
    values = case(rng, (33, 96))
    x, s_x, w, g = place(device, values)
    saves = saved(rng, 33)
    kept = [device.array(host) for host in saves]
    bias = device.array(bias_of(values))
    # The first call compiles and makes the workspace.
    once = backward(device, values, affine, kept, g=g, arrays=(x, s_x))
    outputs = [device.empty(array.shape, array.dtype) for array in once]
    options = {"outputs": outputs, "pdl_level": level}

    def run(**rest):
        if affine:
            return df.coat.fp8_layernorm_param_backward(x, s_x, g, 16, w, bias, *kept, **rest)
        return (df.coat.fp8_layernorm_noparam_backward(x, s_x, g, 16, *kept, **rest),)

    with df.Graph.capture(device.stream) as graph:
        for _ in range(2):
            run(**options)
        with pytest.raises(CaptureError):
            run()
    for again in (values.g, rng.standard_normal((33, 96), np.float32).astype(BF16)):
        g.copy_from(again)
        graph.launch(device.stream)
        device.synchronize()
        check(values._replace(g=again), affine, saves, outputs)


@AFFINE
def test_arguments_that_do_not_match_are_refused(device, rng, refused, affine):
    values = case(rng, (33, 96))
    x, s_x, w, g = place(device, values)
    kept = [device.array(host) for host in saved(rng, 33)]

    def call(x=x, s_x=s_x, g=g, w=w, b=w, m=kept[0], v=kept[1], QB=16, **rest):
        if affine:
            return lambda: df.coat.fp8_layernorm_param_backward(x, s_x, g, QB, w, b, m, v, **rest)
        return lambda: df.coat.fp8_layernorm_noparam_backward(x, s_x, g, QB, m, v, **rest)

    refused(call(x=g), "x.dtype")
    refused(call(s_x=device.zeros((33, 5), "bfloat16")), "s_x", "(33, 6)")
    refused(call(g=device.zeros((33, 95), "bfloat16")), "g", "(33, 96)")
    refused(call(g=[g, g, g, g]), "g", "1 to 3")
    refused(call(g=[g, device.zeros((33, 96), "float32")]), "g[1].dtype")
    refused(call(m=device.zeros(32, "float32")), "m", "(33,)")
    refused(call(v=device.zeros(33, "bfloat16")), "v.dtype", "float32")
    refused(call(QB=24), "QB")
    refused(call(outputs=(g, w, w) if affine else (g,)), "outputs.dx", "overlapping g")
    if affine:
        refused(call(w=device.zeros(95, "bfloat16")), "w", "(96,)")
        refused(call(b=device.zeros(96, "float32")), "b.dtype")
        refused(call(workspace=device.zeros(df.coat.fp8_workspace_bytes(96), "uint8")), "workspace", "at least")
    else:
        with pytest.raises(Unsupported, match="stochastic"):
            call(stochastic=True)()
