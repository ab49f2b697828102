# SPDX-License-Identifier: Apache-2.0
"""What ptxas says of the kernels of common shapes on a device of 132 multiprocessors: hardly a spill, and PDL: in front
of the wait L2 is asked for the weights, and nothing is read."""

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
    "op,shape,spilled",
    [
        (forward, (1, 2048), 0),
        (forward, (4, 2048), 0),
        (forward, (16, 4096), 0),
        (forward, (256, 4096), 0),
        (forward, (8192, 4096), 12),  # of the rows in registers, once a launch
        (backward, (256, 4096), 0),
        (backward, (8192, 4096), 0),
        (backward, (4096, 11008), 0),
        (layernorm, (8192, 4096), 4),
        (layernorm_backward, (8192, 4096), 0),
        (groups, (8192, 4096), 0),
    ],
)
def test_common_shapes_spill_hardly_anything(monkeypatch, op, shape, spilled):
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
    assert "prefetch.global.L2" in in_front and "ld.global" not in in_front
    assert "griddepcontrol.launch_dependents" in behind
