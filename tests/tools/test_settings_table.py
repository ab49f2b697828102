# SPDX-License-Identifier: Apache-2.0
"""The table of docs/settings.md is that of `drvfuse.config`."""

from __future__ import annotations

from drvfuse import config
from tools import settings_table


def test_the_page_has_the_current_settings() -> None:
    page = settings_table.PAGE.read_text()
    assert settings_table.page_with_table(page) == page, "run python -m tools.settings_table"
    for name in config.SETTINGS:
        assert f"| `DRVFUSE_{name.upper()}` |" in page
