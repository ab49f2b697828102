# SPDX-License-Identifier: Apache-2.0
"""The disk cache: its limit, the order of deletion, many processes at once, folders that cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drvfuse import config
from drvfuse.compiler import cache

DATA = bytes(range(256)) * 40
ENTRY = 10 << 10  # at least the bytes that an entry takes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRVFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DRVFUSE_CACHE", "1")
    monkeypatch.setenv("DRVFUSE_CACHE_LIMIT", "100 MiB")
    monkeypatch.setattr(cache, "_sizes", {})
    return tmp_path / "cache" / "kernels"


def path(number: int) -> Path:
    found = cache.entry_path("k.cu", cache.key_of({"number": number}))
    assert found is not None
    return found


def store(number: int) -> Path:
    cache.store(path(number), {"number": number}, {"data": DATA})
    return path(number)


def numbers(folder: Path) -> list[int]:
    """The numbers of the entries in the folder. Fails if an entry is incomplete or another file is there."""
    found = [cache.load(entry) for entry in folder.iterdir()]
    assert all(entry is not None and entry[1] == {"data": DATA} for entry in found)
    return sorted(entry[0]["number"] for entry in found if entry is not None)


def age(entry: Path, seconds: float) -> None:
    os.utime(entry, (time.time() - seconds,) * 2)


def test_an_entry_comes_back_as_it_was() -> None:
    assert cache.load(path(1)) is None
    store(1)
    assert cache.load(path(1)) == ({"number": 1}, {"data": DATA})


def test_without_the_cache_there_is_no_entry() -> None:
    with config.override(cache=False):
        assert cache.entry_path("k.cu", "0" * 64) is None


def test_the_least_recently_used_entry_is_deleted_first(folder: Path) -> None:
    for number in range(6):
        age(store(number), 1000 - number)
    assert cache.load(path(0)) is not None  # now the oldest entry is the most recently used one
    with config.override(cache_limit=5 * ENTRY):
        store(6)
    assert numbers(folder) == [0, 4, 5, 6]


def test_the_size_never_exceeds_the_limit(folder: Path) -> None:
    with config.override(cache_limit=10 * ENTRY):
        for number in range(40):
            age(store(number), 1000 - number)
            assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 10 * ENTRY
    assert 8 <= len(numbers(folder)) <= 9 and numbers(folder)[-1] == 39


def test_the_limit_counts_entries_of_earlier_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        age(store(number), 1000 - number)
    monkeypatch.setattr(cache, "_sizes", {})  # as in another process, which does not know the entries' sizes
    with config.override(cache_limit=3 * ENTRY):
        store(6)
    assert numbers(folder) == [5, 6]


def test_an_entry_larger_than_the_limit_is_deleted(folder: Path) -> None:
    with config.override(cache_limit=100):
        store(0)
    assert numbers(folder) == []


def test_a_use_is_noted_at_most_once_a_minute() -> None:
    entry = store(0)
    age(entry, 30)
    before = entry.stat().st_mtime
    cache.load(entry)
    assert entry.stat().st_mtime == before
    age(entry, 90)
    cache.load(entry)
    assert time.time() - entry.stat().st_mtime < 30


def test_files_of_a_killed_process_are_deleted_after_an_hour(folder: Path) -> None:
    left = [cache._temporary(folder) for _ in range(2)]
    for leftover, seconds in zip(left, (4000, 10), strict=True):
        leftover.mkdir(parents=True)
        age(leftover, seconds)
    store(0)
    assert not left[0].exists() and left[1].exists()


def test_a_damaged_entry_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    entry = store(0)
    (entry / "data").write_bytes(DATA[:-1])
    assert cache.load(entry) is None
    store(0)
    assert cache.load(entry) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is damaged" in caplog.text


def test_a_folder_that_cannot_be_written_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.WARNING)
    with config.override(cache_dir=tmp_path / "file"):
        for number in range(3):
            store(number)
            assert cache.load(path(number)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text


def test_a_read_only_folder_serves_its_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    age(store(0), 1000)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("utime", "rename", "mkdir"):  # file permissions do not restrict root, and tests may run as root
        monkeypatch.setattr(os, name, refuse)
    assert cache.load(path(0)) == ({"number": 0}, {"data": DATA})
    for number in (1, 2):
        store(number)
        assert cache.load(path(number)) is None
    assert caplog.text.count("cannot be written") == 1 and [e.name for e in folder.iterdir()] == [path(0).name]


def test_an_entry_that_another_process_stores_and_deletes_during_a_store_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename, calls = os.rename, []

    def late(source: Path, target: Path) -> None:
        """In the first call the target exists. After it, the other process has deleted the target."""
        calls.append(target)
        if len(calls) == 1:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    store(1)
    assert cache.load(path(1)) == ({"number": 1}, {"data": DATA})
    assert "cannot be written" not in caplog.text


WORKER = """
import random, sys
from drvfuse.compiler import cache
seed = int(sys.argv[1])
draw = random.Random(seed)
hits = 0
for _ in range(300):
    number = draw.randrange(12)
    entry = cache.entry_path("k.cu", cache.key_of({"number": number}))
    data = bytes(range(256)) * 40
    found = cache.load(entry)
    if found is None:
        cache.store(entry, {"number": number}, {"data": data})
    else:
        assert found == ({"number": number}, {"data": data})
        hits += 1
print(hits)
"""


def test_processes_write_read_and_delete_entries_of_one_cache_at_once(folder: Path) -> None:
    """Three processes store twelve entries in a cache with room for six. A process reads an entry whole or not at all,
    and at most six entries remain.
    """
    environment = {**os.environ, "DRVFUSE_CACHE_LIMIT": str(6 * ENTRY + ENTRY // 2)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(seed)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0 and int(output) > 0, errors
        assert "Traceback" not in errors and "cannot be written" not in errors
    with config.override(cache_limit=6 * ENTRY + ENTRY // 2):
        store(12)
    assert 12 in numbers(folder) and len(numbers(folder)) <= 6


def test_threads_that_store_the_same_entry_leave_one(folder: Path) -> None:
    threads = [threading.Thread(target=store, args=(0,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(folder) == [0]


def test_one_process_at_a_time_builds_an_entry_and_the_others_load_it(folder: Path) -> None:
    """Threads take the part of processes: each opens the lock file itself, so the lock excludes them too."""
    entry, order = folder / "entry", []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with cache.building(entry) as look_again:
            order.append(("first", look_again))
            begun.set()
            go_on.wait(10)
            order.append(("built", False))

    def second() -> None:
        with cache.building(entry) as look_again:
            order.append(("second", look_again))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    time.sleep(0.1)
    assert order == [("first", False)]
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == [("first", False), ("built", False), ("second", True)]
    assert not list(folder.iterdir())


def test_waiting_for_the_build_of_another_process_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_BUILD_SECONDS", 0.05)
    entry = folder / "entry"
    with cache.building(entry), cache.building(entry) as look_again:
        assert look_again
