# SPDX-License-Identifier: Apache-2.0
"""The places in a report, its log line, and which findings are one report."""

from __future__ import annotations

import logging
import pprint
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drvfuse as df
from drvfuse.emu import Machine, Report
from drvfuse.errors import DriverError

SOURCE = """
__device__ __forceinline__ void put(volatile int* d, int v) { *(int*)d = v; }  // put
__device__ __forceinline__ int get(const int* d) { return *d; }                // get
extern "C" __global__ void message(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    put(data, 7);  // put is called
    __threadfence_system();
    *STORE flag = 1;  // store
  } else {
    while (*(volatile int*)flag == 0);  // poll
    __threadfence_system();
    *out = get(data);  // get is called
  }
}
extern "C" __global__ void beyond(int* data) { data[threadIdx.x] = 1; }  // beyond
"""


def _line(mark: str) -> int:
    return next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.rstrip().endswith(f"// {mark}"))


def _run(store: str = "", seed: int = 0, kernel: str = "message", threads: int = 1, name: str = "mine.cu") -> Machine:
    """A machine on which two blocks have exchanged a message."""
    with Machine(devices=1, race=True, seed=seed) as machine:
        device = df.device(0, driver=machine)
        arrays = [device.zeros((16,), "int32") for _ in range(3 if kernel == "message" else 1)]
        module = df.compile(SOURCE.replace("STORE", store), driver=machine, name=name)
        module[kernel].prepare(2, threads, *arrays)(device.stream)
        try:
            device.synchronize()
        except DriverError:
            assert kernel == "beyond"
    return machine


def _pairs(machine: Machine) -> dict[tuple[int, ...], Any]:
    return {tuple(sorted((r.line or 0, r.other.line))): r for r in machine.reports if r.other and r.other.line}


def test_a_race_names_the_call_sites_of_inlined_functions() -> None:
    report = _pairs(_run())[_line("put"), _line("get")]
    assert [line for _, line in report.callers] == [_line("get is called")]
    assert [line for _, line in report.other.callers] == [_line("put is called")]
    assert f", called at mine.cu:{_line('get is called')}, of which" in report.message
    assert f"at mine.cu:{_line('put')}, called at mine.cu:{_line('put is called')}: " in report.message
    first, second = report.timeline.splitlines()[:2]
    assert first.endswith(f"(mine.cu:{_line('put')}), called at mine.cu:{_line('put is called')}")
    assert second == f"the later access: called at mine.cu:{_line('get is called')}"


@pytest.mark.parametrize("seed", range(4))
def test_a_flag_that_was_stored_by_a_plain_write_is_named(seed: int) -> None:
    report = _pairs(_run(seed=seed))[_line("put"), _line("get")]
    assert report.edge.startswith(f"the flag at mine.cu:{_line('store')} was stored by a plain write")
    assert not _run("(volatile int*)", seed=seed).reports


def test_a_pair_of_places_is_one_report_in_either_order() -> None:
    for seed in range(8):
        reports = _run(seed=seed).reports
        assert len(reports) == len(_pairs(reports and _run(seed=seed))) == 2


EARLIER = """
extern "C" __global__ void again(int* data, unsigned* flag, int* out) {
  if (blockIdx.x == 0) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
    data[0] = 5;  // late
  } else {
    unsigned v;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);
    __nanosleep(100000);
    out[0] = data[0];
  }
}
"""


def test_a_release_before_its_data_names_the_access_that_it_does_not_cover() -> None:
    with Machine(devices=1, race=True) as machine:
        device = df.device(0, driver=machine)
        data, out = (device.zeros((1,), "int32") for _ in range(2))
        kernel = df.compile(EARLIER, driver=machine, name="early.cu")["again"]
        kernel.prepare(2, 1, data, device.zeros((1,), "uint32"), out)(device.stream)
        device.synchronize()
    late = next(n for n, text in enumerate(EARLIER.splitlines(), 1) if "// late" in text)
    (report,) = machine.reports
    assert report.edge == f"the last release of that block that was seen came before the write at early.cu:{late}"


@pytest.mark.parametrize("name", ["mine.cu", "some/folder/mine.cu"])
def test_places_of_a_report_have_the_base_name_of_the_source(name: str) -> None:
    machine = _run(name=name)
    for report in machine.reports:
        assert Path(report.file or "").name == "mine.cu" and "(mine.cu:" in (report.timeline or "")
    assert "mine.cu:" in machine.counters().table()


