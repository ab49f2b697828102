# SPDX-License-Identifier: Apache-2.0
"""Accesses by multicast addresses: values, faults, counts, waiting, and planted mistakes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emu.driver_helpers import R, ok, primary
from emu.multicast_helpers import (
    PIECE,
    READ_WRITE,
    Shared,
    access,
    launch,
    mapped,
    memory_prop,
    object_prop,
    read,
    shared,
    team,
    write,
)

from drvfuse.emu import Machine

BYTES = 512
INTEGERS = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64}
REALS = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
COMBINE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _kernel(verb: str, form: str, vector: int, register: str, memory: str, multicast: str) -> str:
    """A kernel's body. Each thread handles an element or a vector: it reads it by multimem.ld_reduce and stores the
    result to `memory`, or it loads it from `memory` and writes it by multimem.st or multimem.red.
    """
    names = [f"x{i}" for i in range(vector)]
    nbytes = int(register[1:]) // 8
    value = f"{{{', '.join(names)}}}" if vector > 1 else names[0]
    moves = {
        "ld_reduce": [f"st.global.{register} [%1 + {i * nbytes}], {name};" for i, name in enumerate(names)],
        "other": [f"ld.global.{register} {name}, [%1 + {i * nbytes}];" for i, name in enumerate(names)],
    }["ld_reduce" if verb == "ld_reduce" else "other"]
    operands = f"{value}, [%0]" if verb == "ld_reduce" else f"[%0], {value}"
    lines = [f"multimem.{verb}{form} {operands};"]
    lines = [*lines, *moves] if verb == "ld_reduce" else [*moves, *lines]
    stride = vector * nbytes
    return f"""
