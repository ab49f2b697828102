# SPDX-License-Identifier: Apache-2.0
"""The reference and the kernels have the bytes of COAT's own kernels, whose outputs were recorded on an H200.

rstd may differ by 2 ulp, since COAT's root and quotient are approximate and it adds in another order. COAT rounds dw
after every row and drvfuse once, so dw is compared with float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fp8_support import BF16, Case, bits, same

import drvfuse as df
from drvfuse import dtypes
from drvfuse.reference import coat_rmsnorm

FILE = np.load(Path(__file__).parent / "coat_golden.npz")
META = {entry["tag"]: entry for entry in json.loads(bytes(FILE["meta"]))}


def golden(tag: str, name: str, dtype: str | None = None) -> np.ndarray:
    found = FILE[f"{tag}.{name}"]
    return found if dtype is None else found.view(dtypes.get(dtype).numpy)


def inputs(tag: str) -> Case:
    w = golden(tag, "w", META[tag]["w"])
    return Case(golden(tag, "x", "float8_e4m3fn"), golden(tag, "sx", "bfloat16"), w, golden(tag, "g", "bfloat16"))


def check(tag: str, qy, s_y, qy_t, rstd) -> None:
    expected = golden(tag, "rstd")
    number = ~np.isnan(expected)
    assert (np.isnan(rstd) == ~number).all()
    assert np.abs(bits(rstd)[number].astype(np.int64) - bits(expected)[number]).max() <= 2
    assert np.isnan(s_y.astype(np.float32)) == np.isnan(golden(tag, "s_y", "bfloat16").astype(np.float32))
    if not np.isnan(s_y.astype(np.float32)):
        same(s_y, golden(tag, "s_y", "bfloat16"), "s_y")
    same(qy, golden(tag, "qy", "float8_e4m3fn"), "qy")
    same(qy_t, golden(tag, "qy_t", "float8_e4m3fn"), "qy_t")


@pytest.mark.parametrize("tag", META)
def test_the_reference_has_the_bytes_of_coat(tag):
    x, s_x, w, _ = inputs(tag)
    result = coat_rmsnorm.fp8_rmsnorm_forward(x, s_x, w, 16, META[tag]["eps"], True)
    check(tag, result.qy, result.s_y, result.qy_t, result.rstd)


@pytest.mark.parametrize("tag", META)
def test_the_kernels_have_the_bytes_of_coat(device, tag):
    case = inputs(tag)
    x, s_x, w, g = (device.array(value) for value in case)
    qy, s_y, qy_t, (_, rstd, _) = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, META[tag]["eps"], True)
    check(tag, qy.numpy(), s_y.numpy(), qy_t.numpy(), rstd.numpy())
    saved = golden(tag, "rstd")
    dx, dw = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, device.array(saved), 16, 8)
    number = ~np.isnan(saved)
    columns = case.x.shape[-1]
    ours, theirs = (a.reshape(-1, columns)[number] for a in (dx.numpy(), golden(tag, "dx", "bfloat16")))
    same(ours, theirs, "dx")
    if number.all():
        values = coat_rmsnorm.dequantise(case.x, case.s_x, 16).astype(np.float64)
        exact = (case.g.reshape(-1, columns).astype(np.float64) * values * saved[:, None].astype(np.float64)).sum(0)
        error = np.linalg.norm(dw.numpy().astype(np.float64) - exact) / np.linalg.norm(exact)
        coat = np.linalg.norm(golden(tag, "dw", META[tag]["w"]).astype(np.float64) - exact) / np.linalg.norm(exact)
        # The relative error of one rounding to bf16 is at most 2^-9, that of an fp32 sum of 128 terms a few 2^-24.
        assert error <= (2**-9 if case.w.dtype == BF16 else 2e-6)
        assert error <= coat * 1.01 or case.w.dtype != BF16
