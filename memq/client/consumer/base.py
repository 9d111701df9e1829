"""The part that both consumers share: settings, the core, and the arguments of callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memq.client.arguments import check_callbacks, check_tracer_provider, public_name, runtime_of
from memq.client.consumer.core import ConsumerCore
from memq.client.consumer.fetch.fetcher import BatchFetcher, ReadMode
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.record import TopicPartition, place_of
from memq.client.consumer.settings import ConsumerSettings, OnDamaged, OnExpired, Point, topics_of
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.observers.report_carrier import reporting
from memq.limits import MIB
from memq.runtime.network import Runtime

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.client.observers.consumer_traces import ConsumerTraces

OnPartitions = Callable[[list[TopicPartition]], object]  # of an AsyncConsumer it may return an awaitable


class BaseConsumer(ABC):
    """A consumer without its calls: those block, or are awaited."""

    @public_name("Consumer")
    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        topics: str | Sequence[str],
        *,
        group: str | None = None,
        start: Point = "beginning",
        end: Point | None = None,
        auto_commit: bool = True,
        auto_commit_interval_ms: int = 1_000,
        session_timeout_ms: int = 10_000,
        prefetch_bytes_max: int = 64 * MIB,
        on_damaged: OnDamaged = "fail",
        on_expired: OnExpired = "fail",
        read: ReadMode = "auto",
        s3: Mapping[str, object] | None = None,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        audit: bool = True,
        tracer_provider: TracerProvider | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        settings = ConsumerSettings(
            topics=topics_of(topics),
            group=group,
            start=start,
            end=end,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            session_timeout_ms=session_timeout_ms,
            prefetch_bytes_max=prefetch_bytes_max,
            on_damaged=on_damaged,
            on_expired=on_expired,
            read=read,
            connect_timeout_ms=connect_timeout_ms,
            s3=s3,
            client_id=client_id,
            zone=zone,
            audit=audit,
        ).check()
        check_callbacks(on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost)
        check_tracer_provider(tracer_provider)
        self._runtime = runtime_of(runtime)
        self._traces: ConsumerTraces | None = None
        if tracer_provider is not None:
            from memq.client.observers.consumer_traces import ConsumerTraces

            self._traces = ConsumerTraces(tracer_provider, self._runtime.clock, group)
        observe = reporting("consumer", group or "") if audit else None
        make_fetcher = BatchFetcher if self._traces is None else self._traces.fetcher
        self._core = ConsumerCore(settings, self._runtime, bootstrap_addresses(brokers), make_fetcher, observe)
        self._callbacks = (on_lost, on_revoked, on_assigned)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Take the core to the loop on which it is to run."""

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._runtime.clock.monotonic() + timeout_s

    def _left_s(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - self._runtime.clock.monotonic())

    def _calls(self, changes: AssignmentEvents) -> list[tuple[OnPartitions, list[TopicPartition]]]:
        """Return the callbacks on_lost, on_revoked and on_assigned that changes concern, with their arguments."""
        parts = (changes.lost, changes.revoked, changes.assigned)
        named = zip(self._callbacks, parts, strict=True)
        return [(each, [place_of(one) for one in part]) for each, part in named if each is not None and part]
