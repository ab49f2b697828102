# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, in runs of pytest inside a test. Some tests add a report to a machine by hand."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from drvfuse.emu import Machine
from drvfuse.testing import plugin

pytest_plugins = "pytester"
pytestmark = pytest.mark.emulated

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(point.value == plugin.__name__ for point in entry_points(group="pytest11"))
HEAD = """
import pytest
from drvfuse.emu import Report

def trap(machine, text="went wrong", timeline=None):
    machine.report(Report("trap", text, kernel="k", file="k.cu", line=3, timeline=timeline))
"""

Inner = Callable[..., pytest.RunResult]


def test_a_test_gets_a_machine_with_the_options_of_its_closest_marks(inner: Inner) -> None:
    result = inner(
        HEAD
        + """
pytestmark = pytest.mark.emu(devices=3, arch="sm_80")

@pytest.mark.emu(arch="sm_100a", race="strict", delay_stores=True)
class TestClass:
    @pytest.mark.emu(devices=2)
    def test_it(self, emu_machine, emu_devices, emu_device, emu_driver, emu_seed):
        assert (len(emu_machine.devices), emu_machine.arch, emu_machine.delay_stores) == (2, "sm_100a", True)
        assert emu_machine.detector.state.strict and emu_machine.seed == emu_seed == 0
        assert [device.index for device in emu_devices] == [0, 1] and emu_device is emu_devices[0]
        assert emu_driver is emu_machine.driver and emu_driver.cuDeviceGetCount()[1] == 2
        TestClass.machine = emu_machine

    def test_another(self, emu_machine):
        assert len(emu_machine.devices) == 3 and self.machine is not emu_machine and self.machine.closed

def test_without_a_detector(emu_machine):
    assert emu_machine.detector is None
"""
    )
    result.assert_outcomes(passed=3)


def test_a_test_runs_under_several_seeds_and_a_failing_one_has_its_replay_line(inner: Inner) -> None:
    source = (
        HEAD
        + """
@pytest.mark.parametrize("x", ["a"])
@pytest.mark.emu(devices=1, seeds=3)
def test_it(emu_machine, x):
    assert emu_machine.seed != 1

@pytest.mark.emu(devices=1, seeds=[7, 40])
def test_chosen(emu_seed, emu_machine):
    assert emu_seed == emu_machine.seed and emu_seed in (7, 40)
"""
    )
    result = inner(source, "-v")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*::test_chosen[[]seed40[]] PASSED*"])
    name = "test_a_test_runs_under_several_seeds_and_a_failing_one_has_its_replay_line.py"
    section = result.stdout.str().split("- emulated driver -")[1].splitlines()
    assert section[1:3] == ["<Machine of 1 x sm_90a, seed 1>", f"replay: pytest '{name}::test_it[a-seed1]'"]
    replayed = inner(source, f"{name}::test_it[a-seed1]")
    replayed.assert_outcomes(failed=1)


def test_the_replay_line_is_relative_to_the_folder_where_pytest_was_started(inner: Inner) -> None:
    source = HEAD + "def test_it(emu_machine): raise AssertionError"
    result = inner(source, "--rootdir", os.sep)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["replay: pytest test_the_replay_line_is_relative_*.py::test_it"])


def test_the_options_ask_for_seeds_and_races_and_the_replay_line_repeats_them(inner: Inner) -> None:
    source = (
        HEAD
        + """
@pytest.mark.emu(devices=1, seeds=2)
def test_seeds(emu_machine):
    assert emu_machine.seed != 3 and not emu_machine.detector.state.strict

def test_plain():
    pass

@pytest.mark.emu(devices=1, race=False)
def test_said(emu_machine):
    assert emu_machine.detector is None
"""
    )
    result = inner(source, "--emu-race", "--emu-seeds=4")
    result.assert_outcomes(passed=1 + 3 + 4, failed=1)
    result.stdout.fnmatch_lines(["replay: pytest 'test_*.py::test_seeds[[]seed3[]]' --emu-race --emu-seeds=4"])
    strict = inner(source, "--emu-race=strict")  # `test_seeds` fails, as it asserts that the profile is not strict
    strict.assert_outcomes(passed=2, failed=2)
    strict.stdout.fnmatch_lines(["replay: pytest 'test_*.py::test_seeds[[]seed0[]]' --emu-race=strict"])


