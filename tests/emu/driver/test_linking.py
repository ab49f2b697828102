# SPDX-License-Identifier: Apache-2.0
"""cuLink* and fat binaries: which images are loaded, which are refused, and the error buffers."""

from __future__ import annotations

import base64
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as types
from driver_helpers import R, code, ok, primary
from loopback import FORMS, initialised

from drvfuse.emu import Machine

IN, JIT = types.CUjitInputType, types.CUjit_option
HEAD = b".version 7.0\n.target sm_80\n.address_size 64\n"
MAIN = (
    HEAD
    + b"""
.extern .func (.param .b32 r) twice (.param .b32 x);
.extern .global .align 4 .u32 offset;
.visible .entry run(.param .u64 out) {
  .reg .b64 %rd<2>; .reg .b32 %r<4>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  { .param .b32 x; .param .b32 r;
    st.param.b32 [x], %r1;
    call (r), twice, (x);
    ld.param.b32 %r2, [r]; }
  ld.global.u32 %r3, [offset];
  add.u32 %r2, %r2, %r3;
  mul.wide.u32 %rd0, %r1, 4;
  add.u64 %rd1, %rd1, %rd0;
  st.global.u32 [%rd1], %r2;
  ret;
}
"""
)
TWICE = (
    HEAD
    + b"""
.visible .global .align 4 .u32 offset = 100;
.visible .func (.param .b32 r) twice (.param .b32 x) {
  .reg .b32 %r<2>;
  ld.param.b32 %r1, [x];
  shl.b32 %r1, %r1, 1;
  st.param.b32 [r], %r1;
  ret;
}
"""
)


@pytest.fixture(params=FORMS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with initialised(request.param, devices=1) as made:
        yield made


@pytest.fixture
def own() -> Iterator[Any]:
    with Machine(devices=1) as machine:
        machine.driver.cuInit(0)
        primary(machine.driver)
        yield machine


def _add(cuda: Any, state: Any, data: bytes, name: bytes = b"a", kind: Any = IN.CU_JIT_INPUT_PTX) -> Any:
    return code(cuda.cuLinkAddData(state, kind, data, len(data), name, 0, [], []))


def _run(cuda: Any, module: Any, name: bytes = b"run") -> list[int]:
    out = ok(cuda.cuMemAlloc(16))
    kernel = ok(cuda.cuModuleGetFunction(module, name))
    ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 4, 1, 1, 0, 0, ((int(out),), (ctypes.c_void_p,)), 0))
    back = np.zeros(4, np.uint32)
    ok(cuda.cuMemcpyDtoH(back, out, 16))
    return [int(value) for value in back]


def test_a_linked_image_is_loaded_from_its_address_and_from_its_bytes(cuda: Any, tmp_path: Path) -> None:
    (tmp_path / "twice.ptx").write_bytes(TWICE)
    state = ok(cuda.cuLinkCreate(1, [JIT.CU_JIT_MAX_REGISTERS], [32]))
    assert _add(cuda, state, MAIN + b"\0") == 0
    path = os.fsencode(tmp_path / "twice.ptx")
    ok(cuda.cuLinkAddFile(state, IN.CU_JIT_INPUT_PTX, path, 0, [], []))
    address, size = ok(cuda.cuLinkComplete(state))
    content = ctypes.string_at(address, size)
    assert _run(cuda, ok(cuda.cuModuleLoadData(address))) == [100, 102, 104, 106]
    ok(cuda.cuLinkDestroy(state))
    library = ok(cuda.cuLibraryLoadData(content, [], [], 0, [], [], 0))
    assert _run(cuda, ok(cuda.cuLibraryGetModule(library))) == [100, 102, 104, 106]
    assert code(cuda.cuLinkDestroy(state)) == R.CUDA_ERROR_INVALID_HANDLE
    missing = cuda.cuLinkAddFile(state, IN.CU_JIT_INPUT_PTX, path, 0, [], [])
    assert code(missing) == R.CUDA_ERROR_INVALID_HANDLE


def test_ptx_labelled_as_a_cubin_is_linked(cuda: Any) -> None:
    state = ok(cuda.cuLinkCreate(0, [], []))
    assert _add(cuda, state, MAIN, kind=IN.CU_JIT_INPUT_CUBIN) == _add(cuda, state, TWICE, kind=IN(3)) == 0
    assert _run(cuda, ok(cuda.cuModuleLoadData(ok(cuda.cuLinkComplete(state))[0]))) == [100, 102, 104, 106]


