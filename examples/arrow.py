"""Read a topic into an Arrow table (extra [arrow]). Run it with an address, or alone on a cluster in memory."""

from __future__ import annotations

import sys

import memq
from memq.testing import Cluster


def main(address: str) -> int:
    table = memq.read_arrow(address, "clicks")  # start= and end= take times and positions
    print(table.schema)
    print(table.slice(0, 3).to_pylist())
    with memq.Consumer(address, ["clicks"], end="end") as consumer:
        rows = sum(batch.arrow().num_rows for batch in consumer)  # batch by batch, without a copy of the values
    assert rows == table.num_rows
    return int(rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(main(sys.argv[1]), "rows")
    else:
        with Cluster() as cluster, memq.Producer(cluster.address) as producer:
            for number in range(1_000):
                producer.send("clicks", b'{"page": %d}' % number, key=b"user %d" % (number % 7))
            producer.flush()
            assert main(cluster.address) == 1_000
