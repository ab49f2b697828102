# SPDX-License-Identifier: Apache-2.0
"""SIGINT during long emulated work takes effect at once, and the native engine can be used afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from engine_harness import Rig

signal.signal(signal.SIGINT, signal.default_int_handler)
rig = Rig()
flag, out = rig.array(np.zeros(1, np.uint32)), rig.array(np.zeros(64, np.uint32))
SPIN = "KERNEL k(const u32* flag, u32* out) { while (!load(flag)); if (!threadIdx.x) out[0] = 7; }"
HEAVY = '''KERNEL k(const u32* in, u32* out) {
    u32 a = threadIdx.x;
    for (u32 i = 0; i < ROUNDS; i++) a = BODY;
    out[threadIdx.x & 63] = a | 7;
}'''.replace("ROUNDS", str(eval(os.environ.get("ROUNDS", "1"))))
source, grid, block = {
    "spinning": (SPIN, 264, 1024),
    "accesses": (HEAVY.replace("BODY", "a * 3 + in[a & 31]"), 1, 256),
    "arithmetic": (HEAVY.replace("BODY", "a & 1 ? a * 3 + i : a ^ i"), 1, 256),
    "blocks": (HEAVY.replace("BODY", "a * 3 + in[a & 31]"), 100_000, 128),
}[sys.argv[1]]
launch = rig.launch(source, flag if source is SPIN else out, out, grid=grid, block=block)
sent = []
work = time.pthread_getcpuclockid(threading.get_ident())
def interrupt():
    time.sleep(0.5)
    sent.append(time.clock_gettime(work))
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
print("ready", flush=True)
try:
    rig.finish(launch)
    sys.exit("not interrupted")
except KeyboardInterrupt:
    print(time.clock_gettime(work) - sent[0])  # what this thread worked since, however busy the processors are
if not launch.running:  # it was in the middle of millions of rounds without a suspend
    launch.settle()
    assert launch.fault.kind == "interrupted" and sys.argv[1] in ("accesses", "arithmetic")
if sys.argv[1] == "spinning":
    rig.window.view(flag, 4)[:] = 1
    assert rig.finish(launch) and launch.done
else:
    launch.abandon()
rig.run("KERNEL k(u32* out) { out[threadIdx.x] = threadIdx.x; }", out)
assert (rig.read(out, np.uint32, 32) == np.arange(32)).all()
"""


@pytest.mark.parametrize(
    "work, rounds", [("spinning", 1), ("accesses", 4_000_000), ("arithmetic", 40_000_000), ("blocks", 1000)]
)
def test_an_interrupt_during_long_work_takes_effect_at_once(work, rounds):
    done = _run(PROGRAM, work, ROUNDS=str(rounds))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 1.5


# A signal arrives after a random number of Python lines inside the emulated driver. "busy" runs long
# enough for some signals to arrive in native code.
MOMENTS = """
import ctypes, os, random, signal, sys, threading, time
import numpy as np
from driver_helpers import R, function, ok, primary
from drvfuse.emu import Machine

signal.signal(signal.SIGINT, signal.default_int_handler)
SOURCE = 'extern "C" __global__ void busy(unsigned* p, long n) { for (long i = 0; i < n; i++) atomicAdd(p, 1u); }'
random.seed(int(sys.argv[1]))
left = 0

def trace(frame, event, arg):
    global left
    if "drvfuse" + os.sep + "emu" not in frame.f_code.co_filename:
        return None
    left -= 1
    if left == 0:
        signal.raise_signal(signal.SIGINT)
    return trace

def work(cuda, busy, count):
    streams = [ok(cuda.cuStreamCreate(1)) for _ in range(2)]
    host = ok(cuda.cuMemHostAlloc(4, 0))
    memory = ok(cuda.cuMemAlloc(64))
    for stream in streams:
        ok(cuda.cuMemsetD32Async(memory, 1, 16, stream))
        ok(cuda.cuLaunchKernel(busy, 2, 1, 1, 32, 1, 1, 0, stream, ((count, 10), (None, ctypes.c_long)), 0))
        ok(cuda.cuMemcpyDtoHAsync(host, count, 4, stream))
    event = ok(cuda.cuEventCreate(0))
    ok(cuda.cuEventRecord(event, streams[1]))
    ok(cuda.cuStreamWaitEvent(streams[0], event, 0))
    for stream in streams:
        ok(cuda.cuStreamSynchronize(stream))
    ok(cuda.cuMemFree(memory))

with Machine(devices=1) as machine:
    cuda = machine.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    busy, count = function(cuda, SOURCE, "busy"), ok(cuda.cuMemAlloc(4))
    ok(cuda.cuMemsetD32(count, 0, 1))
    work(cuda, busy, count)
    interrupted = 0
    for round in range(150):
        left = random.randrange(1, 2500)
        sys.settrace(trace)
        try:
            work(cuda, busy, count)
        except KeyboardInterrupt:
            interrupted += 1
        sys.settrace(None)
        if machine.reports:  # it came while kernels ran, which it has ended
            (report,) = machine.reports
            assert report.kind == "interrupted" and machine.finding(0) is report
            assert cuda.cuCtxSynchronize()[0] == R.CUDA_ERROR_LAUNCH_TIMEOUT
            machine.reports.clear()
            ok(cuda.cuDevicePrimaryCtxReset(0))
            primary(cuda)
            busy, count = function(cuda, SOURCE, "busy"), ok(cuda.cuMemAlloc(4))
            ok(cuda.cuMemsetD32(count, 0, 1))
        threads = [threading.Thread(target=lambda: (primary(cuda), ok(cuda.cuCtxSynchronize())))]
        threads[0].start()
        threads[0].join(20)
        assert not threads[0].is_alive(), "the machine's lock was lost"
        before, after = ctypes.c_uint(), ctypes.c_uint()
        ok(cuda.cuCtxSynchronize())
        ok(cuda.cuMemcpyDtoH(ctypes.addressof(before), count, 4))
        assert before.value % 640 == 0, "a launch was lost in the middle"
        work(cuda, busy, count)
        ok(cuda.cuMemcpyDtoH(ctypes.addressof(after), count, 4))
        assert after.value == before.value + 2 * 640
        assert not machine.progress._pending and not machine.reports
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted > 100, interrupted
"""


