# SPDX-License-Identifier: Apache-2.0
"""A wheel of drvfuse is built and used: it runs PTX where no NVRTC is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import drvfuse
from drvfuse.compiler.nvrtc import compile_source

pytestmark = pytest.mark.emulated

CHECKOUT = Path(drvfuse.__file__).parents[1]
SOURCE = 'extern "C" __global__ void square(int* p) { p[threadIdx.x] = threadIdx.x * threadIdx.x; }'

PROGRAM = """
import ctypes, importlib.abc, sys

class NoNvrtc(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "nvidia" or name == "cuda.bindings.nvrtc":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

class Library(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if "nvrtc" in str(name):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kwargs)

sys.meta_path.insert(0, NoNvrtc())
ctypes.CDLL = Library

import importlib.util
spec, importlib.util.find_spec = importlib.util.find_spec, lambda name: None if name == "nvidia" else spec(name)

import drvfuse
from drvfuse.emu import Machine

def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None

print(drvfuse.__file__)
cuda = Machine(1).driver
ok(cuda.cuInit(0))
ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
module = ok(cuda.cuModuleLoadData(open(sys.argv[1], "rb").read() + bytes(1)))
memory = ok(cuda.cuMemAlloc(32))
kernel = ok(cuda.cuModuleGetFunction(module, b"square"))
ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 8, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0))
host = (ctypes.c_int * 8)()
ok(cuda.cuMemcpyDtoH(ctypes.addressof(host), memory, 32))
print(*host)
"""


def without_nvrtc(tree: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM, which finds no NVRTC, with the drvfuse in `tree`."""
    text = tmp_path / "square.ptx"
    text.write_text(compile_source(SOURCE, name="square.cu", arch="sm_90", cubin=False).ptx)
    everything = {**os.environ, "PYTHONPATH": str(tree), "DRVFUSE_NVRTC": "", **environment}
    command = [sys.executable, "-c", PROGRAM, str(text)]
    return subprocess.run(command, env=everything, cwd=tmp_path, capture_output=True, text=True)


def test_a_wheel_runs_ptx_without_nvrtc(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.build_wheel", str(tmp_path / "dist")]
    built = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        files = {name for name in archive.namelist() if name.startswith("drvfuse/")}
    sources = {str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("drvfuse/**/*") if path.is_file()}
    ours = {name for name in sources if "__pycache__" not in name}
    assert files - ours == {f"drvfuse/emu/native/{name}.ptx" for name in ("runtime", "matrix")} and ours <= files
    run = without_nvrtc(tmp_path / "site", tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{tmp_path}/site/drvfuse/__init__.py\n0 1 4 9 16 25 36 49\n"


def test_a_checkout_without_nvrtc_says_what_to_install(tmp_path: Path) -> None:
    run = without_nvrtc(CHECKOUT, tmp_path, DRVFUSE_CACHE_DIR=str(tmp_path / "cache"))
    assert run.returncode == 1
    error = run.stderr.strip().splitlines()[-1]
    assert error.startswith("drvfuse.errors.DriverUnavailable: ") and "native runtime" in error
    assert "no NVRTC library was found: pip install 'drvfuse[cu1" in error
