# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled modules: entries are used, checked, written atomically, and may be missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_harness import ptx

from drvfuse import config
from drvfuse.emu.native import loader
from drvfuse.ptx.ir import PtxError

SOURCE = """
__constant__ int table[3] = {4, 5, 6};
KERNEL k(int* out, float scale) {
    asm volatile("griddepcontrol.wait;");
    out[threadIdx.x] = table[threadIdx.x % 3] * scale;
}"""


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache in memory, so that each load goes to the disk."""
    monkeypatch.setattr(loader, "_last", loader._last.__wrapped__)


def entries(where: Path) -> list[Path]:
    return [p for p in where.glob("kernels/*") if p.is_dir()]


@pytest.fixture(autouse=True)
def load_runtime() -> None:
    """Load the runtime before the test, because the first load in a process would add an entry to the test's cache."""
    loader.runtime()


def describe(module: loader.NativeModule) -> object:
    return module.kernels, module.globals, module.globals_bytes


def test_a_module_comes_back_from_the_cache_as_it_was(tmp_path, monkeypatch):
    loader.runtime()
    with config.override(cache_dir=str(tmp_path), cache=True):
        first = loader.load(ptx(SOURCE))
        assert len(entries(tmp_path)) == 1
        monkeypatch.setattr(loader, "_build", lambda *_: pytest.fail("built again"))
        second = loader.load(ptx(SOURCE))
    assert describe(first) == describe(second)
    kernel = second.kernels["k"]
    assert kernel.has_pdl_wait and [p.type for p in kernel.params] == ["u64", "f32"]
    assert second.globals[0].init == bytes([4, 0, 0, 0, 5, 0, 0, 0, 6])
    assert second.address(kernel.symbol)


@pytest.mark.parametrize("name", ["code.o", "kernels.json"])
def test_a_damaged_entry_is_replaced_and_the_log_says_so(name, tmp_path, caplog):
    with config.override(cache_dir=str(tmp_path), cache=True):
        loader.load(ptx(SOURCE))
        (entry,) = entries(tmp_path)
        whole = (entry / name).read_bytes()
        for damage in (whole[:-100], b"", whole[:500] + b"?" + whole[501:]):
            (entry / name).write_bytes(damage)
            caplog.clear()
            loader.load(ptx(SOURCE))
            assert (entry / name).read_bytes() == whole
            (message,) = caplog.messages
            assert message.startswith(f"cache entry {entry} is damaged and is rebuilt")
    assert entries(tmp_path) == [entry]


def test_without_a_cache_nothing_is_written(tmp_path):
    with config.override(cache_dir=str(tmp_path), cache=False):
        loader.load(ptx(SOURCE))
    assert not list(tmp_path.iterdir())


def test_a_cache_directory_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "kernels").write_text("in the way")
    with config.override(cache_dir=str(tmp_path), cache=True):
        assert loader.load(ptx(SOURCE)).kernels
    assert "cannot be written" in caplog.text


def test_processes_share_a_directory(tmp_path):
    program = """
import sys
from drvfuse.emu.native import loader
print(sorted(loader.load(open(sys.argv[1]).read()).kernels))
"""
    text = tmp_path / "k.ptx"
    text.write_text(ptx(SOURCE))
    loader.runtime()
    # the runtime takes long to build, so the new cache gets a copy
    for entry in Path(config.get("cache_dir"), "kernels").glob("runtime.*"):
        shutil.copytree(entry, tmp_path / "cache/kernels" / entry.name)
    with config.override(cache_dir=str(tmp_path / "cache")):
        environment = {"DRVFUSE_CACHE_DIR": config.get("cache_dir"), "PATH": ""}
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(text)], env=environment, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        assert {run.communicate(timeout=60)[0] for run in runs} == {"['k']\n"}
    names = {entry.name.rpartition("-")[0] for entry in (tmp_path / "cache").glob("*/*")}
    assert names == {"module.o", "runtime.cu", "runtime.o"}, "the module, the runtime and its PTX, and nothing else"
    assert len(list((tmp_path / "cache").glob("*/module.o-*"))) == 1


def test_one_of_several_processes_that_need_an_uncached_module_builds_it(tmp_path, monkeypatch):
    """Two threads take the place of the processes: the lock on a file excludes threads just as it does processes."""
    loader.runtime()
    monkeypatch.setenv("DRVFUSE_CACHE_DIR", str(tmp_path))
    build, builds = loader._build, []

    def slow(*arguments):
        builds.append(arguments)
        time.sleep(0.2)
        return build(*arguments)

    monkeypatch.setattr(loader, "_build", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda text: loader._load(text, raw=False), [ptx(SOURCE)] * 2)
    assert len(builds) == 1 and describe(first) == describe(second)


def test_an_unknown_opcode_is_refused_at_load_with_its_line():
    text = ptx("KERNEL k() {}").replace("ret;", "frobnicate.u32 %r1, %r2;\n\tret;")
    with pytest.raises(PtxError) as caught:
        loader.load(text)
    assert "frobnicate" in text.splitlines()[caught.value.line - 1]


def test_threads_that_start_at_once_load_one_runtime():
    """The threads start in a new process, because a process loads the runtime only once. If it loaded two, LLVM would
    use the functions of the later one.
    """
    program = """
import threading, time
from drvfuse.emu.native import loader
load, loads = loader._load, []
def slow(ptx, raw):
    loads.append(raw)
    time.sleep(0.3)
    return load(ptx, raw)
loader._load = slow
threads = [threading.Thread(target=loader.runtime) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert loads == [True], loads
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
