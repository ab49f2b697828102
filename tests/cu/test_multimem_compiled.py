# SPDX-License-Identifier: Apache-2.0
"""The multimem kernels without any driver: their instructions in PTX and in machine code, registers, PDL."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from drvfuse import dtypes
from drvfuse.compiler.nvrtc import Image
from drvfuse.errors import ArgumentError
from drvfuse.ops.collectives.rows.kernel import RowsKernel
from drvfuse.ops.collectives.rows.params import RowsMultimemParams
from drvfuse.ops.collectives.shared.kernel import CollectiveKernel
from drvfuse.ops.collectives.sums.kernel import SumsKernel
from drvfuse.ops.collectives.sums.params import AllreduceMultimemParams
from drvfuse.plans import rows, sums

BF16, F16, F32 = (dtypes.get(name) for name in ("bfloat16", "float16", "float32"))
E4M3 = dtypes.get("float8_e4m3fn")
SECOND_ARCH = "sm_100a"  # every fifth variant is compiled for this architecture
SUMS = {
    "bfloat16": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
    "float16": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
    "float32": "multimem.ld_reduce.relaxed.sys.global.add.v4.f32",
}
TAILS = {
    "bfloat16": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2",
    "float16": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.f16x2",
    "float32": "multimem.ld_reduce.relaxed.sys.global.add.f32",
}
STORE = "multimem.st.relaxed.sys.global"
MACHINE_SUMS = {  # patterns of SASS instructions of sm_90 and sm_100
    "bfloat16": r"LDGMC\.E\.(?:F32ADD|HPADD)\.BF16x8\.RN\.STRONG\.SYS",
    "float16": r"LDGMC\.E\.(?:F32ADD|HPADD)\.F16x8\.RN\.STRONG\.SYS",
    "float32": r"LDGMC\.E\.ADD\.F32x4\.RN\.STRONG\.SYS",
}


def allreduce(algo="two_stage", dtype=BF16, ranks=8, **rest) -> SumsKernel:
    packs = sums.launch(1 << 20, dtype.itemsize, ranks, algo, 64, multimem=True).packs
    return SumsKernel("allreduce", algo, dtype, ranks, dtype, packs, multimem=True, **rest)


def fused(dtype=BF16, ranks=8, columns=8192, out_dtype=E4M3, **rest) -> RowsKernel:
    packs = rows.launch(1, columns, dtype.itemsize, ranks, "two_stage", 64).packs
    kinds = {"gamma_dtype": dtype, "multimem": True, **rest}
    return RowsKernel("allreduce_rmsnorm_fp8", "two_stage", dtype, ranks, out_dtype, packs, **kinds)


FORMS = [
    {"algo": "one_stage"},
    {"algo": "one_stage", "staged": True},
    {},
    {"staged": True},
    {"to_outputs": True},
]
# Every form is compiled for bfloat16, and only some forms for each other dtype, as kernels take long to compile.
VARIANTS = [allreduce(**form) for form in FORMS]
VARIANTS += [allreduce(dtype=F16, **form) for form in FORMS[::2]] + [
    allreduce(dtype=F32, **form) for form in FORMS[1::2]
]
VARIANTS += [allreduce(ranks=2, ragged=True, **form) for form in FORMS]
VARIANTS += [allreduce(dtype=F32, ragged=True, to_outputs=True), allreduce(dtype=F16, ragged=True, to_outputs=True)]
VARIANTS += [fused(staged=staged, residual=residual) for staged in (False, True) for residual in (False, True)]
VARIANTS += [fused(dtype=F16, residual=True), fused(dtype=F16, staged=True)]
VARIANTS += [fused(dtype=F32), fused(dtype=F32, staged=True, residual=True)]
VARIANTS += [
    fused(columns=16384, ranks=2),
    fused(columns=16384, dtype=F32, staged=True),
    fused(columns=1024, scales_dtype=BF16),
    fused(out_dtype=BF16),
    fused(out_dtype=F32, dtype=F32),
    fused(columns=1000, staged=True, ragged=True, ranks=3),
]


EVERY = [*((spec, "sm_90a") for spec in VARIANTS), *((spec, SECOND_ARCH) for spec in VARIANTS[::5])]


def label(spec: CollectiveKernel) -> str:
    flags = [name for name in ("ragged", "staged", "to_outputs", "residual") if getattr(spec, name, False)]
    return "-".join([spec.name, spec.dtype.name, spec.out_dtype.name, str(spec.ranks), str(spec.packs), *flags])


@cache
def compiled(spec: CollectiveKernel, arch: str = "sm_90a") -> Image:
    return spec.specialisation.compile(arch, ("--ptxas-options=-v",))


def stores_to_all(spec: CollectiveKernel) -> set[str]:
    """The types, such as ".v4.f32", with which a kernel's stores to all ranks (multimem.st) are expected."""
    if spec.algo == "one_stage":
        return set()
    if spec.op == "allreduce":
        return {".v4.f32", ".f32"} if spec.to_outputs and spec.ragged else {".v4.f32"}
    if isinstance(spec, RowsKernel) and spec.residual:
        return {".v4.f32"}
    words = 16 // spec.dtype.itemsize * spec.out_dtype.itemsize // 4
    return {{4: ".v4.f32", 2: ".v2.f32", 1: ".f32"}[words]} | ({".f32"} if spec.out_dtype is E4M3 else set())


@pytest.mark.parametrize("spec", VARIANTS, ids=label)
def test_multimem_sums_and_stores_have_the_type_and_width_of_packs(spec):
    ptx = compiled(spec).ptx
    tails = spec.ragged and not spec.staged
    sums = {SUMS[spec.dtype.name], TAILS[spec.dtype.name]} if tails else {SUMS[spec.dtype.name]}
    assert set(re.findall(r"multimem\.ld_reduce\S*", ptx)) == sums
    assert set(re.findall(r"multimem\.st\S*", ptx)) == {STORE + form for form in stores_to_all(spec)}
    assert "multimem.red" not in ptx


