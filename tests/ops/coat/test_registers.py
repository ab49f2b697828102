# SPDX-License-Identifier: Apache-2.0
"""The machine code of kernels for common shapes and 132 multiprocessors: few spills, and which loads precede the PDL
wait."""

from __future__ import annotations

import re

import pytest

import drvfuse as df
from drvfuse.ops.call import planned

pytestmark = pytest.mark.emulated
E4M3 = "float8_e4m3fn"


class Chosen(Exception):
    pass


def forward(x, s_x, w, g, row):
    df.coat.fp8_rmsnorm_forward(x, s_x, w, 16, 1e-5)


def backward(x, s_x, w, g, row):
    df.coat.fp8_rmsnorm_backward(x, s_x, g, w, row, 16)


def layernorm(x, s_x, w, g, row):
    df.coat.fp8_layernorm_param_forward(x, s_x, w, w, 16, 1e-5)


def layernorm_backward(x, s_x, w, g, row):
    df.coat.fp8_layernorm_param_backward(x, s_x, g, 16, w, w, row, row)


def groups(x, s_x, w, g, row):
    df.coat.fp8_add_rmsnorm_pg2pg_forward(g, g, "E4M3", w, 16, 1e-5)


@pytest.mark.parametrize(
    "op,shape,spilled,weights_first",
    [
        (forward, (1, 2048), 0, True),
        (forward, (4, 2048), 0, True),
        (forward, (16, 4096), 0, True),
        (forward, (256, 4096), 0, True),
        (forward, (8192, 4096), 0, False),
        (backward, (256, 4096), 0, False),
        (backward, (8192, 4096), 0, False),
        (backward, (4096, 11008), 0, False),
        (layernorm, (8192, 4096), 4, False),
        (layernorm_backward, (8192, 4096), 0, False),
        (groups, (8192, 4096), 0, True),
    ],
)
def test_kernels_of_common_shapes_spill_little_and_fetch_weights_before_the_wait(
    monkeypatch, op, shape, spilled, weights_first
):
    chosen = []

    def load(device, spec):
        chosen.append(spec)
        raise Chosen

    monkeypatch.setattr(planned, "load", load)
    rows, columns = shape
    with df.emu.Machine(devices=1, sm_count=132) as machine:
        device = df.device(0, driver=machine)
        x, s_x = device.empty(shape, E4M3), device.empty((rows, columns // 16), "bfloat16")
        w, g, row = device.empty(columns, "bfloat16"), device.empty(shape, "bfloat16"), device.empty(rows, "float32")
        with pytest.raises(Chosen):
            op(x, s_x, w, g, row)
    image = chosen[0].compile("sm_90a", ("--ptxas-options=-v",))
    (stores,) = re.findall(r"(\d+) bytes spill stores", image.log)
    assert int(stores) <= spilled
    in_front, behind = image.ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in behind
    assert ("ld.global" in in_front) == weights_first
