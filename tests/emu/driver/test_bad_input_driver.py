# SPDX-License-Identifier: Apache-2.0
"""Bad input to the emulated driver: the error code that a GPU's driver gives, and a report that says what happened.

The codes for images, memory and destroyed contexts were measured on an H200 with driver 580. That driver loads a cubin
that was made for its GPU. The emulated driver refuses every cubin, with the code that a GPU's driver returns for a
cubin of another architecture.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc
from driver_helpers import R, code, function, ok, primary, ptx

import drvfuse as df
from drvfuse import config
from drvfuse.emu import Machine, Report
from drvfuse.errors import DriverError

MIB = 1 << 20
SOURCE = """
extern "C" __global__ void touch(unsigned* p) { *p = 1; }
extern "C" __global__ void spin(const unsigned* flag) {
  unsigned v;
  do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);
}
extern "C" __global__ void forever(unsigned* p) {
  for (unsigned i = 0;; i++)
    *(volatile unsigned*)p = i;
}
extern "C" __global__ void odd() {
  asm volatile("wgmma.fence.sync.aligned;");
}
"""


def line_of(text: str) -> int:
    return SOURCE[: SOURCE.index(text)].count("\n") + 1


def launch(cuda: Any, f: Any, *pointers: Any, stream: Any = 0) -> Any:
    return cuda.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, (pointers, (None,) * len(pointers)), 0)


def runnable(source: str = SOURCE) -> str:
    """`source` without the kernel `odd`, which cannot be loaded."""
    return source[: source.index('extern "C" __global__ void odd')]


def zeros(cuda: Any, nbytes: int = 64) -> Any:
    pointer = ok(cuda.cuMemAlloc(nbytes))
    ok(cuda.cuMemsetD8(pointer, 0, nbytes))
    return pointer


def only(machine: Machine, kind: str) -> Report:
    """The only report of a machine; it must have this kind."""
    (report,) = machine.reports
    assert report.kind == kind
    return report


# Images --------------------------------------------------------------------------------------------------------------


def cubin(arch: str) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(b'extern "C" __global__ void k() {}', b"k.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [f"-arch={arch}".encode()])
    assert error == 0
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    image = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, image)
    return bytes(image)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a"])
def test_a_cubin_is_refused_by_its_name(machine: Machine, cuda: Any, arch: str) -> None:
    primary(cuda)
    image = cubin(arch)
    kept = ctypes.create_string_buffer(image)
    for given in (image, ctypes.addressof(kept), np.frombuffer(image, np.uint8)):
        machine.reports.clear()
        assert code(cuda.cuModuleLoadData(given)) == R.CUDA_ERROR_NOT_SUPPORTED
        message = only(machine, "unsupported").message
        assert f"a cubin (ELF) for {arch};" in message and f"compile to PTX instead (compute_{arch[3:]}," in message
    assert code(cuda.cuLibraryLoadData(image, [], [], 0, [], [], 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert only(machine, "unsupported").message == message  # a second load adds no report


def test_a_fat_binary_without_ptx_is_refused_by_its_name(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    image = (0xBA55ED50).to_bytes(4, "little") + bytes(60)
    for _ in range(3):
        assert code(cuda.cuModuleLoadData(image)) == R.CUDA_ERROR_NOT_SUPPORTED
    assert "fat binary without any" in only(machine, "unsupported").message


def test_a_pointer_that_does_not_lead_to_a_fat_binary_is_refused(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    assert code(cuda.cuModuleLoadData((0x466243B1).to_bytes(4, "little") + bytes(60))) == R.CUDA_ERROR_INVALID_IMAGE
    assert "the image points to memory that holds no fat binary" in only(machine, "module").message


TEXT = ptx(runnable())
IMAGES = {
    "words": (b"hello", "INVALID_IMAGE", "no .version"),
    "nothing": (b"", "INVALID_IMAGE", "no .version"),
    "a target alone": (b".target sm_90\n", "INVALID_IMAGE", "no .version"),
    "bytes": (bytes(range(255, 0, -1)) * 16, "INVALID_IMAGE", "not PTX text"),
    "a library of the host": (b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x3e\0" + bytes(100), "INVALID_IMAGE", "ELF file"),
    "an ELF of zeros": (b"\x7fELF" + bytes(100), "INVALID_IMAGE", "ELF file"),
    "PTX for a newer GPU": (
        TEXT.replace(b"sm_90a", b"sm_100a"),
        "INVALID_PTX",
        "for sm_100a and the devices are sm_90a",
    ),
    "PTX that is not UTF-8": (b"// \xff\n" + TEXT, "INVALID_PTX", "PTX line 1 is not UTF-8"),
    "PTX of a newer CUDA": (
        re.sub(rb"\.version \d+\.\d+", b".version 10.0", TEXT),
        "UNSUPPORTED_PTX_VERSION",
        "the PTX is of version 10.0",
    ),
    "PTX with a trailing operand": (TEXT.replace(b"ret;", b"ret ret;"), "INVALID_PTX", "at most 0 operand(s)"),
    "PTX with an error": (TEXT.replace(b"ret;", b"ret \x29;"), "INVALID_PTX", "PTX line"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_is_no_module_is_refused(machine: Machine, cuda: Any, name: str) -> None:
    primary(cuda)
    image, expected, message = IMAGES[name]
    assert code(cuda.cuModuleLoadData(image)) == getattr(R, f"CUDA_ERROR_{expected}")
    assert message in only(machine, "module").message
    ok(cuda.cuCtxSynchronize())


@pytest.mark.parametrize("words", [12288, 12289])
def test_static_shared_memory_is_at_most_48_kib(machine: Machine, cuda: Any, words: int) -> None:
    """The size is rounded up to 16 bytes. On a GPU, NVRTC or the assembler of the driver reports the excess."""
    primary(cuda)
    line = f"__shared__ int s[{words}]; s[threadIdx.x] = *p; __syncthreads(); p[1] = s[31 - threadIdx.x];"
    status = code(cuda.cuModuleLoadData(ptx(f'extern "C" __global__ void k(int* p) {{ {line} }}')))
    if words == 12288:
        assert status == R.CUDA_SUCCESS
    else:
        assert status == R.CUDA_ERROR_INVALID_PTX
        assert "k has 49168 bytes of static shared memory" in only(machine, "module").message


@pytest.mark.parametrize("nothing", [0, None])
def test_a_null_image_is_an_invalid_value(cuda: Any, nothing: Any) -> None:
    primary(cuda)
    assert code(cuda.cuModuleLoadData(nothing)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuModuleLoadDataEx(nothing, 0, [], [])) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuLibraryLoadData(nothing, [], [], 0, [], [], 0)) == R.CUDA_ERROR_INVALID_VALUE


def test_an_opcode_that_is_not_emulated_is_refused_at_its_source_line(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    image = ptx(SOURCE)
    kernel = ok(cuda.cuModuleGetFunction(ok(cuda.cuModuleLoadData(image)), b"odd"))
    assert code(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
    report = only(machine, "unsupported")
    line = next(i for i, text in enumerate(image.decode().split("\n"), 1) if "wgmma" in text)
    assert report.message.startswith(f"PTX line {line}: wgmma is not emulated")
    assert report.file is not None and report.file.endswith("test.cu") and report.line == line_of('asm volatile("wgmma')


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[Machine]:
    with Machine(devices=2, memory_bytes=64 * MIB) as machine:
        ok(machine.driver.cuInit(0))
        primary(machine.driver)
        yield machine


def test_an_out_of_memory_report_names_the_largest_holders(small: Machine) -> None:
    cuda = small.driver
    sizes = (1 * MIB, 20 * MIB, 3 * MIB, 8 * MIB)
    pointers = [ok(cuda.cuMemAlloc(size)) for size in sizes]
    pooled = ok(cuda.cuMemAllocAsync(5 * MIB, 0))
    for call in (cuda.cuMemAlloc(28 * MIB), cuda.cuMemAllocAsync(28 * MIB, 0), cuda.cuMemAlloc(1 << 60)):
        assert code(call) == R.CUDA_ERROR_OUT_OF_MEMORY
    reports = small.reports
    assert [(r.kind, r.device) for r in reports] == [("out_of_memory", 0)] * 3
    for report, asked in zip(reports, (28 * MIB, 28 * MIB, 1 << 60), strict=True):
        assert report.message == (
            f"{asked} bytes of device 0 were requested; {27 * MIB} of {64 * MIB} bytes are left; {37 * MIB} bytes are "
            f"held in 5 pieces, the largest: {20 * MIB} bytes at 0x{int(pointers[1]):x} of cuMemAlloc, {8 * MIB} bytes "
            f"at 0x{int(pointers[3]):x} of cuMemAlloc, {5 * MIB} bytes at 0x{int(pooled):x} of a pool"
        )
    primary(cuda, 1)
    ok(cuda.cuMemAlloc(28 * MIB))
    primary(cuda, 0)
    ok(cuda.cuMemAlloc(27 * MIB))


def test_an_allocation_waits_for_memory_of_a_queued_free(small: Machine) -> None:
    cuda = small.driver
    ok(cuda.cuMemFreeAsync(ok(cuda.cuMemAllocAsync(40 * MIB, 0)), 0))
    ok(cuda.cuMemAllocAsync(40 * MIB, 0))
    assert small.reports == []


def test_physical_memory_and_addresses_can_run_out(small: Machine) -> None:
    cuda = small.driver
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 1
    ok(cuda.cuMemCreate(40 * MIB, prop, 0))
    assert code(cuda.cuMemCreate(32 * MIB, prop, 0)) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert (
        small.reports[-1].device == 1 and f"the largest: {40 * MIB} bytes of cuMemCreate" in small.reports[-1].message
    )
    assert code(cuda.cuMemAddressReserve(1 << 50, 0, 0, 0)) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert "bytes of addresses were requested" in small.reports[-1].message
    assert code(cuda.cuMemHostAlloc(1 << 50, 0)) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert "of pinned host memory were requested" in small.reports[-1].message
    assert [r.kind for r in small.reports] == ["out_of_memory"] * 3


def test_a_kernel_that_uses_freed_memory_is_stopped_at_its_line(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    f, pointer = function(cuda, runnable(), "touch"), zeros(cuda)
    ok(cuda.cuMemFree(pointer))
    ok(launch(cuda, f, pointer))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_ILLEGAL_ADDRESS
    report = only(machine, "use_after_free")
    assert (report.line, report.address) == (line_of("touch"), int(pointer)) and "which was freed" in report.message
    assert code(cuda.cuMemAlloc(16)) == R.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.mark.parametrize("call", ["cuMemFree", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemsetD8", "cuMemcpyDtoHAsync"])
def test_a_call_with_a_freed_pointer_is_refused_and_harms_nothing(machine: Machine, cuda: Any, call: str) -> None:
    primary(cuda)
    pointer, host = zeros(cuda), np.zeros(64, np.uint8)
    ok(cuda.cuMemFree(pointer))
    arguments = {
        "cuMemFree": (pointer,),
        "cuMemcpyDtoH": (host, pointer, 64),
        "cuMemcpyHtoD": (pointer, host, 64),
        "cuMemsetD8": (pointer, 0, 64),
        "cuMemcpyDtoHAsync": (host, pointer, 64, 0),
    }[call]
    assert code(getattr(cuda, call)(*arguments)) == R.CUDA_ERROR_INVALID_VALUE
    report = only(machine, "use_after_free")
    assert report.address == int(pointer) and "0 bytes into 64 bytes at" in report.message
    ok(cuda.cuCtxSynchronize())


def test_freeing_twice_or_at_an_inner_address_is_refused(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    pointer = zeros(cuda, 1024)
    assert code(cuda.cuMemFree(int(pointer) + 256)) == R.CUDA_ERROR_INVALID_VALUE
    assert "256 bytes into 1024 bytes at" in only(machine, "out_of_bounds").message
    pooled = ok(cuda.cuMemAllocAsync(64, 0))
    ok(cuda.cuMemFreeAsync(pooled, 0))
    machine.reports.clear()
    assert code(cuda.cuMemFreeAsync(pooled, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert "not freed yet" in machine.reports[-1].message


# Contexts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", [True, False])
def test_destroying_a_context_waits_for_its_running_kernel(machine: Machine, cuda: Any, released: bool) -> None:
    primary(cuda, 1)
    flag = zeros(cuda)
    lender = ok(cuda.cuCtxGetCurrent())
    create = getattr(cuda, "cuCtxCreate_v4", cuda.cuCtxCreate)
    context = ok(create(None, 0, 0))
    ok(cuda.cuCtxEnablePeerAccess(lender, 0))
    stream, event, f = ok(cuda.cuStreamCreate(1)), ok(cuda.cuEventCreate(0)), function(cuda, runnable(), "spin")
    ok(launch(cuda, f, flag, stream=stream))
    ok(cuda.cuEventRecord(event, stream))
    assert code(cuda.cuStreamQuery(stream)) == R.CUDA_ERROR_NOT_READY
    if released:
        ok(cuda.cuCtxPushCurrent(lender))
        ok(cuda.cuMemsetD8(flag, 1, 4))
        ok(cuda.cuCtxPopCurrent())
    ok(cuda.cuCtxDestroy(context))
    kinds = [r.kind for r in machine.reports]
    assert kinds == (["context"] if released else ["context", "deadlock"])
    report = machine.reports[0]
    assert (report.kernel, report.device) == ("spin", 0) and "before its kernels have ended (spin)" in report.message
    ok(cuda.cuCtxSetCurrent(0))
    assert code(cuda.cuStreamSynchronize(stream)) == R.CUDA_ERROR_INVALID_CONTEXT
    assert f"the stream 0x{int(stream):x} is used, and its context on device 0 was destroyed" in str(
        machine.reports[-1]
    )
    assert code(cuda.cuEventQuery(event)) == R.CUDA_ERROR_CONTEXT_IS_DESTROYED
    assert machine.reports[-1].kind == "context" and "the event" in machine.reports[-1].message
    primary(cuda, 1)
    ok(cuda.cuCtxSynchronize())


def test_resetting_a_device_with_a_running_kernel_is_reported(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    ok(launch(cuda, function(cuda, runnable(), "touch"), zeros(cuda)))
    ok(cuda.cuDevicePrimaryCtxReset(0))
    assert "before its kernels have ended (touch)" in only(machine, "context").message


def test_destroying_an_idle_context_reports_nothing(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    ok(launch(cuda, function(cuda, runnable(), "touch"), zeros(cuda)))
    ok(cuda.cuCtxSynchronize())
    ok(cuda.cuDevicePrimaryCtxReset(0))
    assert machine.reports == []


# Kernels without an end ----------------------------------------------------------------------------------------------


def test_an_endless_kernel_is_stopped_at_the_configured_limit() -> None:
    with config.override(emu_loop_limit=20_000), Machine(devices=1) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        primary(cuda)
        ok(launch(cuda, function(cuda, runnable(), "forever"), zeros(cuda)))
        assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
        report = machine.reports[-1]
        assert (report.kind, report.kernel) == ("endless", "forever") and "DRVFUSE_EMU_LOOP_LIMIT" in report.message


def test_a_spin_that_no_store_ends_is_a_deadlock(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    flag = zeros(cuda)
    ok(launch(cuda, function(cuda, runnable(), "spin"), flag))
    assert code(cuda.cuCtxSynchronize()) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    report = only(machine, "deadlock")
    assert (report.kernel, report.address) == ("spin", int(flag)) and report.line == line_of("do asm")


# Errors that drvfuse raises ------------------------------------------------------------------------------------------


def test_an_error_of_the_runtime_carries_the_report(small: Machine) -> None:
    device = df.device(0, driver=small)
    with pytest.raises(DriverError, match=r"OUT_OF_MEMORY[\s\S]*out_of_memory: \d+ bytes of device 0 were requested"):
        device.empty((256 * MIB,), "uint8")
    array = device.zeros((64,), "uint8")
    with (
        device.use(),
        pytest.raises(DriverError, match=r"INVALID_VALUE[\s\S]*256 bytes into 64 bytes|past the end"),
    ):
        device.driver.cuMemcpyDtoH(np.zeros(512, np.uint8), array.ptr, 512)
    with device.use(), pytest.raises(DriverError) as caught:
        device.driver.cuStreamQuery(1234)
    assert "report" not in str(caught.value) and "out_of_bounds" not in str(caught.value)
