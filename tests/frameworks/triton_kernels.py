# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton, and what Triton's compiler makes of them. The compiler needs no GPU.

`python tests/frameworks/triton_kernels.py` records the PTX in `triton_kernels.json`, for tests where Triton is missing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

RECORDED = Path(__file__).with_suffix(".json")


@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    product = tl.load(x + i, mask=inside).to(tl.float32) * factor
    tl.store(out + i, (product + tl.load(y + i, mask=inside).to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def row_stats(x, sums, peaks, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, mask=i < columns, other=0.0)
    tl.store(sums + row, tl.sum(values, 0))
    tl.store(peaks + row, tl.max(tl.abs(values), 0))


@triton.jit
def count_atomic(x, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + i, mask=i < n, other=0), 1, mask=i < n)


@triton.jit
def count_racing(x, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = counts + tl.load(x + i, mask=i < n, other=0)
    tl.store(place, tl.load(place, mask=i < n) + 1, mask=i < n)


SIGNATURES: dict[Any, tuple[dict[str, str], int]] = {
    scale_add: ({"x": "*bf16", "y": "*bf16", "out": "*bf16", "n": "i32", "factor": "fp32"}, 256),
    row_stats: ({"x": "*fp32", "sums": "*fp32", "peaks": "*fp32", "columns": "i32"}, 1024),
    count_atomic: ({"x": "*i32", "counts": "*i32", "n": "i32"}, 128),
    count_racing: ({"x": "*i32", "counts": "*i32", "n": "i32"}, 128),
}
"""Kernel -> its parameters and their types, and its BLOCK."""


def compiled(capability: int) -> dict[str, dict[str, Any]]:
    """Compile all kernels for a compute capability such as 90. Returns for each, by name, the threads of a block, the
    bytes of shared memory, BLOCK, PTX and cubin."""
    # Products and sums are rounded separately, as in numpy.
    options = {"enable_fp_fusion": False, "num_warps": 4}
    found = {}
    for kernel, (signature, block) in SIGNATURES.items():
        source = ASTSource(kernel, signature, {"BLOCK": block})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        sizes = {"threads": 32 * made.metadata.num_warps, "shared": made.metadata.shared, "block": block}
        found[kernel.__name__] = sizes | {"ptx": made.asm["ptx"], "cubin": made.asm["cubin"]}
    return found


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # line information would name the folder
    kernels = {name: {k: v for k, v in made.items() if k != "cubin"} for name, made in compiled(90).items()}
    RECORDED.write_text(json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=1) + "\n")
