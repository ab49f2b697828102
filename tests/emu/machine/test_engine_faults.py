# SPDX-License-Identifier: Apache-2.0
"""The report of each kind of fault names its source line, its thread and the memory concerned."""

from __future__ import annotations

import numpy as np
import pytest
from engine_harness import Rig, line_of

from drvfuse.emu import abi
from drvfuse.emu.findings.faults import Fault
from drvfuse.emu.machine.run.engine_launch import EngineLaunch


def fault_of(rig: Rig, launch: EngineLaunch, source: str, kind: str) -> Fault:
    assert rig.finish(launch)
    fault = launch.fault
    assert fault is not None and not launch.done
    assert (fault.kind, fault.line, fault.kernel) == (kind, line_of(source, "here"), "k")
    assert fault.file is not None and fault.file.endswith("test.cu")
    return fault


COPY = """
KERNEL k(const int* in, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = in[i]; // here
}"""


def test_a_read_beyond_the_end_of_an_allocation_is_a_fault(rig):
    in_, out = rig.array(np.arange(100, dtype=np.int32)), rig.empty(1024)
    fault = fault_of(rig, rig.launch(COPY, in_, out, 101, grid=2, block=64), COPY, "out_of_bounds")
    assert (fault.block, fault.thread, fault.address) == ((1, 0, 0), (36, 0, 0), in_ + 400)
    assert fault.message.startswith(f"read of 4 bytes at 0x{in_ + 400:x}: 0 bytes past the end of 400 bytes")


def test_a_write_beyond_memory_of_whole_granules_is_a_fault(rig):
    in_, out = rig.array(np.zeros(1 << 15, np.int32)), rig.empty(1 << 16, 2)
    fault = fault_of(rig, rig.launch(COPY, in_, out, 1 << 15, grid=512, block=64, device=2), COPY, "out_of_bounds")
    assert fault.address == out + (1 << 16)
    assert "write of 4 bytes" in fault.message and fault.device == 2


def test_a_fault_names_only_the_bytes_outside_the_allocation(rig):
    source = "KERNEL k(uint4* p) {\n  *p = uint4(); // here\n}"
    p = rig.empty(12)
    assert fault_of(rig, rig.launch(source, p), source, "out_of_bounds").address == p + 12


@pytest.mark.parametrize("address", [0, 8, 0x7FFF00000000, (1 << 64) - 16])
def test_an_address_outside_of_device_memory_is_a_fault(rig, address):
    fault = fault_of(rig, rig.launch(COPY, address, rig.empty(128), 32), COPY, "out_of_bounds")
    assert fault.address == address and "outside of device memory" in fault.message


def test_a_strong_load_of_a_bad_address_is_a_fault(rig):
    source = "KERNEL k(u32* p, u32* out) {\n *out = atomicAdd(p, 1); // here\n}"
    assert fault_of(rig, rig.launch(source, 64, rig.empty(4)), source, "out_of_bounds").address == 64


def test_a_use_after_free_is_a_fault(rig):
    p = rig.array(np.arange(100, dtype=np.int32))
    rig.window.free(p)
    fault = fault_of(rig, rig.launch(COPY, p, rig.empty(128), 32), COPY, "use_after_free")
    assert "0 bytes into 400 bytes" in fault.message and "which was freed" in fault.message


def test_a_misaligned_vector_access_is_a_fault(rig):
    source = "KERNEL k(char* p) {\n  *(uint4*)(p + 8) = uint4(); // here\n}"
    fault = fault_of(rig, rig.launch(source, rig.empty(64)), source, "misaligned")
    assert "no multiple of 16" in fault.message


def test_memory_of_a_device_without_granted_access_is_a_fault(rig):
    p = rig.window.alloc(400, 1, 0b10, 0b10, initialised=True)
    fault = fault_of(rig, rig.launch(COPY, p, rig.empty(400), 100, block=128), COPY, "no_access")
    assert "device 0 was not given access" in fault.message and "of device 1" in fault.message
    assert rig.finish(launch := rig.launch(COPY, p, rig.empty(400), 100, block=128, device=1)) and launch.done


def test_a_write_to_read_only_memory_is_a_fault(rig):
    p = rig.window.alloc(400, 1, 0b11, 0b10, initialised=True)
    fault = fault_of(rig, rig.launch(COPY, p, p, 100), COPY, "read_only")
    assert "device 0 may only read" in fault.message and "write of 4 bytes" in fault.message


def test_a_read_of_uninitialised_memory_is_a_fault(rig):
    p = rig.array(np.arange(32, dtype=np.int32))
    rig.window.view(p + 4 * 17 + 2 + abi.SHADOW_OFFSET, 1)[:] = abi.SHADOW_ADDRESSABLE
    fault = fault_of(rig, rig.launch(COPY, p, rig.empty(128), 32), COPY, "uninitialised")
    assert fault.hint is not None and "kernel of another stream is to write this memory, an event" in fault.hint
    assert (fault.thread, fault.address) == ((17, 0, 0), p + 4 * 17 + 2)


