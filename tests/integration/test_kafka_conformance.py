"""The contract of the queue behind a proxy that spoils each kind of request to a real Kafka, at each phase of its way.

Whatever is cut, late or falsified on the way: what comes of it is the right answer or an error that may pass. `make
check` has one life of a queue with each kind of request, at a phase that goes round; `make soak` has the product of
all kinds, phases and scenarios of the contract suite.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle, product

import pytest

from memq.clock import SystemClock
from memq.errors import DeniedError, GenerationFencedError, NotFoundError
from memq.notification import Membership, NotificationQueue, Span
from memq.notification.kafka import offsets
from memq.notification.log_reader import all_entries
from tests.contract import test_queue_log
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, Scenario, committed, part, publication, scenarios_of
from tests.integration.kafka import kafka_queue
from tests.integration.kafka_proxy import ApiKey, Fault, KafkaProxy, Phase, kafka_behind_proxy
from tests.integration.patient_queue import PatientQueue
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
OFFSETS = {
    "none": {"offset": -1},
    "library": {"offset": -1001},
    "lower": {"offset_more": -2},
    "higher": {"offset_more": 5},
}
VALUES = [*({"error": code} for code in ERRORS.values()), *OFFSETS.values()]
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
    await queue.commit("outside", "", -1, {part(): committed(2)})
    assert await queue.committed("outside", [part(0), part(1)]) == {part(): committed(2)}
    held = await joined(queue)
    await queue.commit("inside", "a", held.generation, {part(): committed(3)})
    assert await queue.committed("inside", [part()]) == {part(): committed(3)}
    await queue.leave("inside", "a")
    assert {"inside", "outside"} <= set(await queue.groups())
    assert (await queue.describe("outside")).committed == {part(): committed(2)}
    await queue.delete_group("outside")
    await queue.trim(part(), 3)
    assert await queue.span(part()) == Span(3, 4)
    assert [entry.body for entry in await queue.read(part(), 0, 1 << 20)] == [b"3"]
    await queue.drop([part(0), part(1)])


async def joined(queue: NotificationQueue) -> Membership:
    """Return the membership of the only member of a group, once it has all that it wants."""
    wanted = (part(0), part(1))
    held = await queue.join("inside", "a", wanted, 6_000)
    while held.assigned != wanted:
        try:
            held = await queue.heartbeat("inside", "a", held.generation)
        except GenerationFencedError:
            held = await queue.join("inside", "a", wanted, 6_000)
        await queue.wait({}, 0.05)
    return held


def over(proxy: KafkaProxy, fault: Fault, scenario: Scenario) -> None:
    async def run() -> None:
        clock = ManualClock(SystemClock().wall_ms() - BEHIND_MS)
        queue = PatientQueue(kafka_queue(proxy.address, request_timeout_ms=1_500, publish_timeout_ms=8_000))
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(queue, clock)
        finally:
            await queue.close()

    proxy.arm(fault)
    try:
        asyncio.run(run())
    finally:
        proxy.arm(None)


@pytest.mark.parametrize(("key", "phase"), SAMPLE, ids=lambda each: each.name.lower())
def test_a_life_with_a_spoiled_request(proxy: KafkaProxy, key: ApiKey, phase: Phase) -> None:
    spoiled(proxy, key, phase)


@pytest.mark.soak
@pytest.mark.parametrize(("key", "phase"), OTHERS, ids=lambda each: each.name.lower())
def test_a_life_with_each_request_spoiled_in_each_phase(proxy: KafkaProxy, key: ApiKey, phase: Phase) -> None:
    spoiled(proxy, key, phase)


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


@pytest.mark.parametrize("values", VALUES, ids=[*ERRORS, *OFFSETS])
def test_a_life_with_false_offsets(proxy: KafkaProxy, values: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error or offset replaces the true one: an error, or the truth; the next answer is believed again."""
    monkeypatch.setattr(offsets, "SAID_S", 0.2)
    fault = Fault(ApiKey.LIST_OFFSETS, Phase.FALSE, 1, **values)
    over(proxy, fault, lambda queue, clock: false_life(queue, clock, fault))
    assert not fault.times


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
        except (DeniedError, NotFoundError):
            assert fault.error, "a value is no denial"
            continue
        break
    assert (pages, span.end) == ([b"0", b"1", b"2", b"3"], 4)


def spoiled(proxy: KafkaProxy, key: ApiKey, phase: Phase) -> None:
    fault = Fault(key, phase, TIMES)
    over(proxy, fault, life)
    assert fault.times < TIMES, f"no {key.name} request was met"
