# SPDX-License-Identifier: Apache-2.0
"""The kernels compile without a driver and have the expected instructions."""

from __future__ import annotations

import ctypes
import re

import pytest

from drvfuse import dtypes
from drvfuse.comm import workspace
from drvfuse.compiler.nvrtc import Image
from drvfuse.errors import ArgumentError
from drvfuse.ops.call.specialisation import CU
from drvfuse.ops.collectives.rows import params as rows_params
from drvfuse.ops.collectives.rows.kernel import RowsKernel
from drvfuse.ops.collectives.shared import kernel as kernels
from drvfuse.ops.collectives.shared.kernel import CollectiveKernel
from drvfuse.ops.collectives.sums import params as sums_params
from drvfuse.ops.collectives.sums.kernel import SumsKernel
from drvfuse.plans import rows, shared, sums
from drvfuse.plans.rows import MAX_COLUMNS, MAX_ROWS

BF16, F16, F32 = (dtypes.get(name) for name in ("bfloat16", "float16", "float32"))
PARAMETERS = {
    ("allreduce", False): sums_params.AllreduceParams,
    ("allreduce", True): sums_params.AllreducePushParams,
    ("allreduce_rmsnorm_fp8", False): rows_params.RowsParams,
    ("allreduce_rmsnorm_fp8", True): rows_params.RowsPushParams,
}
E4M3, E5M2 = (dtypes.get(name) for name in ("float8_e4m3fn", "float8_e5m2"))


def allreduce(algo="one_stage", dtype=BF16, ranks=8, **rest) -> SumsKernel:
    packs = sums.launch(1 << 20, dtype.itemsize, ranks, algo, 64).packs
    return SumsKernel("allreduce", algo, dtype, ranks, **{"out_dtype": dtype, "packs": packs, **rest})


def fused(algo="one_stage", dtype=BF16, ranks=8, columns=8192, out_dtype=E4M3, **rest) -> RowsKernel:
    packs = rows.launch(1, columns, dtype.itemsize, ranks, algo, 64).packs
    return RowsKernel(
        "allreduce_rmsnorm_fp8", algo, dtype, ranks, out_dtype, **{"packs": packs, "gamma_dtype": dtype, **rest}
    )


VARIANTS = [
    allreduce(),
    allreduce("two_stage"),
    allreduce(dtype=F32, ranks=2),
    allreduce("two_stage", dtype=F16, ranks=4),
    allreduce("two_stage", ranks=3),
    allreduce(ranks=4, staged=True),
    allreduce("two_stage", ranks=4, staged=True),
    allreduce(ranks=4, ragged=True, local=True),
    fused(columns=4096),
    fused("two_stage"),
    fused(residual=True, ranks=4),
    fused("two_stage", residual=True, columns=16384),
    fused("two_stage", ranks=4, columns=16384),
    fused(dtype=F32, columns=16384, residual=True),
    fused(dtype=F16, out_dtype=F16, ranks=2),
    fused("two_stage", dtype=F16, out_dtype=E5M2, scales_dtype=BF16, ranks=2),
    fused(local=True, ranks=4),
    fused(staged=True, ranks=4),
]
RAGGED = [
    allreduce(ragged=True),
    allreduce("two_stage", ragged=True, ranks=4, out_dtype=F32),
    fused(ragged=True, ranks=2, columns=1000),
    fused("two_stage", ragged=True, staged=True, ranks=2, columns=1000),
]


def label(spec: CollectiveKernel) -> str:
    flags = [name for name in ("ragged", "staged", "local", "residual") if getattr(spec, name, False)]
    return "-".join([spec.name, spec.dtype.name, spec.out_dtype.name, str(spec.ranks), str(spec.packs), *flags])


def compiled(spec: CollectiveKernel, arch="sm_90a") -> Image:
    """Compile a kernel to a cubin, with the resource usage that ptxas prints in the log."""
    return spec.specialisation.compile(arch, ("--ptxas-options=-v",))


