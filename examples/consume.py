"""Read a topic from its beginning to its end, twice. Run it with the address of a broker, or alone in memory."""

from __future__ import annotations

import sys

import memq
from memq.testing import Cluster


def main(address: str) -> int:
    count = 0
    with memq.Consumer(address, ["clicks"], start="beginning", end="end") as consumer:
        for batch in consumer:
            for record in batch:
                if count < 3:
                    print(record.position, record.key, record.value, record.timestamp_ms)
                count += 1
        print("lag:", consumer.lag())
    with memq.Consumer(address, ["clicks"], end="end") as consumer:
        values = [value for batch in consumer for value in batch.values()]  # the fast way out
    assert len(values) == count
    return count


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(main(sys.argv[1]), "records were read")
    else:
        with Cluster() as cluster, memq.Producer(cluster.address) as producer:
            producer.send_many("clicks", [b"page %d" % number for number in range(1_000)])
            producer.flush()
            assert main(cluster.address) == 1_000
