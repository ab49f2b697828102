# SPDX-License-Identifier: Apache-2.0
"""The form of the README that a package index shows has no links to paths in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

import drvfuse
from tools import long_description
from tools.long_description import published, relative_links

ROOT = Path(long_description.__file__).parents[1]
TEXT = """See [install](docs/install.md), [a site](https://a.org/x.md), [below](#use), ![chart](docs/images/speed.svg).
```python
a = [1](2)
```
[promise](docs/design.md#numerics)
"""


def test_with_a_repository_links_are_addresses_at_the_tag_of_the_version() -> None:
    base, tag = "https://example.org/drvfuse", f"v{drvfuse.__version__}"
    text = published(TEXT, f"{base}/")
    assert f"[install]({base}/blob/{tag}/docs/install.md)" in text
    assert f"![chart]({base}/raw/{tag}/docs/images/speed.svg)" in text
    assert f"[promise]({base}/blob/{tag}/docs/design.md#numerics)" in text
    assert "[a site](https://a.org/x.md)" in text and "[below](#use)" in text and "a = [1](2)" in text
    assert relative_links(TEXT) == ["docs/install.md", "docs/images/speed.svg", "docs/design.md#numerics"]
    assert not relative_links(text)


def test_without_a_repository_links_are_their_text_and_pictures_are_left_out() -> None:
    first = published(TEXT, None).splitlines()[0]
    assert first == "See install, [a site](https://a.org/x.md), [below](#use), ."


@pytest.mark.parametrize("source", ["https://example.org/drvfuse", None])
def test_the_readme_keeps_no_relative_link(source: str | None) -> None:
    readme = (ROOT / long_description.README).read_text()
    assert relative_links(readme) and not relative_links(published(readme, source))


def test_the_readme_of_a_copy_of_the_checkout_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(TEXT)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nurls = {Source = "https://example.org/x"}\n')
    long_description.rewrite(tmp_path)
    assert (tmp_path / "README.md").read_text() == published(TEXT, "https://example.org/x")
