"""A Kafka with a second listener, whose produce requests can be delayed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memq_localstack.ports import HOST, free_ports
from memq_localstack.servers import Server, start_kafka
from tests.integration.framed_proxy import HANG_S, FramedProxy, Outcome

PRODUCE = 0  # the api key of a request that appends


class Door(FramedProxy):
    """Hands on requests and answers of a listener of Kafka; produce requests can be held."""

    def __init__(self, target: int) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self._held = threading.Event()
        self._handed_on = threading.Event()
        super().__init__(target)

    def hold(self) -> None:
        """Hold produce requests from now on, and return when there is one; what comes behind it waits, too."""
        self.call(self._gate.clear)
        assert self._held.wait(HANG_S), f"no produce request within {HANG_S:.0f} s"

    def release(self) -> None:
        """Hand on what is held, and return when Kafka's socket has the first of it."""
        self.call(self._gate.set)
        assert self._handed_on.wait(HANG_S), f"nothing was handed on within {HANG_S:.0f} s"
        self._held.clear()
        self._handed_on.clear()

    def conversation(self) -> Door:
        """Return itself: all connections share one gate."""
        return self

    def request(self, body: bytes) -> Outcome:
        """Return a request as it is, a produce request once the gate is open."""
        if int.from_bytes(body[:2]) != PRODUCE or self._gate.is_set():
            return Outcome((body,))
        self._held.set()
        return Outcome((body,), gate=self._gate, sent=self._handed_on)

    def answer(self, body: bytes) -> Outcome:
        """Return an answer as it is."""
        return Outcome((body,))


@dataclass(frozen=True)
class DelayedKafka:
    """The server, and the door next to its own."""

    server: Server
    door: Door


@contextmanager
def delayed_kafka(folder: Path) -> Iterator[DelayedKafka]:
    """Run a Kafka that sends who comes through the door there again."""
    (inner,) = free_ports(1)
    door = Door(inner)
    settings = {
        "listeners": f"PLAINTEXT://{HOST}:{{port}},DOOR://{HOST}:{inner},CONTROLLER://{HOST}:{{controller_port}}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{{port}},DOOR://{door.address}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,DOOR:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    try:
        with start_kafka(folder, settings=settings) as server:
            yield DelayedKafka(server, door)
    finally:
        door.close()
