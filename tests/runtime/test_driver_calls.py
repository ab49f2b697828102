# SPDX-License-Identifier: Apache-2.0
"""`Driver`, which makes all driver calls of drvfuse, on an API of a few Python functions."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as bindings

from drvfuse import config
from drvfuse.errors import ArgumentError, ClosedError, DriverError, Unsupported
from drvfuse.runtime.driver import Driver, get_driver, last_calls
from drvfuse.runtime.lifetime import Owned, flush, hold, launch_group, release

OK = bindings.CUresult.CUDA_SUCCESS
BAD = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def driver_of(**functions: object) -> Driver:
    base = {
        "cuGetErrorName": lambda code: (OK, b"CUDA_ERROR_ILLEGAL_ADDRESS"),
        "cuGetErrorString": lambda code: (OK, b"an illegal memory access was encountered"),
    }
    return Driver("cuda", SimpleNamespace(**base, **functions), bindings)


def test_a_call_returns_none_a_value_or_a_tuple() -> None:
    driver = driver_of(cuNone=lambda: (OK,), cuOne=lambda x: (OK, x + 1), cuTwo=lambda: (OK, 1, 2))
    assert driver.cuNone() is None
    assert driver.cuOne(4) == 5
    assert driver.cuTwo() == (1, 2)
    assert driver.result("cuTwo") == (OK, 1, 2)


def test_an_error_names_the_call_its_arguments_the_reason_and_earlier_calls() -> None:
    driver = driver_of(cuFine=lambda x: (OK,), cuMemcpy=lambda *a: (BAD,))
    driver.cuFine(0x20000000)
    with pytest.raises(DriverError) as caught:
        driver.cuMemcpy(0x7F0000001000, 16, b"kernel_name", b"\x00" * 300)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemcpy", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert error.args_text == "0x7f0000001000, 16, 'kernel_name', <300 bytes>"
    assert "illegal memory access" in error.explanation and "context is lost" in error.explanation
    assert error.calls[-1] == "cuFine(0x20000000) -> CUDA_SUCCESS"
    assert "cuMemcpy" in str(error) and "cuFine(0x20000000)" in str(error)


def test_result_returns_the_failure_instead_of_raising() -> None:
    assert driver_of(cuX=lambda: (BAD,)).result("cuX") == (BAD,)


def test_newest_signature_is_chosen_under_either_name() -> None:
    old = driver_of(cuStreamGetCaptureInfo=lambda s: (OK, "old"), cuStreamGetCaptureInfo_v3=lambda s: (OK, "new"))
    assert old.cuStreamGetCaptureInfo(1) == "new"
    assert driver_of(cuStreamGetCaptureInfo=lambda s: (OK, "new")).cuStreamGetCaptureInfo(1) == "new"


def test_a_function_missing_from_the_bindings_is_unsupported() -> None:
    driver = driver_of()
    assert not driver.has("cuFuture")
    with pytest.raises(Unsupported, match="cuFuture"):
        driver.cuFuture()
    with pytest.raises(AttributeError):
        _ = driver.something


def test_an_error_code_newer_than_the_bindings_is_shown_as_a_number() -> None:
    def unknown() -> None:
        raise ValueError("4711 is not a valid CUresult")

    with pytest.raises(DriverError) as caught:
        driver_of(cuX=unknown).cuX()
    assert caught.value.code == 4711


def test_wrong_argument_types_are_argument_errors() -> None:
    def picky(x: int) -> tuple[object]:
        raise TypeError("x must be int")

    with pytest.raises(
        ArgumentError, match=r"^arguments of cuX is \('text'\); it must be what .* take: x must be int$"
    ):
        driver_of(cuX=picky).cuX("text")


def test_recorded_calls_are_oldest_first_and_bounded() -> None:
    driver = driver_of(cuCount=lambda x: (OK,))
    for number in range(300):
        driver.cuCount(number)
    assert last_calls(2) == ["cuCount(298) -> CUDA_SUCCESS", "cuCount(299) -> CUDA_SUCCESS"]
    assert len(last_calls(10_000)) == 256
    assert last_calls(0) == []


def test_arguments_are_abbreviated_in_the_record() -> None:
    driver = driver_of(cuX=lambda *a: (OK,))
    launch = bindings.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.blockDimX, launch.sharedMemBytes = 4, 2, 64, 1024
    driver.cuX(launch)
    assert last_calls(1) == ["cuX(<grid 4x2x0 block 64x0x0 smem 1024>) -> CUDA_SUCCESS"]
    driver.cuX(bindings.CUdeviceptr(0x1234), bindings.CUuuid(), [1, 2, 3, 4, 5], None, True, 0.5)
    assert last_calls(1) == ["cuX(CUdeviceptr:0x1234, CUuuid, [1, 2, 3, 4, ...], None, True, 0.5) -> CUDA_SUCCESS"]


def test_queries_are_not_recorded_among_the_last_calls() -> None:
    codes = iter([OK] * 600 + [BAD])
    reads = (
        "cuDeviceGetAttribute",
        "cuStreamIsCapturing",
        "cuStreamGetCaptureInfo",
        "cuFuncGetAttribute",
        "cuEventQuery",
    )
    functions = {name: lambda *args: (next(codes),) for name in reads}
    driver = driver_of(cuFine=lambda x: (OK,), cuModuleGetFunction=lambda: (OK,), **functions)
    driver.cuFine(1)
    driver.cuModuleGetFunction()
    for _ in range(60):
        for name in reads:
            getattr(driver, name)(5)
            driver.result(name, 5)
    before = ["cuFine(1) -> CUDA_SUCCESS", "cuModuleGetFunction() -> CUDA_SUCCESS"]
    assert last_calls(2) == before
    with pytest.raises(DriverError) as caught:
        driver.cuStreamIsCapturing(7)
    assert (caught.value.call, caught.value.args_text) == ("cuStreamIsCapturing", "7")
    assert list(caught.value.calls[-2:]) == before
    assert last_calls(2) == [before[1], "cuStreamIsCapturing(7) -> CUDA_ERROR_ILLEGAL_ADDRESS"]


def test_the_driver_trace_can_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(trace_driver="stderr"):
        driver = driver_of(cuX=lambda x: (OK, 7))
    assert driver.cuX(3) == 7
    assert "cuX(3) -> CUDA_SUCCESS 7 [" in capsys.readouterr().err


def test_the_driver_trace_can_be_written_as_json_lines(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "calls.jsonl")
    with config.override(trace_driver=path):
        driver = driver_of(cuX=lambda x: (OK, 7), cuBad=lambda: (BAD,))
    driver.cuX(3)
    with pytest.raises(DriverError):
        driver.cuBad()
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    assert [(line["call"], line["args"], line["result"]) for line in lines] == [
        ("cuX", ["3"], "CUDA_SUCCESS"),
        ("cuBad", [], "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ]
    assert lines[0]["values"] == ["7"] and lines[0]["us"] >= 0


def test_without_a_trace_nothing_is_written_and_a_bad_path_is_an_error() -> None:
    with config.override(trace_driver="off"):
        driver = driver_of(cuSilent=lambda: (OK,))
    driver.cuSilent()
    driver.result("cuSilent")
    assert not any("cuSilent" in call for call in last_calls(5))
    with config.override(trace_driver="/nowhere/at/all"), pytest.raises(ArgumentError, match="trace_driver"):
        driver_of()


@pytest.mark.parametrize("spec", ["hip", 3, object()])
def test_an_unknown_driver_is_refused_with_the_known_ones(spec: object) -> None:
    with pytest.raises(ArgumentError, match='"cuda", "emu"'):
        get_driver(spec)


def test_a_setting_chooses_the_driver() -> None:
    with config.override(driver="emu"):
        assert get_driver() is get_driver("emu")


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_driver_library_the_error_suggests_the_emulated_driver() -> None:
    text = run(
        """
        import ctypes, cuda.bindings.driver as d
        def missing(flags): raise RuntimeError("no libcuda")
        d.cuInit = missing
        from drvfuse.errors import DriverUnavailable
        from drvfuse.runtime.driver import get_driver
        try: get_driver("cuda")
        except DriverUnavailable as error: print(error)
        """
    )
    assert "libcuda.so.1" in text and 'driver="emu"' in text and "DRVFUSE_DRIVER=emu" in text


def test_without_a_device_the_driver_is_unavailable() -> None:
    text = run(
        """
        import cuda.bindings.driver as d
        d.cuInit = lambda flags: (d.CUresult.CUDA_ERROR_NO_DEVICE,)
        from drvfuse.errors import DriverUnavailable
        from drvfuse.runtime.driver import get_driver
        try: get_driver("cuda")
        except DriverUnavailable as error: print(error)
        """
    )
    assert "CUDA_ERROR_NO_DEVICE" in text and "CUDA_VISIBLE_DEVICES" in text and 'driver="emu"' in text


def test_missing_bindings_and_missing_llvmlite_name_the_extras() -> None:
    text = run(
        """
        import sys, importlib.util
        from drvfuse.errors import DriverUnavailable
        from drvfuse.runtime.driver import get_driver
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "llvmlite" else real(name, *a)
        try: get_driver("emu")
        except DriverUnavailable as error: print(error)
        importlib.util.find_spec = real
        sys.modules["cuda.bindings"] = None
        for spec in "cuda", "emu":
            try: get_driver(spec)
            except DriverUnavailable as error: print(error)
        """
    )
    first, second, third = text.splitlines()
    assert "drvfuse[emu]" in first
    assert "drvfuse[cu12]" in second and "drvfuse[cu13]" in second
    assert "drvfuse[cu12]" in third


def test_importing_the_runtime_loads_no_library() -> None:
    text = run(
        """
        import sys
        import drvfuse.runtime.module, drvfuse.runtime.graph, drvfuse.runtime.vmm
        heavy = [m for m in sys.modules if m.startswith(("cuda.", "llvmlite", "drvfuse.emu", "ml_dtypes"))]
        maps = open("/proc/self/maps").read()
        print(heavy, "libcuda" in maps, "libnvrtc" in maps)
        """
    )
    assert text.strip() == "[] False False"


def test_use_after_a_fork_raises_in_the_child() -> None:
    text = run(
        """
        import os, sys
        from types import SimpleNamespace
        from cuda.bindings import driver as d
        from drvfuse.runtime import driver as module
        ok = d.CUresult.CUDA_SUCCESS
        d.cuInit = lambda flags: (ok,)
        d.cuDeviceGetCount = lambda: (ok, 1)
        driver = module.get_driver("cuda")
        driver.cuDeviceGetCount()
        from drvfuse.errors import ClosedError
        child = os.fork()
        if child == 0:
            for use in driver.cuDeviceGetCount, lambda: driver.result("cuInit", 0), lambda: module.get_driver("cuda"):
                try: use()
                except ClosedError as error: print("spawn" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(driver.cuDeviceGetCount())
        """
    )
    assert text.split() == ["True", "True", "True", "1"]


def test_a_fork_before_the_first_use_is_allowed() -> None:
    text = run(
        """
        import os
        from cuda.bindings import driver as d
        from drvfuse.runtime import driver as module
        ok = d.CUresult.CUDA_SUCCESS
        d.cuInit = lambda flags: (ok,)
        d.cuDeviceGetCount = lambda: (ok, 1)
        if os.fork() == 0:
            print(module.get_driver("cuda").cuDeviceGetCount(), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert text.strip() == "1"


class Thing(Owned):
    def __init__(self, driver: Driver, handle: int) -> None:
        self._owns(driver, lambda d, h: d.cuFree(h), handle)

    def use(self) -> None:
        self._check_open()


def test_close_may_be_repeated_and_later_use_raises() -> None:
    freed: list[int] = []
    driver = driver_of(cuFree=lambda h: (freed.append(h), (OK,))[1])
    thing = Thing(driver, 5)
    thing.use()
    thing.close()
    thing.close()
    assert freed == [5] and thing.closed
    with pytest.raises(ClosedError, match="Thing"):
        thing.use()


def test_a_collected_object_is_freed_at_the_next_flush_and_its_errors_are_swallowed() -> None:
    freed: list[int] = []
    driver = driver_of(cuFree=lambda h: (freed.append(h), (BAD,))[1])
    Thing(driver, 6)
    gc.collect()
    assert freed == []
    with launch_group():
        flush(driver)
    assert freed == []
    flush(driver)
    assert freed == [6]
    with pytest.raises(DriverError):
        Thing(driver, 7).close()


def test_nothing_is_freed_while_it_is_referenced() -> None:
    class Holder:
        pass

    freed: list[int] = []
    driver = driver_of(cuFree=lambda h: (freed.append(h), (OK,))[1])
    one, other = Holder(), Holder()
    Thing(driver, 6)
    hold(one)
    hold(other)
    release(one)
    flush(driver)
    assert freed == []
    del other
    gc.collect()
    flush(driver)
    assert freed == [6]


def test_a_finalizer_does_not_keep_the_driver_alive() -> None:
    import weakref

    driver = driver_of(cuFree=lambda h: (OK,))
    driver.thing = Thing(driver, 8)  # type: ignore[attr-defined]  # as devices own streams
    weak = weakref.ref(driver)
    del driver
    gc.collect()
    assert weak() is None


def test_arguments_of_a_pending_free_do_not_keep_the_driver_alive() -> None:
    import weakref

    class Holder(Owned):
        def __init__(self, driver: Driver) -> None:
            self._owns(driver, lambda driver, held: None, driver)

    driver = driver_of(cuFree=lambda h: (OK,))
    driver.holder = Holder(driver)  # type: ignore[attr-defined]  # as a group's ranks hold devices
    weak = weakref.ref(driver)
    del driver
    gc.collect()
    assert weak() is None


def test_nothing_is_freed_at_interpreter_exit() -> None:
    code = """
        import drvfuse as df
        machine = df.emu.Machine(devices=2)
        device = df.device(0, driver=machine)
        array = device.zeros((8,), "float32")
        capsule = array.__dlpack__(stream=-1)
        event = device.stream.record()
        buffer = df.SymmetricBuffer([device, df.device(1, driver=machine)], 64)
        with df.Graph.capture(df.Stream(device)) as graph: pass
        array.numpy()
        print("end")
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
