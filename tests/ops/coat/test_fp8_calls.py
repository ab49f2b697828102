# SPDX-License-Identifier: Apache-2.0
"""Streams, graph capture, workspaces, PDL, traffic and bad input of the FP8 RMSNorm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fp8_support import Strided, case, check_backward, check_forward, place

import drvfuse as df
from drvfuse.errors import ArgumentError, CaptureError, Unsupported
from drvfuse.plans.coat_forward import HeldTiles
from drvfuse.plans.scratch import WORDS_BYTES
from drvfuse.reference import coat_rmsnorm

SHAPE = (33, 96)


@pytest.fixture
def values(rng):
    return case(rng, SHAPE)


@pytest.fixture
def arrays(device, values):
    return place(device, values)


def outputs(device, shape=SHAPE):
    rows, columns = shape
    return (
        device.empty(shape, "float8_e4m3fn"),
        device.empty((), "bfloat16"),
        device.empty((columns, rows), "float8_e4m3fn"),
        device.empty(rows, "float32"),
    )


def test_captured_calls_replay_on_new_contents(device, rng, values, arrays):
    x, s_x, w, g = arrays
    out = outputs(device)
    back = (device.empty(SHAPE, "bfloat16"), device.empty(SHAPE[1], "bfloat16"))
    workspace = device.zeros(df.coat.fp8_workspace_bytes(SHAPE[1]), "uint8")
    with df.Graph.capture(device.stream) as graph:
        results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=out, workspace=workspace)
        gradients = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, out[3], 16, outputs=back, workspace=workspace)
        with pytest.raises(CaptureError):
            df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
    for again in (values, case(rng, SHAPE)):
        x.copy_from(again.x)
        s_x.copy_from(again.s_x)
        graph.launch(device.stream)
        device.synchronize()
        seen = values._replace(x=again.x, s_x=again.s_x)
        check_forward(device, seen, results)
        check_backward(seen, out[3].numpy(), gradients)


def test_calls_on_two_streams_at_once_have_the_bits_of_the_reference(device, values, arrays):
    x, s_x, w, _ = arrays
    streams = [df.Stream(device) for _ in range(2)]
    device.synchronize()
    found = [df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, stream=stream) for _ in range(3) for stream in streams]
    device.synchronize()
    for results in found:
        check_forward(device, values, results)


def test_a_capture_allocates_nothing(device, arrays):
    """A call whose shape was used before allocates no memory and loads no module, so it can be captured."""
    x, s_x, w, g = arrays
    out = outputs(device)
    back = (device.empty(SHAPE, "bfloat16"), device.empty(SHAPE[1], "bfloat16"))

    def calls() -> None:
        df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=out)
        df.coat.fp8_rmsnorm_backward(x, s_x, g, w, out[3], 16, outputs=back)

    calls()
    device.synchronize()
    with df.Graph.capture(device.stream) as graph:
        calls()
        made = {text.partition("(")[0] for text in df.last_calls(256)[-_calls_since_capture() :]}
    graph.close()
    assert "cuLaunchKernelEx" in made
    assert not [name for name in made if "Alloc" in name or "Free" in name or "Load" in name or "Memset" in name]


def _calls_since_capture() -> int:
    names = [text.partition("(")[0] for text in df.last_calls(256)]
    return names[::-1].index("cuStreamBeginCapture")


@pytest.mark.parametrize("level", [df.PDLLevel.ON, df.PDLLevel.OVERLAP_AT_BEGINNING])
def test_chains_of_dependent_launches_have_the_bits_of_the_reference(device, driver, values, level):
    machines = [None] if driver == "cuda" else [df.emu.Machine(devices=1, sm_count=16, seed=seed) for seed in (0, 1)]
    for machine in machines:
        where = device if machine is None else df.device(0, driver=machine)
        x, s_x, w, g = place(where, values)
        for _ in range(3):
            results = df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, pdl_level=level)
            gradients = df.coat.fp8_rmsnorm_backward(x, s_x, g, w, results[3][1], 16, pdl_level=level)
        where.synchronize()
        check_forward(where, values, results)
        check_backward(values, results[3][1].numpy(), gradients)
        if machine is not None:
            machine.close()


@pytest.mark.emulated
def test_a_call_moves_the_expected_number_of_bytes(rng, driver, monkeypatch):
    """The rows form whole tiles, and outputs are written once."""
    rows, columns = 64, 640
    monkeypatch.setattr(HeldTiles, "pays", staticmethod(lambda rows, columns: False))
    with df.emu.Machine(devices=1, sm_count=16) as machine:
        device = df.device(0, driver=machine)
        x, s_x, w, _ = place(device, case(rng, (rows, columns)))
        df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)
        device.synchronize()
        forward = list(machine.launches)[-1].counters.total
    elements = rows * columns
    assert forward.local_written >= 2 * elements + 4 * rows
    # A launch writes qy, qy_t and rstd, and less than 64 bytes per block: s_y, the slots of the barrier and the epoch.
    assert forward.local_written <= 2 * elements + 4 * rows + 64 * 16


def test_shapes_that_do_not_match_are_refused(device, arrays, refused):
    x, s_x, w, g = arrays
    rstd = device.zeros(33, "float32")

    def forward(x=x, s_x=s_x, w=w, QB=16, eps=1e-5, **rest):
        return lambda: df.coat.fp8_rmsnorm_forward(x, s_x, w, QB, eps, **rest)

    def backward(x=x, s_x=s_x, g=g, w=w, v=rstd, QB=16, **rest):
        return lambda: df.coat.fp8_rmsnorm_backward(x, s_x, g, w, v, QB, **rest)

    refused(forward(x=device.zeros(96, "float8_e4m3fn")), "x", "[M, N]")
    refused(forward(x=device.zeros((33, 0), "float8_e4m3fn")), "x")
    refused(forward(s_x=device.zeros((33, 5), "bfloat16")), "s_x", "(33, 6)")
    refused(forward(s_x=device.zeros((32, 6), "bfloat16")), "s_x", "(33, 6)")
    ragged = device.zeros((33, 100), "float8_e4m3fn")
    refused(forward(x=ragged, w=device.zeros(100, "bfloat16")), "s_x", "ceil")
    refused(forward(w=device.zeros(95, "bfloat16")), "w", "(96,)")
    refused(backward(g=device.zeros((33, 95), "bfloat16")), "g", "(33, 96)")
    refused(backward(g=device.zeros((3, 11, 96), "bfloat16")), "g", "(33, 96)")
    refused(backward(v=device.zeros(32, "float32")), "v", "(33,)")
    for QB in (8, 0, 48, True, "16", 16.5):
        refused(forward(QB=QB), "QB", "16")
    for eps in (-1.0, math.nan, math.inf, "1e-5"):
        refused(forward(eps=eps), "eps")
    refused(forward(transpose_output_2d=1), "transpose_output_2d")


def test_unsupported_dtypes_are_refused(device, arrays, refused):
    x, s_x, w, g = arrays
    refused(lambda: df.coat.fp8_rmsnorm_forward(g, s_x, w, 16, 1e-5), "x.dtype", "float8_e4m3fn")
    refused(
        lambda: df.coat.fp8_rmsnorm_forward(x, device.zeros((33, 6), "float32"), w, 16, 1e-5), "s_x.dtype", "bfloat16"
    )
    refused(lambda: df.coat.fp8_rmsnorm_forward(x, s_x, device.zeros(96, "float16"), 16, 1e-5), "w.dtype", "float32")
    wide = device.zeros(SHAPE, "float32")
    refused(
        lambda: df.coat.fp8_rmsnorm_backward(x, s_x, wide, w, device.zeros(33, "float32"), 16), "g.dtype", "bfloat16"
    )
    refused(lambda: df.coat.fp8_division(g, 16, "E3M4"), "fp8type", "E5M2")
    with pytest.raises(ArgumentError, match="fp8type"):
        coat_rmsnorm.fp8_division(np.zeros((2, 16), np.float32), "E3M4")
    refused(lambda: df.coat.fp8_division(x, 16, "E4M3"), "x.dtype")
    refused(lambda: df.coat.fp8_division(g, 16, "E4M3", device.zeros(2, "float32")), "s_y", "one element")
    with pytest.raises(Unsupported, match="stochastic"):
        df.coat.fp8_division_transpose(g, 16, "E4M3", None, True)


def test_strided_transposed_and_misaligned_arrays_are_refused(device, arrays, refused):
    x, s_x, w, g = arrays
    turned, expanded = Strided(x, (96, 33), (1, 96)), Strided(x, (33, 96), (0, 1))
    every_second, overlapping = Strided(x, (33, 48), (96, 2)), Strided(x, (30, 96), (48, 1))
    with df.config.override(driver=device.driver):
        for wrong in (turned, expanded, every_second, overlapping):
            refused(
                lambda wrong=wrong: df.coat.fp8_rmsnorm_forward(wrong, s_x, w, 16, 1e-5), "x", "rows at equal distances"
            )
    refused(lambda: df.coat.fp8_rmsnorm_forward(np.zeros(SHAPE, np.float32), s_x, w, 16, 1e-5), "x", "host memory")


def test_outputs_and_workspaces_that_do_not_match_are_refused(device, arrays, refused):
    x, s_x, w, g = arrays
    good = outputs(device)

    def forward(out=good, **rest):
        return lambda: df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5, outputs=out, **rest)

    refused(forward(good[:3]), "outputs", "is 3 arrays; it must be a tuple or list of 4: (qy, s_y, qy_t, rstd)")
    refused(forward((good[0], good[1], device.empty((33, 96), "float8_e4m3fn"), good[3])), "outputs.qy_t", "(96, 33)")
    refused(forward((device.empty(SHAPE, "float8_e5m2"), *good[1:])), "outputs.qy.dtype")
    refused(forward((x, *good[1:])), "outputs.qy", "overlapping x")
    refused(forward(workspace=device.zeros(64, "uint8")), "workspace", str(WORDS_BYTES))
    refused(forward(workspace=device.zeros(9000, "int8")), "workspace.dtype")
    space = device.zeros(df.coat.fp8_workspace_bytes(96), "uint8")
    inside = df.view(space.ptr + 4096, SHAPE, "float8_e4m3fn", device, owner=space)
    refused(forward((inside, *good[1:]), workspace=space), "workspace", "overlapping outputs.qy")
    for columns in (0, -1, 96.0, "96"):
        refused(lambda columns=columns: df.coat.fp8_workspace_bytes(columns), "columns", "at least 1")
    refused(forward(pdl_level=9), "pdl_level")
    with pytest.raises(Unsupported):
        forward(pdl_level=df.PDLLevel.NO_WAIT_OVERLAP_AT_END)()
    refused(forward(stream="mine"), "stream")