@pytest.mark.parametrize("spec", VARIANTS, ids=label)
def test_every_release_of_a_flag_follows_a_fence_between_aliases(spec):
    found = re.findall(r"fence\.proxy\.alias|st\.release\.sys\.global\.u64", compiled(spec).ptx)
    assert found[::2] == ["fence.proxy.alias"] * (len(found) // 2)
    assert found[1::2] == ["st.release.sys.global.u64"] * (len(found) // 2)
    assert len(found) >= 2 * (3 if spec.staged and spec.algo == "two_stage" else 2)


def test_kernels_without_multimem_have_no_multimem_instruction_and_no_alias_fence():
    spec = SumsKernel("allreduce", "two_stage", BF16, 8, BF16)
    ptx = spec.specialisation.compile("sm_90a", cubin=False).ptx
    assert "multimem" not in ptx and "fence.proxy" not in ptx


@pytest.mark.parametrize(("spec", "arch"), EVERY, ids=lambda value: value if isinstance(value, str) else label(value))
def test_kernels_have_no_stack_no_spills_and_registers_for_a_whole_block(spec, arch):
    image = compiled(spec, arch)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    assert int(re.findall(r"Used (\d+) registers", image.log)[0]) <= 128
    assert ".local" not in image.ptx and "ld.global.nc" not in image.ptx


@pytest.mark.parametrize("spec", VARIANTS, ids=label)
def test_kernels_have_the_parameters_of_the_host_and_pdl_instructions(spec):
    info = compiled(spec).kernels[spec.name]
    host = AllreduceMultimemParams if spec.op == "allreduce" else RowsMultimemParams
    assert info.param_bytes == ctypes.sizeof(host)
    assert info.has_pdl_wait and info.has_pdl_trigger
    before, wait, _ = compiled(spec).ptx.partition("griddepcontrol.wait")
    assert wait and not re.search(r"\b(?:ld|st)\.(?:global|acquire|release|relaxed)|multimem\.|\batom|\bred\b", before)


def disassembler() -> str | None:
    """The path of nvdisasm, on PATH or in its Python package; None without it."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia"
    return shutil.which("nvdisasm") or next((str(path) for path in sorted(folder.glob("*/bin/nvdisasm"))), None)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("spec", "arch"), EVERY, ids=lambda value: value if isinstance(value, str) else label(value))
def test_machine_code_has_multimem_loads_strong_stores_and_no_local_memory(tmp_path, spec, arch):
    """Sums are LDGMC and stores to all ranks STG.STRONG.SYS; neither local memory nor plain loads take their place."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled(spec, arch).cubin)
    text = subprocess.run([disassembler(), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    sums = re.findall(r"LDGMC\S*", text)
    assert sum(re.fullmatch(MACHINE_SUMS[spec.dtype.name], found) is not None for found in sums) >= 1
    assert not re.search(r"\b(?:LDL|STL|REDG|LD\.E|ST\.E)\b", text)
    widths = {
        ".v4.f32": r"STG\.E\.128\.STRONG\.SYS",
        ".v2.f32": r"STG\.E\.64\.STRONG\.SYS",
        ".f32": r"STG\.E\.STRONG\.SYS",
    }
    for form in stores_to_all(spec):
        assert re.search(widths[form], text), form
    assert text.count("ACQBULK") == 1 and "PREEXIT" in text


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"algo": "push_one_shot"}, "algo"),
        ({"local": True, "algo": "one_stage"}, "local"),
        ({"to_outputs": True, "staged": True}, "to_outputs"),
        ({"to_outputs": True, "algo": "one_stage"}, "to_outputs"),
        ({"to_outputs": True, "multimem": False}, "to_outputs"),
        ({"op": "allreduce_rmsnorm_fp8", "algo": "one_stage"}, "algo"),
        ({"op": "allreduce_rmsnorm_fp8", "to_outputs": True}, "to_outputs"),
    ],
)
def test_a_combination_of_options_without_a_kernel_is_refused(change, argument):
    fields = {"op": "allreduce", "algo": "two_stage", "dtype": BF16, "ranks": 2, "out_dtype": BF16, "multimem": True}
    with pytest.raises(ArgumentError) as caught:
        (SumsKernel if change.get("op") is None else RowsKernel)(**{**fields, **change})
    assert caught.value.argument == argument


def test_multicast_needs_compute_capability_9():
    assert allreduce().specialisation.capability == fused().specialisation.capability == (9, 0)


def test_chunks_fit_the_staging_memory():
    """Sizes of chunks are those that the headers of the .cu files state."""
    payload, many = 100_000, 10**7
    for spec, each in (
        (allreduce("one_stage", staged=True), 2 * 16),
        (allreduce(), 2 * 8 * 16),
        (allreduce(staged=True), 8 * 16),
    ):
        chunk = sums.chunk(spec.work, many, payload)
        assert chunk * each <= payload < (chunk + 1) * each
    assert sums.chunk(allreduce(to_outputs=True).work, many, 16) == -(-many // 64)
    row, columns = 1000 * 2, 1000
    for spec, slot in (
        (fused(columns=columns), 1008 + 16),
        (fused(columns=columns, staged=True), row + 16),
        (fused(columns=columns, residual=True), row),
        (fused(columns=columns, residual=True, staged=True), row),
        (fused(columns=columns, out_dtype=BF16), row),
    ):
        each = 8 * slot * (1 if spec.staged else 2)
        chunk = rows.chunk(spec.work, 10**6, columns, payload)
        assert chunk * each <= payload < (chunk + 1) * each
