# SPDX-License-Identifier: Apache-2.0
"""The length of one wait for a deadline that may be years away.

Time-outs may have up to a billion seconds, but system calls take fewer: `epoll_wait` about 25 days, a socket's time-out
as much. So whoever waits for a deadline waits for pieces of it, in a loop that looks at the clock.
"""

from __future__ import annotations

import time

MOST_SECONDS = 1e9
"""Time-outs are shorter than this."""
_PIECE = 3600.0


def piece(until: float) -> float:
    """Return how many seconds to wait now for `until`, a time of the monotonic clock: from 0 to an hour."""
    return min(max(until - time.monotonic(), 0.0), _PIECE)
