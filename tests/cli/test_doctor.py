# SPDX-License-Identifier: Apache-2.0
"""`drvfuse doctor` while other processes use the cache."""

from __future__ import annotations

import os

import drvfuse as df
from drvfuse.cli import doctor


def test_files_deleted_while_the_cache_is_counted_are_ignored(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one").write_bytes(b"12345")
    walk = os.walk

    def with_a_ghost(root):
        for folder, folders, names in walk(root):
            yield folder, folders, [*names, "ghost"]

    monkeypatch.setattr(os, "walk", with_a_ghost)
    with df.config.override(cache_dir=str(tmp_path)):
        found = doctor._cache()
    assert (found["files"], found["bytes"]) == (1, 5)
