# SPDX-License-Identifier: Apache-2.0
"""`drvfuse check`: its output, that every planted fault and nothing else is found, and that findings can be
repeated."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drvfuse.__main__ import main
from drvfuse.check import cases, shared
from drvfuse.check.differing import FEW, compared
from drvfuse.check.explorer import _interrupts_held
from drvfuse.check.mutant import Mutant, hunt
from drvfuse.check.mutants import MUTANTS
from drvfuse.check.mutants.barriers import direct_two_stage
from drvfuse.check.run import Run, explore
from drvfuse.emu import Machine
from drvfuse.emu.machine.run.engine import Engine
from drvfuse.ops.call import faults
from drvfuse.ops.call.specialisation import CU
from drvfuse.ops.collectives.shared import kernel as kernels

pytestmark = pytest.mark.emulated


def check(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["check", "--json", "--jobs", "1", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_is_found_and_its_case_is_clean_without_it(name):
    verdict = hunt(MUTANTS[name], range(12))
    assert verdict.caught
    assert verdict.unexpected == ()


def test_a_seed_gives_the_same_run_beside_other_machines(monkeypatch):
    """The addresses of a machine's memory depend on the machines that are open when it is made."""
    steps, run = [], Engine.run

    def recorded(self, *given, **options):
        run(self, *given, **options)
        steps.append((self.clock_ns, self.event_count))

    monkeypatch.setattr(Engine, "run", recorded)
    runs = []
    with contextlib.ExitStack() as others:
        for _ in range(3):
            assert explore("seeded", partial(compared, kinds=FEW, shape=(3, 72), first=False), 1) == []
            runs.append(steps.copy())
            steps.clear()
            others.enter_context(Machine(devices=2))
    assert runs[0] and runs[0] == runs[1] == runs[2]


def test_data_overwritten_too_early_is_a_race_or_an_ordered_read_of_wrong_data():
    mutant = MUTANTS["payload-not-doubled"]
    with mutant.planted():
        found = [{finding.kind for finding in explore("payload-not-doubled", mutant.case, seed)} for seed in (0, 1)]
    assert found == [{"mismatch"}, {"mismatch", "race"}]


@pytest.mark.parametrize(("name", "seed"), [(name, 2 + number % 2) for number, name in enumerate(cases.CASES)])
def test_kernels_are_clean_by_the_model_of_ptx(name, seed):
    """Even seeds start dependent launches late, odd ones early; `drvfuse check` runs every case under both."""
    assert explore(name, cases.CASES[name], seed, "strict") == []


@pytest.mark.parametrize("fault", ["volatile-flag-load", "fence-before-relaxed-flag"])
def test_orders_of_hardware_beyond_the_ptx_model_are_reported_by_the_strict_profile_only(fault):
    with faults.in_kernels(fault):
        assert explore("", direct_two_stage, 0) == []
        assert {finding.kind for finding in explore("", direct_two_stage, 0, "strict")} == {"race"}


def test_the_json_report_has_runs_failures_and_planted_faults(capsys):
    status, report = check(capsys, "--seeds", "2", "--only", "allreduce-t*", "--only", "rank-not-launched")
    assert status == 0
    assert report.pop("seconds") > 0
    (mutant,) = report.pop("mutants")
    assert (mutant["name"], mutant["caught"], mutant["by"]) == ("rank-not-launched", True, ["timeout"])
    expected = {"ok": True, "runs": 4, "seeds": 2, "races": 0, "deadlocks": 0, "mismatches": 0, "failures": []}
    assert report == expected


