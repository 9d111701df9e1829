"""Send records: one by one, and many at once. Run it with the address of a broker, or alone on a cluster in memory."""

from __future__ import annotations

import sys

import memq
from memq.testing import Cluster


def main(address: str) -> int:
    with memq.Producer(address) as producer:
        delivery = producer.send("clicks", b"page 1", key=b"user 7", headers={"trace": b"a1"}, tag="web")
        ack = delivery.result(timeout=10)  # one delivery for each block; wait only where you must
        print(f"{ack.records} record of topic '{ack.topic}' is stored, from sequence {ack.first_sequence} on")
        producer.send_many("clicks", [b"page %d" % number for number in range(2, 1_001)])
        producer.flush(timeout=10)
        return producer.stats().records_acked


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(main(sys.argv[1]), "records are stored")
    else:
        with Cluster() as cluster:
            print(main(cluster.address), "records are stored")
            assert len(cluster.records("clicks")) == 1_000
