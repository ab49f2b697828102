# SPDX-License-Identifier: Apache-2.0
"""`drvfuse run`: the environment and output of ranks, and how a run ends when a rank fails or Ctrl-C is pressed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from drvfuse.cli.demo import OPS
from drvfuse.emu import Machine
from drvfuse.emu.serve.server import Server

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def start(tmp_path):
    """`start(ranks, code, *arguments, options=(), **environment)`: a running `drvfuse run` of the program `code`."""
    started = []

    def begin(ranks, code, *arguments, options=(), **environment):
        script = tmp_path / "program.py"
        script.write_text("import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(code))
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "drvfuse", "run", "-n", str(ranks), *options, str(script), *arguments],
                env={**os.environ, "PYTHONPATH": str(ROOT), "DRVFUSE_SPIN_TIMEOUT": "0.5", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_run_with_closed_standard_files_ends_as_usual(tmp_path, closed):
    script = tmp_path / "program.py"
    script.write_text(
        "import os; print('out', flush=True); os.write(2, b'err'); open('done' + os.environ['RANK'], 'x')"
    )
    command = f"{sys.executable} -m drvfuse run -n 2 --driver cuda {script} {closed}"
    process = subprocess.run(
        command, shell=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert process.returncode == 0 and "Traceback" not in process.stderr
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()
    assert (process.stdout != "") == (not closed.startswith(">"))


def test_a_run_whose_reader_has_gone_ends_with_an_error_and_leaves_no_process(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("while True: print('x' * 1000, flush=True)")
    command = f"{sys.executable} -m drvfuse run -n 2 --driver cuda {script} | head -n 1; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2 and process.stderr == "drvfuse run: [Errno 32] Broken pipe\n"


def test_a_time_out_of_years_does_not_stop_a_run_whose_rank_fails(run):
    code = """
    if RANK == 0:
        sys.exit(3)
    print("ends by itself", flush=True)
    """
    status, out, err = run(2, code, options=("--driver", "cuda"), DRVFUSE_SPIN_TIMEOUT="1e8")
    assert status == 3 and "[1] ends by itself" in out
    assert not any("Traceback" in line for line in err)


@pytest.fixture
def run(start):
    """`run(...)` takes the arguments of `start` and waits. Returns the exit status and the lines of stdout and
    stderr."""

    def complete(*arguments, **environment):
        process = start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err.splitlines()

    return complete


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def gone(pids) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_rank_knows_its_place_and_its_output_is_prefixed(run):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT DRVFUSE_DRIVER DRVFUSE_SECRET"
    code = f"""
        print([os.environ[name] for name in {names.split()}], sys.argv[1:], "TORCHELASTIC_RUN_ID" in os.environ)
        print("an error", file=sys.stderr)
        sys.stdout.write("no newline at the end")
    """
    status, out, err = run(3, code, "--option", "-n", "5", "--", TORCHELASTIC_RUN_ID="none", DRVFUSE_DRIVER="cuda")
    assert status == 0 and sorted(err) == [f"[{rank}] an error" for rank in range(3)]
    shared = set()
    for rank in range(3):
        first, second = (line for line in out if line.startswith(f"[{rank}] "))
        assert second == f"[{rank}] no newline at the end"
        found = re.fullmatch(
            rf"\[{rank}\] \['{rank}', '3', '{rank}', '3', '127.0.0.1', '(\d+)', 'cuda', '([0-9a-f]+)'\] "
            r"\['--option', '-n', '5', '--'\] False",
            first,
        )
        shared.add(found.groups())
    ((_, secret),) = shared
    assert len(secret) >= 32


def test_lines_of_ranks_are_not_mixed(run):
    status, out, _ = run(4, "for i in range(300): print(RANK, i, 'x' * 1000)")
    assert status == 0
    for rank in range(4):
        lines = [line for line in out if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] {rank} {i} {'x' * 1000}" for i in range(300)]


def test_ranks_started_by_run_connect_to_a_group(run):
    code = """
        from drvfuse.bootstrap.rendezvous import meet
        place, board = meet(timeout=20)
        print(place.launcher, place.one_host, board.gather("rank", b"%d" % RANK))
        board.close()
    """
    status, out, err = run(3, code)
    assert (status, err) == (0, [])
    assert sorted(out) == [f"[{rank}] torchrun True [b'0', b'1', b'2']" for rank in range(3)]


@pytest.mark.parametrize(
    "act,status,how",
    [("sys.exit(7)", 7, "ended with exit status 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_first_failure_is_named_and_other_ranks_may_still_raise(run, act, status, how):
    code = f"""
        if RANK == 1:
            time.sleep(0.3)
            {act}
        time.sleep(1)
        print("raised")
        sys.exit(9)
    """
    got, out, err = run(3, code)
    assert got == status and sorted(out) == ["[0] raised", "[2] raised"]
    assert err == [f"drvfuse run: rank 1 {how}; the others have 5.5 s to end"]


def test_ranks_that_do_not_exit_are_killed():
    """Ranks get SIGTERM after the grace period and SIGKILL if they ignore it, and so do their child processes."""
    code = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from drvfuse.bootstrap import supervisor
        supervisor._END_SECONDS = 0.3
        with supervisor.Supervisor(0.3, lambda text: print(text, flush=True)) as these:
            stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
            parent = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
            failing = "import time; time.sleep(0.5); raise SystemExit(3)"
            these.start("rank 0", "", [sys.executable, "-c", stubborn], os.environ)
            these.start("rank 1", "", [sys.executable, "-c", parent], os.environ)
            these.start("rank 2", "", [sys.executable, "-c", failing], os.environ)
            sys.exit(these.wait())
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 3, result.stderr
    child, *said = result.stdout.splitlines()
    assert said == [
        "rank 2 ended with exit status 3; the others have 0.3 s to end",
        "SIGTERM to rank 0, rank 1",
        "SIGKILL to rank 0",
    ]
    gone([int(child)])


def pids_of(process, ranks):
    """The process ids that the ranks print first. There may be empty lines between them."""
    pids = []
    while len(pids) < ranks:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids += map(int, line.split()[1:])
    return pids


def test_ctrl_c_is_passed_to_the_ranks_once(start):
    code = """
        try:
            print(os.getpid())
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.2)  # a second signal would interrupt this too
            print("interrupted")
    """
    process = start(2, code)
    pids = pids_of(process, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and sorted(out.splitlines()) == ["[0] interrupted", "[1] interrupted"]
    assert err == "drvfuse run: interrupted; the processes have 5.5 s to end\n"
    gone(pids)


def test_a_second_ctrl_c_kills_the_ranks(start):
    process = start(2, "signal.signal(signal.SIGINT, signal.SIG_IGN); print(os.getpid()); time.sleep(60)")
    pids = pids_of(process, 2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - begin < 4
    gone(pids)


def test_sigterm_ends_the_ranks(start):
    process = start(2, "print(os.getpid()); time.sleep(60)")
    pids = pids_of(process, 2)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    gone(pids)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(start):
    process = start(2, "print(os.getpid()); time.sleep(60)")
    pids = pids_of(process, 2)
    process.kill()
    gone(pids)


def test_a_closed_output_pipe_ends_the_run(start):
    process = start(2, "print(os.getpid())\nwhile True: print(); time.sleep(0.01)")
    pids = pids_of(process, 2)
    process.stdout.close()
    process.stdout = None
    process.wait(timeout=30)
    assert process.returncode == 2
    gone(pids)


def test_run_takes_a_module_and_a_double_dash(tmp_path):
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for words in (["-m", "mod", "a", "-n", "3"], ["--", str(tmp_path / "mod.py"), "a", "-n", "3"]):
        command = [sys.executable, "-m", "drvfuse", "run", "-n", "1", *words]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout) == (0, "[0] __main__ ['a', '-n', '3']\n"), result.stderr


@pytest.mark.parametrize(
    "words,text",
    [
        (["-n", "2"], "the program is missing"),
        (["-n", "2", "/nowhere/program.py"], "a Python script that exists"),
        (["-n", "0", "x.py"], "0 is not positive"),
        (["x.py"], "-n"),
    ],
)
def test_wrong_usage_starts_no_process(words, text):
    result = subprocess.run(
        [sys.executable, "-m", "drvfuse", "run", *words], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and text in result.stderr and not result.stdout


@pytest.fixture
def machine():
    """A machine of two devices, served by this process, and its address."""
    with Machine(devices=2, served=True) as one, Server(one) as server:
        yield one, server.address


@pytest.mark.emulated
def test_ranks_share_the_machine_that_a_variable_names(run, machine):
    code = """
        import numpy as np
        import drvfuse as df
        with df.Group.connect() as group:
            (rank,) = group.ranks
            y = df.allreduce(group, rank.array(np.full((2, 8), 1.5 + RANK, np.float32)))
            print(rank.index, group.size, set(y.numpy().flat) == {4.0})
    """
    status, out, err = run(2, code, DRVFUSE_DRIVER="emu", DRVFUSE_EMU_MACHINE=machine[1], DRVFUSE_SPIN_TIMEOUT="10")
    assert (status, sorted(out)) == (0, ["[0] 0 2 True", "[1] 1 2 True"]), err
    assert not machine[0].reports


EMU = "--driver", "emu"


@pytest.mark.emulated
def test_a_machine_is_started_for_the_ranks_and_prints_its_findings(run):
    code = """
        import drvfuse as df
        from drvfuse.errors import DriverError
        device = df.device(RANK)
        stray = df.compile('extern "C" __global__ void stray(long p) { if (p) *(int*)p = 1; }')["stray"]
        try:
            stray.prepare(1, 1, 8 * RANK, device=device)(device.stream)
            device.stream.synchronize()
            print("fine")
        except DriverError:
            print("failed")
    """
    status, out, err = run(2, code, options=EMU)
    assert status == 1 and {"[0] fine", "[1] failed"} <= set(out), err
    assert any(line.startswith("[emu] ") and "stray" in line for line in out)
    assert err[-1] == "drvfuse run: the emulated machine ended with exit status 1"


@pytest.mark.emulated
def test_a_killed_machine_is_named_in_the_error(run):
    code = """
        import drvfuse as df
        from pathlib import Path
        df.device(0)
        if RANK == 0:
            machine = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()[0]
            os.kill(int(machine), signal.SIGKILL)
        time.sleep(1)
    """
    status, _, err = run(2, code, options=EMU)
    assert status == 137
    said = next(line for line in err if line.startswith("drvfuse run:"))  # a rank may print to stderr too
    assert said == "drvfuse run: the emulated machine was killed by SIGKILL; the others have 5.5 s to end"


@pytest.mark.emulated
def test_more_ranks_than_emulated_devices_are_refused(run):
    status, out, err = run(99, "print('started')", options=EMU)
    assert status == 2 and not out
    assert err == ["drvfuse run: -n is 99; it must be from 1 to 8, the number of emulated devices"]


@pytest.mark.emulated
def test_a_machine_that_fails_to_start_is_an_error(run):
    status, out, err = run(2, "print('started')", options=EMU, DRVFUSE_EMU_WINDOW_GIB="none")
    assert status == 2 and not out
    assert err[-1] == "drvfuse run: the emulated machine did not start: it ended with exit status 2"


@pytest.mark.emulated
def test_the_demo_runs_with_a_process_for_each_gpu(machine):
    command = [
        "-m",
        "drvfuse",
        "demo",
        "--processes",
        "--gpus",
        "2",
        "--driver",
        "emu",
        "--json",
        "--rows",
        "8",
        "--cols",
        "512",
    ]
    environment = {**os.environ, "DRVFUSE_EMU_MACHINE": machine[1]}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["gpus"], report["processes"], report["ok"]) == (2, 2, True)
    algos = ("push_one_shot", "one_stage", "two_stage")
    assert [(check["op"], check["algo"]) for check in report["checks"]] == [(op, algo) for op in OPS for algo in algos]
    assert not machine[0].reports
