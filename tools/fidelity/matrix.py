# SPDX-License-Identifier: Apache-2.0
"""Runs the forms of matrix instructions on a driver. Each form has a kernel of its own, with one warp per block."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from drvfuse.runtime.device import Device

from .fixture import Answer
from .matrix_forms import SHARED, MatrixForm, table

_HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
MODULE_FORMS = 24


def batches(times: int = 1) -> Iterator[tuple[MatrixForm, ...]]:
    """All forms, in groups that become a PTX module each, with `times` as many warps and operands as in the table."""
    forms = tuple(replace(form, warps=times * form.warps) for form in table())
    for start in range(0, len(forms), MODULE_FORMS):
        yield forms[start : start + MODULE_FORMS]


def ptx(forms: tuple[MatrixForm, ...]) -> str:
    return _HEAD + "\n".join(_kernel(f"form_{i}", form) for i, form in enumerate(forms))


def _kernel(name: str, form: MatrixForm) -> str:
    return f""".visible .entry {name}(.param .u64 in, .param .u64 out) {{
.reg .b64 %in, %out, %me, %to; .reg .b32 %lane, %block, %near, %mine, %word;
.shared .align 128 .b8 rows[{SHARED}];
mov.u32 %lane, %laneid; mov.u32 %block, %ctaid.x; mov.u32 %near, rows; mad.lo.u32 %mine, %lane, 4, %near;
ld.param.u64 %in, [in]; mad.wide.u32 %in, %block, {form.in_bytes}, %in; mad.wide.u32 %me, %lane, 4, %in;
ld.param.u64 %out, [out]; mad.wide.u32 %out, %block, {form.out_bytes}, %out; mad.wide.u32 %to, %lane, 4, %out;
{form.body}
ret; }}"""


def run(device: Device, forms: tuple[MatrixForm, ...]) -> dict[str, Answer]:
    """Run the forms on a device. Returns their results by the name of the form, as 32-bit words."""
    driver, stream, found = device.driver, device.stream, {}
    with device.use():
        module = driver.cuModuleLoadData(ptx(forms).encode() + b"\0")
        try:
            for i, form in enumerate(forms):
                inputs = form.inputs()
                given, out = device.array(inputs), device.zeros(form.warps * form.out_bytes, "uint8")
                kernel = driver.cuModuleGetFunction(module, f"form_{i}".encode())
                parameters = ((given.ptr, out.ptr), (ctypes.c_uint64, ctypes.c_uint64))
                driver.cuLaunchKernel(kernel, form.warps, 1, 1, 32, 1, 1, 0, stream.handle, parameters, 0)
                found[form.name] = Answer(_digest(form, inputs), np.frombuffer(out.numpy().tobytes(), "<u4"))
        finally:
            driver.cuModuleUnload(module)
    return found


def _digest(form: MatrixForm, inputs: np.ndarray) -> bytes:
    """A digest of a form and of its operands."""
    text = repr((form.name, form.body, form.warps, form.out_bytes)).encode()
    return hashlib.blake2b(text + inputs.tobytes(), digest_size=8).digest()


def answers(device: Device, times: int = 1) -> dict[str, Answer]:
    """The results of all forms on a device, by the name of the form."""
    found: dict[str, Answer] = {}
    for batch in batches(times):
        found |= run(device, batch)
    return found