if ((threadIdx.x + 1) * {stride} > {BYTES}) return;
u64 multicast = (u64)({multicast}) + threadIdx.x * {stride}, memory = (u64)({memory}) + threadIdx.x * {stride};
asm volatile("{{.reg .{register} {", ".join(names)}; {" ".join(lines)}}}" :: "l"(multicast), "l"(memory) : "memory");
"""


def _form(how: str, precision: str, vector: str, type_: str) -> tuple[str, int, str, Any]:
    """For a type of multimem: the modifiers of the instruction, the number of elements, the type of the registers that
    hold them, and the dtype of the numbers."""
    element, packed = _split(type_)
    dtype = np.dtype(INTEGERS.get(element) or REALS[element])
    register = type_ if type_ in ("f32", "f64") else f"b{packed * dtype.itemsize * 8}"
    return (
        "".join(f".{part}" for part in (how, precision, vector, type_) if part),
        int(vector[1:] or 1),
        register,
        dtype,
    )


def _split(type_: str) -> tuple[str, int]:
    """The element type of a packed type, and the number of its elements."""
    return (type_[:-2], int(type_[-1])) if type_[-2:] in ("x2", "x4") else (type_, 1)


def _values(rng: np.random.Generator, element: str, how: str) -> Any:
    if element in INTEGERS:
        dtype = np.dtype(INTEGERS[element])
        return np.frombuffer(rng.bytes(BYTES), dtype).copy()
    dtype = np.dtype(REALS[element])
    scale = 1.0 if element in ("e4m3", "e5m2") else 100.0
    return (rng.standard_normal(BYTES // dtype.itemsize) * scale).astype(dtype)


def _expected(parts: list[Any], how: str, precision: Any) -> Any:
    """`parts`, the values of the members of a multicast object, combined in order. Each step is computed in `precision`
    and rounded to it; the result is rounded to the type of the values.
    """
    dtype = parts[0].dtype
    with np.errstate(over="ignore"):
        total = parts[0].astype(precision)
        for part in parts[1:]:
            if how == "add" and precision in (np.float16, ml_dtypes.bfloat16, *(REALS[k] for k in ("e4m3", "e5m2"))):
                total = (total.astype(np.float32) + part.astype(np.float32)).astype(precision)
            else:
                total = COMBINE[how](total, part.astype(precision))
        return total.astype(dtype)


FORMS = [
    *(("add", "", "", t) for t in ("u32", "s32", "u64", "f32", "f64", "f16x2", "bf16x2")),
    *((how, "", "", t) for how in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16x2", "bf16x2")),
    *((how, "", "", t) for how in ("and", "or", "xor") for t in ("b32", "b64")),
    *(("add", "", v, "f32") for v in ("v2", "v4")),
    *(("add", p, v, t) for p in ("", "acc::f32") for v in ("v2", "v4") for t in ("f16x2", "bf16x2", "f16", "bf16")),
    *(("add", "acc::f32", v, t) for v, t in (("", "f16x2"), ("", "bf16x2"), ("v8", "f16"), ("v8", "bf16"))),
    *(("add", p, v, t) for p in ("", "acc::f16") for v, t in (("", "e4m3x4"), ("v4", "e5m2x4"), ("v4", "e4m3"))),
    *((how, "", "v8", t) for how in ("add", "min", "max") for t in ("e4m3x2", "e5m2x2")),
]


@pytest.mark.parametrize(("how", "precision", "vector", "type_"), FORMS)
def test_a_load_combines_the_members(
    rng: np.random.Generator, how: str, precision: str, vector: str, type_: str
) -> None:
    *form, dtype = _form(how, precision, vector, type_)
    kernel = _kernel("ld_reduce", *form, "t.own[t.rank] + 1024", "t.mc")
    element, fp8 = _split(type_)[0], "e4m3" in type_ or "e5m2" in type_
    with Machine(devices=3, arch="sm_100a" if fp8 else "sm_90a") as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 3)
        data = [_values(rng, element, how) for _ in range(3)]
        for address, values in zip(made.own, data, strict=True):
            write(cuda, address, values)
        arch = "compute_100a" if fp8 else "compute_90a"
        assert launch(cuda, made, kernel, threads=128, arch=arch) == [R.CUDA_SUCCESS] * 3, machine.reports
        inner: Any = {"acc::f32": np.float32, "acc::f16": np.float16}.get(precision, dtype)
        expected = _expected(data, how, inner)
        for address in made.own:
            assert read(cuda, address + 4096, BYTES, np.uint8).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("how", "vector", "type_"),
    [
        ("add", "", "u32"), ("max", "", "s64"), ("xor", "", "b64"), ("add", "v4", "f32"), ("add", "", "f64"),
        ("add", "v4", "f16x2"), ("add", "", "bf16x2"), ("min", "v2", "bf16x2"), ("add", "v8", "bf16"),
    ],
)  # fmt: skip
def test_a_reduction_changes_every_members_word(rng: np.random.Generator, how: str, vector: str, type_: str) -> None:
    *form, dtype = _form(how, "", vector, type_)
    kernel = _kernel("red", *form, "t.own[0] + 1024", "t.mc")
    element = _split(type_)[0]
    with Machine(devices=3) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 3)
        data, operand = [_values(rng, element, how) for _ in range(3)], _values(rng, element, how)
        for address, values in zip(made.own, data, strict=True):
            write(cuda, address, values)
        write(cuda, made.own[0] + 4096, operand)
        assert launch(cuda, made, f"if (t.rank) return;\n{kernel}", threads=128) == [R.CUDA_SUCCESS] * 3
        for address, values in zip(made.own, data, strict=True):
            expected = _expected([values, operand], how, dtype)
            assert read(cuda, address, BYTES, np.uint8).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("vector", "type_"), [("", "u32"), ("", "b64"), ("v4", "f32"), ("v2", "f16x2"), ("v8", "bf16"), ("v4", "e4m3x4")]
)
def test_a_store_writes_the_same_bits_everywhere(rng: np.random.Generator, vector: str, type_: str) -> None:
    *form, _ = _form("", "", vector, type_)
    kernel = _kernel("st", *form, "t.own[1] + 1024", "t.mc")
    fp8 = "e4m3" in type_
    with Machine(devices=3, arch="sm_100a" if fp8 else "sm_90a") as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 3)
        data = np.frombuffer(rng.bytes(BYTES), np.uint8)
        write(cuda, made.own[1] + 4096, data)
        arch = "compute_100a" if fp8 else "compute_90a"
        assert launch(cuda, made, f"if (t.rank != 1) return;\n{kernel}", threads=128, arch=arch) == [R.CUDA_SUCCESS] * 3
        for address in made.own:
            assert np.array_equal(read(cuda, address, BYTES, np.uint8), data)


# The order in which the values of the devices are added -------------------------------------------------------------

SUM = """
float v;
asm volatile("multimem.ld_reduce.weak.global.add.f32 %0, [%1];" : "=f"(v) : "l"(t.mc + threadIdx.x) : "memory");
((float*)t.own[t.rank])[1024 + threadIdx.x] = v;
"""


def _sums(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The values in the memory of each of 3 devices, and the sums of them that each device reads by multimem."""
    data = np.array([[1e8] * 64, [1.0] * 64, [-1e8] * 64], np.float32)
    with Machine(devices=3, seed=seed) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 3)
        for address, values in zip(made.own, data, strict=True):
            write(cuda, address, values)
        launch(cuda, made, SUM, threads=64)
        return data, np.array([read(cuda, address + 4096, 64, np.float32) for address in made.own])