def test_a_finding_is_logged_as_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "drvfuse.emu"):
        machine = _run(kernel="beyond", threads=32)
    (record,) = caplog.records
    (report,) = machine.reports
    assert (record.name, record.levelname) == ("drvfuse.emu", "WARNING")
    assert record.getMessage() == report.brief() and len(report.brief()) < 240
    assert re.match(
        rf"out_of_bounds at mine\.cu:{_line('beyond')}: write of 4 bytes at 0x\w+: 0 bytes past", report.brief()
    )
    assert str(Path(report.file or "").parent) not in report.brief()


def test_the_text_of_a_report_names_the_page_and_leaves_out_the_folders_of_a_cache() -> None:
    (report,) = _run(kernel="beyond", threads=32).reports
    first, *rest = str(report).splitlines()
    assert Path(report.file or "").parent.name not in str(report) and Path(report.file or "").exists()
    assert first.startswith(f"mine.cu:{_line('beyond')}: out_of_bounds: ")
    assert rest == ["  see docs/findings.md#out_of_bounds"] and report.page == "docs/findings.md#out_of_bounds"
    elsewhere = Report("trap", "trap", file="/home/someone/kernels/mine.cu", line=3, hint="look")
    assert str(elsewhere).splitlines()[:2] == ["/home/someone/kernels/mine.cu:3: trap: trap", "  hint: look"]


def test_races_are_logged_as_information_and_deadlocks_as_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "drvfuse.emu"):
        assert len(_run().reports) == 2 and not caplog.records
    with caplog.at_level(logging.INFO, "drvfuse.emu"):
        _run()
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2
    assert caplog.messages[0].startswith(
        f"race at mine.cu:{_line('poll')}: not ordered after mine.cu:{_line('store')}: "
    )
    caplog.clear()
    with Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        arrays = [device.zeros((1,), "int32") for _ in range(3)]
        kernel = df.compile(SOURCE.replace("STORE", "").replace("flag == 0", "flag < 2"), driver=machine)["message"]
        kernel.prepare(2, 1, *arrays)(device.stream)
        with pytest.raises(DriverError, match="LAUNCH_TIMEOUT"):
            device.synchronize()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    assert record.getMessage().startswith(f"deadlock at kernel.cu:{_line('poll')}: nothing can go on (kernel message")


def test_a_report_is_one_line_in_a_list_and_its_text_has_real_lines() -> None:
    with Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        arrays = [device.zeros((1,), "int32") for _ in range(3)]
        kernel = df.compile(SOURCE.replace("STORE", "").replace("flag == 0", "flag < 2"), driver=machine)["message"]
        kernel.prepare(2, 1, *arrays)(device.stream)
        with pytest.raises(DriverError, match="LAUNCH_TIMEOUT"):
            device.synchronize()
    (report,) = machine.reports
    place = f"deadlock at kernel.cu:{_line('poll')}"
    assert repr(report) == f"<Report {place} (kernel message, device 0, block 1, thread 0)>"
    assert pprint.pformat([report, report], width=400) == f"[{report!r}, {report!r}]"
    assert "\n" in str(report) and report.message in str(report) and "\\n" not in str(report)
    written: list[str] = []
    report._repr_pretty_(SimpleNamespace(text=written.append), False)
    assert written == [str(report)]
    assert repr(Report("module", "line 1\nline 2")) == "<Report module>"


POLLS = """
extern "C" __global__ void polls(int* flags, int words) {
  while (*(volatile int*)(flags + threadIdx.x % words) == 0);  // polled
}
"""


@pytest.mark.parametrize("words", [4, 5])
def test_threads_that_poll_many_words_at_one_place_share_a_report_line(words: int) -> None:
    with Machine(devices=1) as machine:
        device = df.device(0, driver=machine)
        flags = device.zeros((words,), "int32")
        df.compile(POLLS, driver=machine, name="polls.cu")["polls"].prepare(2, 10, flags, words)(device.stream)
        with pytest.raises(DriverError):
            device.synchronize()
    (report,) = machine.reports
    lines = report.message.splitlines()[1:]
    first = f"on 0x{flags.ptr:x}, which holds 0, at polls.cu:3"
    if words == 4:
        assert len(lines) == 4 and lines[0].endswith(f" threads of 2 blocks (0 to 1) polling {first}")
    else:
        shared = first.replace("on ", "on 5 words or values, the first ")
        assert lines == [f"  device 0, polls: 20 threads of 2 blocks (0 to 1) polling {shared}"]