@pytest.mark.parametrize("seed", range(2))
def test_an_interrupt_at_any_moment_leaves_the_machine_consistent(seed):
    done = _run(MOMENTS, str(seed))
    assert done.returncode == 0, done.stderr


# An endless kernel, and a Ctrl-C during the wait for it.
ENDLESS = """
import os, signal, sys, threading, time
import drvfuse as df
from drvfuse import emu
from drvfuse.errors import DriverError

signal.signal(signal.SIGINT, signal.default_int_handler)
SOURCE = '''
extern "C" __global__ void waits(volatile int* flag, int* out) {
  for (int i = 0; *flag == 0; i++) out[1] = i;  // waits
}
extern "C" __global__ void counts(int* flag, int* out) {
  for (;;) atomicAdd(out, 1);  // counts
}
extern "C" __global__ void spins(int* flag, int* out) {
  for (unsigned i = 1; i; i = i * 3 + 2) asm volatile("");  // spins
  *out = 1;
}
extern "C" __global__ void walks(int* flag, int* out) {
  for (unsigned i = 0;; i++) out[i % 2] = i;  // walks
}
'''
line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith("// " + sys.argv[1]))
with emu.Machine(devices=2) as machine:
    one, two = (df.device(i, driver=machine) for i in range(2))
    flag, out, other = one.zeros((1,), "int32"), one.zeros((2,), "int32"), two.zeros((4,), "int32")
    other.numpy()
    df.compile(SOURCE, driver=machine, name="endless.cu")[sys.argv[1]].prepare(1, 32, flag, out)(one.stream)
    sent = []
    def interrupt():
        time.sleep(1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        out.numpy()
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        print(time.monotonic() - sent[0])
    (report,) = machine.reports
    assert (report.kind, report.kernel, report.line) == ("interrupted", sys.argv[1], line), report
    begin = time.monotonic()
    for use in (out.numpy, one.synchronize):
        try:
            use()
            sys.exit("no error")
        except DriverError as error:
            assert error.name == "CUDA_ERROR_LAUNCH_TIMEOUT" and "interrupted: " in str(error), error
            assert "ended by Ctrl-C" in str(error) and "display" not in str(error)
    assert time.monotonic() - begin < 1
    assert (other.numpy() == 0).all()
"""


@pytest.mark.parametrize("kernel", ["waits", "counts", "spins", "walks"])
def test_an_interrupt_ends_an_endless_kernel_and_reports_its_position(kernel):
    done = _run(ENDLESS, kernel, DRVFUSE_EMU_LOOP_LIMIT=str(10**15))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3


HOST_FUNCTION = """
import ctypes, signal, time
from driver_helpers import ok, primary
from drvfuse.emu import Machine

signal.signal(signal.SIGINT, signal.default_int_handler)
order = []

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def host(argument):
    order.append("begins")
    signal.raise_signal(signal.SIGINT)
    order.append("ends")

with Machine(devices=1) as machine:
    cuda = machine.driver
    ok(cuda.cuInit(0))
    primary(cuda)
    memory = ok(cuda.cuMemAlloc(4))
    ok(cuda.cuLaunchHostFunc(0, ctypes.cast(host, ctypes.c_void_p).value, 0))
    ok(cuda.cuMemsetD32Async(memory, 1, 1, 0))
    try:
        ok(cuda.cuCtxSynchronize())
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        pass
    assert order == ["begins", "ends"]
    ok(cuda.cuCtxSynchronize())
"""


def test_an_interrupt_during_a_host_function_takes_effect_after_it():
    done = _run(HOST_FUNCTION)
    assert done.returncode == 0, done.stderr


def _run(program, *args, **variables):
    here = str(Path(__file__).parents[1])
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", program, *args], env=environment, capture_output=True, text=True, timeout=60
    )
