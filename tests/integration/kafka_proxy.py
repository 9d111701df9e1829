"""A proxy before a real Kafka that cuts, delays and falsifies requests of one kind, at a chosen phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from memq_localstack.ports import HOST, free_ports
from memq_localstack.servers import Server
from tests.integration.framed_proxy import FramedProxy, Outcome
from tests.integration.kafka import running_kafka
from tests.integration.kafka_answers import PINNED, Lie, pinned

ANSWER_DELAY_S = 2.5  # longer than a request of the tests may take


class ApiKey(Enum):
    """The kinds of requests that memq makes of Kafka, by Kafka's numbers."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    DESCRIBE_CONFIGS = 32
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44


class Phase(Enum):
    """Where a request goes wrong."""

    BEFORE = "the connection ends before the request reaches Kafka"
    AFTER = "the connection ends when Kafka has done it, before its answer"
    MIDDLE = "the connection ends in the middle of the answer"
    LATE = "the answer comes after the request has timed out"
    SHORT = "the answer is well framed, and its second half is missing"
    FALSE = "the answer says something else"


@dataclass
class Fault:
    """The fault of the next `times` requests of a kind; with FALSE their answers are those of the lie."""

    key: ApiKey
    phase: Phase
    times: int
    lie: Lie | None = None


class KafkaProxy(FramedProxy):
    """Hands on what clients say to a listener of Kafka, request by request, and what it answers."""

    def __init__(self, target: int) -> None:
        self.met: Counter[int] = Counter()  # faults by the number of their kind
        self.seen: Counter[int] = Counter()  # requests by the number of their kind
        self._fault: Fault | None = None
        super().__init__(target)

    def arm(self, fault: Fault | None) -> None:
        """Have this befall requests from now on, in place of what was to befall them before."""
        self.met.clear()
        self.seen.clear()
        self._fault = fault

    @property
    def lies(self) -> bool:
        """Whether answers will be false, for which clients have to choose versions that have no compact fields."""
        return self._fault is not None and self._fault.lie is not None

    def conversation(self) -> _Conversation:
        """See `FramedProxy.conversation`."""
        return _Conversation(self)

    def fault_of(self, key: int, version: int) -> Fault | None:
        """Return the fault that a request meets, and count it.

        A client that is older than the fault may use compact fields: a lie that is none in them ends the process of
        librdkafka with a segmentation fault. Its requests are answered truly.
        """
        self.seen[key] += 1
        fault = self._fault
        if fault is None or fault.key.value != key or fault.times <= 0:
            return None
        if fault.lie is not None and version > PINNED.get(key, version):
            return None
        fault.times -= 1
        self.met[key] += 1
        return fault


class _Conversation:
    def __init__(self, proxy: KafkaProxy) -> None:
        self._proxy = proxy
        self._under_way: dict[bytes, tuple[Fault | None, bytes]] = {}  # requests by their ids, and their faults

    def request(self, body: bytes) -> Outcome:
        key = int.from_bytes(body[:2])
        fault = self._proxy.fault_of(key, int.from_bytes(body[2:4]))
        if fault is not None and fault.phase is Phase.BEFORE:
            return Outcome(ends=True)
        if fault is not None or (key == ApiKey.API_VERSIONS.value and self._proxy.lies):
            self._under_way[body[4:8]] = fault, body
        return Outcome((body,))

    def answer(self, body: bytes) -> Outcome:
        fault, request = self._under_way.pop(body[:4], (None, b""))
        if fault is None:
            return Outcome((pinned(body, int.from_bytes(request[2:4])) if request else body,))
        if fault.phase is Phase.AFTER:
            return Outcome(ends=True)
        if fault.phase is Phase.MIDDLE:
            return Outcome((body,), cut=True, ends=True)
        if fault.phase is Phase.LATE:
            return Outcome((body,), wait_s=ANSWER_DELAY_S)
        if fault.phase is Phase.SHORT:
            return Outcome((body[: max(4, len(body) // 2)],))
        return Outcome((fault.lie(request, body) if fault.lie is not None else body,))


@contextmanager
def kafka_behind_proxy(folder: Path) -> Iterator[tuple[Server, KafkaProxy]]:
    """Run a Kafka that sends clients who come through the proxy there again; its own door is a sound one."""
    (inner,) = free_ports(1)
    proxy = KafkaProxy(inner)
    settings = {
        "listeners": f"PLAINTEXT://{HOST}:{{port}},PROXY://{HOST}:{inner},CONTROLLER://{HOST}:{{controller_port}}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{{port}},PROXY://{proxy.address}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXY:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    try:
        with running_kafka(folder, **settings) as server:
            yield server, proxy
    finally:
        proxy.close()