def test_memory_written_by_a_kernel_is_initialised(rig):
    source = "KERNEL k(int* p) { p[threadIdx.x] = 1; __syncthreads(); p[threadIdx.x] += p[31 - threadIdx.x]; }"
    rig.run(source, rig.empty(128))


def test_a_read_of_uninitialised_shared_memory_is_a_fault(rig):
    source = """
    KERNEL k(int* out) {
        __shared__ int s[32];
        if (threadIdx.x != 5) s[threadIdx.x] = 1;
        __syncthreads();
        out[threadIdx.x] = s[threadIdx.x]; // here
    }"""
    for _ in range(2):  # the second run uses memory that a block of the first has used
        fault = fault_of(rig, rig.launch(source, rig.empty(128)), source, "uninitialised")
        assert fault.thread == (5, 0, 0)


def test_an_access_beyond_the_shared_memory_of_a_block_is_a_fault(rig):
    source = """
    KERNEL k(int n) {
        extern __shared__ int s[];
        s[n] = 1; // here
    }"""
    rig.run(source, 63, smem=256)
    fault = fault_of(rig, rig.launch(source, 64, smem=256), source, "foreign_shared")
    assert "outside of the block's 256 bytes of shared memory" in fault.message


def test_a_store_to_a_parameter_is_a_fault(rig):
    source = """
    KERNEL k(const __grid_constant__ int n) {
        *const_cast<volatile int*>(&n) = 1; // here
    }"""
    fault_of(rig, rig.launch(source, 3), source, "read_only")


def test_an_access_to_local_memory_of_another_thread_is_a_fault(rig):
    source = """
    KERNEL k(int n, int* out) {
        volatile int a[8];
        for (int i = 0; i < 8; i++) a[i] = i;
        out[threadIdx.x] = a[n]; // here
    }"""
    rig.run(source, 7, rig.empty(128))
    fault_of(rig, rig.launch(source, 40, rig.empty(128)), source, "foreign_local")


def test_a_trap_is_a_fault(rig):
    source = "KERNEL k() {\n  if (threadIdx.x == 9) __trap(); // here\n}"
    assert fault_of(rig, rig.launch(source), source, "trap").thread == (9, 0, 0)


def test_a_failed_assertion_is_a_fault(rig):
    source = """
    KERNEL k(int n) {
        if (threadIdx.x >= n)
            __assertfail("threadIdx.x < n", "some.cu", 33, "k", 1); // here
    }"""
    fault = fault_of(rig, rig.launch(source, 4), source, "assert")
    assert fault.message == "some.cu:33: k: assertion `threadIdx.x < n` failed" and fault.thread == (4, 0, 0)


def test_a_warp_operation_whose_mask_lacks_the_calling_lane_is_a_fault(rig):
    source = "KERNEL k(int* out) {\n out[threadIdx.x] = __ballot_sync(0xfffffffe, 1); // here\n}"
    assert "lacks the calling lane" in fault_of(rig, rig.launch(source, rig.empty(128)), source, "warp_lanes").message


def test_lanes_that_wait_at_different_warp_operations_are_a_deadlock(rig):
    source = """
    KERNEL k(int* out) {
        int v;
        if (threadIdx.x < 16) v = __shfl_xor_sync(0xffffffff, 1, 1);
        else v = __ballot_sync(0xffffffff, 1); // here
        out[threadIdx.x] = v;
    }"""
    fault_of(rig, rig.launch(source, rig.empty(128)), source, "warp_mismatch")


def test_a_barrier_with_different_thread_counts_is_a_fault(rig):
    source = """
    KERNEL k() {
        if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
        else asm volatile("bar.sync 1, 96;"); // here
    }"""
    fault = fault_of(rig, rig.launch(source, block=96), source, "barrier_count")
    assert fault.message == "barrier of 96 threads, at which others wait for 64"


BARRIER_FAULTS = {
    "a count that is no multiple of a warp": ("bar.sync 1, 33;", "bar.sync 1, 33;", "barrier_count", "multiple of 32"),
    "a number too high": ("bar.sync %0;", "bar.sync %0;", "barrier_count", "barriers 0 to 15"),
    "a reduction with a wait": (
        "{.reg .pred p; setp.ne.u32 p, %0, 0; bar.red.or.pred p, 1, 64, p;}",
        "bar.sync 1, 64;",
        "barrier_kinds",
        "barrier 1",
    ),
    "an arrival that nobody joins": ("", "bar.arrive 3, 64;", "barrier_left", "barrier 3"),
}


