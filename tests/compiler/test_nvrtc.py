# SPDX-License-Identifier: Apache-2.0
"""Compiling without a driver: images, errors, the cache on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from drvfuse import config
from drvfuse.compiler import nvrtc
from drvfuse.compiler.library import Library, library
from drvfuse.compiler.nvrtc import compile_source, included
from drvfuse.errors import ArgumentError, CompileError, DriverUnavailable, Unsupported

SOURCE = """
struct Pair { int a; double b; };
template <class T> __global__ __launch_bounds__(512)
void scale(T* p, int n, float x, Pair s, bool f, unsigned char c, long long z) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = T(x * s.b + z + c + f);
}
extern "C" __global__ void plain(int* p) { *p = VALUE; }
"""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nvrtc, "_images", {})
    monkeypatch.setenv("DRVFUSE_CACHE_DIR", str(tmp_path / "cache"))  # threads do not inherit config.override
    monkeypatch.setenv("DRVFUSE_CACHE", "1")
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    real = Library.compile

    def counted(self: Library, source: str, name: str, *args: object) -> object:
        done.append(name)
        return real(self, source, name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Library, "compile", counted)
    return done


def compiled(value: int = 1, **changes: object) -> nvrtc.Image:
    arguments: dict[str, object] = {"name": "scale.cu", "arch": "sm_90a", "names": ["scale<float>"]}
    return compile_source(SOURCE, defines={"VALUE": value}, **{**arguments, **changes})  # type: ignore[arg-type]


def forget() -> None:
    nvrtc._images.clear()


def test_image_has_cubin_ptx_and_facts_of_every_kernel() -> None:
    image = compiled()
    assert image.cubin[:4] == b"\x7fELF" and ".target sm_90a" in image.ptx
    info = image.kernels["scale<float>"]
    assert info.name == "scale<float>" and image.kernels[info.lowered].params == info.params
    shapes = [(p.kind, p.size, p.offset) for p in info.params]
    ints_and_struct = [("int", 8, 0), ("int", 4, 8), ("float", 4, 12), ("bytes", 16, 16)]
    assert shapes == [*ints_and_struct, ("int", 1, 32), ("int", 1, 33), ("int", 8, 40)]
    assert info.param_bytes == 48 and info.max_threads == 512
    assert info.has_pdl_wait and not info.has_pdl_trigger
    plain = image.kernels["plain"]
    assert plain.lowered == "plain" and plain.max_threads is None and not plain.has_pdl_wait


def test_ptx_compiled_alone_equals_the_ptx_of_the_cubin(fresh_cache: Path, compilations: list[str]) -> None:
    with config.override(cache=False):  # otherwise the PTX contains the path of the cache entry
        both, alone = compiled(), compiled(cubin=False)
    assert alone.cubin is None and both.cubin is not None
    assert alone.ptx == both.ptx and alone.kernels == both.kernels
    assert alone.arch == both.arch == "sm_90a"


def test_a_request_for_ptx_alone_has_an_entry_of_its_own(fresh_cache: Path, compilations: list[str]) -> None:
    for _ in range(2):
        assert compiled(cubin=False).cubin is None
        assert compiled().cubin is not None
        forget()
    assert len(compilations) == 2
    assert sorted(len(list(entry.iterdir())) for entry in fresh_cache.iterdir()) == [3, 4]


def test_headers_may_be_given_as_texts(compilations: list[str]) -> None:
    def image(value: int) -> nvrtc.Image:
        source = '#include "given.cuh"\nextern "C" __global__ void k(int* p) { *p = N; }'
        return compile_source(source, name="k.cu", arch="sm_90", headers={"given.cuh": f"#define N {value}\n"})

    assert "1234" in image(1234).ptx and "4321" in image(4321).ptx and "1234" in image(1234).ptx
    assert len(compilations) == 2


def test_later_requests_are_served_from_memory_and_from_disk(compilations: list[str]) -> None:
    first = compiled()
    assert compiled() is first
    forget()
    again = compiled()
    assert again == first and len(compilations) == 1


@pytest.mark.parametrize(
    "change",
    [{"value": 2}, {"arch": "sm_80"}, {"options": ["--fmad=false"]}, {"names": ["scale<int>"]}, {"name": "other.cu"}],
)
def test_key_covers_everything_that_decides_the_output(compilations: list[str], change: dict[str, object]) -> None:
    if change == {"arch": "sm_80"}:
        source = 'extern "C" __global__ void plain(int* p) { *p = 1; }'
        compile_source(source, name="a.cu", arch="sm_90")
        compile_source(source, name="a.cu", arch="sm_80")
    else:
        compiled()
        compiled(**change)  # type: ignore[arg-type]
    assert len(compilations) == 2


def test_a_changed_header_compiles_again(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "inner.cuh").write_text("#define N 1\n")
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
    source = '#include "outer.cuh"\nextern "C" __global__ void k(int* p) { *p = N; }'

    def image() -> nvrtc.Image:
        return compile_source(source, name="k.cu", arch="sm_90", include=[tmp_path])

    first = image()
    assert image() is first
    (tmp_path / "inner.cuh").write_text("#define N 2\n")
    assert image().cubin != first.cubin and len(compilations) == 2


def test_a_computed_include_puts_the_whole_folder_into_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("int a;")
    (tmp_path / "b.cuh").write_text("int b;")
    found = included("#include HEADER\n", None, [tmp_path])
    assert sorted(found.values()) == ["int a;", "int b;"]


def test_entry_is_one_directory_of_readable_files(fresh_cache: Path) -> None:
    image = compiled()
    (entry,) = fresh_cache.iterdir()
    assert entry.name.startswith("scale.cu-")
    assert sorted(p.name for p in entry.iterdir()) == ["kernel.cubin", "kernel.ptx", "meta.json", "scale.cu"]
    assert (entry / "kernel.cubin").read_bytes() == image.cubin
    assert json.loads((entry / "meta.json").read_text())["meta"]["arch"] == "sm_90a"


def test_line_information_leads_to_a_file(tmp_path: Path, fresh_cache: Path) -> None:
    image = compiled()
    (entry,) = fresh_cache.iterdir()
    assert f'"{entry}/scale.cu"' in image.ptx and (entry / "scale.cu").is_file()
    file = tmp_path / "real.cu"
    file.write_text('extern "C" __global__ void k(int* p) { *p = 1; }')
    assert f'"{file}"' in compile_source(file.read_text(), name=str(file), arch="sm_90").ptx


@pytest.mark.parametrize("name", ["kernel.ptx", "meta.json", "", "..", "a b/c d.cu"])
def test_a_name_that_is_no_file_name_still_makes_an_entry(
    name: str, fresh_cache: Path, compilations: list[str]
) -> None:
    source = 'extern "C" __global__ void k(int* p) { *p = 1; }'
    first = compile_source(source, name=name, arch="sm_90")
    forget()
    assert compile_source(source, name=name, arch="sm_90") == first and len(compilations) == 1
    (entry,) = fresh_cache.iterdir()
    assert len(list(entry.iterdir())) == 4
    assert (entry / ("c_d.cu" if "/" in name else "source.cu")).read_text() == source


@pytest.mark.parametrize(
    "damage", ["truncated cubin", "no meta", "bad json", "another meta", "no such meta", "missing file", "empty"]
)
def test_damaged_entry_is_rebuilt(
    damage: str, fresh_cache: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    image = compiled()
    (entry,) = fresh_cache.iterdir()
    if damage == "truncated cubin":
        (entry / "kernel.cubin").write_bytes(image.cubin[:100])
    elif damage == "bad json":
        (entry / "meta.json").write_text("{")
    elif damage == "another meta":
        text = (entry / "meta.json").read_text()
        (entry / "meta.json").write_text(text.replace('"max_threads": 512', '"max_threads": 513'))
    elif damage == "no such meta":
        (entry / "meta.json").write_text("[]")
    elif damage == "empty":
        for path in entry.iterdir():
            path.unlink()
    else:
        (entry / ("meta.json" if damage == "no meta" else "kernel.ptx")).unlink()
    for _ in range(2):
        forget()
        assert compiled().kernels == image.kernels
    assert len(compilations) == 2 and "rebuilt" in caplog.text
    assert [path.name for path in fresh_cache.iterdir()] == [entry.name]


def test_cache_off_writes_nothing(fresh_cache: Path, compilations: list[str]) -> None:
    with config.override(cache=False):
        compiled()
        forget()
        compiled()
    assert len(compilations) == 2 and not fresh_cache.exists()


def test_unwritable_cache_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with config.override(cache_dir=str(tmp_path / "file")):
        assert compiled().cubin
    assert "cannot be written" in caplog.text


def test_threads_compile_the_same_source_once(compilations: list[str]) -> None:
    images: list[nvrtc.Image] = []
    threads = [threading.Thread(target=lambda: images.append(compiled())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1 and all(image is images[0] for image in images) and len(images) == 4


def test_processes_with_an_empty_cache_compile_once(tmp_path: Path) -> None:
    code = (
        "from drvfuse.compiler.nvrtc import compile_source;"
        "i = compile_source('extern \"C\" __global__ void k(int* p) { *p = 1; }', name='k.cu', arch='sm_90');"
        "print(i.cubin[:4], i.kernels)"
    )
    environment = {**os.environ, "DRVFUSE_CACHE_DIR": str(tmp_path / "shared"), "DRVFUSE_CACHE": "1"}
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {job.communicate(timeout=60)[0] for job in jobs}
    assert len(outputs) == 1 and "ELF" in outputs.pop()
    assert len(list((tmp_path / "shared" / "kernels").iterdir())) == 1


def test_compile_error_shows_the_log_and_numbered_lines(fresh_cache: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(SOURCE.replace("p = VALUE", "q = 1"), name="scale.cu", arch="sm_90")
    text = str(caught.value)
    assert caught.value.name == "scale.cu"
    assert 'scale.cu(9): error: identifier "q" is undefined' in text
    assert '>     9 | extern "C" __global__ void plain' in text and "      6 |     int i =" in text
    assert str(fresh_cache) not in text


def test_compile_error_in_a_header_shows_the_header(tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("int fine;\nint broken = nothing;\n")
    with pytest.raises(CompileError, match=r">     2 \| int broken = nothing;"):
        compile_source('#include "bad.cuh"\n', name="k.cu", arch="sm_90", include=[tmp_path])


def test_unknown_name_expression_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="nothere"):
        compiled(names=["nothere<int>"])


def test_architectures_are_checked_against_the_library() -> None:
    with pytest.raises(Unsupported, match="sm_33.*sm_90"):
        compiled(arch="sm_33")
    with pytest.raises(ArgumentError, match="arch"):
        compiled(arch="compute_90")


@pytest.mark.parametrize("option", ["-I/somewhere", "--gpu-architecture=sm_90", "--include-path=/x"])
def test_options_that_have_an_argument_of_their_own_are_refused(option: str) -> None:
    with pytest.raises(ArgumentError, match="include"):
        compiled(options=[option])


def test_a_string_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ArgumentError, match="options"):
        compiled(options="--fmad=false")
    with pytest.raises(ArgumentError, match="names"):
        compiled(names="scale<float>")


def test_the_language_standard_can_be_chosen() -> None:
    source = 'extern "C" __global__ void k(long* p) { *p = __cplusplus; }'
    ptx = compile_source(source, name="k.cu", arch="sm_90", options=["--std=c++20"]).ptx
    assert "202002" in ptx
    assert "201703" in compile_source(source, name="k.cu", arch="sm_90").ptx


def test_a_setting_names_the_nvrtc_library(tmp_path: Path) -> None:
    real = library()
    with config.override(nvrtc=real.path):
        assert library().version == real.version
    with config.override(nvrtc=str(tmp_path / "none.so")), pytest.raises(DriverUnavailable, match="none.so"):
        library()


def test_warnings_are_kept_with_the_image() -> None:
    source = 'extern "C" __global__ void k(int* p) { int unused = 3; *p = 1; }'
    image = compile_source(source, name="warn.cu", arch="sm_90")
    forget()
    assert "unused" in image.log and compile_source(source, name="warn.cu", arch="sm_90").log == image.log


@pytest.mark.parametrize("line", ["#include <cuda_fp16.h>", '#include "mine.cuh"'])
def test_the_error_for_a_missing_header_has_a_hint(line: str) -> None:
    with pytest.raises(CompileError, match=r"hint: .*no CUDA headers by itself.*include=\[") as caught:
        compile_source(f"{line}\n", name="k.cu", arch="sm_90")
    assert caught.value.log in str(caught.value)
    with pytest.raises(CompileError) as caught:
        compile_source("int broken = nothing;\n", name="k.cu", arch="sm_90")
    assert "hint" not in str(caught.value)


@pytest.mark.parametrize("include", ["/usr/include", Path("/usr/include"), [3], [None]])
def test_include_must_be_a_sequence_of_folders(include: Any) -> None:
    with pytest.raises(ArgumentError, match="include is .*sequence of folders"):
        compile_source("", name="k.cu", arch="sm_90", include=include)


def test_a_cache_that_cannot_be_written_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with config.override(cache_dir=tmp_path / "file"):
        for number in range(3):
            compile_source(f"__device__ int x{number};", name="k.cu", arch="sm_90")
    assert caplog.text.count("cannot be written") == 1
