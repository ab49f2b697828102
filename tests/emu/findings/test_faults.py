# SPDX-License-Identifier: Apache-2.0
"""The message for each kind of fault, made from the record that native code writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from drvfuse.emu.abi import BarrierCount, Endless, FaultKind, MbarrierError, Trap, structs
from drvfuse.emu.findings import faults
from drvfuse.emu.findings.places import Identity
from drvfuse.emu.space.window import Window
from drvfuse.emu.translate.code import Site

OPCODES = (
    "ld.global.u32",
    "st.shared.u32",
    "ld.local.u32",
    "cp.async.ca.shared.global",
    "cp.async.bulk.global.shared::cta.bulk_group",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
)
GLOBAL, SHARED, LOCAL, COPY, STORE, LOAD, MATRIX = range(7)
SITES = tuple(Site(opcode, 9, "a/k.cu", line, ()) for line, opcode in enumerate(OPCODES, 1))
WHO = Identity("k", 3, (4, 2, 1), (8, 8, 1), SITES)
AT = 0x2000_0001_0000  # address of the memory in the expected texts; `described` shifts the real addresses to match
HERE = "bytes at 0x200000010"
THERE = "100 bytes at 0x200000010000 (device of device 2)"
RAISE = "DRVFUSE_EMU_LOOP_LIMIT raises this limit"


class Memory(Window):
    """A window in which 100 bytes of device 2 lie at the address `at`, which is `AT` if the process has no other
    window.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.at = self.alloc(100, 2, 0xFF, 0xFF)


@pytest.fixture
def window() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


def described(window: Memory, kind: FaultKind, **fields: int) -> faults.Fault:
    """The fault that a native record describes. Its addresses are shifted as if the memory of `window` were at `AT`."""
    moved = window.at - AT
    if fields.get("addr", 0) >= AT:
        fields["addr"] += moved
    launch = structs.Launch(shared_bytes=640, local_bytes=48)
    launch.fault = structs.Fault(kind=kind, block=5, thread=33, **fields)
    found = faults.describe(launch, WHO, window)
    message = re.sub(r"0x2\w{11}\b", lambda address: hex(int(address[0], 16) - moved), found.message)
    address = found.address - moved if found.address is not None and found.address >= window.at else found.address
    return replace(found, message=message, address=address)


