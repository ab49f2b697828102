# SPDX-License-Identifier: Apache-2.0
"""docs/ptx.md, the table of PTX instructions, is the page that `tools.ptx_table` makes by translating its examples."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llvmlite")
from drvfuse.emu.translate import module  # noqa: E402, F401  (registers the opcodes)
from drvfuse.emu.translate.opcode import HANDLERS  # noqa: E402
from drvfuse.emu.translate.refused import FAMILIES  # noqa: E402
from tools import ptx_table  # noqa: E402


def test_the_page_agrees_with_the_translator() -> None:
    page = Path(ptx_table.__file__).parents[1] / "docs" / "ptx.md"
    assert page.read_text() == ptx_table.page(), "python -m tools.ptx_table > docs/ptx.md"


def test_every_opcode_is_in_the_table() -> None:
    names = " ".join(
        f"{names} {example}"
        for rows in ptx_table.SECTIONS.values()
        for names, examples in rows.items()
        for example in examples
    )
    words = {word.strip(",;") for word in names.split()}
    opcodes = {".".join(parts[:n]) for word in words for parts in [word.split(".")] for n in range(1, len(parts) + 1)}
    assert {name for name in HANDLERS if name[0] != "@"} - opcodes == set()
    assert set(FAMILIES) - opcodes == set()