@pytest.mark.parametrize("name", BARRIER_FAULTS)
def test_misuse_of_a_barrier_is_a_fault(rig, name):
    first, second, kind, message = BARRIER_FAULTS[name]
    source = f"""
    KERNEL k(u32 n) {{
        if (threadIdx.x < 32) asm volatile("{first}" :: "r"(n) : "memory");
        else asm volatile("{second}" :: "r"(n) : "memory"); // here
    }}"""
    launch = rig.launch(source, 99, block=64)
    assert rig.finish(launch) and launch.fault is not None
    assert launch.fault.kind == kind and message in launch.fault.message
    assert launch.fault.file.endswith("test.cu") and launch.fault.line in (3, 4)


def test_lanes_of_one_warp_at_different_barriers_are_a_fault(rig):
    source = """
    KERNEL k(int* out) {
        if (threadIdx.x < 16) {
            out[threadIdx.x] = 1;
            __syncthreads(); // other
        } else {
            __syncthreads(); // here
            out[threadIdx.x] = 2;
        }
    }"""
    fault = fault_of(rig, rig.launch(source, rig.empty(128)), source, "barrier_divergence")
    assert fault.thread == (16, 0, 0) and f"another at line {line_of(source, 'other')}" in fault.message


def test_an_endless_spin_on_a_plain_load_is_a_fault(rig):
    source = """
    KERNEL k(const u32* flag) {
        u32 v;
        do asm volatile("ld.global.u32 %0,[%1];" : "=r"(v) : "l"(flag) : "memory"); // here
        while (!v);
    }"""
    flag = rig.array(np.zeros(1, np.uint32))
    assert fault_of(rig, rig.launch(source, flag, block=1), source, "endless").address == flag


