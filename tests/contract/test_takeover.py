"""Early takeovers, over every coordinator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memq.errors import TermFencedError
from memq.governor import BrokerEntry, Coordinator
from tests.contract.coordinators import broker, over_coordinators, topic

NOW_MS = 1_760_000_000_000


def suspect(name: str, session: str) -> BrokerEntry:
    return replace(broker(name, session), host=f"host of {name}", pid=7)


@over_coordinators
async def test_a_governor_that_is_taken_over_governs_no_more_until_it_registers_again(coordinator: Coordinator) -> None:
    one, two = suspect("b1", "s1"), suspect("b2", "s2")
    await coordinator.create_topic(topic(partitions=1))
    (first,) = await coordinator.assignments()
    for each in (one, two):
        await coordinator.register(each)
    assert await coordinator.govern(one) == 1
    assert not await coordinator.take_over(two, term=0, now_ms=NOW_MS), "without a term only the governor is taken over"
    assert await coordinator.take_over(one, term=0, now_ms=NOW_MS)
    assert (list(await coordinator.brokers()), await coordinator.governor()) == ([two], "")
    assert [await coordinator.govern(each) for each in (one, two)] == [0, 2]
    with pytest.raises(TermFencedError, match="term 1 of the governor has ended"):
        await coordinator.set_assignment(replace(first, broker="b1"), term=1)
    with pytest.raises(TermFencedError, match="term 1 of the governor has ended"):
        await coordinator.take_over(two, term=1, now_ms=NOW_MS)
    assert list(await coordinator.loads()) == []
    await coordinator.register(one)
    assert list(await coordinator.brokers()) == [one, two]
    assert [await coordinator.govern(each) for each in (one, two)] == [0, 2]
    await coordinator.unregister(two)
    assert await coordinator.govern(one) == 3


@over_coordinators
async def test_the_last_broker_that_takes_partitions_is_not_taken_over(coordinator: Coordinator) -> None:
    """Two brokers that refuse each other took each other over, and no broker was a member until they came back."""
    one, two, leaving = suspect("b1", "s1"), suspect("b2", "s2"), replace(suspect("b3", "s3"), draining=True)
    for each in (one, two, leaving):
        await coordinator.register(each)
    term = await coordinator.govern(one)
    assert await coordinator.take_over(two, term=term, now_ms=NOW_MS)
    assert not await coordinator.take_over(one, term=0, now_ms=NOW_MS)
    assert (list(await coordinator.brokers()), await coordinator.governor()) == ([one, leaving], "b1")
    await coordinator.register(two)
    assert await coordinator.take_over(one, term=0, now_ms=NOW_MS)


@over_coordinators
async def test_a_registration_is_taken_over_once_a_minute(coordinator: Coordinator) -> None:
    one, two, three = suspect("b1", "s1"), suspect("b2", "s2"), suspect("b3", "s3")
    for each in (one, two, three):
        await coordinator.register(each)
    term = await coordinator.govern(one)
    assert await coordinator.take_over(two, term=term, now_ms=NOW_MS)
    assert not await coordinator.take_over(two, term=term, now_ms=NOW_MS + 120_000), "it is no member"
    await coordinator.register(two)
    assert not await coordinator.take_over(two, term=term, now_ms=NOW_MS + 59_999)
    assert await coordinator.take_over(three, term=term, now_ms=NOW_MS + 59_999), "others have a minute of their own"
    assert await coordinator.take_over(two, term=term, now_ms=NOW_MS + 60_000)
    four = suspect("b4", "s5")
    await coordinator.register(four)
    assert await coordinator.take_over(four, term=term, now_ms=NOW_MS + 600_000)
    assert list(await coordinator.brokers()) == [one], "sessions may last longer than the minute"
    again = suspect("b2", "s4")
    await coordinator.register(again)
    assert await coordinator.take_over(again, term=term, now_ms=NOW_MS + 600_001), "it is a new registration"
    assert list(await coordinator.brokers()) == [one]


@over_coordinators
async def test_only_the_suspected_registration_is_taken_over(coordinator: Coordinator) -> None:
    one, two = suspect("b1", "s1"), suspect("b2", "s2")
    await coordinator.register(one)
    term = await coordinator.govern(one)
    await coordinator.register(suspect("b2", "restarted"))
    assert not await coordinator.take_over(two, term=term, now_ms=NOW_MS), "it has restarted at the same address"
    leaving, older = replace(two, draining=True), broker("b2", "s2")
    for each in (leaving, older):
        await coordinator.register(each)
        assert not await coordinator.take_over(each, term=term, now_ms=NOW_MS), "it would not register again"
    assert not await coordinator.take_over(suspect("b9", "s9"), term=term, now_ms=NOW_MS)
    assert [each.id for each in await coordinator.brokers()] == ["b1", "b2"]