SENTENCES = [
    ("OUT_OF_BOUNDS", {"size": 4, "addr": AT + 104}, f"read of 4 {HERE}068: 4 bytes past the end of {THERE}"),
    (
        "MISALIGNED",
        {"size": 4, "addr": AT + 2},
        f"read of 4 {HERE}002, which is no multiple of 4: 2 bytes into {THERE}",
    ),
    (
        "NO_ACCESS",
        {"size": 8, "addr": AT, "flags": 2},
        f"atomic on 8 {HERE}000: device 3 was not given access to this memory (peer access, cuMemSetAccess): "
        f"0 bytes into {THERE}",
    ),
    (
        "READ_ONLY",
        {"size": 4, "addr": AT + 4, "flags": 1},
        f"write of 4 {HERE}004: device 3 may only read this memory: 4 bytes into {THERE}",
    ),
    (
        "UNINITIALISED",
        {"size": 4, "addr": AT},
        f"read of 4 {HERE}000: this memory was never written: 0 bytes into {THERE}",
    ),
    (
        "UNINITIALISED",
        {"size": 4, "addr": AT, "value": COPY + 1},
        f"read of 4 {HERE}000: this memory is not written yet: the cp.async at line 4 will write it, "
        "and no cp.async.wait_group of its thread that covers it comes before the read",
    ),
    (
        "UNINITIALISED",
        {"size": 4, "addr": AT, "value": STORE + 1},
        f"read of 4 {HERE}000: this memory is not written yet: the cp.async.bulk at line 5 will write it, "
        "and no cp.async.bulk.wait_group (without .read) of its thread that covers it comes before the read",
    ),
    (
        "UNINITIALISED",
        {"size": 4, "addr": AT, "value": LOAD + 1},
        f"read of 4 {HERE}000: this memory is not written yet: the cp.async.bulk at line 6 will write it, "
        "and no wait for its mbarrier (mbarrier.try_wait) comes before the read",
    ),
    (
        "FOREIGN_SHARED",
        {"size": 4, "site": SHARED, "addr": 64, "flags": 1},
        "write of 4 bytes at 0x40: outside of the block's 640 bytes of shared memory",
    ),
    (
        "FOREIGN_LOCAL",
        {"size": 4, "site": LOCAL, "addr": 64},
        "read of 4 bytes at 0x40: outside of the thread's 48 bytes of local memory",
    ),
    ("TRAP", {"flags": Trap.TRAP}, "trap"),
    ("TRAP", {"flags": Trap.BREAKPOINT}, "breakpoint"),
    ("WARP_LANES", {"value": 0xF0}, "warp operation with mask 0x000000f0, which lacks the calling lane"),
    (
        "WARP_MISMATCH",
        {"value": 0xF0, "flags": LOCAL},
        "lanes of a warp wait for one another at different operations: this one has mask 0x000000f0, the other "
        "is at line 3",
    ),
    (
        "MATRIX_LANES",
        {"value": 0xFFFF, "site": MATRIX},
        "ldmatrix needs all 32 lanes of a warp, and only lanes 0x0000ffff are there: the others have exited, or the "
        "block does not have them",
    ),
    (
        "BARRIER_COUNT",
        {"addr": BarrierCount.NUMBER, "value": 99},
        "barrier 99 does not exist: a block has the barriers 0 to 15",
    ),
    (
        "BARRIER_COUNT",
        {"addr": BarrierCount.THREADS, "value": 33},
        "barrier of 33 threads: the number must be a multiple of 32, and barrier.arrive must have one",
    ),
    (
        "BARRIER_COUNT",
        {"addr": BarrierCount.OTHERS_DIFFER, "value": 0, "flags": 64},
        "barrier of all threads, at which others wait for 64",
    ),
    (
        "BARRIER_DIVERGENCE",
        {"flags": COPY, "value": 2},
        "lanes of one warp are at different barriers: this one at barrier 2, another at line 4",
    ),
    (
        "BARRIER_KINDS",
        {"value": 7},
        "threads are at barrier 7 by different instructions: a barrier with a reduction (barrier.red) "
        "needs the same reduction in all threads",
    ),
    (
        "BARRIER_LEFT",
        {"value": 7},
        "the block has ended, and barrier 7, at which this warp has arrived, was never completed",
    ),
    ("UNSUPPORTED", {"flags": 12}, "status 12 is not supported"),
    (
        "ENDLESS",
        {"addr": Endless.RESUMES, "value": 1000},
        "no thread has exited and no block has started during 1000 strong accesses (or 16 times as many other waits): "
        f"a livelock, or very long work; {RAISE}",
    ),
    (
        "ENDLESS",
        {"addr": Endless.ROUNDS, "value": 1000},
        f"the thread has made 1000 rounds of a loop that accesses no memory; {RAISE}",
    ),
    (
        "ENDLESS",
        {"addr": AT, "size": 4, "flags": 1, "value": 1000},
        f"write of 4 {HERE}000: the thread has made 1000 plain accesses without a wait; "
        f"a word that other threads write must be read by a strong load; {RAISE}",
    ),
    ("INTERRUPTED", {}, "Ctrl-C ended the running kernels; this thread was running"),
    ("COPY_SIZE", {"size": 24, "value": 24}, "cp.async.bulk of 24 bytes: 16, or a multiple of it, is expected"),
    ("COPY_SIZE", {"size": 8, "value": 12}, "cp.async of 8 bytes with a src-size of 12"),
    *(
        ("MBARRIER", {"size": 8, "addr": 64, "flags": error, "value": 77}, f"at 0x40: {words}")
        for error, words in (
            (
                MbarrierError.NO_BARRIER,
                "there is no mbarrier: it was not initialised (mbarrier.init), or it was overwritten",
            ),
            (MbarrierError.COUNT, "a count of 77, which is out of range"),
            (MbarrierError.ARRIVALS, "77 arrivals are more than the phase expects"),
            (MbarrierError.BYTES, "77 bytes are more than an mbarrier can count"),
            (MbarrierError.PENDING, "more than 77 bulk copies are pending"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "fields", "sentence"), SENTENCES)
def test_a_fault_is_described_in_one_sentence(window: Memory, kind: str, fields: dict[str, int], sentence: str) -> None:
    fault = described(window, FaultKind[kind], **fields)
    assert fault.message == sentence and fault.kind == kind.lower()
    assert (fault.kernel, fault.device, fault.block, fault.thread) == ("k", 3, (1, 1, 0), (1, 4, 0))
    assert (fault.file, fault.line) == ("a/k.cu", fields.get("site", GLOBAL) + 1)
    assert fault.address == (fields["addr"] if "size" in fields and "addr" in fields else fault.address)


def test_use_after_free_names_the_freed_memory(window: Memory) -> None:
    window.free(window.at)
    fault = described(window, FaultKind.USE_AFTER_FREE, size=4, addr=AT + 8)
    assert fault.message == f"read of 4 {HERE}008: 8 bytes into {THERE}, which was freed"


def test_every_kind_of_fault_has_a_sentence() -> None:
    assert set(faults._SENTENCES) == set(FaultKind) - {FaultKind.NONE}


@pytest.mark.parametrize(
    ("site", "flags", "kind"),
    [
        (GLOBAL, 0, "out_of_bounds"),
        (SHARED, 1, "foreign_shared"),
        (LOCAL, 0, "foreign_local"),
        (COPY, 0, "out_of_bounds"),
        (COPY, 1, "foreign_shared"),
        (STORE, 0, "foreign_shared"),
        (STORE, 1, "out_of_bounds"),
        (LOAD, 0, "out_of_bounds"),
        (LOAD, 1, "foreign_shared"),
    ],
)
@pytest.mark.parametrize("native", ["OUT_OF_BOUNDS", "FOREIGN_SHARED", "FOREIGN_LOCAL"])
def test_a_wild_address_is_described_by_the_state_space_of_its_access(
    window: Memory, native: str, site: int, flags: int, kind: str
) -> None:
    assert described(window, FaultKind[native], size=16, site=site, addr=AT + 4096, flags=flags).kind == kind


def test_the_mbarrier_of_a_bulk_copy_is_in_shared_memory(window: Memory) -> None:
    fault = described(window, FaultKind.OUT_OF_BOUNDS, size=8, site=LOAD, addr=AT + 4096)
    assert fault.kind == "foreign_shared"
