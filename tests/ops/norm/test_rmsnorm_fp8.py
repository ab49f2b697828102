# SPDX-License-Identifier: Apache-2.0
"""Norm and quantisation of rows on one device have the bits of the reference, however blocks and clusters hold the
rows."""

from __future__ import annotations

import numpy as np
import pytest
from norm_support import EPSILON, OFFSET, WRITTEN, Q, call, check, expected, numbers, on_device, results, run

import drvfuse as df
from drvfuse import reference
from drvfuse.ops.call.repeat import Repeats

CASES = {
    "a warp has a row": {"shape": (19, 1024)},
    "two warps have a row and its groups": {"shape": (19, 2048), "residual": "bfloat16", "quantisation": Q.per_group()},
    "more groups than lanes": {"shape": (9, 16384), "residual": "bfloat16", "quantisation": Q.static(0.0625)},
    "a cluster has a row": {
        "shape": (2, 8192),
        "residual": "float32",
        "gamma": "float32",
        "quantisation": Q.per_group(64, layout="column"),
    },
    "a cluster has a row and a mean": {
        "shape": (1, 8200),
        "dtype": "float16",
        "norm": "layer",
        "beta": True,
        "quantisation": Q.per_row(scales="bfloat16"),
    },
    "a mean and no beta": {"shape": (19, 1000), "norm": "layer", "residual": "float32"},
    "parts of packs": {"shape": (13, 77), "dtype": "float32", "residual": "float32", "quantisation": Q.none()},
    "parts of packs in a block": {
        "shape": (13, 1044),
        "residual": "bfloat16",
        "quantisation": Q.per_row("float8_e5m2", upper_bound=2.0),
    },
    "heads by lanes": {"shape": (13, 384), "head_columns": 128, "quantisation": Q.mxfp8(layout="tiles")},
    "heads by few lanes": {
        "shape": (2, 3, 192),
        "head_columns": 64,
        "quantisation": Q.nvfp4(0.03125),
        "norm": "layer",
        "beta": True,
        "gamma": "float32",
    },
    "a group is all packs of lanes": {
        "shape": (140, 128),
        "dtype": "float32",
        "quantisation": Q.per_group(scales="float8_e8m0fnu", layout="tiles"),
    },
    "a group of FP4 is few packs": {
        "shape": (133, 208),
        "dtype": "float32",
        "gamma": "float32",
        "quantisation": Q.nvfp4(0.03125, "tiles"),
    },
    "one column": {"shape": (11, 1), "dtype": "float16"},
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_reference(device, rng, name):
    of = call(rng, **CASES[name])
    normed = list(CASES).index(name) % 2 == 0
    given = results(device, of, normed)
    found = run(device, of, given)
    check(found, expected(of))
    assert all(found[key] is given[key] for key in given)  # the given arrays are returned


def test_results_are_allocated(device, rng):
    of = call(rng, (19, 1024))
    check(run(device, of), expected(of))
    none = call(rng, (0, 1024), special=False, quantisation=Q.per_group(64, layout="column"))
    found = run(device, none)
    assert found["output"].shape == (0, 1024) and found["scales"].shape == (16, 0)


def test_arrays_may_begin_at_any_address(device, rng):
    """Arrays of 16-bit elements may begin at an odd element; packs are then read and written element by element."""
    of = call(rng, (9, 128), quantisation=Q.per_group(64), residual="bfloat16")
    arrays, given = {}, {}
    for name, values in of.arrays.items():
        wide = device.empty(values.size + 1, "bfloat16")
        wide.copy_from(np.concatenate([values[:0].reshape(-1), np.zeros(1, values.dtype), values.reshape(-1)]))
        arrays[name] = df.view(wide.ptr + 2, values.shape, "bfloat16", device, owner=wide)
    wide = device.zeros(9 * 128 + 3, "float8_e4m3fn")
    given["output"] = df.view(wide.ptr + 3, (9, 128), "float8_e4m3fn", device, owner=wide)
    found = df.rmsnorm_fp8(epsilon=EPSILON, weight_offset=OFFSET, **arrays, **given, **of.rest)
    check(dict(zip(WRITTEN, found, strict=False)), expected(of))
    assert wide.numpy().view(np.uint8)[:3].tolist() == [0, 0, 0]


def test_the_residual_is_updated_in_place(device, rng):
    of = call(rng, (19, 1024), residual="bfloat16")
    arrays = on_device(device, of)
    found = df.rmsnorm_fp8(epsilon=EPSILON, weight_offset=OFFSET, residual_output=arrays["residual"], **arrays)
    assert found.residual is arrays["residual"]
    check(dict(zip(WRITTEN, found, strict=False)), expected(of))


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("rows", {}),
        ("columns of scales", {"residual": "float32", "quantisation": Q.per_group(layout="column")}),
        ("a layer of heads", {"head_columns": 128, "norm": "layer", "beta": True, "quantisation": Q.nvfp4(0.03125)}),
    ],
)
def test_bits_are_those_of_the_collective_of_one_rank(driver, rng, name, others):
    of = call(rng, (7, 1024), **others)
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        arrays = on_device(group[0].device, of)
        options = {f"{argument}s": arrays[argument] for argument in ("residual", "beta") if argument in arrays}
        found = df.allreduce_rmsnorm_fp8(
            group, arrays["inputs"], arrays["gamma"], epsilon=EPSILON, weight_offset=OFFSET, **options, **of.rest
        )
        group.synchronize()
        check(dict(zip(WRITTEN, found, strict=False)), expected(of))