@pytest.mark.parametrize(
    "options, said",
    [
        (("--emu-race=loose",), "loose"),
        (("--emu-seeds=0",), "--emu-seeds: '0' is no integer of at least 1"),
        (("--emu-seeds=x",), "--emu-seeds: 'x' is no integer of at least 1"),
    ],
)
def test_a_wrong_option_is_refused(inner: Inner, options: tuple[str, ...], said: str) -> None:
    result = inner(HEAD, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR and said in result.stderr.str()


@pytest.mark.parametrize(
    "mark, said",
    [
        ("sedes=3", "the mark emu has no option sedes; it takes devices, race, seeds, "),
        ("4", "takes no argument without a name; it takes devices, race, seeds, "),
        ("seeds=0", "seeds=0 of the mark emu; it must be a number of at least 1, or a list of different integers"),
        ("seeds=[1, 1]", "seeds=[1, 1] of the mark emu"),
        ("seeds='3'", "seeds='3' of the mark emu"),
        ("devices=9", "an option of the mark emu: devices is 9; it must be an integer between 1 and 8"),
        ("race='loose'", "an option of the mark emu: race is 'loose'; it must be"),
    ],
)
def test_a_wrong_mark_is_an_error_that_names_it(inner: Inner, mark: str, said: str) -> None:
    result = inner(f"{HEAD}\n@pytest.mark.emu({mark})\ndef test_it(emu_machine): pass\n")
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert said in text and "::test_it" in text and "plugin.py" not in text and "During handling" not in text


def test_a_method_of_unittest_gets_a_machine_but_not_several_seeds(inner: Inner) -> None:
    result = inner(
        HEAD
        + """
import unittest
from cuda.bindings import driver

class TestCase(unittest.TestCase):
    @pytest.mark.emu(devices=3)
    def test_once(self):
        driver.cuInit(0)
        self.assertEqual(driver.cuDeviceGetCount()[1], 3)

    @pytest.mark.emu(seeds=3)
    def test_seeds(self):
        pass
"""
    )
    result.assert_outcomes(passed=1, errors=1)
    assert "a test method of unittest runs once" in result.stdout.str()


def test_an_unexpected_report_fails_the_test_and_is_shown_with_its_timeline(inner: Inner) -> None:
    result = inner(
        HEAD
        + """
def test_it(emu_machine):
    trap(emu_machine, timeline="what came before")

def test_late(emu_machine, request):
    request.addfinalizer(lambda: trap(emu_machine, "too late"))

@pytest.mark.xfail(strict=True)
def test_known(emu_machine):
    trap(emu_machine)
"""
    )
    result.assert_outcomes(failed=1, xfailed=1, passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "1 unexpected report of the emulated driver:",
            "  trap at k.cu:3: went wrong (kernel k)",
            "*- emulated driver -*",
            "<Machine of 8 x sm_90a, seed 0>",
            "replay: pytest test_*.py::test_it",
            "k.cu:3: trap: went wrong (kernel k)",
            "  see docs/findings.md#trap",
            "what came before",
        ]
    )
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_late*", "*unexpected report*", "*too late*"])


def test_an_expected_report_passes_and_a_missing_one_fails(inner: Inner) -> None:
    result = inner(
        HEAD
        + """
def test_expected(emu_machine, emu_reports):
    trap(emu_machine, "first")
    trap(emu_machine, "second")
    assert emu_reports.expect("trap", "sec.nd").message == "second"
    assert emu_reports.expect().message == "first" and emu_reports.unexpected == []

def test_one_is_left(emu_machine, emu_reports):
    trap(emu_machine, "first")
    trap(emu_machine, "second")
    emu_reports.expect("trap")

def test_missing(emu_machine, emu_reports):
    trap(emu_machine, "another")
    emu_reports.expect("race", match="word")

def test_a_call_that_is_not_emulated(emu_machine):
    emu_machine.report(Report("unsupported", "cuArrayCreate is not emulated"))
"""
    )
    result.assert_outcomes(passed=2, failed=2)
    text = result.stdout.str()
    assert "expected: k.cu:3: trap: first" in text and "  trap at k.cu:3: second (kernel k)" in text
    assert "expected a report of kind 'race' that matches 'word' of the emulated driver; there is" in text
    assert "  trap at k.cu:3: another (kernel k)" in text and "run.py" not in text


