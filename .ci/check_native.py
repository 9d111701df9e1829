"""Sends and reads records through a cluster in memory with the compiled kernel: a check of its wheels."""

import memq
import memq.testing
from memq import kernel

assert kernel.description().startswith("compiled (memq-native "), kernel.description()
values = [b"%d" % n for n in range(10_000)]
with memq.testing.Cluster() as cluster:
    for codec in ("none", "zstd", "lz4"):
        with memq.Producer(cluster.address, codec=codec) as producer:
            producer.send_many(codec, values)
            producer.send(codec, b"last", key=b"user-1").result(timeout=30)
        with memq.Consumer(cluster.address, codec, start="beginning", end="end") as consumer:
            assert [bytes(record.value) for batch in consumer for record in batch] == [*values, b"last"]
print(kernel.description())
