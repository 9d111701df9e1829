"""Requests of consumers by message: the broker's calls of the queue, and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.api import Ask, Call, WithBlocks, reader_requests
from memq.broker.api.group_requests import HEARTBEAT_S, REQUEST_S, GroupRequests, shown_member
from memq.broker.api.reader_requests import WAIT_MS_MAX, ReaderRequests
from memq.broker.metrics import Counters
from memq.broker.partition.recent_pointer_cache import RecentPointer, RecentPointerCache
from memq.broker.partitions import not_owner
from memq.errors import (
    InvalidRequestError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    QueueError,
    TimedOutError,
    TooLargeError,
)
from memq.format.pointer import Location
from memq.groups import GroupState, Membership
from memq.groups.remote import wire_of
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entries, Entry, Span
from memq.notification.remote import partition_of, ref_of
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.connection import ANONYMOUS
from memq.protocol.frames import Api
from memq.protocol.group_messages import (
    CommitAnswer,
    CommitRequest,
    DeleteGroup,
    DescribeGroup,
    HeartbeatRequest,
    JoinRequest,
    ListGroups,
    MembershipAnswer,
    WireRanges,
)
from memq.protocol.link import Link
from memq.protocol.messages import (
    PartitionEntries,
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollFrom,
    PollSpans,
    PollTime,
    error_of,
)
from memq.topic import STATE_TOPIC, Committed, Position, ReadPartition, Topic, TopicSettings, Totals, equal_slots
from tests.access import EVERYTHING
from tests.skipping_loop import now_s, run_skipping, skip

TOPIC_ID = "0a" * 16
COUNT = 4
PARTS = [ReadPartition("clicks", TOPIC_ID, number) for number in range(COUNT)]
BODY = b'{"a": 1}'
STORED = Committed(Position(1, 7, 2), Totals(70, 700))


class Queue:
    """A queue with logs of entries from `begin` to `end`; notes each call that reaches it."""

    def __init__(self, begin: int = 0, end: int = 3) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.logs = Span(begin, end)
        self.compacted = Span(0, end)  # with the compacted part
        self.failing: dict[int, MemqError] = {}

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of the calls of one name."""
        return [call[1:] for call in self.calls if call[0] == name]

    async def span(self, partition: ReadPartition) -> Span:
        self.calls.append(("span", partition.partition))
        if partition.partition in self.failing:
            raise self.failing[partition.partition]
        return self.logs

    async def join(self, *arguments: Any) -> Membership:
        self.calls.append(("join", *arguments))
        return Membership(5, (PARTS[1],), (PARTS[2],))

    async def heartbeat(self, *arguments: Any) -> Membership:
        self.calls.append(("heartbeat", *arguments))
        return Membership(6, (PARTS[1],))

    async def leave(self, *arguments: Any) -> None:
        self.calls.append(("leave", *arguments))

    async def commit(self, *arguments: Any) -> None:
        self.calls.append(("commit", *arguments))

    async def committed(self, *arguments: Any) -> dict[ReadPartition, Committed]:
        self.calls.append(("committed", *arguments))
        return {PARTS[1]: STORED}

    async def groups(self, *, proven: bool = True) -> Sequence[str]:
        self.calls += [] if proven else [("groups without a proof",)]
        return ("audience", "billing")

    async def delete_group(self, group: str) -> None:
        self.calls.append(("delete_group", group))

    async def describe(self, group: str, *, proven: bool = True) -> GroupState:
        self.calls += [] if proven else [("describe without a proof",)]
        return GroupState(group, 4, {"m-1": (PARTS[0], PARTS[1])}, {PARTS[1]: STORED})