KERNEL = """
import ctypes
import drvfuse as df

SOURCE = 'extern "C" __global__ void last(int* word) { word[0] = threadIdx.x; }'
"""


def test_work_left_queued_by_a_test_is_run_and_checked(inner: Inner) -> None:
    result = inner(
        HEAD
        + KERNEL
        + """
@pytest.mark.emu(devices=1, race=True)
def test_it(emu_device):
    word = emu_device.zeros(1, "int32")
    df.compile(SOURCE, driver=emu_device.driver)["last"].prepare(1, 64, word)(emu_device.stream)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["1 unexpected report*", "  race at kernel.cu:1: *", "race | * races *A+0x0* (kernel.cu:1)"]
    )


def test_in_a_marked_test_cuda_python_and_the_default_driver_use_its_machine(inner: Inner) -> None:
    result = inner(
        HEAD
        + """
import drvfuse as df
from cuda.bindings import driver

def switched():
    return type(driver.cuDeviceGetCount).__name__ == "function"

@pytest.mark.emu(devices=3, seeds=2)
def test_marked():
    assert switched() and driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1] == 3
    assert df.device(0).zeros(2, "int32").numpy().tolist() == [0, 0]

def test_by_a_fixture(emu_cuda):
    assert emu_cuda is driver and driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1] == 8

@pytest.mark.emu(devices=2)
def test_with_fixtures(emu_driver):
    assert not switched() and emu_driver.cuDeviceGetCount()[1] == 2

def test_neither():
    assert not switched()
"""
    )
    result.assert_outcomes(passed=5)


def test_the_plugin_works_under_xdist(inner: Inner) -> None:
    source = (
        HEAD
        + """
@pytest.mark.emu(devices=1, seeds=4)
def test_it(emu_machine):
    if emu_machine.seed == 2:
        trap(emu_machine, timeline="what came before")
"""
    )
    result = inner(source, "-p", "xdist", "-n2", "--emu-race=strict", apart=True)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*- emulated driver -*",
            "replay: pytest 'test_the_plugin_works_under_xdist.py::test_it[[]seed2[]]' --emu-race=strict",
            "what came before",
        ]
    )


def test_the_plugin_does_not_affect_other_tests(pytester: pytest.Pytester) -> None:
    """pytest runs in a process of its own, and finds the plugin by the entry point that a wheel has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"drvfuse": plugin.__name__}
    site = pytester.mkdir("site")
    folder = site / "stand_in-1.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    # pytest rewrites the assertions of the modules that are listed here.
    folder.joinpath("RECORD").write_text("drvfuse/__init__.py,,\n")
    folder.joinpath("entry_points.txt").write_text("" if INSTALLED else f"[pytest11]\ndrvfuse = {plugin.__name__}\n")
    pytester.makepyfile("""
import sys

def test_it(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("drvfuse")
    ours = sorted(name for name in sys.modules if name.startswith("drvfuse"))
    assert ours == ["drvfuse", "drvfuse.lazy", "drvfuse.testing", "drvfuse.testing.plugin"]
    assert not {"llvmlite", "cuda.bindings", "numpy"} & set(sys.modules)
    import drvfuse.errors
    assert not [name for name in vars(drvfuse.errors) if name.startswith("@")]
""")
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"],
        env={**os.environ, "PYTHONPATH": path}, cwd=pytester.path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1 passed", done.stdout)


def test_the_mark_takes_the_options_of_a_machine() -> None:
    parameters = set(inspect.signature(Machine).parameters)
    assert set(plugin.OPTIONS) - {"seeds"} == parameters - {"seed", "record", "replay", "served"}