@pytest.mark.parametrize("made", [Q.per_row(), Q.per_group(64)], ids=str)
def test_rows_with_an_infinite_factor_have_the_bits_of_the_reference(driver, rng, made):
    """If the squares of a row underflow, its factor is infinite. An element of 0 then makes the maximum of its group
    NaN, but not that of its row."""
    of = call(rng, (3, 1024), quantisation=made)
    of.arrays["inputs"][:] = (1e-30 * rng.integers(-1, 2, (3, 1024))).astype(of.arrays["inputs"].dtype)
    of.arrays["inputs"][:, 64:128] = of.arrays["inputs"].dtype.type(1e-30)
    wanted = reference.rmsnorm_fp8(epsilon=0.0, **of.arrays, **of.rest)
    with df.Group.local(1, driver=driver, max_blocks=4) as group:
        arrays = on_device(group[0].device, of)
        alone = df.rmsnorm_fp8(epsilon=0.0, **arrays, **of.rest)
        found = df.allreduce_rmsnorm_fp8(group, *arrays.values(), epsilon=0.0, **of.rest)
        group.synchronize()
        for result in (alone, found):
            check({"output": result.output, "scales": result.scales}, {"output": wanted[0], "scales": wanted[1]})


def test_a_row_has_the_same_bits_in_any_batch(device, rng):
    """A row is computed by a cluster if it is the only one, and by a single block if there are many."""
    many = call(rng, (19, 8192), special=False)
    one = many._replace(arrays=many.arrays | {"inputs": many.arrays["inputs"][6:7]})
    found, alone = run(device, many), run(device, one)
    for name in ("output", "scales"):
        assert found[name].numpy()[6:7].tobytes() == alone[name].numpy().tobytes()


def test_repeated_calls_may_change_arrays_and_quantisation(device, rng):
    device.part(Repeats).clear()
    for made in (Q.per_row(), Q.per_row(upper_bound=1.0), Q.per_row()) * 2:
        of = call(rng, (19, 1024), quantisation=made)
        check(run(device, of), expected(of))
    assert len(device.part(Repeats)) == 2


def test_normed_rows_are_written_beside_the_codes(device, rng):
    of = call(rng, (19, 1024), quantisation=Q.per_group())
    given = results(device, of, normed=True)
    found = run(device, of, given)
    y = reference.rmsnorm_fp8(epsilon=EPSILON, weight_offset=OFFSET, **of.arrays, quantisation=Q.none())
    assert reference.bits(found["normed_output"].numpy()).tolist() == reference.bits(y.output).tolist()


def test_codes_and_scales_stand_for_the_normed_rows(rng):
    x, gamma = numbers(rng, (4, 256), "float32"), numbers(rng, 256, "float32")
    for made, error in ((Q.per_row(), 0.04), (Q.per_group(), 0.04), (Q.mxfp8(), 0.07), (Q.nvfp4(0.03125), 0.2)):
        found = reference.rmsnorm_fp8(x, gamma, EPSILON, quantisation=made)
        values = reference.dequantise(found.output, found.scales, made)
        exact = x * gamma / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPSILON)
        assert np.abs(values - exact).max() <= error * np.abs(exact).max()
