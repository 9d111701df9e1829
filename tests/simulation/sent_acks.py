"""The acks that owners send, noted at the moment when they leave: only then is it certain what their log has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from memq.broker.ingest.connection import Connection
from memq.broker.partition.append import Stream
from memq.protocol.frames import AckLevel, AckPosition
from memq.simulation.ports.ownership_monitor import OwnershipMonitor
from tests.simulation.checker import Checker


@contextmanager
def noted_acks(note: Callable[[Stream, int, int], None]) -> Iterator[None]:
    """Call `note` with stream, next sequence and epoch of each ack of level `all` that a broker sends in the block."""
    send = Connection.send_ack

    def noting(
        connection: Connection,
        stream: Stream,
        level: int,
        next_sequence: int,
        epoch: int,
        positions: Sequence[AckPosition] = (),
    ) -> None:
        if level == AckLevel.ALL:
            note(stream, next_sequence, epoch)
        send(connection, stream, level, next_sequence, epoch, positions)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Connection, "send_ack", noting)
        yield


class SentAcks:
    """Passes acks of one topic to the rules of owners and of records."""

    def __init__(self, topic_id: str, checker: Checker, monitor: OwnershipMonitor) -> None:
        self._topic_id = topic_id
        self._checker = checker
        self._monitor = monitor

    def note(self, stream: Stream, next_sequence: int, epoch: int) -> None:
        """An owner sends an ack of all blocks of a stream below a sequence."""
        if stream.home.topic.id == self._topic_id:
            self._monitor.acks(self._topic_id, stream.home.partition, epoch)
            self._checker.acked_by_owner((stream.home.partition, stream.producer_id), next_sequence, epoch)
