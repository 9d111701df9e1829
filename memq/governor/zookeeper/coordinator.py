"""The Coordinator port on ZooKeeper: each change is one transaction; no node per batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    TermFencedError,
    UnreachableError,
    VersionConflictError,
)
from memq.governor import Assignment, BrokerEntry, Load, RuleKeeper
from memq.governor.registry import check_topic, encode_topic, released_by
from memq.governor.watchers import Watchers
from memq.governor.zookeeper import layout, mirror
from memq.governor.zookeeper.layout import Government
from memq.governor.zookeeper.mirror import DecodedNodes, Mirror, MirroredValue, gathered
from memq.governor.zookeeper.rules import ZookeeperRules
from memq.governor.zookeeper.session import (
    CheckVersion,
    CreateNode,
    DeleteNode,
    Node,
    Operation,
    SetData,
    ZookeeperSession,
)
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.governor.zookeeper.takeovers import Takeovers
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic, check_name

BACKOFF_S_MAX = 2.0
RELEASES_AT_ONCE_MAX = 100  # in one transaction: far below ZooKeeper's limit on the size of a request
ROUND_PAUSE_FACTOR = 4  # pause of `_follow`, as a multiple of its last read, which covers all partitions:
ROUND_PAUSE_S_MAX = 1.0  # 10,000 partitions that close cause one change each
TopicPaths = tuple[Topic, list[str]]  # a topic, and the nodes of its assignments by partition


class ZookeeperCoordinator:
    """A coordinator for any number of brokers. Its first call connects, and creates missing nodes."""

    def __init__(self, address: ZookeeperAddress, settings: ZookeeperSettings, runtime: Runtime, cluster: str) -> None:
        self.cluster = check_name(cluster, "cluster")
        self._runtime = runtime
        self.address = address
        self._connect_s = settings.connect_timeout_ms / 1000
        events = self._events = EventLog(runtime.clock)
        self.session = ZookeeperSession(address, settings, events, self._connected)
        self.rules: RuleKeeper = ZookeeperRules(self.session, self._open)
        self._watchers = Watchers(events)
        self._changed = asyncio.Event()
        self._mirror = Mirror(self.session, self._changed.set)
        self._takeovers = Takeovers(self.session, self._mirror, self._changed.set, events)
        self._topics = DecodedNodes(_topic)
        self._assignments = DecodedNodes(_assignment)
        self._all_topics: MirroredValue[list[TopicPaths]] = MirroredValue(self._mirror)
        self._all_assignments: MirroredValue[list[Assignment]] = MirroredValue(self._mirror)
        self._tasks = TaskOwner(lambda error: events.error("zookeeper-failed", repr(error), error), events)
        self._registered: dict[str, BrokerEntry] = {}  # registered by this process, again after a lost session
        self._reports: dict[str, bytes] = {}  # the last loads of each of them, reported again with it
        self._registering = asyncio.Lock()  # guards `_registered` and `_reports`, and the nodes of each broker
        self._ready = False
        self._following = False
        self._readying = asyncio.Lock()

    async def close(self) -> None:
        """See `Coordinator.close`; closing twice is fine. All registrations of this session end at once."""
        await self._tasks.stop()
        await self._watchers.close()
        await self.session.close()

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """See `Coordinator.watch`."""
        if not self._following:
            self._following = True
            self._changed.clear()
            self._tasks.start(self._follow(), "follow")
        elif not self._watchers:
            self._changed.set()  # without watchers, `_follow` read no changes
        return self._watchers.watch(callback)

    # ---- membership --------------------------------------------------------------------------------

    async def register(self, broker: BrokerEntry) -> int | None:
        """See `Coordinator.register`."""
        check_name(broker.id, "broker")
        await self._open()
        async with self._registering:
            before = self._registered.get(broker.id)
            self._registered[broker.id] = broker  # before the node exists: the session may be lost in between
            try:
                return await self._register_node(broker)
            except BaseException:
                del self._registered[broker.id]
                if before is not None:
                    self._registered[broker.id] = before
                raise

    async def unregister(self, broker: BrokerEntry) -> None:
        """See `Coordinator.unregister`."""
        async with self._registering:
            ours = self._registered.get(broker.id)
            if ours is not None and ours.session == broker.session:
                del self._registered[broker.id]
                self._reports.pop(broker.id, None)
        await self._open()
        found = await self.session.find(layout.broker_path(broker.id))
        live = found is not None and self._entry(broker.id, found).session == broker.session
        held = [entry for entry in await self.assignments() if released_by(entry, broker, live=live) != entry]
        for start in range(0, len(held), RELEASES_AT_ONCE_MAX):
            await self._release_all(held[start : start + RELEASES_AT_ONCE_MAX], broker, live=live)
        if live and found is not None:
            await self._remove_node(broker, found)

    async def brokers(self) -> Sequence[BrokerEntry]:
        """See `Coordinator.brokers`."""
        await self._open()
        names = await self._mirror.children(layout.BROKERS)
        found = await self._mirror.nodes([layout.broker_path(name) for name in names])
        entries = [self._entry(name, node) for name, node in zip(names, found, strict=True) if node is not None]
        ended = await self._takeovers.ended()
        return [entry for entry in entries if entry.session not in ended]

    async def _register_node(self, broker: BrokerEntry) -> int | None:
        """Create the broker's node; it replaces the node of an older session. Return ZooKeeper's time of it."""
        path, data = layout.broker_path(broker.id), layout.encode(broker)
        while True:
            found = await self.session.find(path)
            try:
                if found is None:
                    await self.session.change(CreateNode(path, data, ephemeral=True))
                elif found.session == self.session.number:
                    await self.session.change(SetData(path, data, found.version))
                else:
                    await self.session.change(DeleteNode(path, found.version), CreateNode(path, data, ephemeral=True))
            except (AlreadyExistsError, NotFoundError, VersionConflictError):
                continue  # the node was created, removed or changed after `find`
            finally:
                self._mirror.forget(path)
            await self._takeovers.note_return(broker.session)
            stored = await self.session.find(path)
            return stored.modified_ms or None if stored is not None and stored.data == data else None

    async def _remove_node(self, broker: BrokerEntry, found: Node) -> None:
        path = layout.broker_path(broker.id)
        try:
            await self.session.change(DeleteNode(path, found.version))
        except (NotFoundError, VersionConflictError):
            pass  # another session with the same broker id has replaced the node
        finally:
            self._mirror.forget(path)
        governor = await self.session.find(layout.GOVERNOR)
        if governor is not None and self._government(governor).session == broker.session:
            await self._give_up(DeleteNode(layout.GOVERNOR, governor.version))
        if await self.session.find(layout.loads_path(broker.id)) is not None:
            await self._give_up(DeleteNode(layout.loads_path(broker.id)))

    async def _give_up(self, operation: DeleteNode) -> None:
        try:
            await self.session.change(operation)
        except (NotFoundError, VersionConflictError):
            pass  # ZooKeeper removed it at the end of the session
        finally:
            self._mirror.forget(operation.path)

    async def _release_all(self, entries: Sequence[Assignment], broker: BrokerEntry, *, live: bool) -> None:
        """Release assignments in one transaction.

        If another process changed one of them, release them one at a time.
        """
        puts = [_put(released_by(entry, broker, live=live)) for entry in entries]
        try:
            await self._change(*puts)
        except (VersionConflictError, NotFoundError):
            for entry in entries:
                await self._release(entry, broker, live=live)

    async def _release(self, entry: Assignment, broker: BrokerEntry, *, live: bool) -> None:
        """Release an assignment; read it again and retry when another process changes it."""
        while True:
            after = released_by(entry, broker, live=live)
            if after == entry:
                return
            try:
                await self.set_assignment(after)
            except VersionConflictError:
                entry = await self.assignment(entry.topic_id, entry.partition)
            except NotFoundError:
                return
            else:
                return

    # ---- topics ------------------------------------------------------------------------------------

    async def topics(self) -> Sequence[Topic]:
        """See `Coordinator.topics`."""
        await self._open()
        return [topic for topic, _ in await self._known_topics()]

    async def _known_topics(self) -> list[TopicPaths]:
        return await self._all_topics.value(self._read_topics)

    async def _read_topics(self) -> list[TopicPaths]:
        nodes = await self._mirror.children(layout.TOPICS)
        paths = [layout.topic_path(name) for name in sorted(map(layout.topic_of_node, nodes))]
        return self._topics.values(paths, await self._mirror.nodes(paths))

    async def create_topic(self, topic: Topic) -> None:
        """See `Coordinator.create_topic`."""
        check_topic(topic)
        await self._open()
        if await self.session.find(layout.topic_path(topic.name)) is not None:
            raise AlreadyExistsError(f"topic '{topic.name}' exists already")
        owned = [CreateNode(layout.partition_path(topic.id, part.partition), b"{}") for part in topic.partitions]
        first = CreateNode(layout.topic_path(topic.name), encode_topic(topic))
        try:
            await self._change(first, CreateNode(layout.id_path(topic.id), topic.name.encode()), *owned)
        except AlreadyExistsError as error:
            if await self.session.find(first.path) is not None:
                raise AlreadyExistsError(f"topic '{topic.name}' exists already") from error
            raise AlreadyExistsError(
                f"topic id {topic.id} was used before", hint="draw a new id; ids are never reused"
            ) from error

    async def alter_topic(self, topic: Topic) -> Topic:
        """See `Coordinator.alter_topic`."""
        check_topic(topic)
        await self._open()
        before, stored = await self._current_topic(topic)
        known = {part.partition for part in before.partitions}
        lost = known - {part.partition for part in topic.partitions}
        if lost:
            raise InvalidRequestError(f"topic '{topic.name}' would lose its partitions {sorted(lost)}")
        added = [
            CreateNode(layout.partition_path(topic.id, part.partition), b"{}")
            for part in topic.partitions
            if part.partition not in known
        ]
        body = encode_topic(topic, stored)
        await self._change(SetData(layout.topic_path(topic.name), body, topic.version - 1), *added)
        return msgspec.structs.replace(topic, version=topic.version + 1)

    async def delete_topic(self, topic: Topic) -> None:
        """See `Coordinator.delete_topic`."""
        await self._open()
        before, _ = await self._current_topic(topic)
        owned = [DeleteNode(layout.partition_path(topic.id, part.partition)) for part in before.partitions]
        await self._change(DeleteNode(layout.topic_path(topic.name), topic.version - 1), *owned)

    async def current_topic(self, name: str) -> Topic | None:
        """See `Coordinator.current_topic`. Without `sync` a server of ZooKeeper may lag behind its leader."""
        await self._open()
        path = layout.topic_path(name)
        await self.session.catch_up(path)
        node = await self.session.find(path)
        return None if node is None else layout.decode_topic(path, node.data, node.version)

    async def deleted(self, topic_id: str) -> bool:
        """See `Coordinator.deleted`.

        One transaction creates the nodes of the topic, of its id and of its partitions. A deletion removes all but
        the id's node, also in one transaction. So a server that lags may show a deleted topic, but never a deletion
        that did not happen. Partitions are checked by `find` and by `children`: one wrong answer proves nothing.
        """
        await self._open()
        above = layout.id_path(topic_id)
        known = await self.session.find(above)
        if known is None or await self.session.find(layout.partition_path(topic_id, 0)) is not None:
            return False
        if await self.session.children(above):
            return False
        path = layout.topic_path(known.data.decode(errors="replace"))
        node = await self.session.find(path)
        return node is None or layout.decode_topic(path, node.data, node.version).id != topic_id

    async def _current_topic(self, topic: Topic) -> tuple[Topic, bytes]:
        """Return the stored topic, and its bytes. Raises: NotFoundError, VersionConflictError."""
        path = layout.topic_path(topic.name)
        node = await self.session.find(path)
        found = layout.decode_topic(path, node.data, node.version) if node is not None else None
        if node is None or found is None or found.id != topic.id:
            raise NotFoundError(f"topic '{topic.name}' with id {topic.id} does not exist")
        if found.version != topic.version:
            raise VersionConflictError(f"topic '{topic.name}' has version {found.version}, not {topic.version}")
        return found, node.data

    # ---- assignments -------------------------------------------------------------------------------

    async def assignments(self) -> Sequence[Assignment]:
        """See `Coordinator.assignments`."""
        await self._open()
        return await self._all_assignments.value(self._read_assignments)

    async def _read_assignments(self) -> list[Assignment]:
        topics = sorted(await self._known_topics(), key=lambda known: known[0].id)
        paths = [path for _, owned in topics for path in owned]
        return self._assignments.values(paths, await self._mirror.nodes(paths))

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """See `Coordinator.assignment`."""
        await self._open()
        path = layout.partition_path(topic_id, partition)
        await self.session.catch_up(path)
        node = await self.session.find(path)
        if node is None:
            raise NotFoundError(f"partition {partition} of topic id {topic_id} does not exist")
        return _assignment(path, node)

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """See `Coordinator.set_assignment`."""
        path = layout.partition_path(assignment.topic_id, assignment.partition)
        known = self._mirror.known(path)  # usable only if it has the expected version: else it may be stale
        if known is not None and known.version == assignment.version:
            before = _assignment(path, known)
        else:
            before = await self.assignment(assignment.topic_id, assignment.partition)
        if before.version != assignment.version:
            raise _conflict(assignment, before.version)
        if assignment.epoch < before.epoch:
            raise InvalidRequestError(f"epoch {assignment.epoch} is below {before.epoch}: epochs only grow")
        try:
            await self._change(_put(assignment), *([CheckVersion(layout.TERM, term)] if term else []))
        except VersionConflictError as error:
            await self._check_term(term)
            raise _conflict(assignment, None) from error
        return msgspec.structs.replace(assignment, version=assignment.version + 1)

    async def _check_term(self, term: int) -> None:
        """Raise TermFencedError when `term` is not the last one; 0 is no term."""
        last = await self.session.read(layout.TERM)
        if term and last.version != term:
            raise TermFencedError(f"term {term} of the governor has ended, the last one is {last.version}")

    # ---- the governor ------------------------------------------------------------------------------

    async def govern(self, broker: BrokerEntry) -> int:
        """See `Coordinator.govern`."""
        await self._open()
        held, node = await self._takeovers.government()
        if held is None or node is None:
            return await self._takeovers.begin_term(broker)
        if held.session != broker.session or node.session != self.session.number:
            return 0
        await self._takeovers.repair()
        return held.term

    async def governor(self) -> str:
        """See `Coordinator.governor`."""
        await self._open()
        held, _ = await self._takeovers.government()
        return held.id if held is not None else ""

    async def take_over(self, suspect: BrokerEntry, *, term: int, now_ms: int) -> bool:
        """See `Coordinator.take_over`."""
        await self._open()
        return await self._takeovers.take_over(suspect, term, now_ms)

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """See `Coordinator.report`."""
        await self._open()
        async with self._registering:
            ours = self._registered.get(broker.id)
            if ours is None or ours.session != broker.session:
                return
            self._reports[broker.id] = layout.encode(list(loads))
            await self._report(broker.id)

    async def _report(self, broker_id: str) -> None:
        """Write a broker's last reported loads, if any, into a node of this session."""
        data = self._reports.get(broker_id)
        if data is None:
            return
        path = layout.loads_path(broker_id)
        found = await self.session.find(path)
        if found is not None and found.session == self.session.number:
            await self.session.change(SetData(path, data))
        else:
            older = [DeleteNode(path)] if found is not None else []
            await self.session.change(*older, CreateNode(path, data, ephemeral=True))

    async def loads(self) -> Sequence[Load]:
        """See `Coordinator.loads`."""
        await self._open()
        live = {broker.id for broker in await self.brokers()}
        names = [name for name in await self.session.children(layout.LOADS) if name in live]
        paths = [layout.loads_path(name) for name in names]
        found: list[Load] = []
        for path, node in zip(paths, await gathered(map(self.session.find, paths)), strict=True):
            found += layout.decode(path, node.data, list[Load]) if node is not None else []
        return sorted(found, key=lambda load: (load.topic_id, load.partition))

    async def store_mark(self, mark: str = "", *, before: str = "") -> str:
        """See `MarkKeeper.store_mark`."""
        await self._open()
        await self.session.catch_up(layout.STORE)
        node = await self.session.find(layout.STORE)
        found = node.data.decode(errors="replace") if node is not None else ""
        if not mark or found != before:
            return found
        path, data = layout.STORE, mark.encode()
        operation = CreateNode(path, data) if node is None else SetData(path, data, node.version)
        with suppress(AlreadyExistsError, NotFoundError, VersionConflictError):  # another broker was faster
            await self.session.change(operation)
        return (await self.session.read(layout.STORE)).data.decode(errors="replace")

    # ---- inside ------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Connect, and create missing nodes once.

        If ZooKeeper stops in between, retry for `connect_timeout_ms`.
        Raises: InvalidRequestError when another cluster uses the path; UnreachableError.
        """
        if self._ready:
            await self.session.start()
            return
        clock = self._runtime.clock
        until_s, tries = clock.monotonic() + self._connect_s, 0
        while True:
            try:
                await self.session.start()
                async with self._readying:
                    await self._open_once()
            except UnreachableError:
                if clock.monotonic() >= until_s:
                    raise
                tries += 1
                await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=0.1, most_s=BACKOFF_S_MAX))
            else:
                return

    async def _open_once(self) -> None:
        if self._ready:
            return
        await self.session.create_missing(layout.INITIAL_NODES)
        node = await self.session.find(layout.CLUSTER)
        if node is None:
            try:
                await self.session.change(CreateNode(layout.CLUSTER, self.cluster.encode()))
            except AlreadyExistsError:
                node = await self.session.read(layout.CLUSTER)
        found = node.data.decode(errors="replace") if node is not None else self.cluster
        if found != self.cluster:
            raise InvalidRequestError(
                f"ZooKeeper path {self.address.path} belongs to cluster {found[:60]!a}, not '{self.cluster}'",
                hint="set cluster to that name, or name another path in the coordinator's URL",
            )
        self._ready = True
        self._tasks.start(self._refresh(), "refresh")

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(mirror.REFRESH_S)
            with suppress(MemqError):  # the next refresh, or the next connection, reads again
                await self._mirror.refresh()

    async def _change(self, *operations: Operation) -> None:
        """Change nodes, and forget them in the mirror, also after an error: the change may have happened."""
        try:
            await self.session.change(*operations)
        finally:
            for operation in operations:
                self._mirror.forget(operation.path)
            self._changed.set()

    def _connected(self, lost: bool) -> None:
        """Take a new connection: all watches are gone, and after a loss all ephemeral nodes, too."""
        self._mirror.clear()
        if self._ready:
            self._changed.set()
        if lost and not self._tasks.stopped:
            for broker_id in self._registered:
                self._tasks.start(self._register_again(broker_id), f"register {broker_id}")

    async def _register_again(self, broker_id: str) -> None:
        """Register a broker after a lost session; retry until it is registered, or its id is taken.

        Every error of ZooKeeper is retried: one wrong answer must not exclude a broker until its restart.
        """
        tries = 0
        while True:
            try:
                async with self._registering:
                    broker = self._registered.get(broker_id)
                    if broker is not None and not await self._is_taken(broker):
                        await self._report(broker_id)  # first: the governor plans again when the broker is registered
                        await self._register_node(broker)
                        self._events.info("broker-entered-again", f"broker '{broker_id}' after a lost session")
                return
            except ClosedError:
                return
            except MemqError as error:
                tries += 1
                self._events.warning("zookeeper-enter-retry", f"broker '{broker_id}', try {tries}: {error}")
                await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))

    async def _is_taken(self, broker: BrokerEntry) -> bool:
        """Return whether another session has this broker's id, by two answers: one may be stale or wrong."""
        path, other = layout.broker_path(broker.id), ""
        for _ in range(2):
            await self.session.catch_up(path)
            found = await self.session.find(path)
            other = self._entry(broker.id, found).session if found is not None else broker.session
            if other == broker.session:
                return False
        text = f"broker '{broker.id}' was registered by session {other}, this one is {broker.session}"
        self._events.error("broker-id-taken", text)
        return True

    async def _follow(self) -> None:
        """After each change, read all that watchers follow, which renews the watches; then call them."""
        tries, known, clock = 0, False, self._runtime.clock
        while True:
            began_s = clock.monotonic()
            try:
                if self._watchers:
                    await self.brokers()
                    await self.assignments()
                    await self.governor()
            except MemqError as error:
                tries, known = tries + 1, True  # changes may have been missed: call the watchers after the next read
                self._events.warning("zookeeper-read-failed", f"try {tries}: {error}")
                await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=0.1, most_s=BACKOFF_S_MAX))
                self._changed.clear()
                continue
            if known:
                self._watchers.changed()
            tries, known = 0, True
            await asyncio.sleep(min(ROUND_PAUSE_FACTOR * (clock.monotonic() - began_s), ROUND_PAUSE_S_MAX))
            await self._changed.wait()
            self._changed.clear()  # after the first read: else a change since `watch` would be lost

    def _entry(self, name: str, node: Node) -> BrokerEntry:
        return layout.decode(layout.broker_path(name), node.data, BrokerEntry)

    def _government(self, node: Node) -> Government:
        return layout.decode(layout.GOVERNOR, node.data, Government)


def _topic(path: str, node: Node) -> TopicPaths:
    topic = layout.decode_topic(path, node.data, node.version)
    numbers = sorted(part.partition for part in topic.partitions)
    return topic, [layout.partition_path(topic.id, number) for number in numbers]


def _assignment(path: str, node: Node) -> Assignment:
    return layout.decode_assignment(path, node.data, node.version)


def _put(assignment: Assignment) -> SetData:
    path = layout.partition_path(assignment.topic_id, assignment.partition)
    return SetData(path, layout.encode_assignment(assignment), assignment.version)


def _conflict(assignment: Assignment, version: int | None) -> VersionConflictError:
    entry = f"assignment of partition {assignment.partition} of topic id {assignment.topic_id}"
    if version is None:
        return VersionConflictError(f"{entry} was changed meanwhile")
    return VersionConflictError(f"{entry} has version {version}, not {assignment.version}")