@pytest.mark.parametrize("spec", [*VARIANTS, *RAGGED], ids=label)
def test_kernel_compiles_with_pdl_and_its_parameter_block(spec):
    image = compiled(spec)
    info = image.kernels[spec.name]
    assert [param.kind for param in info.params] == ["bytes"]
    assert info.param_bytes == ctypes.sizeof(PARAMETERS[spec.op, spec.pushes])
    assert info.has_pdl_wait and info.has_pdl_trigger
    assert info.max_threads == shared.MAX_THREADS


@pytest.mark.parametrize("spec", VARIANTS, ids=label)
def test_kernel_uses_no_stack_and_spills_nothing(spec):
    image = compiled(spec)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", image.log) == [("0", "0")]
    assert ".local" not in image.ptx


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if not spec.ragged], ids=label)
def test_peer_data_moves_in_vectors_and_never_by_the_read_only_path(spec):
    ptx = compiled(spec).ptx
    assert "ld.global.nc" not in ptx
    assert "ld.global.v4.u32" in ptx
    element_accesses = re.findall(r"(?:ld|st)\.global\.u(?:8|16)\b", ptx)
    assert len(element_accesses) <= (8 if getattr(spec, "scales_dtype", None) is BF16 else 0)


@pytest.mark.parametrize("spec", VARIANTS, ids=label)
def test_flags_are_release_and_acquire_at_system_scope(spec):
    ptx = compiled(spec).ptx
    assert ("st.release.sys.global.u64" in ptx) == ("ld.acquire.sys.global.u64" in ptx) == (not spec.local)


EPILOGUE = (
    "struct EpilogueParams { float scale; const bf16* bias; };\n"
    "__device__ float epilogue(float x, i64 i, i64 row, i64 col, int rank, const EpilogueParams& params) {\n"
    "    return x * params.scale + params.bias[col];\n}"
)


@pytest.mark.parametrize("spec", [*VARIANTS, allreduce(epilogue=EPILOGUE, local=True)], ids=label)
def test_only_gamma_is_read_before_the_pdl_wait(spec):
    """A thread loads its packs of gamma before the wait only if it holds at most two packs of a row; each is one load
    of 16 bytes.
    """
    ptx = compiled(spec).ptx
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    ahead = spec.op == "allreduce_rmsnorm_fp8" and spec.algo == "one_stage" and spec.packs <= 2
    assert (
        wait
        and len(re.findall(r"\bld\.global|\bld\.acquire|\bld\.relaxed|\batom|\bred\b", before)) == ahead * spec.packs
    )
    assert not re.search(r"\bst\.(?:global|release|relaxed)", before)


@pytest.mark.parametrize("spec", [allreduce(), fused()], ids=label)
def test_kernels_use_ieee_operations_and_no_contraction(spec):
    ptx = compiled(spec).ptx
    assert not re.search(r"\b(?:fma|mad)\.\w+\.f32|\.approx|\.ftz|\bdiv\.full|\badd\.f32|\bmul\.f32", ptx)


@pytest.mark.parametrize("spec", [allreduce(), fused(out_dtype=BF16)], ids=label)
def test_kernels_without_fp8_compile_for_sm_80_without_pdl(spec):
    assert spec.specialisation.capability == (8, 0)
    assert not compiled(spec, arch="sm_80").kernels[spec.name].has_pdl_wait


def test_fp8_compiles_for_sm_89():
    assert fused().specialisation.capability == (8, 9)
    assert fused().name in compiled(fused(), arch="sm_89").kernels


