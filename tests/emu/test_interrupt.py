# SPDX-License-Identifier: Apache-2.0
"""SIGINT during long emulated work takes effect at once, and the engine goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from engine_harness import Rig

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
def interrupt():
    time.sleep(0.5)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
print("ready", flush=True)
try:
    rig.finish(launch)
    sys.exit("not interrupted")
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
assert launch.running
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
def test_an_interrupt_during(work, rounds):
    here = str(Path(__file__).parent)
    environment = {**os.environ, "ROUNDS": str(rounds), "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, work],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 1.5
