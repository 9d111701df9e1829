"""The contract of the queue through a proxy that spoils each kind of Kafka request at each phase.

Whatever is cut, late or falsified on the way: what comes of it is the right answer or an error that may pass. `make
check` has one life of a queue with each kind of request, at a phase that goes round; `make soak` has the product of
all kinds, phases and scenarios of the contract suite.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count, cycle, product

import pytest

from memq.aio import Producer
from memq.errors import DeniedError, RetryableError
from memq.notification import NotificationQueue, Span
from memq.notification.kafka import queue, topic_metadata_cache
from memq.notification.kafka.reading import offsets
from memq.notification.log_reader import all_entries
from memq.runtime.clock import SystemClock
from tests.component.cluster_rig import read_from
from tests.contract import test_queue_log
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, Scenario, committed, part, publication, scenarios_of
from tests.integration.kafka import kafka_queue
from tests.integration.kafka_answers import (
    LAYOUTS,
    Described,
    Fenced,
    Fetched,
    FewerPartitions,
    Lie,
    NoPositions,
    Offsets,
    Older,
    Produced,
    Refused,
)
from tests.integration.kafka_proxy import ApiKey, Fault, KafkaProxy, Phase, kafka_behind_proxy
from tests.integration.queued_broker import broker_on
from tests.integration.retrying_queue import RetryingQueue
from tests.soak import SOAKING

BEHIND_MS = 10_000
TIMES = 2
SLOW = ["test_a_long_trim_takes_all", "test_many_publishes_at_once_get_one_offset_each"]  # publish thousands at once
ROUGH = [phase for phase in Phase if phase is not Phase.FALSE]
SAMPLE = list(zip(ApiKey, cycle(ROUGH), strict=False))
ALL = list(product(ApiKey, ROUGH))
ERRORS = {"unknown-topic": 3, "not-leader": 6, "timed-out": 7, "denied": 29, "offset-out-of-range": 1, "fenced": 74} | {
    "unknown-epoch": 75,
    "not-available": 78,
    "storage": 56,
    "server": -1,
}
FETCH_ERRORS = ("unknown-topic", "not-leader", "offset-out-of-range", "fenced", "storage", "server")
PRODUCE_ERRORS = (0, 3, 6, 7, 10, 19, 32, 45, 46, 47, 56, 59, 87, -1)
REPEATED = 59  # UNKNOWN_PRODUCER_ID: the library sends again what has landed, under a new id
OFFSETS = {name: Offsets(error=code) for name, code in ERRORS.items()} | {
    "none": Offsets(value=-1),
    "library": Offsets(value=-1001),
    "lower": Offsets(more=-2),
    "higher": Offsets(more=5),
}
LIES = {
    **{f"fetch-{name}": (ApiKey.FETCH, Fetched(error=ERRORS[name])) for name in FETCH_ERRORS},
    "fetch-older": (ApiKey.FETCH, Fetched(older=2)),
    "fetch-empty": (ApiKey.FETCH, Fetched(empty=True)),
    "fetch-flipped": (ApiKey.FETCH, Fetched(flipped=True)),
    **{f"metadata-{name}": (ApiKey.METADATA, Described(error=ERRORS[name])) for name in ("unknown-topic", "server")},
    "metadata-without-topics": (ApiKey.METADATA, Described(absence=True)),
    "metadata-fewer-partitions": (ApiKey.METADATA, Described(fewer=True)),
    "metadata-no-leader": (ApiKey.METADATA, Described(leader=-1)),
    "metadata-other-leader": (ApiKey.METADATA, Described(leader=77)),
    "metadata-older": (ApiKey.METADATA, Older()),
    **{f"produce-{code}": (ApiKey.PRODUCE, Produced(code)) for code in PRODUCE_ERRORS if code != REPEATED},
}
# Errors in the answers of all other kinds, whatever Kafka has done. Some make no sense where they come.
FALSE_ERRORS = {"loading": 14, "no-coordinator": 15, "moved": 16, "generation": 22, "member": 25, "rebalance": 27} | {
    "timed-out": 7,
    "server": -1,
    "not-controller": 41,
    "unknown-topic": 3,
}
REFUSED = list(product(map(ApiKey, LAYOUTS), FALSE_ERRORS))[:: 1 if SOAKING else 9]
NUMBERS = count()
EVER = 1 << 30
READING = {name: each for name, each in LIES.items() if each[0] is not ApiKey.PRODUCE}
FALSE = [(*each, times) for each in READING.values() for times in (1, EVER)]
if not SOAKING:
    FALSE = [*FALSE[::2], (*LIES["fetch-empty"], EVER), (*LIES["metadata-unknown-topic"], EVER)]
SAMPLE_LIES = [LIES["fetch-older"]]
SCENARIOS = scenarios_of(test_queue_log, without=SLOW)[:: 1 if SOAKING else 6]
LOST = (ApiKey.LIST_OFFSETS, Phase.BEFORE)  # librdkafka answers offset -1001
OTHERS = [each for each in ALL if each not in SAMPLE] if SOAKING else [LOST]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProxy]:
    with kafka_behind_proxy(tmp_path_factory.mktemp("behind-proxy")) as (_, found):
        yield found


async def life(queue: NotificationQueue, clock: ManualClock) -> None:
    """Make every kind of request that memq makes of Kafka."""
    await queue.check()
    await queue.create([part(0)], STALE_MS)
    await queue.create([part(0), part(1)], 2 * STALE_MS)
    for number in range(4):
        assert await queue.publish(publication(clock, b"%d" % number)) == number
        clock.advance(1)
    assert await queue.span(part()) == Span(0, 4)
    pages = [entry.body async for page in all_entries(queue, part()) for entry in page]
    assert pages == [b"0", b"1", b"2", b"3"]
    assert await queue.seek_time(part(), clock.wall_ms() - 2) == 2
    await queue.wait({part(): 3}, 10)
    await queue.former.store("outside", {part(): committed(2)})
    assert "outside" in await queue.former.names()
    assert (await queue.former.read("outside")).committed == {part(): committed(2)}
    await queue.former.remove("outside")
    await queue.trim(part(), 3)
    assert await queue.span(part()) == Span(3, 4)
    assert [entry.body for entry in await queue.read(part(), 0, 1 << 20)] == [b"3"]
    await queue.drop([part(0), part(1)])


def over(proxy: KafkaProxy, fault: Fault, scenario: Scenario) -> None:
    async def run() -> None:
        async with opened(proxy) as queue:
            await scenario(RetryingQueue(queue), behind())

    struck(proxy, fault, run())


def behind() -> ManualClock:
    return ManualClock(SystemClock().wall_ms() - BEHIND_MS)


@asynccontextmanager
async def opened(proxy: KafkaProxy, **section: object) -> AsyncIterator[NotificationQueue]:
    queue = kafka_queue(proxy.address, **{"request_timeout_ms": 1_500, "publish_timeout_ms": 8_000, **section})
    try:
        yield queue
    finally:
        await queue.close()


def struck(proxy: KafkaProxy, fault: Fault, work: Coroutine[None, None, None]) -> None:
    """Run this while requests meet the fault."""
    proxy.arm(fault)
    try:
        asyncio.run(asyncio.wait_for(work, HANG_S))
    finally:
        proxy.arm(None)


@pytest.mark.parametrize(("key", "phase"), SAMPLE, ids=lambda each: each.name.lower())
def test_a_life_with_a_spoiled_request(proxy: KafkaProxy, key: ApiKey, phase: Phase) -> None:
    spoiled(proxy, Fault(key, phase, TIMES))


@pytest.mark.soak
@pytest.mark.parametrize(("key", "phase"), OTHERS, ids=lambda each: each.name.lower())
def test_a_life_with_each_request_spoiled_in_each_phase(proxy: KafkaProxy, key: ApiKey, phase: Phase) -> None:
    spoiled(proxy, Fault(key, phase, TIMES))


@pytest.mark.soak
@pytest.mark.parametrize(("key", "phase"), ALL if SOAKING else [LOST], ids=lambda each: each.name.lower())
@pytest.mark.parametrize(
    "scenario",
    SCENARIOS,
    ids=lambda scenario: scenario.__name__,
)
def test_the_contract_with_each_request_spoiled(
    proxy: KafkaProxy, key: ApiKey, phase: Phase, scenario: Scenario
) -> None:
    over(proxy, Fault(key, phase, TIMES), scenario)


@pytest.mark.parametrize("lie", OFFSETS.values(), ids=OFFSETS)
def test_a_life_with_false_offsets(proxy: KafkaProxy, lie: Offsets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error or offset replaces the true one: an error, or the truth; the next answer is believed again."""
    monkeypatch.setattr(offsets, "LOWER_END_S", 0.2)
    fault = Fault(ApiKey.LIST_OFFSETS, Phase.FALSE, 1, lie)
    over(proxy, fault, lambda queue, clock: false_life(queue, clock, fault))
    assert not fault.times


