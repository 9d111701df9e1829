"""The processes of the rows against confluent-kafka: a broker and the mock cluster, and a client process for each."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.child import Child
from benchmarks.concurrent_runs import ConcurrentRuns


class Peers(ConcurrentRuns):
    """Both sides, with clients that wait for commands.

    librdkafka does not allow to set the congestion control of its sockets, so both sides run with the system's.
    """

    def __init__(self, store: str = "recent") -> None:
        with ExitStack() as stack:
            self.broker = stack.enter_context(Child("broker", store=store))
            self.mock = stack.enter_context(Child("kafka_mock"))
            address = self.broker.ready["address"]
            self.memq = stack.enter_context(Child("memq_client", address=address))
            self.memq_reader = stack.enter_context(Child("memq_client", address=address))
            self.kafka = stack.enter_context(Child("kafka_client", address=self.mock.ready["address"]))
            self.kafka_reader = stack.enter_context(Child("kafka_client", address=self.mock.ready["address"]))
            self._stack = stack.pop_all()
