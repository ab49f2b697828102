# SPDX-License-Identifier: Apache-2.0
"""`drvfuse emu run`: programs written for cuda-python, what is found in them, and their status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from drvfuse.emu.program import runner
from drvfuse.errors import ArgumentError, Unsupported

PROGRAM = '''
import ctypes, sys
import numpy as np
from cuda.bindings import driver, runtime

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry put(.param .u64 to)
{
    .reg .u32 %r<2>; .reg .u64 %a<3>;
    ld.param.u64 %a1, [to];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %a2, %r1, 4;
    add.u64 %a1, %a1, %a2;
    st.global.u32 [%a1], %r1;
    ret;
}
"""

def ok(result):
    assert not int(result[0]), result
    return result[1] if len(result) == 2 else None

def put(threads, words=4):
    ok(runtime.cudaSetDevice(0))
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b"put"))
    at = ok(runtime.cudaMalloc(4 * words))
    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, 0, ((at,), (ctypes.c_void_p,)), 0))
    return at
'''


@pytest.fixture
def run(tmp_path):
    """`run(text, *options, arguments=(), **environment)` runs the program `text` under `drvfuse emu run`."""
    (tmp_path / "kernels.py").write_text(PROGRAM)

    def start(text, *options, arguments=(), **environment):
        (tmp_path / "program.py").write_text(text)
        command = [sys.executable, "-m", "drvfuse.emu", "run", *options, str(tmp_path / "program.py"), *arguments]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        return subprocess.run(command, capture_output=True, text=True, env=known, cwd=tmp_path)

    return start


def test_a_program_without_findings_runs_as_under_python(run):
    text = """
import sys
from pathlib import Path
from cuda.bindings import driver, runtime
from kernels import *  # the program's folder is in sys.path
assert __name__ == "__main__" and Path(__file__).name == "program.py"
assert "program/in_children" not in " ".join(sys.path)
from drvfuse import emu, errors
try:
    with emu.program.switched():
        raise AssertionError
except errors.Unsupported as error:
    assert "switched to <Machine of 3 x sm_90a, seed 0> already" in str(error)
found = np.empty(4, np.uint32)
ok(runtime.cudaMemcpy(found, put(4), 16, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost))
print(found, sys.argv[1:], ok(driver.cuDeviceGetCount()))
sys.exit(7)
"""
    done = run(text, "--devices", "3", "--race", arguments=["-x", "--seed"])
    assert (done.stdout, done.stderr, done.returncode) == ("[0 1 2 3] ['-x', '--seed'] 3\n", "", 7)


def test_findings_are_printed_and_written_to_the_report_and_the_status_is_1(run, tmp_path):
    """The program ends without waiting for its kernel; work that is still queued then runs all the same."""
    done = run("import kernels; kernels.put(5)", "--race=strict", "--report", "found.json", DRVFUSE_EMU_SEED="4")
    assert done.returncode == 1 and "1 finding (1 out_of_bounds)" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {
        *("drvfuse", "program", "machine", "pid", "program_status", "status", "findings", "reports"),
    }
    assert found["program"] == [str(tmp_path / "program.py")] and found["machine"]["race"] == "strict"
    assert (found["machine"]["seed"], found["program_status"], found["status"], found["findings"]) == (4, 0, 1, 1)
    (report,) = found["reports"]
    assert (report["kind"], report["kernel"], report["thread"]) == ("out_of_bounds", "put", [4, 0, 0])
    assert report["pid"] == found["pid"] and report["text"] in done.stderr


def test_processes_that_a_program_starts_are_switched_with_its_settings(run, tmp_path):
    text = """
import subprocess, sys
if len(sys.argv) == 1:
    child = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
    print(child.stdout, child.returncode)
else:
    import drvfuse as df
    import kernels
    kernels.put(9)
    machine = df.emu.default_machine()
    print(len(machine.devices), machine.seed)
"""
    done = run(text, "--devices", "2", "--seed", "5", "--report", "found.json")
    assert done.stdout == "2 5\n 0\n"
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1 and [report["kind"] for report in found["reports"]] == ["out_of_bounds"]
    assert found["reports"][0]["pid"] != found["pid"] and f"process {found['reports'][0]['pid']}:" in done.stderr


def test_processes_share_one_machine_on_request(run, tmp_path):
    text = """
import multiprocessing
from cuda.bindings import runtime
import kernels
def work(handle):
    given = runtime.cudaIpcMemHandle_t()
    given.reserved = handle
    found = bytearray(16)
    memory = kernels.ok(runtime.cudaIpcOpenMemHandle(given, 1))
    kernels.ok(runtime.cudaMemcpy(found, memory, 16, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost))
    kernels.put(5)
    assert runtime.cudaDeviceSynchronize()[0] == runtime.cudaError_t.cudaErrorIllegalAddress
    return bytes(found)
if __name__ == "__main__":
    memory = kernels.put(4)
    kernels.ok(runtime.cudaDeviceSynchronize())
    handle = bytes(kernels.ok(runtime.cudaIpcGetMemHandle(memory)).reserved)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, [handle])[::4])
"""
    done = run(text, "--share")
    assert done.stdout == f"{bytes([0, 1, 2, 3])}\n", done.stderr
    assert done.returncode == 1 and "1 finding (1 out_of_bounds)" in done.stderr and "process 1" in done.stderr


def test_forks_of_a_program_report_nothing_and_a_program_that_replaces_itself_does(run):
    text = """
import os, sys
import kernels
if len(sys.argv) == 1:
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.execv(sys.executable, [sys.executable, __file__, "again"])
kernels.put(5)
"""
    done = run(text)
    assert done.returncode == 1 and done.stderr.count("1 finding (1 out_of_bounds)") == 1


def test_an_exception_is_shown_from_the_program_on_and_its_findings_too(run):
    text = """
import kernels
from cuda.bindings import runtime
kernels.put(5)
raise ValueError(runtime.cudaDeviceSynchronize()[0].name)
"""
    done = run(text)
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "program.py" in trace[1] and "runpy" not in done.stderr
    assert "ValueError: cudaErrorIllegalAddress" in trace and "(1 out_of_bounds)" in done.stderr
    assert done.returncode == 1


def test_an_error_names_loaded_libraries_that_call_the_real_driver(run, tmp_path):
    (tmp_path / "cupy.py").write_text("")
    done = run("import cupy\nraise OSError('no libcuda.so.1')")
    assert done.stderr.splitlines()[-1] == (
        "drvfuse emu run: the program has imported cupy: what such a library calls from C is the real CUDA driver, not "
        "the emulated one (docs/emulated-programs.md#what-is-switched)"
    )


def test_a_module_is_run_as_by_python_and_threads_are_waited_for(run, tmp_path):
    (tmp_path / "late.py").write_text("""
import sys, threading, time
from cuda.bindings import driver
def work():
    time.sleep(0.2)
    print(driver.cuInit(0)[0].name, sys.argv[1:])
threading.Thread(target=work).start()
""")
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "drvfuse.emu", "run", "-m", "late", "--race", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=known, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("CUDA_SUCCESS ['--race', 'x']\n", "", 0)


def test_the_package_of_a_module_is_imported_after_the_switch(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from cuda.bindings.driver import cuInit")
    (tmp_path / "package/tool.py").write_text("from . import cuInit; print(cuInit(0)[0].name)")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text("import no_such_dependency")
    (tmp_path / "broken/tool.py").write_text("")
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "drvfuse.emu", "run", "-m"]
    tool, broken, package, missing = (
        subprocess.run([*command, name], capture_output=True, text=True, env=known, cwd=tmp_path)
        for name in ("package.tool", "broken.tool", "package", "package.no_such")
    )
    assert (tool.stdout, tool.stderr, tool.returncode) == ("CUDA_SUCCESS\n", "", 0)
    assert "ModuleNotFoundError: No module named 'no_such_dependency'" in broken.stderr and broken.returncode == 1
    said = "drvfuse emu run: -m is 'package'; it must be the name of a module that can be run: No module named pack"
    assert package.stderr.startswith(said) and package.returncode == 2
    assert missing.stderr.startswith("drvfuse emu run: -m is 'package.no_such'; it must be") and missing.returncode == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no_such.py"], "the program is 'no_such.py'; it must be a Python script that exists"),
        (["-m", "no.such.module"], "-m is 'no.such.module'; it must be the name of a module that can be imported"),
        ([], "the program is missing; it must be a Python script, or -m and a module"),
        (["--fast", "no_such.py"], "drvfuse emu run: error: unrecognized arguments: --fast"),
        (["--race=loose", "no_such.py"], "argument --race: 'loose' is no value that it takes"),
        (["--race", "strict", __file__], "the program is 'strict'; it must be a Python script that exists; to choose"),
        (
            [os.path.dirname(__file__)],
            "program', a folder; it must be a Python script, or a folder that has a file __main__.py",
        ),
        (["--devices", "9", "no_such.py"], "argument --devices: 9 is above 8"),
        (
            ["--report", "no/such/folder/x.json", __file__],
            "--report is 'no/such/folder/x.json'; it must be in a folder",
        ),
        (["--arch", "sm_10", __file__], "arch is 'sm_10'; it must be one of"),
    ],
)
def test_a_program_that_cannot_be_run_is_an_error_before_anything_runs(command, message, capsys, monkeypatch):
    from drvfuse.__main__ import main
    from drvfuse.emu.machine import machine

    monkeypatch.setattr(machine, "_default", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        status = main(["emu", "run", *command])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and message in capsys.readouterr().err


def test_a_process_that_has_used_the_real_driver_is_refused(monkeypatch):
    class Loaded:
        status = 3  # CUDA_ERROR_NOT_INITIALIZED: the real driver was loaded but not initialised

        def __init__(self, name, mode):
            assert name == "libcuda.so.1" and mode & os.RTLD_NOLOAD

        def cuDeviceGetCount(self, count):
            return self.status

    monkeypatch.setattr(runner.ctypes, "CDLL", Loaded)
    with pytest.raises(ArgumentError, match=r"the program is 'no_such\.py'"):
        runner.run(["no_such.py"])
    runner._refuse_used_driver()
    monkeypatch.setattr(Loaded, "status", 0)
    with pytest.raises(Unsupported, match="has initialised the real CUDA driver already"):
        runner._refuse_used_driver()


def test_options_for_an_existing_machine_are_refused(run):
    done = run("", "--seed", "3", DRVFUSE_EMU_MACHINE="unix:@no-such-machine")
    assert done.returncode == 2 and "--seed is given; it must be left out, as DRVFUSE_EMU_MACHINE" in done.stderr
