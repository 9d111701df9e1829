"""The acks that owners send, noted at the moment when they leave: only then is it certain what their log has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from memq.broker.api import stream_requests
from memq.broker.api.staged_publisher import publish_staged
from memq.broker.ingest.connection import Connection
from memq.broker.partition.append import Stream
from memq.broker.partition.appender import Appender
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.partition.topic_processor import TopicProcessor
from memq.format.report import AUDIT_TOPIC
from memq.protocol.admin_messages import PublishStaged
from memq.protocol.frames import AckLevel, AckPosition
from memq.simulation.ports.ownership_monitor import OwnershipMonitor
from tests.simulation.checker import Checker
from tests.simulation.staged_rules import StagedRules


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


@contextmanager
def noted_staged_acks(note: Callable[[PublishStaged, int, int], None]) -> Iterator[None]:
    """Call `note` with request, number of published pieces and epoch for each answer to a commit in the block."""
    append = Appender.append_staged
    epochs: dict[asyncio.Task[object] | None, int] = {}  # in which each request publishes

    async def appending(appender: Appender, own: Ownership, batch: StagedBatch) -> None:
        epochs[asyncio.current_task()] = own.epoch
        await append(appender, own, batch)

    async def publishing(processor: TopicProcessor, ask: PublishStaged) -> int:
        task = asyncio.current_task()
        try:
            published = await publish_staged(processor, ask)
        finally:
            epoch = epochs.pop(task, None)
        if epoch is None:  # the owner has answered from its state, and waited for nothing since
            assert processor.own is not None, f"{processor.name} answers a commit without an epoch"
            epoch = processor.own.epoch
        note(ask, published, epoch)
        return published

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Appender, "append_staged", appending)
        patched.setattr(stream_requests, "publish_staged", publishing)
        yield


class SentAcks:
    """Passes acks to the rules of owners, of records and of staged batches: of one topic, and of `transient` others."""

    def __init__(
        self, topic_id: str, checker: Checker, transient: Checker, monitor: OwnershipMonitor, batches: StagedRules
    ) -> None:
        self._topic_id = topic_id
        self._checker = checker
        self._transient = transient
        self._monitor = monitor
        self._batches = batches

    def note_staged(self, ask: PublishStaged, published: int, epoch: int) -> None:
        """An owner answers a commit: the queue has so many pieces of the batch."""
        if ask.topic_id == self._topic_id:
            self._monitor.acks(self._topic_id, ask.partition, epoch)
            self._batches.acked_by_owner(ask, published, epoch)

    def note(self, stream: Stream, next_sequence: int, epoch: int) -> None:
        """An owner sends an ack of all blocks of a stream below a sequence."""
        topic, partition = stream.target.topic, stream.target.partition
        if topic.name == AUDIT_TOPIC:
            return
        self._monitor.acks(topic.id, partition, epoch)
        checker = self._checker if topic.id == self._topic_id else self._transient
        checker.acked_by_owner((partition, stream.producer_id), next_sequence, epoch)
