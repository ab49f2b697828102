# SPDX-License-Identifier: Apache-2.0
"""The example tests of docs/testing.md pass as shown, and the one with a mistake fails as the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = "pytester"
pytestmark = pytest.mark.emulated

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "testing.md").read_text()
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def test_the_example_tests_of_the_page_pass(inner: Callable[..., pytest.RunResult]) -> None:
    inner(CODE).assert_outcomes(passed=4 + 1 + 1)


def test_without_its_barrier_the_first_example_fails_as_the_page_says(inner: Callable[..., pytest.RunResult]) -> None:
    result = inner(CODE.replace("    __syncthreads();\n", ""), "-k", "test_total")
    result.assert_outcomes(failed=4, deselected=2)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = re.sub(r"0x\w{5,}", "0x...", re.sub(r"test_\w+\.py", "test_total.py", result.stdout.str()))
    assert shown in printed


def test_the_example_test_of_the_page_on_checking_passes(inner: Callable[..., pytest.RunResult]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "checking.md").read_text(), re.DOTALL)
    source = [block for block in blocks if "SOURCE = " in block or "@pytest" in block]
    inner("\n".join(source)).assert_outcomes(passed=6)


def test_the_page_has_every_option_and_fixture() -> None:
    from drvfuse.testing import plugin

    named = set(re.findall(r"`([\w-]+)", PAGE))
    fixtures = {name for name in vars(plugin) if name.startswith("emu_")}
    assert len(fixtures) == 7 and fixtures | set(plugin.OPTIONS) | {"--emu-race", "--emu-seeds"} <= named