def test_what_cannot_be_linked_is_refused(cuda: Any) -> None:
    state = ok(cuda.cuLinkCreate(0, [], []))
    assert code(cuda.cuLinkComplete(state)) == R.CUDA_ERROR_INVALID_IMAGE
    for kind in (IN.CU_JIT_INPUT_CUBIN, IN.CU_JIT_INPUT_OBJECT, IN.CU_JIT_INPUT_LIBRARY, IN.CU_JIT_INPUT_NVVM):
        assert _add(cuda, state, b"\x7fELF" + bytes(60), kind=kind) == R.CUDA_ERROR_NOT_SUPPORTED
    # undefined symbols are reported when the link is completed
    assert _add(cuda, state, HEAD + b".visible .entry k() { what; }") == 0
    assert code(cuda.cuLinkComplete(state)) == R.CUDA_ERROR_INVALID_PTX
    state = ok(cuda.cuLinkCreate(0, [], []))
    assert _add(cuda, state, HEAD + b".visible .entry k( {") == R.CUDA_ERROR_INVALID_PTX
    assert _add(cuda, state, HEAD.replace(b"80", b"100") + MAIN[len(HEAD) :]) == R.CUDA_ERROR_INVALID_PTX
    missing = cuda.cuLinkAddFile(state, IN.CU_JIT_INPUT_PTX, b"/no/such/file", 0, [], [])
    assert code(missing) == R.CUDA_ERROR_FILE_NOT_FOUND
    assert _add(cuda, state, MAIN, b"main.ptx") == 0
    assert code(cuda.cuLinkComplete(state)) == R.CUDA_ERROR_INVALID_IMAGE
    assert _add(cuda, state, TWICE) == 0
    ok(cuda.cuLinkComplete(state))
    assert _add(cuda, state, TWICE) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLinkComplete(state)) == R.CUDA_ERROR_INVALID_VALUE


def _log(nbytes: int = 200) -> tuple[list[Any], list[Any], bytearray]:
    buffer = bytearray(b"\1" * nbytes)
    options = [JIT.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, JIT.CU_JIT_ERROR_LOG_BUFFER, JIT.CU_JIT_LOG_VERBOSE]
    return options, [nbytes, buffer, 1], buffer


def _said(buffer: bytearray) -> str:
    return bytes(buffer).split(b"\0", 1)[0].decode()


def test_the_error_buffer_of_a_link_describes_the_failure(own: Machine) -> None:
    cuda = own.driver
    options, values, buffer = _log()
    state = ok(cuda.cuLinkCreate(3, options, values))
    assert _add(cuda, state, MAIN, b"main.ptx") == 0
    assert code(cuda.cuLinkComplete(state)) == R.CUDA_ERROR_INVALID_IMAGE
    assert _said(buffer).startswith("error: Undefined reference to 'twice' in 'main.ptx'")
    assert _add(cuda, state, b"\x7fELF", b"x.o", IN.CU_JIT_INPUT_OBJECT) == R.CUDA_ERROR_NOT_SUPPORTED
    assert _said(buffer).startswith("error: x.o is an input of the type object")
    options, values, short = _log(20)
    bad = HEAD + b".visible .entry k() { what; }"
    assert code(cuda.cuModuleLoadDataEx(bad, 3, options, values)) == R.CUDA_ERROR_INVALID_PTX
    assert len(_said(short)) == 19 and _said(short).startswith("error: PTX line 4")
    options, values, own_buffer = _log()
    library = cuda.cuLibraryLoadData(bad, options, values, 3, [], [], 0)
    assert code(library) == R.CUDA_ERROR_INVALID_PTX and "what" in _said(own_buffer)
    options, values, untouched = _log()
    ok(cuda.cuModuleLoadDataEx(TWICE, 3, options, values))
    assert untouched == b"\1" * 200


# Fat binaries -------------------------------------------------------------------------------------------------------


