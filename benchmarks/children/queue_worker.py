"""A worker of the row `workers`: `queue_worker BROKER JOURNAL QUEUE SECONDS`. It may be killed at any moment."""

from __future__ import annotations

import os
import sys
import time

import memq


def main(broker: str, journal: str, queue: str, seconds: float) -> None:
    """Sleep for each job, and write one line for its begin and its end, until SIGTERM."""
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(item: memq.QueueItem) -> None:
        os.write(out, b"begin %s %d\n" % (item.payload, item.attempt))
        time.sleep(seconds)
        os.write(out, b"done %s %d\n" % (item.payload, item.attempt))

    with memq.Worker(handle, queue, brokers=broker) as worker:
        worker.start()
        os.write(out, b"ready\n")
        worker.run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
