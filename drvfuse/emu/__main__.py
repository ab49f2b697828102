# SPDX-License-Identifier: Apache-2.0
"""`python -m drvfuse.emu` is `drvfuse emu`."""

import sys

from ..__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["emu", *sys.argv[1:]]))
