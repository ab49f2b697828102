# SPDX-License-Identifier: Apache-2.0
"""A rank of `bench.processes`: `python -m drvfuse.bench.process_worker NODES`, with the variables of torchrun.

It reads requests, one JSON object per line, until the end of its input. An object with `op`, `rows`, `cols`, `algo`,
`sets` and `calls` prepares calls of that op, captures them in a graph, and is answered with the algorithm that was
chosen. For the object {} one replay of this graph is timed, and the answer is the microseconds per call.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from ..comm.group import Group
from .collective_calls import launches
from .ops import calls_of
from .timing import Replays


def main(nodes: int) -> None:
    """Answer the requests, which are the same for all ranks. All ranks start a replay together, after a barrier."""
    exchange = "nccl" if nodes > 1 else None  # as in the group of one process with which this group is compared
    with Group.connect(nodes=nodes, exchange=exchange) as group, contextlib.ExitStack() as open_now:
        replays: Replays | None = None
        for line in sys.stdin:
            asked: dict[str, Any] = json.loads(line)
            answer: Any = None
            if asked:
                open_now.close()
                calls = calls_of(group, asked["op"], asked["rows"], asked["cols"], asked["sets"])
                calls.check(asked["algo"])
                prepared = calls.prepared(asked["algo"])
                replays = Replays(group, launches(prepared), asked["calls"])
                open_now.callback(replays.close)
                answer = prepared[0].algo
            elif replays is not None:
                with group.transport.step("time a replay"):
                    pass
                answer = replays.microseconds()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