@pytest.mark.soak
@pytest.mark.parametrize(("key", "lie"), LIES.values(), ids=LIES)
def test_a_life_with_false_answers(proxy: KafkaProxy, key: ApiKey, lie: Lie) -> None:
    spoiled(proxy, Fault(key, Phase.FALSE, TIMES, lie))


@pytest.mark.soak
@pytest.mark.parametrize(("key", "lie"), LIES.values() if SOAKING else SAMPLE_LIES, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_contract_with_false_answers(proxy: KafkaProxy, key: ApiKey, lie: Lie, scenario: Scenario) -> None:
    over(proxy, Fault(key, Phase.FALSE, TIMES, lie), scenario)


@pytest.mark.soak
@pytest.mark.parametrize(("key", "error"), REFUSED, ids=lambda each: getattr(each, "name", each))
def test_a_life_with_false_errors(proxy: KafkaProxy, key: ApiKey, error: str) -> None:
    """An error in place of what Kafka has done is no reason to give up, whatever it says."""
    spoiled(proxy, Fault(key, Phase.FALSE, TIMES, Refused(FALSE_ERRORS[error])))


def test_that_a_group_has_no_position_takes_two_answers(proxy: KafkaProxy) -> None:
    fault = Fault(ApiKey.OFFSET_FETCH, Phase.FALSE, 0, NoPositions())

    async def scenario(queue: NotificationQueue, _: ManualClock) -> None:
        await queue.create([part(0), part(1)], STALE_MS)
        await queue.former.store("outside", {part(): committed(0)})
        fault.times = 1
        assert (await queue.former.read("outside")).committed == {part(): committed(0)}
        assert fault.times == 0

    over(proxy, fault, scenario)


@pytest.mark.parametrize("topics", [False, True])
def test_a_position_that_an_answer_lacks_takes_two_answers_to_be_none(proxy: KafkaProxy, *, topics: bool) -> None:
    fault = Fault(ApiKey.OFFSET_FETCH, Phase.FALSE, 0, FewerPartitions(topics=topics))
    positions = {part(0): committed(3), part(1): committed(5, partition=1)}

    async def scenario(queue: NotificationQueue, _: ManualClock) -> None:
        await queue.create([part(0), part(1)], STALE_MS)
        await queue.former.store("outside", positions)
        fault.times = 1
        assert (await queue.former.read("outside")).committed == positions
        assert fault.times == 0

    over(proxy, fault, scenario)


@pytest.mark.parametrize("topics", [False, True])
def test_positions_that_the_answer_to_a_commit_lacks_are_stored_or_an_error(proxy: KafkaProxy, *, topics: bool) -> None:
    fault = Fault(ApiKey.OFFSET_COMMIT, Phase.FALSE, 1, FewerPartitions(topics=topics))
    positions = {part(0): committed(3), part(1): committed(5, partition=1)}

    async def scenario(queue: NotificationQueue, _: ManualClock) -> None:
        await queue.create([part(0), part(1)], STALE_MS)
        await queue.former.store("outside", positions)
        assert fault.times == 0
        assert (await queue.former.read("outside")).committed == positions

    over(proxy, fault, scenario)


@pytest.mark.parametrize(("key", "lie", "times"), FALSE, ids=str)
def test_a_reader_of_false_answers(
    proxy: KafkaProxy, key: ApiKey, lie: Lie, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that was seen is neither gone nor shorter: each question is answered rightly, or fails for now."""
    monkeypatch.setattr(topic_metadata_cache, "FRESH_S", -1.0)  # each question reads the topic again
    monkeypatch.setattr(queue, "LEADERLESS_S_MAX", 0.2)
    fault = Fault(key, Phase.FALSE, 0, lie)
    struck(proxy, fault, lied_to(proxy, fault, times))


async def lied_to(proxy: KafkaProxy, fault: Fault, times: int) -> None:
    """Ask everything of a queue that knows the topic, while one kind of answers is false."""
    clock, prefix = behind(), f"lied{next(NUMBERS)}."
    async with opened(proxy, prefix=prefix) as writer:
        await writer.create([part(0)], STALE_MS)
        for number in range(4):
            assert await writer.publish(publication(clock, b"%d" % number)) == number
    async with opened(proxy, prefix=prefix, request_timeout_ms=700) as reader:
        assert await patiently(lambda: reader.span(part())) == Span(0, 4)  # 700 ms are little on a busy machine
        for ask, right in questions(reader, clock.wall_ms()).items():
            fault.times = times
            with suppress(RetryableError):
                assert await ask() in right
            fault.times = 0
            assert await patiently(ask) in right


def questions(reader: NotificationQueue, time_ms: int) -> dict[Callable[[], Awaitable[object]], list[object]]:
    """Return what is asked of a log of four, and the right answers."""

    async def pages() -> list[bytes]:
        return [entry.body async for page in all_entries(reader, part()) for entry in page]

    async def rest() -> list[bytes]:
        return [entry.body for entry in await reader.read(part(), 2, 1 << 20)]

    return {
        pages: [[b"0", b"1", b"2", b"3"]],
        rest: [[b"2", b"3"], [b"2"]],
        lambda: reader.span(part()): [Span(0, 4)],
        lambda: reader.seek_time(part(), time_ms): [0, 4],
    }


async def patiently(ask: Callable[[], Awaitable[object]]) -> object:
    """Ask until the answer is no error that may pass."""
    while True:
        with suppress(RetryableError):
            return await ask()


@pytest.mark.parametrize("code", PRODUCE_ERRORS if SOAKING else PRODUCE_ERRORS[::3])
def test_pointer_that_was_refused_but_landed_is_no_loss_of_the_queue(proxy: KafkaProxy, code: int) -> None:
    """Neither a false offset nor an end of the queue: the next publishes are answered with the place where they lie."""

    async def scenario(queue: NotificationQueue, clock: ManualClock) -> None:
        await queue.create([part(0)], STALE_MS)
        for number in range(3):
            offset = await queue.publish(publication(clock, b"%d" % number))
            assert [entry.body for entry in await queue.read(part(), offset, 1)] == [b"%d" % number]

    over(proxy, Fault(ApiKey.PRODUCE, Phase.FALSE, TIMES, Produced(code)), scenario)


def test_a_kafka_that_names_no_broker_at_first_is_asked_again(proxy: KafkaProxy) -> None:
    """The library waited for its next refresh: up to 30 s after a pause of Kafka no owner could read its log."""

    async def scenario() -> None:
        prefix = "no-broker."
        # By a queue of its own: the library remembers up to its next refresh that a topic was missing.
        async with opened(proxy, prefix=prefix) as maker:
            await RetryingQueue(maker).create([part(0)], STALE_MS)
            assert await RetryingQueue(maker).span(part()) == Span(0, 0)
        seldom = {"topic.metadata.refresh.interval.ms": str(5 * 1000 * HANG_S)}
        async with opened(proxy, prefix=prefix, **seldom) as queue:
            for fault in (
                Fault(ApiKey.METADATA, Phase.BEFORE, EVER),
                Fault(ApiKey.METADATA, Phase.FALSE, EVER, Fenced()),
            ):
                proxy.arm(fault)
                for _ in range(2):
                    with pytest.raises(RetryableError):
                        await queue.check()
            fault.times = 0
            assert await RetryingQueue(queue).span(part()) == Span(0, 0)

    struck(proxy, Fault(ApiKey.METADATA, Phase.FALSE, 0, Fenced()), scenario())


@pytest.mark.parametrize("more", [100, 1, -1, -2] if SOAKING else [100, -1])
def test_a_false_offset_of_a_publish_stops_no_partition_and_is_in_no_ack(proxy: KafkaProxy, more: int) -> None:
    """One that was too high stopped the partition until the broker was started again."""
    fault = Fault(ApiKey.PRODUCE, Phase.FALSE, 0, Produced(more=more))

    async def scenario() -> None:
        values = [b"%d" % number for number in range(9)]
        async with opened(proxy) as queue, broker_on(queue) as broker, Producer(broker.address) as producer:
            acks = []
            for number, value in enumerate(values):
                fault.times = TIMES if number == 3 else fault.times
                acks.append(await (await producer.send("clicks", value, partition=0)))
            assert fault.times == 0
            places = [ack.position for ack in acks]
            for number, place in enumerate(places):
                if place is not None:
                    assert await read_from(broker, place) == values[number:]
            assert None not in (places[0], places[-1]), "only where the answer was false the position is in doubt"

    struck(proxy, fault, scenario())


def test_refused_pointer_is_not_published_even_if_kafka_reports_success(proxy: KafkaProxy) -> None:
    async def scenario() -> None:
        clock = behind()
        async with opened(proxy) as queue:
            await queue.create([part(0)], STALE_MS)
            with pytest.raises(RetryableError):
                await queue.publish(publication(clock, age_ms=10 * STALE_MS))
            assert await queue.span(part()) == Span(0, 0)

    struck(proxy, Fault(ApiKey.PRODUCE, Phase.FALSE, TIMES, Produced(0)), scenario())


async def false_life(queue: NotificationQueue, clock: ManualClock, fault: Fault) -> None:
    """Ask for offsets while one answer is false: retryable errors are asked again, others are tried again here."""
    times, fault.times = fault.times, 0
    await queue.create([part(0)], STALE_MS)
    for number in range(4):
        assert await queue.publish(publication(clock, b"%d" % number)) == number
    fault.times = times
    while True:
        try:
            pages = [entry.body async for page in all_entries(queue, part()) for entry in page]
            span = await queue.span(part())
        except DeniedError:
            assert fault.lie == OFFSETS["denied"], "only a denial is one"
            continue
        break
    assert (pages, span.end) == ([b"0", b"1", b"2", b"3"], 4)


def spoiled(proxy: KafkaProxy, fault: Fault) -> None:
    over(proxy, fault, life)
    assert fault.times < TIMES, f"no {fault.key.name} request was met"