LOOPS = {
    "without_an_end": """
        while (true) a = a * 3 + 1; // here
    """,
    "behind_accesses": """
        for (u32 i = 0; i < 8; i++) a += out[i];
        do a = a & 1 ? a * 3 + 1 : a / 2; while (a | 1); // here
    """,
    "beside_an_access": """
        do { // here
            while (a & 1) a = a * 3; // here
            if (a == 4) store(out, a);
            a += 7;
        } while (true);
    """,
    "of_prefetches": """
        do asm volatile("cp.async.bulk.prefetch.L2.global [%0], 16;" :: "l"(out)); while (true); // here
    """,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_endless_loop_without_accesses_ends_at_the_limit(rig, loop):
    source = "KERNEL k(u32 a, u32* out) {" + LOOPS[loop] + "    *out = a;\n}"
    launch = rig.launch(source, 1, rig.array(np.ones(8, np.uint32)), block=1)
    assert rig.finish(launch) and launch.fault.kind == "endless"
    lines = [i for i, line in enumerate(source.splitlines(), 1) if "// here" in line]
    assert launch.fault.line in lines and launch.fault.file.endswith("test.cu")
    assert "DRVFUSE_EMU_LOOP_LIMIT" in launch.fault.message and launch.fault.address is None


@pytest.mark.parametrize("limit, ends", [(100_000, False), (1_000_000, True)])
@pytest.mark.parametrize("body", ["a = a & 1 ? a * 3 + i : a ^ i;", "a = a * 3 + in[a & 7];"])
def test_the_limit_of_loop_iterations_is_an_option(body, limit, ends):
    source = "KERNEL k(u32 n, const u32* in, u32* out) {\n u32 a = n;\n for (u32 i = 0; i < n; i++) " + body
    source += "\n *out = a;\n}"
    rig = Rig(loop_limit=limit)
    launch = rig.launch(source, 500_000, rig.array(np.arange(8, dtype=np.uint32)), rig.empty(4), block=1)
    assert rig.finish(launch)
    assert launch.done == ends
    if not ends:
        assert launch.fault.kind == "endless" and launch.fault.line == 3
    rig.close()


def test_only_the_first_fault_of_a_launch_is_reported(rig):
    out = rig.empty(400)
    good = rig.array(np.arange(100, dtype=np.int32))
    bad = rig.launch(COPY, 0, out, 100, block=128)
    fine = rig.launch(COPY, good, out, 100, block=128, device=1)
    assert rig.finish(bad, fine)
    assert bad.fault and not bad.running and fine.done
    assert (rig.read(out, np.int32, 100) == np.arange(100)).all()


def test_a_fault_inside_an_inlined_function_names_the_call(rig):
    source = """
    KERNEL k(u32* p) {
        store(p, 1); // call
    }"""
    launch = rig.launch(source, 0)
    assert rig.finish(launch)
    assert f"called at test.cu:{line_of(source, 'call')}" in launch.fault.message


# Memory that the report of an access out of bounds names --------------------------------------------------------------

STORE = """
KERNEL k(int* out, u64 at) {
    __shared__ int s[24];
    s[threadIdx.x % 24] = 1;
    __syncthreads();
    if (threadIdx.x == 0) out[at / 4] = s[3]; // here
}"""
GENERIC = """
KERNEL k(int** table, u64 at) {
    extern __shared__ int s[];
    s[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.u32 [%0], %1;" :: "l"((char*)table[0] + at), "r"(s[3]) : "memory"); // here
}"""


def lent(rig: Rig, kind: abi.Kind) -> int:
    """The lowest address of the memory of this kind that the native engine keeps for blocks and threads."""
    return min(a.address for a in rig.window.index._live.values() if a.kind is kind)


@pytest.mark.parametrize("smem", [0, 4096])
@pytest.mark.parametrize("away", [-8, 40 << 10, (1 << 16) + 8], ids=["in_front", "inside", "behind"])
@pytest.mark.parametrize("kind", [abi.Kind.SHARED, abi.Kind.PARAM])
def test_a_global_write_out_of_bounds_is_reported_for_global_memory(rig, kind, away, smem):
    out = rig.empty(400)
    rig.run(STORE, out, 0, smem=smem)  # after this run the native engine keeps the memory of block slots
    at = lent(rig, kind) + away - out
    launch = rig.launch(STORE, out, at, smem=smem)
    fault = fault_of(rig, launch, STORE, "out_of_bounds")
    expected = f"write of 4 bytes at 0x{out + at:x}: {at - 400} bytes past the end of 400 bytes at 0x{out:x}"
    assert fault.message == f"{expected} (device of device 0)" and fault.address == out + at


def test_a_generic_write_out_of_bounds_is_reported_for_global_memory(rig):
    out = rig.empty(400)
    table = rig.array(np.array([out], np.uint64))
    rig.run(GENERIC, table, 0, smem=128)
    at = lent(rig, abi.Kind.SHARED) + (40 << 10) - out
    fault = fault_of(rig, rig.launch(GENERIC, table, at, smem=128), GENERIC, "out_of_bounds")
    near = f"bytes past the end of 8 bytes at 0x{table:x} (device of device 0)"
    own = "bytes past the end of the block's 128 bytes of shared memory"
    assert near in fault.message and fault.message.endswith(own)


def test_a_global_write_to_released_memory_of_the_engine_is_out_of_bounds(rig):
    """The launch needs more shared memory than the native engine keeps, so this memory is released when the launch
    ends."""
    out = rig.empty(400)
    large = rig.launch(STORE, out, 0, smem=200 << 10, grid=400)
    gone = lent(rig, abi.Kind.SHARED) + 4096
    assert rig.finish(large) and rig.window.index.find(gone) is None
    fault = fault_of(rig, rig.launch(STORE, out, gone - out), STORE, "out_of_bounds")
    assert "shared" not in fault.message and "freed" not in fault.message


@pytest.mark.parametrize("n", [48, 1 << 14, 1 << 20])
def test_a_shared_write_out_of_bounds_is_reported_relative_to_its_block(rig, n):
    source = """
    KERNEL k(int n) {
        __shared__ int fixed[16];
        extern __shared__ int s[];
        fixed[threadIdx.x % 16] = 1;
        s[n + fixed[0] - 1] = fixed[threadIdx.x % 16]; // here
    }"""
    rig.empty(400)
    fault = fault_of(rig, rig.launch(source, n, smem=100), source, "foreign_shared")
    assert fault.message.endswith("outside of the block's 164 bytes of shared memory")


def test_uninitialised_shared_memory_is_reported_by_its_offset_in_the_block(rig):
    source = """
    KERNEL k(int* out) {
        __shared__ int fixed[32];
        extern __shared__ int s[];
        fixed[threadIdx.x] = 1;
        if (threadIdx.x != 5) s[threadIdx.x] = 1;
        __syncthreads();
        out[threadIdx.x] = s[threadIdx.x] + fixed[31 - threadIdx.x]; // here
    }"""
    fault = fault_of(rig, rig.launch(source, rig.empty(128), smem=130), source, "uninitialised")
    assert fault.message.endswith(
        "this memory was never written: 148 bytes into the block's 258 bytes of shared memory"
    )


def test_a_store_to_a_parameter_is_reported_by_its_offset_in_the_parameters(rig):
    source = """
    KERNEL k(const __grid_constant__ int n, const __grid_constant__ int m) {
        *const_cast<volatile int*>(&m) = 1; // here
    }"""
    fault = fault_of(rig, rig.launch(source, 3, 4), source, "read_only")
    assert fault.message.endswith("4 bytes into the kernel's 8 bytes of parameters")
