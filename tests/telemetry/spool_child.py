"""A process that appends, and sends, for ever and is meant to be killed. Arguments: the store, the commit interval, s.

Says on standard output the number of every row before it is sent. What is sent is acknowledged a little later.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from pathlib import Path

from edge_runtime.clock import SystemClock
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.spool import Spool, SpoolOptions

IN_FLIGHT = 7


def main() -> None:
    store, commit_s = Path(sys.argv[1]), float(sys.argv[2])
    options = SpoolOptions(commit_s=commit_s)
    spool = Spool(store, Identity("gate-07", "b1", "killed", "0", 0), SystemClock(), options=options)
    spool.start()
    lane, visible = spool.lane("telemetry"), threading.Event()
    lane.on_put(visible.set)
    cursor = -1
    flying: deque[int] = deque()
    while True:
        for _ in range(20):
            spool.append("telemetry", "t", lambda seq: b"%d child" % seq)
        visible.wait(0.002)
        visible.clear()
        for row in lane.read(cursor, 20):
            cursor = row.token
            flying.append(cursor)
            print(cursor, flush=True)
        while len(flying) > IN_FLIGHT:
            lane.done([flying.popleft()])


if __name__ == "__main__":
    main()