def _lz4(content: bytes) -> bytes:
    """Compressed data: a block of literals, then an overlapping match that repeats the last byte."""
    out, at = bytearray(), 0
    while at < len(content):
        end = next(
            (i for i in range(at + 1, len(content) - 30) if len(set(content[i - 1 : i + 20])) == 1), len(content)
        )
        last, literals = end == len(content), content[at:end]
        token = min(len(literals), 15) << 4 | (0 if last else 15)
        out.append(token)
        for length in (len(literals),):
            if length >= 15:
                out += b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])
        out += literals
        if not last:
            out += b"\1\0" + bytes([20 - 4 - 15])
            end += 20
        at = end
    return bytes(out)


def _fat(*images: tuple[int, int, int, bytes, bytes]) -> bytes:
    """A fat binary of these images: (kind, arch, flags, stored content, uncompressed content)."""
    body = b""
    for kind, arch, flags, written, content in images:
        padded = -(-len(written) // 8) * 8
        compressed = len(written) if flags & 0xA000 else 0
        sizes = struct.pack("<HHIQIIHHI", kind, 0x101, 64, padded, compressed, 0, 0, 9, arch)
        unpacked = len(content) if compressed else 0
        body += sizes + struct.pack("<IIQQQ", 0, 0, 0x11 | flags, 0, unpacked) + written.ljust(padded, b"\0")
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(body)) + body


def _kernel(value: int, target: str = "sm_80") -> bytes:
    text = f""".version 8.6
.target {target}
.address_size 64
.visible .entry run(.param .u64 out) {{
  .reg .b64 %rd<3>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [out];                            // {"-" * 60}
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  add.u32 %r1, %r1, {value};
  st.global.u32 [%rd1], %r1;
  ret;
}}
"""
    return text.encode()


CUBIN = (2, 90, 0, b"\x7fELF" + bytes(60), b"")


def test_the_best_matching_ptx_of_a_fat_binary_is_loaded(cuda: Any) -> None:
    """The device of the machine is an sm_90a."""

    def image(number: int, value: int, suffix: str = "") -> tuple[int, int, int, bytes, bytes]:
        text = _kernel(value, f"sm_{number}{suffix}")
        return 1, number, 0, text, text

    fat = _fat(image(100, 5), CUBIN, image(90, 2), image(90, 3, "a"), image(80, 1))
    for load in (cuda.cuModuleLoadFatBinary, cuda.cuModuleLoadData):
        assert _run(cuda, ok(load(fat))) == [3, 4, 5, 6]
    assert _run(cuda, ok(cuda.cuModuleLoadFatBinary(_fat(image(80, 1), image(100, 5), image(90, 2))))) == [2, 3, 4, 5]
    assert code(cuda.cuModuleLoadFatBinary(_fat(image(100, 5), image(120, 1)))) == R.CUDA_ERROR_INVALID_PTX
    assert code(cuda.cuModuleLoadFatBinary(_fat(CUBIN))) == R.CUDA_ERROR_NOT_SUPPORTED
    keep = ctypes.create_string_buffer(fat)
    wrapper = struct.pack("<4sIQQ", b"\xb1\x43\x62\x46", 1, ctypes.addressof(keep), 0)
    held = ctypes.create_string_buffer(wrapper)
    for given in (wrapper, ctypes.addressof(held), ctypes.addressof(keep)):
        assert _run(cuda, ok(cuda.cuModuleLoadFatBinary(given))) == [3, 4, 5, 6]
    state = ok(cuda.cuLinkCreate(0, [], []))
    assert _add(cuda, state, fat, kind=IN.CU_JIT_INPUT_FATBINARY) == 0
    assert _run(cuda, ok(cuda.cuModuleLoadData(ok(cuda.cuLinkComplete(state))[0]))) == [3, 4, 5, 6]


def test_compressed_ptx_is_loaded(own: Machine) -> None:
    text = _kernel(7)
    packed = _lz4(text)
    assert len(packed) < len(text)
    assert _run(own.driver, ok(own.driver.cuModuleLoadFatBinary(_fat((1, 80, 0x2000, packed, text))))) == [7, 8, 9, 10]
    endless = b"\x1fA\1\0" + b"\xff" * 4_000_000 + b"\0"
    for wrong in (packed[:-5], b"\xf0" + packed, packed.replace(b"\1\0", b"\xff\xff"), endless):
        refused = own.driver.cuModuleLoadFatBinary(_fat((1, 80, 0x2000, wrong, text)))
        assert code(refused) == R.CUDA_ERROR_INVALID_IMAGE
    refused = own.driver.cuModuleLoadFatBinary(_fat((1, 80, 0x8000, b"nonsense", text)))
    assert code(refused) == R.CUDA_ERROR_INVALID_IMAGE


