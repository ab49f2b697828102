# SPDX-License-Identifier: Apache-2.0
"""Every function of cuda.bindings.driver is emulated, or is on the list of refused functions."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from driver_helpers import R, code, ok, primary

from drvfuse.emu import Machine
from drvfuse.emu.bindings import FUNCTIONS, MAJOR, NAMES, T
from drvfuse.emu.driver import ENTRIES
from drvfuse.emu.driver.refused import NEWER, REFUSED, refusal, results


def test_every_function_is_emulated_or_on_the_closed_list() -> None:
    assert [name for name in FUNCTIONS if name not in ENTRIES and name not in REFUSED] == []
    assert ENTRIES.keys() & REFUSED.keys() == set()
    assert all(re.match(r"cu[A-Z0-9]\w+$", name) for name in REFUSED)


def test_a_refused_function_is_reported_and_logged_once(
    machine: Machine, cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    primary(cuda)
    with caplog.at_level(logging.WARNING, "drvfuse.emu"):
        for _ in range(3):
            assert cuda.cuTexObjectCreate(None, None, None) == (R.CUDA_ERROR_NOT_SUPPORTED, None)
        assert cuda.cuArrayDestroy(0) == (R.CUDA_ERROR_NOT_SUPPORTED,)
    (first, second) = machine.reports
    words = "cuTexObjectCreate is refused: arrays, textures and surfaces are not emulated"
    assert (first.kind, first.message) == ("unsupported", words) and "cuArrayDestroy" in second.message
    assert len(caplog.records) == 2 and words in caplog.text
    ok(cuda.cuCtxSynchronize())


def test_a_function_that_is_newer_than_this_version_is_refused_too(
    machine: Machine, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest(something: Any) -> Any:
        """Do something.

        Returns
        -------
        CUresult
            an error
        first : int
            one result
        second : int
            another, over
            two lines

        See Also
        --------
        cuInit
        """

    monkeypatch.setitem(FUNCTIONS, "cuDoSomethingNew", newest)
    primary(cuda)
    assert cuda.cuDoSomethingNew(7) == (R.CUDA_ERROR_NOT_SUPPORTED, None, None)
    assert machine.reports[0].message == refusal("cuDoSomethingNew") and NEWER in machine.reports[0].message


def test_numbers_of_results_are_read_from_the_docstrings_of_the_bindings() -> None:
    """The counts agree with those of the emulated functions; some releases document the results of a few functions
    separately."""
    apart = {"cuMemPoolGetAccess", "cuMemPoolGetAttribute", "cuGetExportTable"}
    apart.add("cuMulticastCreate")  # the test suite replaces this function
    known = [name for name in FUNCTIONS if name in ENTRIES and name not in apart]
    assert {name: results(name) for name in known} == {name: ENTRIES[name].outputs for name in known}


def test_a_star_import_has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec("from drvfuse.emu.driver import *", namespace)
    assert set(NAMES) <= namespace.keys() and namespace["CUresult"] is R
    assert code(namespace["cuDriverGetVersion"]()) == R.CUDA_SUCCESS


def test_the_name_of_a_null_kernel_is_an_invalid_value(cuda: Any) -> None:
    primary(cuda)
    assert code(cuda.cuFuncGetName(0)) == code(cuda.cuKernelGetName(None)) == R.CUDA_ERROR_INVALID_VALUE
    assert code(cuda.cuFuncGetName(0x1000)) == R.CUDA_ERROR_INVALID_HANDLE


def test_a_closed_machine_refuses_unsupported_functions_as_deinitialised(machine: Machine, cuda: Any) -> None:
    machine.close()
    assert cuda.cuTexObjectCreate(None, None, None) == (R.CUDA_ERROR_DEINITIALIZED, None)
    assert machine.reports == []


def test_cuGetProcAddress_finds_no_function(cuda: Any) -> None:
    status = T.CUdriverProcAddressQueryResult
    found = [ok(cuda.cuGetProcAddress(b"cuMemAlloc", version, 0)) for version in (12000, 99000)]
    assert [address for address, _ in found] == [0, 0]
    assert [s for _, s in found] == [
        status.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
        status.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
    ]


def test_virtual_time_passes_between_events_recorded_before_and_after_work(cuda: Any) -> None:
    primary(cuda)
    stream, events = ok(cuda.cuStreamCreate(0)), [ok(cuda.cuEventCreate(0)) for _ in range(3)]
    pointer = ok(cuda.cuMemAlloc(64))
    for event in events:
        ok(cuda.cuEventRecord(event, stream))
        ok(cuda.cuMemsetD8Async(pointer, 1, 64, stream))
    ok(cuda.cuStreamSynchronize(stream))
    first, both = ok(cuda.cuEventElapsedTime(*events[:2])), ok(cuda.cuEventElapsedTime(events[0], events[2]))
    assert 0 < first < both < 1


def test_resources_that_no_emulated_device_has_are_not_found(cuda: Any) -> None:
    primary(cuda)
    mask = T.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
    assert ok(cuda.cuDeviceGetAttribute(mask, 0)) == 0
    asked = T.CUmemDecompressParams()
    assert cuda.cuMemBatchDecompressAsync(asked, 1, 0, 0) == (R.CUDA_ERROR_NOT_SUPPORTED, None)
    assert code(cuda.cuMemBatchDecompressAsync(None, 1, 0, 0)) == R.CUDA_ERROR_INVALID_VALUE
    assert cuda.cuGetExportTable(T.CUuuid()) == (R.CUDA_ERROR_NOT_FOUND, None)
    assert code(cuda.cuGetExportTable(None)) == R.CUDA_ERROR_INVALID_VALUE


def test_an_unsupported_argument_is_reported_once_by_name(machine: Machine, cuda: Any) -> None:
    primary(cuda)
    pointer, graph = ok(cuda.cuMemAlloc(64)), ok(cuda.cuGraphCreate(0))
    p = T.CUDA_MEMCPY2D()
    p.srcMemoryType, p.dstMemoryType = T.CUmemorytype.CU_MEMORYTYPE_ARRAY, T.CUmemorytype.CU_MEMORYTYPE_DEVICE
    p.dstDevice, p.WidthInBytes, p.Height = pointer, 16, 1
    for _ in range(2):
        assert code(cuda.cuMemcpy2D(p)) == R.CUDA_ERROR_NOT_SUPPORTED
        assert code(cuda.cuGraphInstantiate(graph, 4)) == R.CUDA_ERROR_NOT_SUPPORTED
    messages = [(report.kind, report.message) for report in machine.reports]
    assert messages == [
        ("unsupported", "a copy that reads an array is refused: arrays, textures and surfaces are not emulated"),
        (
            "unsupported",
            "graphs that kernels launch (CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) are not emulated",
        ),
    ]


def test_a_context_can_be_created_with_empty_parameters(cuda: Any) -> None:
    ok(cuda.cuInit(0))
    create = cuda.cuCtxCreate if MAJOR == 13 else cuda.cuCtxCreate_v4
    params = T.CUctxCreateParams()
    for given in (None, params):
        ok(cuda.cuCtxDestroy(ok(create(given, 0, 0))))
    params.numExecAffinityParams = 1
    assert code(create(params, 0, 0)) == R.CUDA_ERROR_NOT_SUPPORTED
