# SPDX-License-Identifier: Apache-2.0
"""The disk cache: its limit, the order of deletion, many processes at once, folders that cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drvfuse import config, own_files
from drvfuse.compiler import cache

DATA = bytes(range(256)) * 40
ENTRY = 10 << 10  # at least the bytes that an entry takes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRVFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DRVFUSE_CACHE", "1")
    monkeypatch.setenv("DRVFUSE_CACHE_LIMIT", "100 MiB")
    monkeypatch.setattr(cache, "_sizes", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache" / "kernels"


def path(number: int) -> Path:
    found = cache.entry_path("k.cu", cache.key_of({"number": number}))
    assert found is not None
    return found


def store(number: int) -> Path:
    cache.store(path(number), {"number": number}, {"data": DATA})
    return path(number)


def load(entry: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    return cache.load(entry, lambda meta, files: (meta, files))


def numbers(folder: Path) -> list[int]:
    """The numbers of the entries in the folder. Fails if an entry is incomplete or another file is there."""
    found = [load(entry) for entry in folder.iterdir()]
    assert all(entry is not None and entry[1] == {"data": DATA} for entry in found)
    return sorted(entry[0]["number"] for entry in found if entry is not None)


def age(entry: Path, seconds: float) -> None:
    os.utime(entry, (time.time() - seconds,) * 2)


def test_an_entry_comes_back_as_it_was() -> None:
    assert load(path(1)) is None
    store(1)
    assert load(path(1)) == ({"number": 1}, {"data": DATA})


def test_without_the_cache_there_is_no_entry() -> None:
    with config.override(cache=False):
        assert cache.entry_path("k.cu", "0" * 64) is None


def test_the_least_recently_used_entry_is_deleted_first(folder: Path) -> None:
    for number in range(6):
        age(store(number), 1000 - number)
    assert load(path(0)) is not None  # now the oldest entry is the most recently used one
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
    load(entry)
    assert entry.stat().st_mtime == before
    age(entry, 90)
    load(entry)
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
    assert load(entry) is None
    store(0)
    assert load(entry) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is damaged" in caplog.text


def test_a_folder_that_cannot_be_written_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.WARNING)
    with config.override(cache_dir=tmp_path / "file"):
        for number in range(3):
            store(number)
            assert load(path(number)) is None
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
    assert load(path(0)) == ({"number": 0}, {"data": DATA})
    for number in (1, 2):
        store(number)
        assert load(path(number)) is None
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
    assert load(path(1)) == ({"number": 1}, {"data": DATA})
    assert "cannot be written" not in caplog.text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_and_files_of_the_cache_are_for_the_user_alone(tmp_path: Path, folder: Path) -> None:
    before = os.umask(0)
    try:
        entry = store(0)
        with cache.building(path(1)):
            (lock,) = folder.glob("~lock-*")
            assert mode(lock) == 0o600
    finally:
        os.umask(before)
    assert [mode(at) for at in (tmp_path / "cache", folder, entry)] == [0o700] * 3
    assert {mode(file) for file in entry.iterdir()} == {0o600}


@pytest.mark.parametrize("what", ["cache", "kernels", "entry", "data", "meta.json"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_may_write_is_ignored_with_one_warning(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, what: str, bits: int
) -> None:
    entry, other = store(0), store(1)
    at = {"cache": tmp_path / "cache", "kernels": folder, "entry": entry}.get(what, entry / what)
    at.chmod(mode(at) | bits)
    for _ in range(2):
        assert load(entry) is None
    assert (load(other) is None) == (what in ("cache", "kernels"))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "may be written by other users" in record.message
    assert at.name in record.message and "chmod -R go-w" in record.message
    store(0)  # replaces an entry of others, and stores nothing in a folder of others
    assert (load(entry) is None) == (what in ("cache", "kernels"))
    assert len(caplog.records) == 1 and not list(folder.glob("~*"))


def test_nothing_is_stored_in_a_new_cache_that_others_may_write(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    store(0)
    with cache.building(path(1)) as waited:
        assert not waited
    assert not list(folder.iterdir())


@pytest.mark.parametrize("owner, permissions, trusted", [
    (1000, 0o755, True), (1000, 0o700, True), (0, 0o755, True), (1001, 0o700, False), (1001, 0o555, False),
    (1000, 0o775, False), (1000, 0o757, False), (0, 0o775, False),
])  # fmt: skip
def test_only_what_the_user_or_root_alone_could_write_is_trusted(owner: int, permissions: int, trusted: bool) -> None:
    status = os.stat_result((stat.S_IFDIR | permissions, 1, 1, 1, owner, owner, 0, 0, 0, 0))
    if trusted:
        own_files.require_own(status, "x", 1000)
        return
    with pytest.raises(own_files.Untrusted, match="^x (belongs to user 1001|may be written by other users)"):
        own_files.require_own(status, "x", 1000)


@pytest.mark.parametrize("what", ["folder", "entry", "data"])
def test_what_belongs_to_another_user_is_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The owner is changed in the answers of the system, as only root can give a file to another user."""
    entry = store(0)
    foreign = {"folder": folder, "entry": entry, "data": entry / "data"}[what].stat().st_ino
    fstat = os.fstat

    def of_another(file: int) -> os.stat_result:
        found = fstat(file)
        return os.stat_result((*found[:4], os.geteuid() + 7, *found[5:])) if found.st_ino == foreign else found

    monkeypatch.setattr(os, "fstat", of_another)
    assert load(entry) is None
    assert f"belongs to user {os.geteuid() + 7}, not to user {os.geteuid()} or root" in caplog.text


def test_links_inside_the_cache_are_not_followed_but_the_cache_may_be_one(tmp_path: Path, folder: Path) -> None:
    entry = store(0)
    (entry / "data").rename(tmp_path / "elsewhere")
    (entry / "data").symlink_to(tmp_path / "elsewhere")
    assert load(entry) is None
    store(0)
    assert load(entry) is not None and not (entry / "data").is_symlink()
    entry.rename(tmp_path / "moved")
    entry.symlink_to(tmp_path / "moved")
    assert load(entry) is None
    store(0)
    (tmp_path / "cache").rename(tmp_path / "real")
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    assert load(entry) == ({"number": 0}, {"data": DATA})


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", "null", '{"meta": {}, "sha256": 3}', "fifo", "folder"])
def test_a_damaged_description_is_a_miss(folder: Path, text: str) -> None:
    entry = store(0)
    (entry / "meta.json").unlink()
    if text == "fifo":
        os.mkfifo(entry / "meta.json")
    elif text == "folder":
        (entry / "meta.json").mkdir()
    else:
        (entry / "meta.json").write_text(text)
    assert load(entry) is None
    store(0)
    assert load(entry) is not None


def test_a_file_that_is_a_fifo_is_a_miss(folder: Path) -> None:
    entry = store(0)
    (entry / "data").unlink()
    os.mkfifo(entry / "data")
    assert load(entry) is None


def test_an_entry_that_its_reader_does_not_understand_is_a_miss(folder: Path) -> None:
    entry = store(0)
    for wrong in (lambda meta, files: files["other"], lambda meta, files: json.loads(files["data"])):
        assert cache.load(entry, wrong) is None


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
    found = cache.load(entry, lambda *found: found)
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
