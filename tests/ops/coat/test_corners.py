# SPDX-License-Identifier: Apache-2.0
"""RMSNorm's forward and backward for unusual inputs: special values, exact ties, layouts, large offsets."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, Case, Strided, case, check_backward, check_forward, guarded, place, same

import drvfuse as df
from drvfuse.errors import ArgumentError
from drvfuse.reference import coat_rmsnorm

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def run_both(device, values: Case, QB=16, flag=False) -> None:
    x, s_x, w, g = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, QB, 1e-5, flag)
    check_forward(device, values, results, QB, transpose_output_2d=flag)
    rstd = results[3][1]
    check_backward(values, rstd.numpy(), df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, QB), QB)


@pytest.mark.parametrize("shape", [(1, 33, 96), (33, 1, 96), (3, 11, 96), (0, 4, 32), (4, 0, 32)])
def test_batches_of_size_one_and_zero_are_supported(device, rng, shape):
    for flag in (False, True):
        run_both(device, case(rng, shape), flag=flag)


@pytest.mark.parametrize("byte", [0x7C, 0xFC, 0x7D, 0x7E, 0xFF])
def test_infinities_and_nans_of_e5m2_have_the_bits_of_the_reference(device, rng, byte):
    """An infinity in x makes its element of qy NaN and the rest of its row 0. A NaN in x makes all of qy NaN."""
    values = case(rng, (33, 96), fp8=E5M2)
    values.x.view(np.uint8)[5, 9] = byte
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    check_forward(device, values, results)
    qy = results[0].numpy().astype(np.float32)
    if byte & 0x7F == 0x7C:
        nan = np.zeros(qy.shape, bool)
        nan[5, 9] = True
        assert (np.isnan(qy) == nan).all() and not qy[5][~nan[5]].any()
    else:
        assert np.isnan(qy).all()


SPECIAL_GRADIENTS = ("NaN in g", "infinite g", "zero g", "NaN in w", "zero w", "NaN scale", "NaN rstd", "zero rstd")


@pytest.mark.parametrize("name", SPECIAL_GRADIENTS)
def test_special_values_of_the_gradient_have_the_bits_of_the_reference(device, rng, name):
    """A NaN in g makes its row of dx and its column of dw NaN. A NaN in w makes all of dx NaN, as the mean c1 of every
    row is then NaN, but no element of dw.
    """
    values = case(rng, (33, 96))
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    rows, columns = {5}, {9}
    if name in ("NaN in g", "infinite g"):
        values.g[5, 9] = np.nan if name == "NaN in g" else np.inf
    elif name == "zero g":
        values.g[:] = 0
    elif name == "NaN in w":
        values.w[9] = np.nan
        rows, columns = set(range(33)), set()
    elif name == "zero w":
        values.w[:] = 0
    elif name == "NaN scale":
        values.s_x[5, 1] = np.nan
        columns = set(range(16, 32))
    else:
        rstd[5] = np.nan if name == "NaN rstd" else 0.0
        columns = set(range(96))
    if name.startswith("zero"):
        rows, columns = set(), set()
    x, s_x, w, g = place(device, values)
    found = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, device.array(rstd), 16)
    check_backward(values, rstd, found)
    dx, dw = (array.numpy().astype(np.float32) for array in found)
    assert set(np.flatnonzero(~np.isfinite(dx).all(axis=1))) == rows
    assert set(np.flatnonzero(~np.isfinite(dw))) == columns
    if name in ("zero g", "zero w"):
        assert not dx.any() and dw.any() == (name == "zero w")


def test_a_nan_scale_makes_everything_nan(device, rng):
    values = case(rng, (33, 96))
    values.s_x[5, 1] = np.nan
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    check_forward(device, values, results)
    assert np.isnan(results[0].numpy().astype(np.float32)).all()


def test_negative_weights_have_the_bits_of_the_reference(device, rng):
    values = case(rng, (33, 96))
    values.w[::2] = -values.w[::2]
    run_both(device, values)


@pytest.mark.parametrize("significand", [128, 144, 192, 224, 240, 131])
def test_quotients_that_are_exact_ties_round_to_even(device, rng, significand):
    """A scale with few significant bits puts many quotients halfway between two FP8 values; other scales put none."""
    values = case(rng, (40, 96), w="float32")
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    largest = np.abs(coat_rmsnorm.dequantise(values.x, values.s_x, 16) * rstd[:, None] * values.w).max()
    values.w[:] *= np.float32(448 * significand / 64) / largest
    x, s_x, w, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    check_forward(device, values, results)
    s_y = results[1].numpy().astype(np.float64)
    assert s_y == significand / 64
    rstd = results[3][1].numpy()
    y = coat_rmsnorm.dequantise(values.x, values.s_x, 16) * rstd[:, None] * values.w
    quotients = np.abs(y.astype(BF16).astype(np.float64) / s_y)
    quotients = quotients[quotients >= 2**-6]  # the normal numbers of e4m3, which have 4 significant bits
    fraction = np.frexp(quotients)[0] * 32 % 2
    assert (fraction == 1).any() == (significand % 16 == 0)


@pytest.mark.parametrize("first", [1, 2, 8, 48])
def test_rows_may_begin_at_any_address(device, rng, first):
    """The rows are slices of wider arrays. Each slice begins at a multiple of 1, 2, 8 or 16 bytes."""
    wide = case(rng, (33, 192))
    x, s_x, _, g = place(device, wide)
    columns = slice(first, first + 96)
    cut = Case(wide.x[:, columns], wide.s_x[:, 3:9], wide.w[columns], wide.g[:, columns])
    w = device.array(cut.w)
    with df.config.override(driver=device.driver):
        rows, gradient = (Strided(array, (33, 96), (192, 1), first) for array in (x, g))
        scales = Strided(s_x, (33, 6), (12, 1), 3)
        results = df.coat.fp8_rmsnorm_forward(rows, scales, w, 16, 1e-5)
        check_forward(device, cut, results)
        rstd = results[3][1]
        check_backward(cut, rstd.numpy(), df.coat.fp8_rmsnorm_backward(rows, scales, gradient, w, rstd, 16))


def test_slices_of_batches_have_the_bits_of_the_reference(device, rng):
    """Slices of columns are accepted, as all rows are equally far apart. Slices of the rows of each batch are
    refused."""
    wide = case(rng, (3, 11, 192))
    x, s_x, _, g = place(device, wide)
    cut = Case(wide.x[..., 48:144], wide.s_x[..., 3:9], wide.w[48:144], wide.g[..., 48:144])
    w, shape = device.array(cut.w), (3, 11, 96)
    with df.config.override(driver=device.driver):
        rows, gradient = (Strided(array, shape, (11 * 192, 192, 1), 48) for array in (x, g))
        scales = Strided(s_x, (3, 11, 6), (132, 12, 1), 3)
        results = df.coat.fp8_rmsnorm_forward(rows, scales, w, 16, 1e-5)
        check_forward(device, cut, results)
        rstd = results[3][1]
        check_backward(cut, rstd.numpy(), df.coat.fp8_rmsnorm_backward(rows, scales, gradient, w, rstd, 16))
        with pytest.raises(ArgumentError, match="rows at equal distances") as caught:
            df.coat.fp8_rmsnorm_forward(Strided(x, (3, 9, 192), (11 * 192, 192, 1)), s_x, w, 16, 1e-5)
        assert caught.value.argument == "x"


def test_gradients_that_are_transposed_expanded_or_misaligned_are_refused(device, rng):
    values = case(rng, (96, 96))
    x, s_x, w, g = place(device, values)
    v = device.zeros(96, "float32")
    odd = Strided(g, (95, 96), (96, 1))
    odd.__cuda_array_interface__["data"] = (g.ptr + 1, False)
    with df.config.override(driver=device.driver):
        for wrong, text in (
            (Strided(g, (96, 96), (1, 96)), "rows at equal distances"),
            (Strided(g, (96, 96), (0, 1)), "rows at equal distances"),
            (odd, "aligned to 2 bytes"),
        ):
            with pytest.raises(ArgumentError, match=text) as caught:
                df.coat.fp8_rmsnorm_backward(x, s_x, wrong, w, v, 16)
            assert caught.value.argument == "g"


def test_partially_overlapping_outputs_are_refused(device, rng):
    values = case(rng, (32, 96))
    x, s_x, w, g = place(device, values)
    memory = device.zeros(64 * 96 * 2, "uint8")
    qy = df.view(memory.ptr, (32, 96), E4M3, device, owner=memory)
    qy_t = df.view(memory.ptr + 32 * 96 - 1, (96, 32), E4M3, device, owner=memory)
    s_y, rstd = device.zeros((), "bfloat16"), device.zeros(32, "float32")
    with pytest.raises(ArgumentError, match=r"overlapping outputs\.qy") as caught:
        df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=(qy, s_y, qy_t, rstd))
    assert caught.value.argument == "outputs.qy_t"
    with pytest.raises(ArgumentError, match="overlapping g") as caught:
        df.coat.fp8_rmsnorm_backward(x, s_x, g, w, rstd, 16, outputs=(g, device.zeros(96, "bfloat16")))
    assert caught.value.argument == "outputs.dx"
    with pytest.raises(ArgumentError, match="overlapping x"):
        df.coat.fp8_division(g, 16, "E4M3", outputs=(df.view(g.ptr, (32, 96), E4M3, device, owner=g), s_y))


@pytest.mark.parametrize("shape", [(33, 100), (3, 11, 97)])
def test_nothing_is_written_outside_the_outputs_of_ragged_rows(device, rng, shape):
    """The workspace has guard bytes too."""
    values = case(rng, shape)
    x, s_x, w, g = place(device, values)
    rows, columns = values.x.size // shape[-1], shape[-1]
    turned = (columns, rows) if len(shape) == 2 else (shape[0], columns, shape[1])
    nbytes = df.coat.fp8_workspace_bytes(columns)
    wanted = [(shape, E4M3), ((), "bfloat16"), (turned, E4M3), ((rows,), "float32"), (shape, "bfloat16")]
    made = [guarded(device, *one) for one in [*wanted, ((columns,), "bfloat16"), ((nbytes,), "uint8")]]
    *out, space = (array for array, _ in made)
    space.copy_from(np.zeros(nbytes, np.uint8))
    check_forward(device, values, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=out[:4], workspace=space))
    found = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, out[3], 16, outputs=out[4:], workspace=space)
    check_backward(values, out[3].numpy(), found)
    for _, untouched in made:
        untouched()


def test_the_backward_takes_rows_with_offsets_beyond_32_bits(device, rng):
    """The second row of x and of g begins more than 2^32 elements after the first."""
    values, stride = case(rng, (2, 96)), (1 << 32) + 16
    far = [device.empty(stride + 96, dtype) for dtype in (E4M3, "bfloat16")]
    for array, host in zip(far, (values.x, values.g), strict=True):
        for row in range(2):
            to = array.ptr + row * stride * array.dtype.itemsize
            df.view(to, (96,), array.dtype, device, owner=array).copy_from(host[row])
    _, s_x, w, _ = place(device, values)
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    with df.config.override(driver=device.driver):
        x, g = (Strided(array, (2, 96), (stride, 1)) for array in far)
        check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, device.array(rstd), 16))


def test_the_backward_of_few_long_rows_has_the_bits_of_the_reference(device, rng):
    values = case(rng, (2, 11008))
    x, s_x, w, g = place(device, values)
    rstd = coat_rmsnorm.row_rstd(values.x, values.s_x, 16, 1e-5)
    check_backward(values, rstd, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, device.array(rstd), 16))


@pytest.mark.parametrize("shape", [(514, 96), pytest.param((8192, 2048), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("level", [df.PDLLevel.OFF, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_grids_that_fill_the_device_run_on_two_streams_with_two_workspaces(device, rng, shape, level):
    both = [case(rng, shape) for _ in range(2)]
    placed = [place(device, values) for values in both]
    spaces = [device.zeros(df.coat.fp8_workspace_bytes(shape[1]), "uint8") for _ in range(2)]
    streams = [df.Stream(device) for _ in range(2)]
    device.synchronize()
    found = []
    for _ in range(3):
        for (x, s_x, w, g), workspace, stream in zip(placed, spaces, streams, strict=True):
            rest = {"workspace": workspace, "stream": stream, "pdl_level": level}
            forward = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, **rest)
            found.append((forward, df.coat.fp8_rmsnorm_backward(x, s_x, g, w, forward[3][1], 16, **rest)))
    device.synchronize()
    df.check_device(device)
    for number, (forward, backward) in enumerate(found[-2:]):
        check_forward(device, both[number], forward)
        check_backward(both[number], forward[3][1].numpy(), backward)
    for number, (forward, backward) in enumerate(found):
        last = found[-2 + number % 2]
        for array, expected in (
            (forward[0], last[0][0]),
            (forward[2], last[0][2]),
            *zip(backward, last[1], strict=True),
        ):
            same(array, expected.numpy())


COLUMNS = (16, 32, 48, 80, 96, 272, 896, 1536, 2048, 3584, 4096, 5120, 6656, 8192, 11008, 16384, 32768)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_number_of_columns_has_the_bits_of_the_reference(device, rng, columns):
    for rows in (1, 100, 333):
        run_both(device, case(rng, (rows, columns)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 48), (16384, 64), (262144, 16), (2, 8191, 32)])
def test_many_rows_have_the_bits_of_the_reference(device, rng, shape):
    run_both(device, case(rng, shape))


@pytest.mark.gpu
def test_the_backward_of_more_than_two_to_the_31_elements_has_the_bits_of_the_reference(device, rng):
    """All rows are equal, so dw is a multiple of the dw of one row."""
    rows, columns = 524800, 4096
    one = case(rng, (1, columns))
    x = device.array(np.tile(one.x.view(np.uint8), (rows, 1)).view(one.x.dtype))
    s_x, w = device.array(np.tile(one.s_x, (rows, 1))), device.array(one.w.astype(np.float32))
    g = device.array(np.tile(one.g, (rows, 1)))
    rstd = coat_rmsnorm.row_rstd(one.x, one.s_x, 16, 1e-5)
    dx, dw = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, device.array(np.repeat(rstd, rows)), 16)
    small, _ = df.coat.fp8_rmsnorm_backward(*place(device, one)[:2], device.array(one.g), w, device.array(rstd), 16)
    same(df.view(dx.ptr + 2 * (rows - 1) * columns, (columns,), "bfloat16", device, owner=dx), small.numpy()[0])
    assert (dx.numpy().view(np.uint16) == small.numpy().view(np.uint16)).all()
    exact = rows * (one.g.astype(np.float64) * coat_rmsnorm.dequantise(one.x, one.s_x, 16) * rstd)[0]
    # A segment has about 4000 equal terms. Each addition is rounded to fp32, so the error is at most 4000 * 2^-24.
    assert np.linalg.norm(dw.numpy() - exact) <= 3e-4 * np.linalg.norm(exact)