class Pointers:
    """The reader of a broker's pointers: the logs of the queue with their compacted parts."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.body = BODY

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self._queue.calls.append(("read", partition.partition, offset, bytes_max))
        first = max(offset, self._queue.logs.begin)
        return Entries([Entry(first, 1, self.body)], first + 1)

    async def span(self, partition: ReadPartition) -> Span:
        self._queue.calls.append(("compacted span", partition.partition))
        return self._queue.compacted

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        self._queue.calls.append(("seek_time", partition.partition, time_ms))
        return 2

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        self._queue.calls.append(("wait", {each.partition: offset for each, offset in ends.items()}, timeout_s))


class Processor:
    """Write partition 1, with the end that its owner proves."""

    name = "clicks/1"

    def __init__(self) -> None:
        self.end = 0
        self.proving = asyncio.Event()
        self.proving.set()

    async def proven_end(self) -> int:
        await self.proving.wait()
        return self.end


class Topics:
    """One topic of `COUNT` read partitions."""

    def __init__(self) -> None:
        self.owned = Processor()
        self.processors = {(TOPIC_ID, 1): self.owned}

    async def current_topic(self, name: str, topic_id: str) -> Topic:
        if (name, topic_id) != ("clicks", TOPIC_ID):
            raise NotFoundError(f"topic '{name}' does not exist")
        return Topic(name=name, id=topic_id, created_ms=0, settings=TopicSettings(), partitions=equal_slots(COUNT))

    def owns(self, topic: Topic, partition: int) -> bool:
        return partition == 1

    def processor(self, topic: Topic, partition: int, *, to_end: bool) -> Processor:
        assert to_end == ((topic.id, partition) in self.processors), "what is at work answers until it is drained"
        if partition != 1:
            raise not_owner(topic, partition, {2: "b:2"}.get(partition, ""))
        return self.owned


class Hosts:
    """One coordinator has all groups; the queue notes its calls. The queue has no groups of an earlier release."""

    groups = None

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def check(self, find: object) -> None:
        pass

    def address_of(self, group: str) -> str:
        return "here:1"

    async def service_or_link(self, kind: None, group: str, *, forwarded: bool) -> Queue:
        return self._queue

    async def service_topic(self, *, create: bool) -> Topic:
        assert create
        return Topic(name=STATE_TOPIC, id=TOPIC_ID, created_ms=0, partitions=equal_slots(3))

    async def service_in(self, kind: None, topic: Topic, partition: int) -> Queue:
        return self._queue


class Handlers:
    """The handlers of a broker with that queue."""

    def __init__(self, queue: Queue | None = None) -> None:
        self.queue = queue or Queue()
        self.pointers = Pointers(self.queue)
        self.recent = RecentPointerCache()
        self.services = SimpleNamespace(
            queue=self.queue, pointers=self.pointers, recent_pointers=self.recent, counters=Counters()
        )
        self.topics = Topics()
        hosts = cast(Any, Hosts(self.queue))  # the `GroupMigrator`, too
        self.requests = GroupRequests(cast(Any, self.topics), hosts, hosts)
        self.readers = ReaderRequests(cast(Any, self.services), cast(Any, self.topics))

    async def wait(self, ask: PollEntries) -> list[tuple[Any, ...]]:
        """Let a POLL wait; return how it did."""
        await self.readers.prepare_poll(ask)
        return self.queue.named("wait")

    async def poll(self, ask: PollEntries | PollTime | PollSpans) -> PollAnswer:
        if isinstance(ask, PollEntries):
            answer = await self.readers.poll_entries(call(ask, await self.readers.prepare_poll(ask)))
        elif isinstance(ask, PollSpans):
            answer = await self.readers.poll_spans(call(ask))
        else:
            answer = await self.readers.poll_time(call(ask))
        assert isinstance(answer, PollAnswer)
        return answer

    async def entries(self, offset: int = 0, numbers: Sequence[int] = range(COUNT), **more: Any) -> dict[int, Any]:
        """Poll partitions; return what the answer has of each, by its number."""
        answer = await self.poll(PollEntries(partitions=[from_(number, offset) for number in numbers], **more))
        return {part.partition.partition: part for part in answer.partitions}


def call(ask: Ask, attachment: Any = None) -> Call[Ask]:
    return Call(cast(Any, SimpleNamespace(program="test")), ANONYMOUS, 0, ask, attachment, access=EVERYTHING)


def ref(number: int, topic: str = "clicks") -> PartitionRef:
    return PartitionRef(topic=topic, topic_id=TOPIC_ID, partition=number)


def from_(number: int, offset: int = 0) -> PollFrom:
    return PollFrom(partition=ref(number), offset=offset)


def shown(part: PartitionEntries) -> tuple[int, int, int, int]:
    """Return begin and end of an answer, how many entries it has, and where reading continues."""
    return part.begin, part.end, len(part.entries), part.next


def handling(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


# ---- POLL waits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait_ms", "waits_s"), [(0, None), (-5, None), (1, 0.001), (700, 0.7), (10**9, 30.0)])
def test_a_poll_waits_as_long_as_it_asks_to_within_a_bound(wait_ms: int, waits_s: float | None) -> None:
    async def work() -> None:
        assert WAIT_MS_MAX == 30_000
        waits = await Handlers().wait(PollEntries(partitions=[from_(1, 5), from_(3, 0)], wait_ms=wait_ms))
        assert waits == ([] if waits_s is None else [({1: 5, 3: 0}, waits_s)])

    handling(work())


def test_a_poll_of_an_unknown_partition_does_not_wait() -> None:
    async def work() -> None:
        unknown = PollFrom(partition=ref(0, "gone"), offset=0)
        assert await Handlers().wait(PollEntries(partitions=[unknown], wait_ms=50)) == [], "its answer says why"

    handling(work())


def test_a_poll_of_too_many_partitions_is_refused_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_requests, "POLL_PARTITIONS_MAX", 3)

    async def work() -> None:
        handlers = Handlers()
        fits, more = ([from_(number) for number in range(count)] for count in (3, 4))
        assert await handlers.wait(PollEntries(partitions=more, wait_ms=50)) == []
        with pytest.raises(TooLargeError, match="poll of 4 partitions at once, 3 are allowed"):
            await handlers.poll(PollEntries(partitions=more))
        with pytest.raises(TooLargeError):
            await handlers.poll(PollSpans(partitions=[each.partition for each in more]))
        assert handlers.queue.calls == []
        assert len(await handlers.wait(PollEntries(partitions=fits, wait_ms=50))) == 1
        assert len((await handlers.poll(PollEntries(partitions=fits))).partitions) == 3

    handling(work())


def test_a_pointer_that_was_just_published_is_answered_without_its_log() -> None:
    async def work() -> None:
        handlers = Handlers()
        for offset in (5, 6):
            handlers.recent.add(partition_of(ref(1)), RecentPointer(Entry(offset, offset, BODY), None))
        found = await handlers.entries(5, [1], wait_ms=50)
        assert (shown(found[1]), [entry.offset for entry in found[1].entries]) == ((5, 7, 2, 7), [5, 6])
        assert handlers.queue.calls == []
        found = await handlers.entries(5, [1, 2], wait_ms=50)
        assert shown(found[1]) == (5, 7, 2, 7)
        assert handlers.queue.named("wait") == [], "a pointer is here"
        assert handlers.queue.named("span") == [(2,)], "nothing is known of the other log"

    handling(work())


def test_a_poll_that_does_not_wait_asks_the_log() -> None:
    """It may confirm what an answer from memory has said."""

    async def work() -> None:
        handlers = Handlers()
        handlers.recent.add(partition_of(ref(1)), RecentPointer(Entry(0, 0, BODY), None))
        await handlers.entries(0, [1])
        assert (handlers.queue.named("span"), len(handlers.queue.named("read"))) == ([(1,)], 1)

    handling(work())


# ---- what POLL answers ---------------------------------------------------------------------------


def test_pointers_of_an_answer_stay_within_its_bytes() -> None:
    async def work() -> None:
        size = len(BODY)
        for bytes_max, read in ((0, 1), (1, 1), (size, 1), (size + 1, 2), (2 * size, 2), (3 * size, 3)):
            handlers = Handlers()
            found = await handlers.entries(bytes_max=bytes_max)
            assert [len(found[number].entries) for number in range(COUNT)] == [1] * read + [0] * (COUNT - read)
            asked = [(number, 0, max(0, bytes_max - number * size)) for number in range(read)]
            assert handlers.queue.named("read") == asked
            left_out = found[COUNT - 1]
            assert shown(left_out) == (0, 3, 0, -1), "nothing is said of what lies behind the asked offset"
        handlers = Handlers()
        await handlers.entries(bytes_max=10**12)
        assert handlers.queue.named("read")[0] == (0, 0, POLL_BYTES_MAX)

    handling(work())


@pytest.mark.parametrize(("spare_bytes", "count"), [(9, 0), (10, 1), (29, 2), (30, 3)])
def test_blocks_of_an_answer_stay_within_the_memory_that_is_free_for_them(spare_bytes: int, count: int) -> None:
    async def work() -> None:
        handlers = Handlers()
        handlers.services.recent_batches = SimpleNamespace(read=lambda key, offset, length: bytes(length))
        for offset in range(3):
            location = Location(store="main", key="k", offset=0, length=10)
            handlers.recent.add(partition_of(ref(1)), RecentPointer(Entry(offset, offset, BODY), location))
        ask = PollEntries(partitions=[from_(1)], wait_ms=50)
        spans = await handlers.readers.prepare_poll(ask)
        answer = await handlers.readers.poll_entries(replace(call(ask, spans), spare_bytes=spare_bytes))
        blocks = answer.blocks if isinstance(answer, WithBlocks) else []
        assert list(blocks) == [bytes(10)] * count

    handling(work())


def test_a_log_that_fails_has_no_begin_and_no_end() -> None:
    async def work() -> None:
        handlers = Handlers()
        handlers.queue.failing = {1: QueueError("no leader")}
        found = await handlers.entries()
        assert shown(found[1]) == (-1, -1, 0, -1)
        assert str(error_of(found[1].error)) == "no leader"
        assert [found[number].error for number in (0, 2, 3)] == [None] * 3

    handling(work())


def test_the_compacted_part_is_asked_for_only_where_the_queue_does_not_continue() -> None:
    async def work() -> None:
        handlers = Handlers(Queue(begin=2, end=5))
        found = await handlers.entries(2, [0])
        assert (shown(found[0]), handlers.queue.named("compacted span")) == ((2, 5, 1, 3), [])
        found = await handlers.entries(1, [0])
        assert (shown(found[0]), handlers.queue.named("compacted span")) == ((0, 5, 1, 3), [(0,)])
        found = await handlers.entries(5, [0])
        assert (shown(found[0]), handlers.queue.named("compacted span")) == ((2, 5, 0, 5), [(0,)]), "without news"
        assert len(handlers.queue.named("read")) == 2
        empty = Handlers(Queue(begin=4, end=4))
        assert shown((await empty.entries(4, [0]))[0]) == (4, 4, 0, 4)
        assert empty.queue.named("compacted span") == []

    handling(work())


def test_a_pointer_that_is_no_json_goes_apart() -> None:
    async def work() -> None:
        handlers = Handlers()
        sound = (await handlers.entries(0, [0]))[0].entries[0]
        assert (bytes(sound.pointer), sound.damaged, sound.offset, sound.time_ms) == (BODY, None, 0, 1)
        handlers.pointers.body = b"{torn"
        torn = (await handlers.entries(0, [0]))[0].entries[0]
        assert (bytes(torn.pointer), torn.damaged, torn.offset, torn.time_ms) == (b"null", b"{torn", 0, 1)

    handling(work())


def test_times_and_spans_are_those_of_the_log_with_its_compacted_part() -> None:
    async def work() -> None:
        handlers = Handlers(Queue(begin=2, end=5))
        assert await handlers.poll(PollTime(partition=ref(1), time_ms=90)) == PollAnswer(offset=2)
        assert handlers.queue.named("seek_time") == [(1, 90)]
        spans = await handlers.poll(PollSpans(partitions=[ref(2), ref(0)]))
        assert [(part.partition.partition, *shown(part)) for part in spans.partitions] == [
            (2, 0, 5, 0, -1),
            (0, 0, 5, 0, -1),
        ]

    handling(work())


def test_spans_that_an_owner_has_to_show_are_refused_by_others_with_its_address() -> None:
    async def work() -> None:
        handlers = Handlers(Queue(begin=2, end=5))
        spans = await handlers.poll(PollSpans(partitions=[ref(0)], writer=1))
        assert [part.end for part in spans.partitions] == [5]
        with pytest.raises(MovedError, match="partition 2 of topic 'clicks' is not at this broker") as moved:
            await handlers.poll(PollSpans(partitions=[ref(0)], writer=2))
        assert moved.value.address == "b:2"
        for nobody in (0, 3):
            with pytest.raises(NotReadyError, match=f"partition {nobody} of topic 'clicks' has no owner now"):
                await handlers.poll(PollSpans(partitions=[ref(0)], writer=nobody))
        assert len(handlers.queue.named("compacted span")) == 1

    handling(work())


def test_an_owner_shows_no_end_before_the_one_that_it_proved_and_none_without_a_proof() -> None:
    async def work() -> None:
        handlers = Handlers(Queue(begin=2, end=5))
        handlers.topics.owned.end = 9
        spans = await handlers.poll(PollSpans(partitions=[ref(0), ref(1)], writer=1))
        assert [part.end for part in spans.partitions] == [5, 9], "it proved the end of its own log"
        handlers.topics.owned.proving.clear()
        with pytest.raises(NotReadyError, match="clicks/1: its owner proved no end within 5 s"):
            await handlers.poll(PollSpans(partitions=[ref(1)], writer=1))

    handling(work())


@pytest.mark.parametrize(("number", "known"), [(-1, False), (0, True), (COUNT - 1, True), (COUNT, False)])
def test_partitions_of_a_topic_are_those_that_it_has(number: int, *, known: bool) -> None:
    async def work() -> None:
        asks: list[PollSpans | PollTime | PollEntries] = [
            PollSpans(partitions=[ref(number)]),
            PollTime(partition=ref(number), time_ms=1),
            PollEntries(partitions=[from_(number)]),
        ]
        for ask in asks:
            handlers = Handlers()
            if known:
                await handlers.poll(ask)
            else:
                with pytest.raises(NotFoundError, match=f"'clicks' has 4 read partitions, none is {number}"):
                    await handlers.poll(ask)
                assert handlers.queue.calls == []

    handling(work())


# ---- groups --------------------------------------------------------------------------------------


def test_a_member_joins_lives_and_leaves() -> None:
    async def work() -> None:
        handlers = Handlers()
        join = JoinRequest(group="g", member="m", partitions=[ref(1), ref(2)], session_timeout_ms=900)
        answer = await handlers.requests.join(call(join))
        owner = "here:1"
        assert answer == MembershipAnswer(generation=5, assigned=[ref(1)], revoking=[ref(2)], waits=True, owner=owner)
        beat = HeartbeatRequest(group="g", member="m", generation=5, released=[ref(2)])
        answer = await handlers.requests.heartbeat(call(beat))
        assert answer == MembershipAnswer(generation=6, assigned=[ref(1)], waits=True, owner=owner)
        leave = JoinRequest(group="g", member="m", leave=True)
        answer = await handlers.requests.join(call(leave))
        assert answer == MembershipAnswer(generation=-1), "a generation that is none"
        assert handlers.queue.calls == [
            ("join", "g", "m", [PARTS[1], PARTS[2]], 900),
            ("heartbeat", "g", "m", 5, [PARTS[2]]),
            ("leave", "g", "m"),
        ]
        unknown = JoinRequest(group="g", member="m", partitions=[ref(COUNT)])
        with pytest.raises(NotFoundError):
            await handlers.requests.join(call(unknown))

    handling(work())


def joined(*ranges: WireRanges) -> JoinRequest:
    return JoinRequest(group="g", member="m", ranges=list(ranges), session_timeout_ms=0, session_ms=900)


def test_a_member_joins_with_ranges_of_partitions() -> None:
    async def work() -> None:
        handlers = Handlers()
        topic, topic_id = PARTS[1].topic, PARTS[1].topic_id
        whole = WireRanges(topic=topic, topic_id=topic_id, bounds=(0, 1, 2, COUNT))
        await handlers.requests.join(call(joined(whole)))
        assert handlers.queue.calls == [("join", "g", "m", (PARTS[0], *PARTS[2:COUNT]), 900)]
        for bounds in ((), (0,), (0, 1, 2), (1, 0), (1, 1), (0, 1, 1, 2), (2, 3, 0, 1)):
            with pytest.raises(InvalidRequestError, match="not in order"):
                await handlers.requests.join(call(joined(WireRanges(topic=topic, topic_id=topic_id, bounds=bounds))))
        with pytest.raises(InvalidRequestError, match="one is named twice"):
            await handlers.requests.join(call(joined(whole, whole)))
        for bounds in ((-1, 1), (0, COUNT + 1)):
            with pytest.raises(NotFoundError):
                await handlers.requests.join(call(joined(WireRanges(topic=topic, topic_id=topic_id, bounds=bounds))))
        with pytest.raises(TooLargeError, match="a member wants 1099511627776 partitions, at most 65536"):
            await handlers.requests.join(call(joined(WireRanges(topic=topic, topic_id=topic_id, bounds=(0, 1 << 40)))))
        assert len(handlers.queue.calls) == 1

    handling(work())


def test_positions_are_stored_and_read() -> None:
    async def work() -> None:
        handlers = Handlers()
        wire = wire_of(PARTS[1], STORED)
        store = CommitRequest(group="g", member="m", generation=5, number=3, positions=[wire])
        assert await handlers.requests.commit(call(store)) == CommitAnswer()
        assert handlers.queue.calls == [("commit", "g", "m", 5, {PARTS[1]: STORED}, 3)]
        handlers.queue.calls.clear()
        read = CommitRequest(group="g", fetch=[ref(1), ref(2)])
        answer = await handlers.requests.commit(call(read))
        assert answer == CommitAnswer(positions=[wire])
        assert handlers.queue.calls == [("committed", "g", [PARTS[1], PARTS[2]])]

    handling(work())


def test_names_of_groups_are_checked_before_the_queue_is_asked() -> None:
    async def work() -> None:
        handlers = Handlers()
        for name in ("", "two words", "_memq_mine"):
            for join in (JoinRequest(group=name, member="m"), JoinRequest(group=name, member="m", leave=True)):
                with pytest.raises(InvalidRequestError):
                    await handlers.requests.join(call(join))
            with pytest.raises(InvalidRequestError):
                await handlers.requests.commit(call(CommitRequest(group=name, fetch=[ref(0)])))
        assert handlers.queue.calls == []

    handling(work())


BEAT = HeartbeatRequest(group="g", member="m", generation=1)


@pytest.mark.parametrize("ask", [BEAT, JoinRequest(group="g", member="m"), CommitRequest(group="g")])
def test_a_request_waits_for_the_owner_of_its_group_within_a_bound(ask: Any) -> None:
    """Another broker may be the owner by then. The member keeps its connection to this one."""

    class Hanging(Link):
        def __init__(self) -> None:
            pass

        async def request(self, api: Api, message: Any, answer: Any, *, timeout_s: float = 30.0, **_: Any) -> Any:
            await skip(timeout_s)
            raise TimedOutError(f"no answer to {api.name}")

    async def work() -> None:
        requests = Handlers(cast(Any, Hanging())).requests
        with pytest.raises(NotReadyError, match="the owner of group 'g' does not answer: no answer to "):
            await getattr(requests, type(ask).__name__.removesuffix("Request").lower())(call(ask))
        assert now_s() == (HEARTBEAT_S if ask is BEAT else REQUEST_S)

    handling(work())


def test_groups_are_listed_described_and_deleted() -> None:
    async def work() -> None:
        handlers = Handlers()
        assert await handlers.requests.list_groups(call(ListGroups())) == AdminAnswer(groups=["audience", "billing"])
        assert await handlers.requests.delete(call(DeleteGroup(group="g"))) == AdminAnswer()
        assert handlers.queue.calls == [("delete_group", "g")]
        answer = await handlers.requests.describe(call(DescribeGroup(group="g")))
        assert isinstance(answer, AdminAnswer)
        group = answer.group
        assert group is not None
        assert (group.group, group.generation) == ("g", 4)
        (member,) = group.members
        assert (member.member, member.assigned) == (shown_member("m-1"), [ref(0), ref(1)])
        assert [partition_of(each.partition) for each in group.positions] == [PARTS[1]]
        assert ref_of(PARTS[1]) == ref(1)
        handlers.queue.calls.clear()
        await handlers.requests.list_groups(call(ListGroups(proven=False)))
        await handlers.requests.describe(call(DescribeGroup(group="g", proven=False)))
        assert handlers.queue.calls == [("groups without a proof",), ("describe without a proof",)]

    handling(work())
