# SPDX-License-Identifier: Apache-2.0
"""Runs a batch of instruction forms on a driver. The driver gets PTX text, so that its own assembler is used."""

from __future__ import annotations

import ctypes

import numpy as np

from drvfuse.runtime.device import Device

from . import operands
from .batch import BLOCK, PAIR, Batch, width


def run(device: Device, batch: Batch, extra: int = 0) -> dict[str, np.ndarray]:
    """The results of each form by its name, as unsigned integers: a word for each row, or two for 128 bits, low first.

    A row is one set of operands. `extra` rows of random operands follow those of the fixture.
    """
    driver, columns = device.driver, operands.rows(batch.sources, extra)
    count = len(columns[0]) if columns else operands.ROWS[0]
    count -= count % BLOCK
    stream = device.stream
    inputs = [
        device.array(column[:count].astype(f"<u{width(kind) // 8}"))
        for column, kind in zip(columns, batch.sources, strict=True)
    ]
    found = {}
    with device.use():
        module = driver.cuModuleLoadData(batch.ptx.encode() + b"\0")
        try:
            for name, forms in batch.kernels():
                sizes = [count * width(form.result) // 8 for form in forms]
                out, scratch = device.zeros(sum(sizes), "uint8"), device.zeros(16 * count, "uint8")
                kernel = driver.cuModuleGetFunction(module, name.encode())
                values = (*(a.ptr for a in inputs), PAIR, out.ptr, scratch.ptr, count)
                types = (ctypes.c_uint64,) * (len(values) - 1) + (ctypes.c_uint32,)
                grid = count // BLOCK
                driver.cuLaunchKernel(kernel, grid, 1, 1, BLOCK, 1, 1, 0, stream.handle, (values, types), 0)
                raw = out.numpy().tobytes()
                for form, start, size in zip(forms, np.cumsum([0, *sizes]), sizes, strict=False):
                    found[form.name] = _words(raw[start : start + size], width(form.result))
        finally:
            driver.cuModuleUnload(module)
    return found


def _words(raw: bytes, bits: int) -> np.ndarray:
    return np.frombuffer(raw, "<u8").reshape(-1, 2) if bits == 128 else np.frombuffer(raw, f"<u{bits // 8}")
