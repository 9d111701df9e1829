"""Two members of a group share a topic and commit their batches. Run it with an address, or alone in memory."""

from __future__ import annotations

import sys

import memq
from memq.testing import Cluster

RECORDS = 1_000


def member(address: str, name: str) -> memq.Consumer:
    return memq.Consumer(
        address,
        ["orders"],
        group="billing",
        auto_commit=False,  # commit when the work is done, not when the next batch is asked for
        on_assigned=lambda places: print(name, "reads", *places),
        on_revoked=lambda places: print(name, "gives back", *places),
    )


def main(address: str) -> int:
    with memq.Admin(address) as admin:
        admin.create_topic("orders", partitions=4, exist_ok=True)
    with memq.Producer(address) as producer:
        for number in range(RECORDS):
            producer.send("orders", b"order %d" % number, key=b"customer %d" % (number % 50))
    seen: set[bytes | None] = set()
    with member(address, "first") as first, member(address, "second") as second:
        while len(seen) < RECORDS:
            for consumer in (first, second):
                batch = consumer.poll(timeout=0.1)
                if batch is not None:
                    seen.update(batch.values())
                    consumer.commit(batch)
    with memq.Admin(address) as admin:
        for progress in admin.group("billing").partitions:
            print(f"{progress.topic_partition}: at {progress.position}, {progress.lag.records} records behind")
    return len(seen)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(main(sys.argv[1]), "orders were billed")
    else:
        with Cluster() as cluster:
            assert main(cluster.address) == RECORDS