def test_several_jobs_find_what_one_job_finds():
    command = [sys.executable, "-m", "drvfuse", "check", "--seeds", "2", "--only", "*-two-streams", "--only", "two-*"]
    reports = []
    for jobs in ("1", "2"):
        result = subprocess.run([*command, "--json", "--jobs", jobs], capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, result.stderr
        reports.append({**json.loads(result.stdout), "seconds": 0})
    assert reports[0] == reports[1]
    assert reports[0]["runs"] == 2 and [mutant["caught"] for mutant in reports[0]["mutants"]] == [True]


def broken(run: Run) -> None:
    """The one-stage all-reduce without its last barrier."""
    with MUTANTS["start-barrier-only"].planted():
        shared.repeated(run, "allreduce", "one_stage", private=False, tight=False, graph=False, side=False)


def test_a_failure_comes_with_the_command_that_repeats_it(capsys, monkeypatch):
    monkeypatch.setitem(cases.CASES, "broken", broken)
    status, report = check(capsys, "--seeds", "3", "--only", "broken")
    assert status == 1 and not report["ok"]
    assert report["races"] + report["mismatches"] + report["deadlocks"] == len(report["failures"]) > 0
    last = report["failures"][-1]
    assert last["replay"] == f"drvfuse check --only broken --seed {last['seed']}"
    again_status, again = check(capsys, *last["replay"].split()[2:])
    assert again_status == 1
    assert again["failures"] == [failure for failure in report["failures"] if failure["seed"] == last["seed"]]


def test_the_terminal_names_failed_cases_and_undetected_faults(capsys, monkeypatch):
    monkeypatch.setitem(cases.CASES, "broken", broken)
    monkeypatch.setitem(MUTANTS, "harmless", Mutant("harmless", "nothing", "nowhere", lambda run: None))
    status = main(["check", "--jobs", "1", "--seed", "1", "--only", "broken", "--only", "harmless"])
    text = capsys.readouterr().out
    assert status == 1
    assert "FAILED broken; to repeat: drvfuse check --only broken --seed 1" in text
    assert "FAILED harmless" in text and "ESCAPED" in text and "0 of 1 planted faults found" in text


def test_without_planted_faults_the_terminal_says_so(capsys, monkeypatch):
    monkeypatch.setitem(cases.CASES, "nothing", lambda run: None)
    assert main(["check", "--jobs", "1", "--seed", "1", "--only", "nothing"]) == 0
    assert "nothing found in 1 schedule; --only names no planted fault;" in capsys.readouterr().out


def test_an_exception_of_a_case_is_a_finding(capsys, monkeypatch):
    def fails(run: Run) -> None:
        raise ZeroDivisionError("of the case")

    monkeypatch.setitem(cases.CASES, "fails", fails)
    status, report = check(capsys, "--seed", "7", "--only", "fails")
    assert status == 1
    assert [(f["kind"], f["seed"]) for f in report["failures"]] == [("error", 7)]
    assert "ZeroDivisionError: of the case" in report["failures"][0]["text"]


def test_wrong_bits_are_a_finding():
    run = Run("", 0)
    values = np.array([0.0, 1.0], np.float32)
    run.compare("same", values, values.copy())
    assert run.findings == []
    run.compare("other", -values, values)
    assert [(f.kind, f.text) for f in run.findings] == [
        ("mismatch", "other: 2 of 2 elements differ, first [0]: -0.0 and not 0.0")
    ]


@pytest.mark.parametrize(
    "options", [("--seeds", "0"), ("--seeds", "x"), ("--seed", "-1"), ("--jobs", "0"), ("--only", "no-such-case")]
)
def test_bad_options_end_with_a_message_and_status_2(options):
    result = subprocess.run([sys.executable, "-m", "drvfuse", "check", *options], capture_output=True, text=True)
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert options[0] in last and options[1] in last


def test_an_option_that_is_not_an_integer_is_refused():
    result = subprocess.run([sys.executable, "-m", "drvfuse", "check", "--seeds", "x"], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "drvfuse check: error: argument --seeds: 'x' is not an integer"


def test_a_fault_that_the_first_seed_misses_is_tried_under_further_seeds(capsys):
    late = next(name for name in MUTANTS if hunt(MUTANTS[name], [0]).seed is None)
    status, report = check(capsys, "--seed", "0", "--only", late)
    assert status == 0 and report["mutants"][0]["caught"] and report["mutants"][0]["seed"] > 0


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt the check even if the suite is a background job, for which shells ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_held_interrupt_takes_effect_at_the_end_of_its_block(interruptible):
    """An interrupt inside the block could leave a lock of the pool taken, and the process would never exit."""
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with _interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("after the signal")
        steps.append("after the block")
    assert steps == ["after the signal"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_ends_the_check_at_once(interruptible):
    options = ["--only", "rows-*", "--jobs", "2"]
    # The kernels that the workers need are compiled here, since a signal does not interrupt the compiler.
    assert main(["check", "--seeds", "1", *options]) == 0
    command = [sys.executable, "-m", "drvfuse", "check", "--seeds", "2000", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _wait_for_workers(process.pid)
            time.sleep(1.5)
            process.send_signal(signal.SIGINT)
            # communicate() returns when both pipes are closed, so the workers have ended too
            output, errors = process.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert output == "" and errors == "drvfuse check: interrupted\n"


def test_a_killed_worker_ends_the_check_with_a_message_and_status_2():
    command = [sys.executable, "-m", "drvfuse", "check", "--seeds", "2000", "--only", "rows-*", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            os.kill(int(_wait_for_workers(process.pid)[-1]), signal.SIGKILL)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert output == "" and "was killed" in errors and "Traceback" not in errors


def _wait_for_workers(pid: int) -> list[str]:
    """Wait until a check with several jobs has started a worker. Return the ids of its workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (workers := [child for child in children.read_text().split() if _works(child)]):
        time.sleep(0.05)
    return workers


def _works(pid: str) -> bool:
    """True if a child process is a worker. The only other child process is the resource tracker of multiprocessing."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_every_fault_of_a_kernel_is_planted_by_the_check_or_a_test():
    root = Path(__file__).parents[2]
    sources = [path for folder in ("cu", "check/cu") for path in (root / "drvfuse" / folder).rglob("*.cu*")]
    points = {name for path in sources for name in re.findall(r'FAULT\("(\S+?)"\)', path.read_text())} - {"name"}
    planted = {mutant.name for mutant in MUTANTS.values() if mutant.in_kernels}
    assert planted < points
    tests = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    assert [name for name in points - planted if f'"{name}"' not in tests] == []


def test_every_kernel_of_the_library_runs_in_a_case():
    library = CU.rglob("*.cu")
    named = {match for path in library for match in re.findall(r"__global__[^{;]*?(\w+)\(const", path.read_text())}
    named = named - {"DRVFUSE_KERNEL"} | {
        f"{op}_{algo}" for op in ("allreduce", "allreduce_rmsnorm_fp8") for algo in kernels.ALGOS
    }
    seen = set()

    original = Machine.close

    def close(machine):
        seen.update(record.kernel for record in machine.launches)
        original(machine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "close", close)
        for name, case in cases.CASES.items():
            explore(name, case, 2, race=False)  # only which kernels are launched matters
    assert named - seen == set()


def test_the_page_names_every_case_and_the_number_of_faults():
    page = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall("`(.*?)`", row)) == sorted(cases.CASES)
    assert f"plants {len(MUTANTS)} known faults" in page


def test_an_incomplete_name_is_refused_with_the_pattern_that_matches(capsys):
    assert main(["check", "--only", "layernorm"]) == 2
    assert "'*layernorm*' for a part of a name" in capsys.readouterr().err