# PTX as the tool fatbinary of CUDA 13.0 writes it: without further options, and with --compress-mode=speed.
ZSTANDARD = (
    "UO1VugEAEAAYAQAAAAAAAAEAAQFQAAAAyAAAAAAAAADEAAAAQAAAAAAABwBQAAAAAAAAAAAAAAARgAAAAAAAAAAAAAAAAAAAEgEA"
    "AAAAAABIAAAAAAAAAAAAAAAAAAAAKLUv/WASANUFAEJLJB9QSewYqYrMkRb/IhdoURAzUyer0YtmMGpcK1QNI/QYh2xI9e2pEEtb"
    "zGvNPkxFgDCvVKlAuJkhbIsuVcIye6TFEfd5LhXi41u0ONgRt3SkSKLKIClgR5oUZrVp32TQgI9PkxJX3fJ1sABOdFXwd3q1G8Mg"
    "ezaTor3AYALCdua1aQwkHNTvxtdvGiugzmPQ+9kPIBA0jA+hyCyuewlaaCrQ5ctLQJoyHGPPgN1MI9Y+jgivrExFAQAAAAA="
)
LZ4 = (
    "UO1VugEAEAA4AQAAAAAAAAEAAQFQAAAA6AAAAAAAAADmAAAAQAAAAAAABwBQAAAAAAAAAAAAAAARIAAAAAAAAAAAAAAAAAAAEgEA"
    "AAAAAABIAAAAAAAAAAAAAAAAAAAA81YudmVyc2lvbiA3LjAKLnRhcmdldCBzbV84MAouYWRkcmVzc19zaXplIDY0Ci52aXNpYmxl"
    "IC5lbnRyeSBydW4oLnBhcmFtIC51NjQgb3V0KSB7Ci5yZWcgLmI2NCAlcmQ8Mz47IBIAUDMyICVyEQAyCmxkOAABNwDxAyVyZDEs"
    "IFtvdXRdOwptb3YudSkA8wQxLCAldGlkLng7Cm11bC53aWRlGgAyZDIsIABnNDsKYWRkRQAFBgATMhoABUoAAE8AwTk7CnN0Lmds"
    "b2JhbBsAEFswABBdNwCwMTsKcmV0Owp9CgAAAA=="
)


@pytest.mark.parametrize("content", [ZSTANDARD, LZ4])
def test_fat_binaries_of_the_cuda_toolkit_are_loaded(own: Machine, content: str) -> None:
    image = base64.b64decode(content)
    assert b".global.u32" not in image
    assert _run(own.driver, ok(own.driver.cuModuleLoadFatBinary(image))) == [9, 10, 11, 12]


@pytest.mark.parametrize("cut", [3, 15, 17, 60, 100, -1])
def test_a_truncated_fat_binary_is_refused(cuda: Any, cut: int) -> None:
    text = _kernel(1)
    fat = _fat((1, 80, 0, text, text))
    assert code(cuda.cuModuleLoadData(fat[:cut])) in (R.CUDA_ERROR_INVALID_IMAGE, R.CUDA_ERROR_INVALID_VALUE)


def test_libraries_are_loaded_from_files(cuda: Any, tmp_path: Path) -> None:
    path = tmp_path / "kernel.ptx"
    path.write_bytes(_kernel(11))
    library = ok(cuda.cuLibraryLoadFromFile(os.fsencode(path), [], [], 0, [], [], 0))
    assert _run(cuda, ok(cuda.cuLibraryGetModule(library))) == [11, 12, 13, 14]
    assert code(cuda.cuLibraryGetUnifiedFunction(library, b"run")) == R.CUDA_ERROR_NOT_FOUND
    missing = cuda.cuLibraryLoadFromFile(os.fsencode(tmp_path / "no"), [], [], 0, [], [], 0)
    assert code(missing) == R.CUDA_ERROR_FILE_NOT_FOUND