def test_the_seed_draws_the_order_of_the_members_for_each_access() -> None:
    data, first = _sums(0)
    assert (first == (data[0] + data[1]) + data[2]).all()
    found = [_sums(seed)[1] for seed in (1, 2)]
    assert np.array_equal(found[0], _sums(1)[1])
    with Machine(devices=2):  # addresses differ beside another machine
        assert np.array_equal(found[0], _sums(1)[1])
    assert not np.array_equal(found[0], found[1])
    for sums in found:
        assert set(sums.ravel()) == {0.0, 1.0}
        assert not np.array_equal(sums[0], sums[1])


def test_sums_and_extrema_of_special_values_are_those_of_a_gpu(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2)
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    write(cuda, made.own[0], np.array([nan, inf, 3.0, -0.0], np.float32))
    write(cuda, made.own[1], np.array([1.0, -inf, nan, -0.0], np.float32))
    write(cuda, made.own[0] + 512, np.array([np.nan, -0.0, 2.0, np.nan], np.float16))
    write(cuda, made.own[1] + 512, np.array([1.0, 0.0, np.nan, np.nan], np.float16))
    launch(cuda, made, SUM, threads=4)
    assert [hex(x) for x in read(cuda, made.own[1] + 4096, 4)] == ["0x7fffffff"] * 3 + ["0x80000000"]
    launch(
        cuda,
        made,
        "u32 v; REDUCE(v, weak, min.f16x2, t.mc + 128 + threadIdx.x) t.own[t.rank][threadIdx.x] = v;",
        threads=2,
    )
    assert list(read(cuda, made.own[0], 4, np.uint16)) == [0x3C00, 0x8000, 0x4000, 0x7FFF]


def test_sums_of_fp8_saturate() -> None:
    with Machine(devices=2, arch="sm_100a") as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, 2)
        for address in made.own:
            write(cuda, address, np.array([400.0, -400.0, 1.0, np.nan], ml_dtypes.float8_e4m3fn))
            write(cuda, address + 4, np.array([5e4, -5e4, 1.0, np.nan], ml_dtypes.float8_e5m2))
        body = """u32 a, b;
        REDUCE(a, weak, add.e4m3x4, t.mc)
        REDUCE(b, weak, add.e5m2x4, t.mc + 1)
        t.own[t.rank][8] = a; t.own[t.rank][9] = b;
        """
        assert launch(cuda, made, body, threads=1, arch="compute_100a") == [R.CUDA_SUCCESS] * 2
        assert read(cuda, made.own[1] + 32, 8, np.uint8).tobytes().hex() == "7efe407f7bfb407f"


# Faults -------------------------------------------------------------------------------------------------------------


def _fault(machine: Machine, results: list[Any], kind: str, code: Any = R.CUDA_ERROR_ILLEGAL_ADDRESS) -> Any:
    assert code in results
    report = next(r for r in machine.reports if r.kind != "deadlock")
    assert report.kind == kind, report
    return report


PLAIN = {
    "load": "u32 v; LD(v, weak, t.mc) t.own[0][0] = v;",
    "store": "ST(weak, t.mc, 1)",
    "strong load": "u32 v; LD(v, acquire.sys, t.mc) t.own[0][0] = v;",
    "atomic": "atomicAdd(t.mc, 1u);",
    "copy": '__shared__ u32 s[4]; asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: '
    '"r"((u32)__cvta_generic_to_shared(s)), "l"(t.mc) : "memory");',
}


@pytest.mark.parametrize("how", PLAIN)
def test_a_plain_access_to_a_multicast_address_is_a_fault(machine: Machine, cuda: Any, how: str) -> None:
    made = shared(cuda, 2)
    report = _fault(machine, launch(cuda, made, PLAIN[how], threads=1), "multicast_plain")
    assert "only multimem instructions may use" in report.message and report.address == made.multicast
    assert report.line is not None


@pytest.mark.parametrize(
    "access_", ["u32 v; REDUCE(v, weak, add.u32, t.own[0])", "MST(weak, t.own[0], 1)", "MRED(relaxed.sys, (u32*)64, 1)"]
)
def test_multimem_at_any_other_address_is_a_fault(machine: Machine, cuda: Any, access_: str) -> None:
    made = shared(cuda, 2)
    report = _fault(machine, launch(cuda, made, access_, threads=1), "no_multicast")
    assert "no address of a multicast object" in report.message


