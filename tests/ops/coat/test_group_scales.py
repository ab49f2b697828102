# SPDX-License-Identifier: Apache-2.0
"""The residual addition, RMSNorm with group scales as results, and both in one launch, against the reference bit for
bit."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_support import BF16, Case, Strided, case, guarded, place, same
from group_support import arithmetic, near

import drvfuse as df
from drvfuse.errors import CaptureError
from drvfuse.reference import coat_groups, coat_rmsnorm

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
CASES = [
    ((1, 16), 16, E4M3, "bfloat16"),
    ((33, 96), 16, E4M3, "bfloat16"),
    ((5, 100), 16, E5M2, "float32"),
    ((5, 8), 32, E4M3, "bfloat16"),
    ((3, 7, 1040), 64, E4M3, "float32"),
    ((130, 144), 128, E5M2, "bfloat16"),
    ((3, 4624), 32, E4M3, "bfloat16"),
    ((2, 9000), 16, E4M3, "bfloat16"),
    ((0, 32), 16, E4M3, "bfloat16"),
    ((0, 5, 32), 16, E4M3, "bfloat16"),
]


def addend(rng: np.random.Generator, values: Case) -> np.ndarray:
    return (3 * rng.standard_normal(values.g.shape, np.float32)).astype(BF16)


def check_norm(device, x, s_x, w, results, QB=16, eps=1e-5) -> None:
    qy, s_y, (_, rstd, warps) = results
    own = near(device, rstd.numpy(), coat_rmsnorm.row_rstd(x, s_x, QB, eps))
    expected = coat_groups.fp8_rmsnorm_pg2pg_forward(x, s_x, w, QB, eps, rstd=own, arithmetic=arithmetic(device))
    same(s_y, expected.s_y, "s_y")
    same(qy, expected.qy, "qy")
    assert warps == 8


def check_add(device, a, b, fp8, results, QB=16) -> None:
    total, (x, s_x) = results
    expected = coat_groups.fp8_add(a, b, fp8, QB, arithmetic(device))
    same(total, expected.total, "sum")
    same(s_x, expected.s_x, "s_x")
    same(x, expected.x, "x")


def check_both(one, add, norm) -> None:
    """Assert that the addition and the norm have the same results in one launch as in two."""
    total, (x, s_x), (qy, s_y, (_, rstd, _)) = one
    pairs = ((total, add[0]), (x, add[1][0]), (s_x, add[1][1]), (qy, norm[0]), (s_y, norm[1]), (rstd, norm[2][1]))
    for name, (found, expected) in zip(("sum", "x", "s_x", "qy", "s_y", "rstd"), pairs, strict=True):
        same(found, expected.numpy(), name)


@pytest.mark.parametrize("shape,QB,fp8,w", CASES)
def test_the_norm_with_group_scales_has_the_bits_of_the_reference(device, rng, shape, QB, fp8, w):
    values = case(rng, shape, QB, fp8, w)
    x, s_x, weight, _ = place(device, values)
    results = df.coat.fp8_rmsnorm_pg2pg_forward(x, s_x, weight, QB, 1e-6)
    check_norm(device, values.x, values.s_x, values.w, results, QB, 1e-6)


@pytest.mark.parametrize("shape", [(33, 96), pytest.param((300, 9000), marks=pytest.mark.gpu)])
def test_rstd_has_the_bits_of_the_per_tensor_forward(device, rng, shape):
    x, s_x, w, _ = place(device, case(rng, shape))
    rstd = df.coat.fp8_rmsnorm_pg2pg_forward(x, s_x, w, 16, 1e-6)[2][1]
    same(rstd, df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-6)[3][1].numpy())


@pytest.mark.parametrize("shape,QB,fp8,w", [CASES[i] for i in (1, 2, 4, 6, 8)])
def test_the_residual_add_and_its_norm_have_the_bits_of_the_reference(device, rng, shape, QB, fp8, w):
    values = case(rng, shape, QB, fp8, w)
    other = addend(rng, values)
    a, b, weight = (device.array(host) for host in (values.g, other, values.w))
    short = "E4M3" if fp8 == E4M3 else "E5M2"
    add = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, short, QB)
    check_add(device, values.g, other, short, add, QB)
    norm = df.coat.fp8_rmsnorm_pg2pg_forward(*add[1], weight, QB, 1e-6)
    check_both(df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, fp8, weight, QB, 1e-6), add, norm)


def test_slices_of_wider_arrays_have_the_bits_of_the_reference(device, rng):
    wide = case(rng, (33, 192))
    other = addend(rng, wide)
    x, s_x, _, g = place(device, wide)
    b, w = device.array(other), device.array(wide.w[48:144])
    with df.config.override(driver=device.driver):
        for first in (48, 40):  # 40 elements take a multiple of 16 bytes as bfloat16, but not as FP8
            columns = slice(first, first + 96)
            cut = [Strided(a, (33, 96), (192, 1), first) for a in (x, g, b)]
            scales = Strided(s_x, (33, 6), (12, 1), 3)
            results = df.coat.fp8_rmsnorm_pg2pg_forward(cut[0], scales, w, 16, 1e-5)
            check_norm(device, wide.x[:, columns], wide.s_x[:, 3:9], wide.w[48:144], results)
            add = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(*cut[1:], E4M3, 16)
            check_add(device, wide.g[:, columns], other[:, columns], E4M3, add)
            norm = df.coat.fp8_rmsnorm_pg2pg_forward(*add[1], w, 16, 1e-5)
            check_both(df.coat.fp8_add_rmsnorm_pg2pg_forward(*cut[1:], E4M3, w, 16, 1e-5), add, norm)


def special(name: str, a: np.ndarray, w: np.ndarray) -> None:
    """Change the addend `a` [33, 96] so that row 5 of the sum has the special value `name`; the other addend is
    finite."""
    if name == "NaN":
        a[5, 9] = np.nan
    elif name == "group of NaN":
        a[5, 16:32] = np.nan
    elif name == "infinity":
        a[5, 9] = -np.inf
    elif name == "overflow":
        with np.errstate(over="ignore"):  # the product overflows for values above 3.4
            a[5] *= 1e38
    elif name == "tiny":
        a[5] *= 1e-38
    elif name == "NaN in w":
        w[7] = np.nan
    elif name == "infinite w":
        w[7] = np.inf
    elif name == "zero w":
        w[:] = 0


@pytest.mark.parametrize(
    "name", ["NaN", "group of NaN", "infinity", "overflow", "tiny", "NaN in w", "infinite w", "zero w", "zero row"]
)
def test_special_values_have_the_bits_of_the_reference(device, rng, name):
    values = case(rng, (33, 96))
    other = addend(rng, values)
    a, w = values.g.copy(), values.w.copy()
    if name in ("tiny", "zero row", "overflow"):
        other[5] = 0
    a[5] *= 0 if name == "zero row" else 1
    special(name, a, w)
    first, second, weight = (device.array(host) for host in (a, other, w))
    add = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(first, second, E4M3, 16)
    check_add(device, a, other, E4M3, add)
    x, s_x = (array.numpy() for array in add[1])
    norm = df.coat.fp8_rmsnorm_pg2pg_forward(*add[1], weight, 16, 1e-5)
    check_norm(device, x, s_x, w, norm)
    check_both(df.coat.fp8_add_rmsnorm_pg2pg_forward(first, second, E4M3, weight, 16, 1e-5), add, norm)
    values_of_x, scales = x.astype(np.float32), s_x.astype(np.float32)
    if name == "NaN":
        assert np.isnan(values_of_x[5, 9]) and np.isnan(values_of_x).sum() == 1 and np.isfinite(scales).all()
    elif name == "group of NaN":
        assert np.isnan(values_of_x[5, 16:32]).all() and np.isnan(scales[5, 1]) and np.isnan(scales).sum() == 1
    elif name == "infinity":
        assert np.isnan(values_of_x[5, 9]) and not values_of_x[5, 0:9].any() and np.isinf(scales[5, 0])
    elif name == "zero row":
        assert not values_of_x[5].any() and (s_x[5] == np.float32(1e-10 / 448).astype(BF16)).all()


def outputs(device, rows=33, columns=96):
    groups = columns // 16
    return [
        guarded(device, shape, dtype)
        for shape, dtype in (
            ((rows, columns), "bfloat16"),
            ((rows, columns), E4M3),
            ((rows, groups), "bfloat16"),
            ((rows, columns), E4M3),
            ((rows, groups), "bfloat16"),
            ((rows,), "float32"),
        )
    ]


# 96 columns consist of pairs of packs, 112 of three pairs and a single pack.
@pytest.mark.parametrize("columns", [96, 112])
def test_given_outputs_are_written_and_nothing_outside_them(device, rng, columns):
    values = case(rng, (33, columns))
    other = addend(rng, values)
    a, b, w = (device.array(host) for host in (values.g, other, values.w))
    made = outputs(device, columns=columns)
    out = [array for array, _ in made]
    add = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, E4M3, 16, outputs=out[:3])
    assert (add[0], *add[1]) == tuple(out[:3])
    check_add(device, values.g, other, E4M3, add)
    norm = df.coat.fp8_rmsnorm_pg2pg_forward(*add[1], w, 16, 1e-5, outputs=out[3:])
    assert (norm[0], norm[1], norm[2][1]) == tuple(out[3:])
    again = outputs(device, columns=columns)
    one = df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, E4M3, w, 16, 1e-5, outputs=[array for array, _ in again])
    check_both(one, add, norm)
    for _, untouched in (*made, *again):
        untouched()


@pytest.mark.parametrize("level", list(df.PDLLevel)[:3])
def test_a_graph_of_dependent_launches_has_the_bits_of_the_reference(device, rng, level):
    values = case(rng, (33, 96))
    other = addend(rng, values)
    a, b, w = (device.array(host) for host in (values.g, other, values.w))
    out = [array for array, _ in outputs(device)]
    once = [array for array, _ in outputs(device)]
    df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, E4M3, w, 16, 1e-5, outputs=once)
    with df.Graph.capture(device.stream) as graph:
        add = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, E4M3, 16, outputs=out[:3], pdl_level=level)
        norm = df.coat.fp8_rmsnorm_pg2pg_forward(*add[1], w, 16, 1e-5, outputs=out[3:], pdl_level=level)
        one = df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, E4M3, w, 16, 1e-5, outputs=once, pdl_level=level)
        with pytest.raises(CaptureError):
            df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, E4M3, 16)
    for _ in range(2):
        other = addend(rng, values)
        b.copy_from(other)
        graph.launch(device.stream)
        device.synchronize()
        check_add(device, values.g, other, E4M3, add)
        check_both(one, add, norm)


@pytest.mark.emulated
def test_a_call_moves_the_expected_number_of_bytes(rng):
    """Every byte is read and written once, except the weights: each thread reads those of its 16 or 32 columns."""
    rows, columns = 64, 4096
    elements, groups = rows * columns, rows * columns // 16
    with df.emu.Machine(devices=1, sm_count=4) as machine:
        device = df.device(0, driver=machine)
        values = case(rng, (rows, columns))
        a, b, w = (device.array(host) for host in (values.g, addend(rng, values), values.w))
        x, s_x = df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, E4M3, 16)[1]
        df.coat.fp8_rmsnorm_pg2pg_forward(x, s_x, w, 16, 1e-5)
        df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, E4M3, w, 16, 1e-5)
        device.synchronize()
        *_, add, norm, both = (record for record in machine.launches)
    count = [(record.counters.total.local_read, record.counters.total.local_written) for record in (add, norm, both)]
    threads = [record.grid[0] * record.block[0] for record in (add, norm, both)]
    weights = [2 * packs * 16 * count for packs, count in zip((0, 2, 1), threads, strict=True)]
    assert count[0] == (4 * elements, 3 * elements + 2 * groups)
    assert count[1] == (elements + 2 * groups + weights[1], elements + 2 * groups + 4 * rows)
    assert count[2] == (4 * elements + weights[2], 4 * elements + 4 * groups + 4 * rows)


def test_arguments_that_do_not_match_are_refused(device, rng, refused):
    values = case(rng, (33, 96))
    x, s_x, w, g = place(device, values)

    def norm(x=x, s_x=s_x, w=w, QB=16, eps=1e-5, **rest):
        return lambda: df.coat.fp8_rmsnorm_pg2pg_forward(x, s_x, w, QB, eps, **rest)

    def add(a=g, b=g, fp8=E4M3, QB=16, **rest):
        return lambda: df.coat.fp8_add_Ifp_Ifp_Ofp_Og16(a, b, fp8, QB, **rest)

    def both(a=g, b=g, fp8=E4M3, w=w, QB=16, eps=1e-5, **rest):
        return lambda: df.coat.fp8_add_rmsnorm_pg2pg_forward(a, b, fp8, w, QB, eps, **rest)

    refused(norm(s_x=device.zeros((33, 5), "bfloat16")), "s_x", "(33, 6)")
    refused(norm(QB=8), "QB")
    refused(norm(x=g), "x.dtype")
    refused(norm(eps=float("nan")), "eps")
    refused(norm(outputs=(x, s_x, device.empty(33, "float32"))), "outputs.qy", "overlapping x")
    for call in (add, both):
        refused(call(b=device.zeros((33, 95), "bfloat16")), "x2", "(33, 96)")
        refused(call(b=device.zeros((33, 96), "float32")), "x2.dtype", "bfloat16")
        refused(call(a=device.zeros(96, "bfloat16")), "x1", "[M, N]")
        refused(call(a=device.zeros((33, 0), "bfloat16")), "x1", "[M, N]")
        refused(call(fp8="E3M4"), "fp8type", "E5M2")
        refused(call(QB=24), "QB")
        refused(call(pdl_level=9), "pdl_level")
        refused(call(outputs=()), "outputs", "s_x")
        wide = device.zeros((1, 32800), "bfloat16")
        refused(call(a=wide, b=wide, **({"w": device.zeros(32800, "bfloat16")} if call is both else {})), "x1", "32768")
    refused(both(w=device.zeros(95, "bfloat16")), "w", "(96,)")
    with df.config.override(driver=device.driver):
        turned = Strided(g, (33, 96), (1, 33))
        refused(add(a=turned, b=turned), "x1", "rows at equal distances")
