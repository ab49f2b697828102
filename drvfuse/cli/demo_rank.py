# SPDX-License-Identifier: Apache-2.0
"""One rank of `drvfuse demo --processes`: `python -m drvfuse.cli.demo_rank ROWS COLS FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..comm.group import Group
from ..comm.process_transport import ProcessTransport
from .demo import Demo


def main(rows: int, cols: int, results: Path) -> None:
    """Run the demo on this rank. Rank 0 writes the checks, with the mismatches of all ranks, to `results` as JSON."""
    with Group.connect() as group:
        checks = Demo(group, rows, cols).run(time_it=False)
        assert isinstance(group.transport, ProcessTransport)
        own = json.dumps([check.mismatches for check in checks]).encode()
        every = [json.loads(found) for found in group.transport.board.gather("compare results of the demo", own)]
        for check, mismatches in zip(checks, zip(*every, strict=True), strict=True):
            check.mismatches = sum(mismatches)
        if group.ranks[0].index == 0:
            results.write_text(json.dumps([vars(check) for check in checks]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
