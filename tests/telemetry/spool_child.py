"""A process that appends for ever and is meant to be killed. Arguments: the store, the commit interval in s.

Says on standard output the highest number of every row that the pump could have sent.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from edge_runtime.clock import SystemClock
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.spool import Spool, SpoolOptions


def main() -> None:
    store, commit_s = Path(sys.argv[1]), float(sys.argv[2])
    options = SpoolOptions(commit_s=commit_s)
    spool = Spool(store, Identity("gate-07", "b1", "killed", "0", 0), SystemClock(), options=options)
    spool.start()
    lane, visible = spool.lane("telemetry"), threading.Event()
    lane.on_put(visible.set)
    cursor = -1
    while True:
        for _ in range(20):
            spool.append("telemetry", "t", lambda seq: b"%d child" % seq)
        visible.wait(0.002)
        visible.clear()
        rows = lane.read(cursor, 1000)
        if rows:
            cursor = rows[-1].token
            print(cursor, flush=True)


if __name__ == "__main__":
    main()
