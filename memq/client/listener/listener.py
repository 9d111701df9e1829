"""The public listeners: `Listener` calls handlers in threads, `AsyncListener` in tasks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from memq.client.arguments import check_callbacks, encryption_of, public_name, runtime_of
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.client.consumer.record_filter import OnForgotten, filter_of
from memq.client.consumer.settings import ConsumerSettings, OnDamaged, OnExpired, Point, topics_of
from memq.client.lifecycle import Background, KafkaHints
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.listener.answers import Message
from memq.client.listener.calls import AsyncCalls, BlockingCalls, CallsCore
from memq.client.listener.core import Call, ListenerCore, ListenerStats
from memq.client.listener.settings import RETRY_DELAYS_S, ListenerSettings, WhenFailing, delays_of
from memq.client.observers.reporter import reporting
from memq.errors import InvalidRequestError
from memq.limits import MIB
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.runtime.threads import ThreadPool
from memq.runtime.tls import Tls

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

Handler = Callable[[Message], object]


class BaseListener(KafkaHints, ABC):
    """Settings that the blocking and the asyncio listener share."""

    @public_name("Listener")
    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        topics: str | Sequence[str],
        group: str,
        handler: Callable[[Message], Any],
        *,
        concurrency: int = 1,
        ordered: bool = False,
        when_failing: WhenFailing = "dead-letter",
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        drain_s: float = 30,
        start: Point = "beginning",
        tags: str | Sequence[str] | None = None,
        where: str | None = None,
        session_timeout_ms: int = 10_000,
        commit_interval_ms: int = 1_000,
        prefetch_bytes_max: int = 64 * MIB,
        on_damaged: OnDamaged = "fail",
        on_expired: OnExpired = "fail",
        read: ReadMode = "auto",
        s3: Mapping[str, object] | None = None,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        audit: bool = True,
        encryption: Encryption | str | None = None,
        on_forgotten: OnForgotten = "deliver",
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        check_callbacks(handler=handler)
        if handler is None:
            raise TypeError("handler must be a function, not None")
        consumer = ConsumerSettings(
            topics=topics_of(topics),
            group=group,
            start=start,
            auto_commit_interval_ms=commit_interval_ms,
            session_timeout_ms=session_timeout_ms,
            prefetch_bytes_max=prefetch_bytes_max,
            on_damaged=on_damaged,
            on_expired=on_expired,
            wanted=filter_of(tags, where, on_forgotten),
            read=read,
            connect_timeout_ms=connect_timeout_ms,
            s3=s3,
            client_id=client_id,
            zone=zone,
            audit=audit,
            encryption=encryption_of(encryption),
        )
        self._settings = ListenerSettings(
            consumer=consumer,
            group=group,
            concurrency=concurrency,
            ordered=ordered,
            when_failing=when_failing,
            retry_delays_s=delays_of(retry_delays_s),
            drain_s=drain_s,
        ).check()
        self._handler = handler
        self._runtime = runtime_of(runtime, tls)
        self._core: CallsCore[ListenerStats] = self._open(bootstrap_addresses(brokers))

    @abstractmethod
    def _open(self, addresses: Sequence[Address]) -> ListenerCore:
        """Return the core."""

    def _new_core(
        self, addresses: Sequence[Address], call: Call, end_calls: Callable[[], Awaitable[object]] | None = None
    ) -> ListenerCore:
        observe = partial(reporting, "consumer") if self._settings.consumer.audit else None
        return ListenerCore(self._settings, self._runtime, addresses, call, observe=observe, end_calls=end_calls)


class Listener(BaseListener, BlockingCalls[ListenerStats]):
    """Calls `handler` for each record of a group's share of topics, in threads.

    The handler gets a `memq.Message`. If it returns, the record is done. If it raises, the record comes again after a
    delay. It may return or raise `memq.Retry`, `memq.Park` or `memq.DeadLetter`. Each record is handled at least once.
    docs/listener.md has the promises.

    Args:
        brokers: `HOST:PORT`, several with commas or as a list; None: the environment variable MEMQ_BROKERS.
        topics: one topic or several; all listeners of a group have the same.
        group: name of the group. It has a retry topic `<group>.retry`, which is read in a group of the same name, and a
            dead-letter topic `<group>.dead-letters`.
        handler: function of one message.
        concurrency: most handlers that run at the same time.
        ordered: records of one key are handled one after another, in their order. Records without a key have no order.
        when_failing: with `ordered`, for a record that has failed in all its tries. "dead-letter": it becomes a dead
            letter, and its key continues; "block": it is tried again until it succeeds, and its key waits; "park": it
            and all later records of its key wait among the dead letters.
        retry_delays_s: delay in s before each further try; its length + 1 is the number of tries.
        drain_s: time for which `close` waits for running handlers, and so does the release of a partition.
        start: as of `memq.Consumer`; it counts for the topics, not for the retry topic.
        tags: only records with one of these tags, as of `memq.Consumer`.
        where: only records whose headers match, as of `memq.Consumer`.
        commit_interval_ms: interval of commits.
        session_timeout_ms: as of `memq.Consumer`.
        prefetch_bytes_max: as of `memq.Consumer`.
        on_damaged: as of `memq.Consumer`.
        on_expired: as of `memq.Consumer`.
        read: as of `memq.Consumer`.
        s3: as of `memq.Consumer`.
        connect_timeout_ms: as of `memq.Consumer`.
        client_id: as of `memq.Consumer`.
        zone: as of `memq.Consumer`.
        audit: as of `memq.Consumer`.
        encryption: as of `memq.Consumer`.
        on_forgotten: as of `memq.Consumer`.
        tls: as of `memq.Consumer`.
        runtime: as of `memq.Consumer`.

    Raises: InvalidRequestError, InvalidSettingError, InvalidNameError, InvalidFilterError.
    """

    def _open(self, addresses: Sequence[Address]) -> ListenerCore:
        if inspect.iscoroutinefunction(self._handler):
            raise InvalidRequestError(
                "the handler of a memq.Listener is a coroutine function", hint="use memq.aio.Listener"
            )
        self._threads = ThreadPool("listener", self._settings.concurrency)
        core = self._new_core(addresses, self._call, lambda: self._threads.close(within_s=0))
        self._background = Background("listener", core)
        self._closed = False
        return core

    async def _call(self, message: Message) -> object:
        return await self._threads.run(self._handler, message)


class AsyncListener(BaseListener, AsyncCalls[ListenerStats]):
    """Calls a coroutine function for each record, in tasks. Arguments as those of `memq.Listener`.

    Use it as `async with`, on one event loop.
    """

    def _open(self, addresses: Sequence[Address]) -> ListenerCore:
        return self._new_core(addresses, self._call)

    async def _call(self, message: Message) -> object:
        answer = self._handler(message)
        return await answer if inspect.isawaitable(answer) else answer
