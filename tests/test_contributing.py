# SPDX-License-Identifier: Apache-2.0
"""The example op and the example opcode of CONTRIBUTING.md work as written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.emulated
def test_the_example_op_of_the_page_works(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = r"`((?:drvfuse|tests)/[\w/]+\.(?:py|cu))`:\n\n```(?:python|cpp)\n((?:#|//) SPDX.*?)```"
    files = dict(re.findall(blocks, text, re.DOTALL))
    assert len(files) == 6
    shutil.copytree(ROOT / "drvfuse", tmp_path / "drvfuse", ignore=shutil.ignore_patterns("__pycache__"))
    refusals = "tests/multicast_refusal.py", "tests/in_children/sitecustomize.py"
    suite = ("tests/conftest.py", *refusals, "tests/test_package.py")
    for name in ("pyproject.toml", *suite, "docs/architecture.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    page = tmp_path / "docs/architecture.md"
    for name in ("ops.", ""):
        (row,) = re.findall(rf"``(\| `{name}scaling` .*?)``", text)
        page.write_text(re.sub(rf"(?=^\| `{name}coat` )", f"{row}\n", page.read_text(), flags=re.MULTILINE))
    selected = ["tests/ops/scaling", "tests/test_package.py", "-k", "scale_rows or scaling or folder"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *selected]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout


def test_the_example_opcode_of_the_page_is_the_one_in_the_tree() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    ((path, handler),) = re.findall(r"`(drvfuse/[\w/]+\.py)`:\n\n```python\n(@opcode.*?)```", page, re.DOTALL)
    assert handler in (ROOT / path).read_text()
