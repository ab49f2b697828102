# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `pip install -e '.[cu12,emu,docs]'`, then `sphinx-build -W -q docs site`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools, and the drvfuse of this checkout

import drvfuse
from tools import docs_site

project = "drvfuse"
author = project_copyright = "drvfuse developers"
release = version = drvfuse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # links to headings are those of GitHub, and a link to no heading is a warning
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"NDArray": "NDArray"}  # for overloads, whose signatures docs_site does not write

highlight_language = "text"  # of blocks that name none: commands and their output
html_theme = "furo"
html_title = f"drvfuse {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False


def setup(app):
    app.connect("source-read", docs_site.fill)
    app.connect("autodoc-skip-member", docs_site.skip)
    app.connect("autodoc-process-signature", docs_site.signature)
    app.connect("autodoc-process-docstring", docs_site.docstring)
