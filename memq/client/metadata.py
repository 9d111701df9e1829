"""A client's knowledge of the cluster: topics, owners, stores; asked of any broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from memq.client.link_pool import LinkPool
from memq.errors import (
    ClosedError,
    MemqError,
    NotFoundError,
    ProtocolError,
    RetryableError,
    TimedOutError,
    UnreachableError,
)
from memq.format.pointer import Pointer
from memq.protocol.frames import Api
from memq.protocol.messages import Metadata, MetadataRequest, Owner, StoreMetadata, TopicMetadata
from memq.runtime.clock import backoff_s
from memq.runtime.network import Address, format_address, parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Topic, check_resource_name

ANSWER_TIMEOUT_S = 5.0
UNCONFIRMED_MAX = 4  # ids of one name: a topic that is created again soon may have several
_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 1.0


@dataclass(slots=True)
class _Refresh:
    """One question for several topics: who comes before it is sent joins it."""

    names: dict[str, None] = field(default_factory=dict)
    task: asyncio.Task[MemqError | None] | None = None


class ClusterMetadata:
    """The cache of one client. It is filled by need and replaced by newer answers.

    Nothing here expires by itself.
    Newer is what has the higher version of the topic, and for each owner the higher epoch.
    """

    def __init__(self, runtime: Runtime, pool: LinkPool, on_topic: Callable[[Topic], None] | None = None) -> None:
        """`on_topic` receives every topic of an answer; it must not raise."""
        self.cluster = ""
        self.stores: tuple[StoreMetadata, ...] = ()
        self._runtime = runtime
        self._pool = pool
        self._on_topic = on_topic
        self._topics: dict[str, TopicMetadata] = {}
        self._doubted: dict[str, None] = {}
        self._unconfirmed: dict[str, list[str]] = {}  # by name: the last ids that no broker could confirm when learned
        self._next: dict[bool, _Refresh] = {}  # not sent yet, by `create`
        self._under_way: list[_Refresh] = []
        self._asking = asyncio.Lock()

    def known(self, name: str) -> TopicMetadata | None:
        """Return the last known state of a topic, without a request."""
        return self._topics.get(name)

    def owner(self, name: str, topic_id: str, partition: int) -> Address | None:
        """Return the last known address of a write partition's owner; None without one.

        Raises: NotFoundError when the topic is gone, or was created again under the same name.
        """
        known = self._topics.get(name)
        if known is None or known.topic.id != topic_id:
            raise NotFoundError(f"topic '{name}' with id {topic_id} does not exist any more")
        for owner in known.owners:
            if owner.partition == partition and owner.address:
                return parse_address(owner.address)
        return None

    def holders(self, pointer: Pointer) -> list[Address]:
        """Return the brokers that may have a batch in memory: its writer, then its partition's owner."""
        known = self._topics.get(pointer.topic)
        owners = [owner for owner in known.owners if owner.address] if known is not None else []
        found = [owner.address for owner in owners if owner.broker == pointer.broker]
        found += [owner.address for owner in owners if owner.partition == pointer.partition]
        return [parse_address(address) for address in dict.fromkeys(found)]

    def moved(self, name: str, topic_id: str, partition: int, address: str) -> None:
        """Note the owner that a broker named; the next answer with as high an epoch replaces it."""
        known = self._topics.get(name)
        if known is not None and known.topic.id == topic_id:
            for owner in known.owners:
                if owner.partition == partition:
                    owner.address = address

    def doubt(self, name: str, topic_id: str = "") -> None:
        """Ask again before a topic of this name is used: a broker answered that it does not exist.

        The answer is confirmed by the coordinator. What is known stays, since an older version must not replace it.
        """
        known = self._topics.get(name)
        if known is not None and topic_id in ("", known.topic.id):
            self._doubted[name] = None

    def is_unconfirmed(self, name: str, topic_id: str) -> bool:
        """Whether this id was learned while no broker could ask the coordinator, and was not confirmed since."""
        return topic_id in self._unconfirmed.get(name, ())

    async def topic(self, name: str, *, create: bool = False, timeout_s: float = 30.0) -> TopicMetadata:
        """Return a topic, asking when it is not known, and again until `timeout_s` while no broker answers.

        Raises: NotFoundError, InvalidNameError, UnreachableError, TimedOutError.
        """
        check_resource_name(name, internal=True)
        deadline = self._runtime.clock.monotonic() + timeout_s
        attempt = 0
        while name not in self._topics or name in self._doubted:
            try:
                await self.refresh(name, create=create)
            except RetryableError:
                attempt += 1
                delay = backoff_s(self._runtime.random, attempt, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX)
                if self._runtime.clock.monotonic() + delay >= deadline:
                    raise
                await asyncio.sleep(delay)
                continue
            if name not in self._topics:
                raise NotFoundError(f"topic '{name}' does not exist")
        return self._topics[name]

    async def refresh(self, name: str, *, create: bool = False) -> TopicMetadata | None:
        """Ask again for a topic; None when it does not exist. Concurrent callers share a request.

        Raises: UnreachableError when no broker answers; what a broker says against the question; ClosedError.
        """
        refresh = self._next.get(create)
        if refresh is None:
            refresh = self._next[create] = _Refresh()
            refresh.task = asyncio.get_running_loop().create_task(self._refresh(refresh, create))
            self._under_way.append(refresh)
        refresh.names[name] = None
        assert refresh.task is not None
        await asyncio.wait((refresh.task,))  # it continues if this caller is cancelled
        if refresh.task.cancelled():
            raise ClosedError(f"the client was closed while it asked for topic '{name}'")
        error = refresh.task.result()
        if error is not None:
            raise error
        return self._topics.get(name)

    async def all_topics(self) -> list[TopicMetadata]:
        """Ask for all topics. Raises: as `refresh`."""
        answer = await self.ask(MetadataRequest())
        self._topics = {}
        self._take(answer, [])
        return answer.topics

    async def ask(self, request: MetadataRequest) -> Metadata:
        """Ask brokers in turn until one can confirm the topics; else return the first answer.

        Raises: UnreachableError naming each of them; InvalidRequestError and DeniedError as the broker answered;
        ProtocolError for a topic that no client can use.
        """
        failures: list[str] = []
        unconfirmed: Metadata | None = None
        for address in self._pool.candidates():
            try:
                session = await self._pool.session(address)
                answer = await session.link.request(Api.METADATA, request, Metadata, timeout_s=ANSWER_TIMEOUT_S)
                _check_topics(address, answer)
                if not answer.unconfirmed:
                    return answer
                unconfirmed = unconfirmed or answer
            except TimedOutError as error:
                failures.append(str(error))
                for session in self._pool.sessions():
                    if session.link.address == address:
                        session.link.abort(UnreachableError(f"{format_address(address)} is silent"))
            except RetryableError as error:
                failures.append(str(error))
        if unconfirmed is not None:
            return unconfirmed
        raise UnreachableError(f"no broker answers: {'; '.join(failures[:5])}")

    async def close(self) -> None:
        """Give up the questions that wait for an answer."""
        tasks = [refresh.task for refresh in self._under_way if refresh.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, refresh: _Refresh, create: bool) -> MemqError | None:
        """Ask for the names that gathered.

        An error is returned, not raised: the callers may all have gone by then.
        """
        try:
            async with self._asking:
                del self._next[create]
                names = list(refresh.names)
                sure = [name for name in names if name in self._topics and name not in self._doubted]
                known = {name: self._topics[name].topic.id for name in sure}
                known = {name: topic_id for name, topic_id in known.items() if not self.is_unconfirmed(name, topic_id)}
                self._take(await self.ask(MetadataRequest(topics=names, create=create, known=known)), names)
        except MemqError as error:
            return error
        finally:
            self._under_way.remove(refresh)
        return None

    def _take(self, answer: Metadata, names: list[str]) -> None:
        self.cluster = answer.cluster
        self.stores = tuple(answer.stores)
        self._pool.learn([parse_address(broker) for broker in answer.brokers], answer.zones)
        known = {name: self._topics.pop(name) for name in names if name in self._topics}
        gone = [name for name in names if name in self._doubted]
        for name in gone:
            del self._doubted[name]
        for found in answer.topics:
            name = found.topic.name
            newest = _newest(known.get(name), found, confirmed=name in gone or name not in answer.unconfirmed)
            self._topics[name] = newest
            if name in answer.unconfirmed and newest is found:
                others = [each for each in self._unconfirmed.get(name, ()) if each != found.topic.id]
                self._unconfirmed[name] = [*others[1 - UNCONFIRMED_MAX :], found.topic.id]
            elif name not in answer.unconfirmed and self.is_unconfirmed(name, found.topic.id):
                self._unconfirmed[name].remove(found.topic.id)
            if self._on_topic is not None:
                self._on_topic(newest.topic)


def _check_topics(address: Address, answer: Metadata) -> None:
    for found in answer.topics:
        fault = found.topic.fault()
        if fault:
            raise ProtocolError(f"{format_address(address)} answers for topic '{found.topic.name[:60]}': {fault}")


def _newest(known: TopicMetadata | None, found: TopicMetadata, *, confirmed: bool) -> TopicMetadata:
    """Return the answer without outdated parts: brokers learn of changes one by one."""
    if known is None or known.topic.id != found.topic.id:
        return found if known is None or confirmed else known
    epochs = {owner.partition: owner for owner in known.owners}
    owners = [max(owner, epochs.get(owner.partition, owner), key=_epoch_of) for owner in found.owners]
    topic = known.topic if known.topic.version > found.topic.version else found.topic
    return TopicMetadata(topic=topic, owners=owners)


def _epoch_of(owner: Owner) -> int:
    return owner.epoch