def test_the_parameters_of_an_epilogue_are_a_second_kernel_argument():
    for spec in (allreduce(epilogue=EPILOGUE), allreduce("two_stage", ragged=True, epilogue=EPILOGUE)):
        sizes = [param.size for param in compiled(spec).kernels[spec.name].params]
        assert sizes == [ctypes.sizeof(sums_params.AllreduceParams), 16]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"op": "broadcast"}, "op"),
        ({"algo": "two_stage", "local": True}, "algo"),
        ({"dtype": dtypes.get("int32")}, "dtype"),
        ({"ranks": 9}, "ranks"),
        ({"packs": 0}, "packs"),
        ({"out_dtype": E4M3}, "out_dtype"),
    ],
)
def test_a_combination_of_options_without_a_kernel_is_refused(change, argument):
    fields = {"op": "allreduce", "algo": "one_stage", "dtype": BF16, "ranks": 2, "out_dtype": BF16, **change}
    with pytest.raises(ArgumentError) as caught:
        SumsKernel(**fields)
    assert caught.value.argument == argument


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("columns", [1, 8, 1000, 4096, 5120, 7168, 8200, 16384])
def test_the_block_of_a_row_covers_all_of_its_columns(dtype, columns):
    shape = rows.launch(5, columns, dtype.itemsize, 4, "one_stage", 64)
    assert shape.blocks == 5
    assert shape.threads % 32 == 0 and shape.threads <= shared.MAX_THREADS and shape.packs <= kernels.MAX_PACKS
    assert shape.threads * shape.packs * shared.PACK_BYTES >= columns * dtype.itemsize


def test_grids_are_bounded_and_never_empty():
    for algo in kernels.ALGOS:
        assert sums.launch(1, BF16.itemsize, 8, algo, 64).blocks == 1
        assert sums.launch(1 << 30, BF16.itemsize, 8, algo, 24).blocks == 24
        assert sums.launch(1 << 30, BF16.itemsize, 8, algo, 10**6).blocks == workspace.MAX_BLOCKS
        assert rows.launch(1, 64, BF16.itemsize, 8, algo, 64).blocks == 1
    assert rows.launch(17, 64, BF16.itemsize, 8, "two_stage", 64).blocks == 3
    for tall, columns in ((1, MAX_COLUMNS + 1), (MAX_ROWS + 1, 1), (1, 0)):
        with pytest.raises(ArgumentError):
            rows.launch(tall, columns, BF16.itemsize, 4, "one_stage", 64)


def test_chunks_fit_the_payload():
    """Sizes of chunks are those that the headers of the .cu files state."""
    payload = 100_000
    for spec in (allreduce(staged=True), allreduce("two_stage"), allreduce("two_stage", staged=True)):
        chunk = sums.chunk(spec.work, 10**7, payload)
        used = 2 * chunk * 16 if not (spec.staged and spec.algo == "two_stage") else (spec.ranks + 1) * chunk * 16
        assert payload - 16 * (spec.ranks + 1) < used <= payload
        assert sums.chunk(spec.work, 8 * 64, payload) == (64 if spec.algo == "one_stage" else 8)
    row = 1000 * 2
    for residual in (False, True):
        for staged in (False, True):
            spec = fused("two_stage", columns=1000, residual=residual, staged=staged)
            chunk = rows.chunk(spec.work, 1000, 1000, payload)
            result = chunk * row if residual else chunk * 1008 + (4 * chunk + 15) // 16 * 16
            used = spec.ranks * chunk * row + result if staged else 2 * result
            assert used <= payload
    with pytest.raises(ArgumentError, match="workspace_bytes"):
        rows.chunk(fused(staged=True).work, 4, 8192, 30_000)
    assert sums.chunk(allreduce().work, 10**9, 16) == 1


def test_inline_assembly_is_only_in_cu_ptx():
    sources = [path for folder in (CU, CU.parent / "check" / "cu") for path in folder.rglob("*.cu*")]
    with_assembly = {path for path in sources if re.search(r"\basm\b", path.read_text())}
    assert with_assembly == {path for path in sources if path.parent.name == "ptx"}


def test_each_ptx_instruction_has_one_wrapper():
    """The exceptions are the two forms of the wait on an mbarrier, one for each architecture."""
    text = "\n".join(path.read_text() for path in sorted((CU / "ptx").glob("*.cuh")))
    forms = re.findall(r'asm(?: volatile)?\(\s*((?:"[^"\n]*"\s*)+)', text)
    assert len(forms) > 40
    assert len(forms) == len(set(forms))