def test_an_access_to_a_partially_bound_range_is_a_fault(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 4, 2 * PIECE)
    for device in (1, 3):
        ok(cuda.cuMulticastUnbind(made.handle, device, 0, 2 * PIECE))
        ok(cuda.cuMulticastBindMem(made.handle, 0, made.memories[device], 0, PIECE, 0))
    body = f"MST(weak, t.mc + {PIECE // 4} * (threadIdx.x ? 1 : 0), 7)"
    report = _fault(machine, launch(cuda, made, body, threads=2), "multicast_unbound")
    assert "device(s) 1, 3" in report.message and report.thread == (1, 0, 0)
    assert report.address == made.multicast + PIECE


def test_misaligned_uninitialised_and_forbidden_accesses_are_faults() -> None:
    cases = {
        "misaligned": ("MST(weak, (u32*)((u64)t.mc + 2), 1)", R.CUDA_ERROR_MISALIGNED_ADDRESS),
        "uninitialised": ("u32 v; REDUCE(v, weak, add.u32, t.mc)", R.CUDA_ERROR_ILLEGAL_ADDRESS),
    }
    for kind, (body, code) in cases.items():
        with Machine(devices=2) as machine:
            ok(machine.driver.cuInit(0))
            made = shared(machine.driver, 2)
            write(machine.driver, made.own[0], np.zeros(4, np.uint32))
            report = _fault(machine, launch(machine.driver, made, body, threads=1), kind, code)
    assert "device 1, which are bound to a multicast object" in report.message


def test_access_rights_are_those_of_the_mapping(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2)
    ok(cuda.cuMemSetAccess(made.multicast, PIECE, access(0, 1, flags=type(READ_WRITE)(1)), 2))
    for address in made.own:
        write(cuda, address, np.ones(4, np.uint32))
    ok(cuda.cuMemSetAccess(made.own[0], PIECE, access(1, flags=type(READ_WRITE)(0)), 1))
    body = "u32 v; if (t.rank == 1) { REDUCE(v, weak, add.u32, t.mc) t.own[1][8] = v; }"
    assert launch(cuda, made, body, threads=1) == [R.CUDA_SUCCESS] * 2
    assert read(cuda, made.own[1] + 32, 1)[0] == 2
    _fault(machine, launch(cuda, made, "if (t.rank == 1) MST(weak, t.mc, 1)", threads=1), "read_only")


def test_an_access_to_an_unmapped_multicast_address_is_a_use_after_free(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2)
    ok(cuda.cuMemUnmap(made.multicast, PIECE))
    _fault(machine, launch(cuda, made, "LD(t.rank, weak, t.mc)", threads=1), "use_after_free")


# Waiting ------------------------------------------------------------------------------------------------------------


def test_a_spin_on_a_load_reduce_sees_every_member_change(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 3)
    for address in made.own:
        write(cuda, address, np.zeros(8, np.uint32))
    body = """
    u32 v;
    if (t.rank) { __nanosleep(1000 * t.rank); ST(release.sys, t.own[t.rank], 1) }
    else { do REDUCE(v, acquire.sys, add.u32, t.mc) while (v < t.ranks - 1); t.own[0][4] = v; }
    """
    assert launch(cuda, made, body, threads=1) == [R.CUDA_SUCCESS] * 3
    assert read(cuda, made.own[0] + 16, 1)[0] == 2 and not machine.reports


def test_a_multimem_spin_that_no_store_ends_is_a_deadlock(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2)
    for address in made.own:
        write(cuda, address, np.zeros(8, np.uint32))
    body = "u32 v; if (!t.rank) do REDUCE(v, relaxed.sys, add.u32, t.mc) while (!v);"
    assert R.CUDA_ERROR_LAUNCH_TIMEOUT in launch(cuda, made, body, threads=1)
    assert machine.reports[0].kind == "deadlock"


# Counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_requested_bytes_of_both_stages_are_counted(ranks: int) -> None:
    """In one stage each rank reduces everything; in two stages it reduces its part and stores it to all."""
    loads = (
        'float v[4]; asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];" '
        ': "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(t.mc + 4 * i) : "memory");'
    )
    stores = (
        'asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%4], {%0, %1, %2, %3};" '
        ':: "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "l"(t.mc + 4096 + 4 * i) : "memory");'
    )
    part = "u32 n = 256 / t.ranks; for (u32 i = t.rank * n + threadIdx.x; i < (t.rank + 1) * n; i += blockDim.x)"
    one = f"for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {{ {loads} }}"
    two = f"{part} {{ {loads} {stores} }}"
    total = 4096
    with Machine(devices=ranks) as machine:
        cuda = machine.driver
        ok(cuda.cuInit(0))
        made = shared(cuda, ranks)
        for address in made.own:
            write(cuda, address, np.ones(1024, np.float32))
        for body, reduced, broadcast in ((one, total, 0), (two, total // ranks, total // ranks)):
            machine.launches.clear()
            assert launch(cuda, made, body, threads=32) == [R.CUDA_SUCCESS] * ranks
            for record in machine.launches:
                count = record.counters.total
                assert (count.reduced, count.broadcast) == (reduced, broadcast)
                assert (count.local_read, count.remote_read) == (reduced, (ranks - 1) * reduced)
                assert (count.local_written, count.remote_written) == (broadcast, (ranks - 1) * broadcast)
        assert (read(cuda, made.own[0] + 16384, 1024, np.float32) == ranks).all()


# Planted mistakes ---------------------------------------------------------------------------------------------------


def test_an_access_before_every_member_is_bound_is_found(machine: Machine, cuda: Any) -> None:
    for device in (1, 0):
        primary(cuda, device)
    handle = team(cuda, 2)
    memory = ok(cuda.cuMemCreate(PIECE, memory_prop(0), 0))
    ok(cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0))
    made = Shared(handle, mapped(cuda, handle, PIECE, 2), [memory], [mapped(cuda, memory, PIECE, 2)] * 2, PIECE)
    report = _fault(machine, launch(cuda, made, "MST(weak, t.mc, 1)", threads=1), "multicast_unbound")
    assert "device(s) 1 of" in report.message


def test_a_bind_before_all_devices_are_added_is_found(machine: Machine, cuda: Any) -> None:
    machine.threads.others = lambda: False  # type: ignore[method-assign]
    handle = ok(cuda.cuMulticastCreate(object_prop(2)))
    for device in range(2):  # the bind of the first iteration waits for device 1, which is a deadlock
        ok(cuda.cuMulticastAddDevice(handle, device))
        memory = ok(cuda.cuMemCreate(PIECE, memory_prop(device), 0))
        result = cuda.cuMulticastBindMem(handle, 0, memory, 0, PIECE, 0)[0]
        if device == 0:
            assert result == R.CUDA_ERROR_TIMEOUT
    assert [r.kind for r in machine.reports] == ["deadlock"]


def test_an_unbind_of_another_range_is_found(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2, 2 * PIECE)
    assert cuda.cuMulticastUnbind(made.handle, 0, 0, PIECE)[0] == R.CUDA_ERROR_INVALID_VALUE
    assert machine.reports[0].kind == "multicast" and "as it was bound" in machine.reports[0].message
    made.close(cuda)


def test_a_reduction_in_place_of_a_store_gives_wrong_values(machine: Machine, cuda: Any) -> None:
    made = shared(cuda, 2)
    for address in made.own:
        write(cuda, address, np.full(32, 5, np.uint32))
    launch(cuda, made, "if (!t.rank) MRED(relaxed.sys, t.mc + threadIdx.x, 7)")
    assert list(read(cuda, made.own[1], 32)) == [12] * 32
    with Machine(devices=2) as fresh:
        ok(fresh.driver.cuInit(0))
        made = shared(fresh.driver, 2)
        _fault(fresh, launch(fresh.driver, made, "MRED(relaxed.sys, t.mc, 7)", threads=1), "uninitialised")


# Late stores --------------------------------------------------------------------------------------------------------


def test_stores_by_multicast_are_late_unless_a_release_covers_them() -> None:
    body = """
    u32 v;
    if (t.rank == 0) { MST(weak, t.mc, 7) ST($sem.sys, t.own[1] + 64, 1) }
    else { do LD(v, acquire.sys, t.own[1] + 64) while (!v); LD(v, weak, t.own[1]) t.own[1][128] = v; }
    """
    for sem, wrong in (("relaxed", {0}), ("release", set())):
        found = set()
        for seed in range(8):
            with Machine(devices=2, seed=seed, delay_stores=True) as machine:
                cuda = machine.driver
                ok(cuda.cuInit(0))
                made = shared(cuda, 2)
                for address in made.own:
                    write(cuda, address, np.zeros(256, np.uint32))
                assert launch(cuda, made, body.replace("$sem", sem), threads=1) == [R.CUDA_SUCCESS] * 2
                found.add(int(read(cuda, made.own[1] + 512, 1)[0]))
                assert read(cuda, made.own[0], 1)[0] == 7
        assert found - {7} == wrong
