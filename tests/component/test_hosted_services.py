"""The services of a broker follow their partitions: opened, given up, refused, and asked of the right broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.service_partitions import hosts
from memq.broker.service_partitions.hosts import OPENING_TRIES, STATE_PARTITIONS
from memq.broker.upkeep.deleted_topics import FORGET_S
from memq.errors import (
    LogLostError,
    MovedError,
    NotReadyError,
    QueueError,
    StoreError,
    ThrottledError,
    TimedOutError,
    UnreachableError,
    UnsupportedFormatError,
)
from memq.format.held_object import HoldId, Target
from memq.format.key import state_prefix
from memq.governor import Assignment
from memq.groups.coordinator import GroupCoordinator
from memq.holds.decisions import HoldState
from memq.holds.keeper import HoldKeeper
from memq.holds.storing import NewHold
from memq.protocol.link import Link
from memq.runtime.runtime import Runtime
from memq.storage_handlers import ObjectEntry
from memq.topic import (
    STATE_TOPIC,
    Committed,
    Position,
    Topic,
    TopicSettings,
    read_partitions,
)
from tests.component.hosted_broker import OTHER, STATE, Hosted, StillLink, events, hosting
from tests.skipping_loop import now_s, skip

# ---- opening -------------------------------------------------------------------------------------


def test_an_owner_opens_its_partitions_and_names_the_owner_of_others() -> None:
    async def work(hosted: Hosted) -> None:
        service = await hosted.opened()
        assert await service.groups() == []
        assert await hosted.service(1) == "b:1"
        assert (await hosted.service(), hosted.groups) == (service, [service]), "it stays open"
        assert (await hosted.assignment()).epoch == 1
        assert hosted.hosts.open_here(hosted.hosts.groups) == [service]
        await hosted.assign(1, "")
        with pytest.raises(NotReadyError, match="partition 1 of topic '_memq_state' has no owner now"):
            await hosted.service(1)

    hosting(work)


def test_a_broker_that_is_starting_has_no_services() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.partitions.serving = False
        for partition in (0, 1):
            with pytest.raises(NotReadyError, match="broker 'a' is starting"):
                await hosted.service(partition)

    hosting(work)


@pytest.mark.parametrize("state", ["serving", "starting", "draining", "drained"])
def test_a_broker_that_does_not_serve_opens_no_log_by_itself(state: str) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.assign(0, "b")
        await hosted.left()
        if state == "drained":
            await hosted.hosts.drain()
        hosted.partitions.serving = state != "starting"
        hosted.partitions.draining = state == "draining"
        opened = len(hosted.groups)
        await hosted.assign(0, "a")
        await skip(5)
        assert len(hosted.groups) - opened == (state == "serving")
        assert bool(hosted.hosts.held()) == (state == "serving")

    hosting(work)


def test_an_opening_is_tried_five_times_before_its_requests_get_the_error() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        asked = hosted.asked
        hosted.failures = [QueueError("no answer")] * (OPENING_TRIES - 1)
        await hosted.opened()
        assert hosted.asked - asked >= OPENING_TRIES
        await hosted.closed()
        asked, hosted.failures = hosted.asked, [*[QueueError("no answer")] * 2 * OPENING_TRIES]
        begin_s = now_s()
        for _ in range(2):
            with pytest.raises(QueueError, match="no answer"):
                await hosted.opened()
        assert hosted.asked - asked == 2 * OPENING_TRIES
        assert 0 < now_s() - begin_s < 2 * OPENING_TRIES
        assert (await hosted.opened()) is hosted.groups[-1]

    hosting(work)


def test_an_opening_waits_in_vain_for_no_former_owner_that_drains(caplog: pytest.LogCaptureFixture) -> None:
    """The request gets the error at once, and its client asks again."""

    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        caplog.clear()
        begin_s = now_s()
        await hosted.change(session=OTHER.session)
        with pytest.raises(NotReadyError, match="partition 0 of topic '_memq_state' is drained by 'b'"):
            await hosted.opened()
        await hosted.change(session="")
        await hosted.opened()
        await hosted.closed()
        assert now_s() - begin_s == 1, "it was given up meanwhile"
        await hosted.change(broker="b")  # and this broker has not learned it
        with pytest.raises(MovedError, match="belongs to broker 'b'"):
            await hosted.opened()
        assert now_s() - begin_s == 1

    hosting(work)
    assert events(caplog, "state-log-retry") == []


def test_a_log_that_this_release_can_not_read_is_not_tried_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        asked, hosted.failures = hosted.asked, [UnsupportedFormatError("the log is newer")]
        with pytest.raises(UnsupportedFormatError, match="the log is newer"):
            await hosted.opened()
        assert hosted.asked == asked + 1

    hosting(work)
    (text,) = events(caplog, "state-log-lost")
    assert "service partition 0: the log is newer" in text


def test_an_owner_makes_no_log_when_the_queue_only_fails() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        hosted.failures = [QueueError("no answer")]
        await hosted.opened()
        assert hosted.created == []
        await hosted.closed()
        await hosted.rig.queue.drop(read_partitions(STATE)[:1])
        await hosted.opened()
        assert hosted.created == [2], "the queue says that it does not have the log"

    hosting(work)


def test_an_owner_takes_no_lost_log_for_a_new_one_because_a_listing_omits_its_snapshot() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        log, store = read_partitions(STATE)[0], hosted.rig.store
        key = f"{state_prefix('memq', STATE_TOPIC, STATE.id, 0)}0000000001-0000000000000003/0000"
        await store.put(key, [b"s"], crc32c(b"s"))
        await hosted.rig.queue.drop([log])
        await hosted.rig.queue.create([log], 30_000)
        listed, calls = store.list, list[str]()

        async def omitting(prefix: str = "") -> AsyncIterator[ObjectEntry]:
            calls.append(prefix)
            async for entry in listed(prefix):
                if len(calls) > 2:
                    yield entry

        store.list = omitting  # type: ignore[method-assign]
        with pytest.raises(LogLostError, match="the queue has lost the log of service partition 0"):
            await hosted.opened()
        await store.delete(key)
        assert await (await hosted.opened()).groups() == [], "a new log has none"

    hosting(work)


def test_a_log_that_is_opened_again_ends_the_services_of_the_epoch_before(caplog: pytest.LogCaptureFixture) -> None:
    async def work(hosted: Hosted) -> None:
        first, claimed = await hosted.opened(), list[int]()
        set_assignment = hosted.services.coordinator.set_assignment

        async def noted(assignment: Assignment, **options: Any) -> Assignment:
            claimed.append(assignment.epoch)
            return await set_assignment(assignment, **options)

        hosted.services.coordinator.set_assignment = noted  # type: ignore[method-assign]
        await hosted.publish_opened(5)
        with pytest.raises(MovedError):
            await first.groups()
        second = await hosted.opened()
        assert (second is not first, await second.groups()) == (True, [])
        assert [owner.stopped for owner in hosted.tasks] == [True, False]
        assert (await hosted.assignment()).epoch == 6
        assert claimed == [2, 6], "the second try begins above the highest epoch of the log"

    hosting(work)


def test_a_cancelled_record_is_not_held_again_within_the_longest_dedup_window() -> None:
    async def work(hosted: Hosted) -> None:
        settings = TopicSettings(dedup_window_ms=900_000, retention_ms=0)
        topic = msgspec.structs.replace(STATE, name="clicks", id="ab" * 16, settings=settings)
        await hosted.services.coordinator.create_topic(topic)
        await hosted.partitions.refresh()
        keeper = await hosted.hosts.service_in(hosted.hosts.holds, STATE, 0)
        assert isinstance(keeper, HoldKeeper)
        due_ms = hosted.services.runtime.clock.wall_ms() + 10_000_000
        first, second = (
            NewHold(HoldId(producer, 0), 1, Target("clicks", topic.id, 0), "", due_ms, b"block") for producer in (1, 2)
        )
        await keeper.hold([first])
        await keeper.cancel([first.id], first.target)
        await skip(800)
        await keeper.hold([second])
        assert await keeper.hold([first]) == [HoldState.DROPPED]

    hosting(work)


def test_an_owner_forgets_positions_in_a_deleted_topic() -> None:
    async def work(hosted: Hosted) -> None:
        service = await hosted.opened()
        gone = msgspec.structs.replace(STATE, name="clicks", id="ab" * 16)
        await hosted.services.coordinator.create_topic(gone)
        await hosted.partitions.refresh()
        at = {read_partitions(gone)[0]: Committed(Position(0, 3))}
        await service.commit("g", "", -1, at)
        await skip(3 * FORGET_S)
        assert (await service.describe("g")).committed == at
        await hosted.services.coordinator.delete_topic(gone)
        await hosted.partitions.refresh()
        await skip(3 * FORGET_S)
        assert (await service.describe("g")).committed == {}

    hosting(work)


def test_a_service_that_meets_an_error_works_again_while_its_log_is_open(caplog: pytest.LogCaptureFixture) -> None:
    async def work(hosted: Hosted) -> None:
        class Failing(GroupCoordinator):
            rounds = 0

            async def run(self) -> None:
                Failing.rounds += 1
                await skip(0.5)
                raise ThrottledError("many wait")

        hosted.hosts.make_coordinator = Failing
        service = await hosted.opened()
        await skip(5)
        assert 3 <= Failing.rounds <= 4
        await hosted.publish_opened(5)
        with pytest.raises(MovedError):
            await service.groups()
        rounds = Failing.rounds
        await skip(5)
        assert Failing.rounds <= rounds + 1, "the log has ended"

    hosting(work)
    (text, *_) = events(caplog, "service-retry")
    assert "groups of service partition 0: ThrottledError('many wait')" in text


# ---- giving up -----------------------------------------------------------------------------------


def test_a_broker_gives_up_what_is_assigned_to_another_one_each_time() -> None:
    async def work(hosted: Hosted) -> None:
        for epoch in (1, 2, 3):
            service = await hosted.opened()
            assert (await hosted.assignment()).session == hosted.services.session
            await hosted.assign(0, "b")
            await hosted.left()
            assert await hosted.service() == "b:1"
            assert (await hosted.assignment()).session == "", "the next owner can open it"
            assert (await hosted.assignment()).epoch == epoch
            with pytest.raises(NotReadyError):
                await service.groups()
            assert hosted.tasks[-1].stopped
            await hosted.assign(0, "a")

    hosting(work)


def test_a_broker_says_when_a_partition_is_given_up() -> None:
    """A broker that leaves waits for that, and for nothing else."""

    async def work(hosted: Hosted) -> None:
        await hosted.opened()
        await hosted.assign(0, "b")
        hosted.partitions.changed.clear()
        await hosted.partitions.changed.wait()
        assert hosted.hosts.held() == []

    hosting(work)


def test_a_broker_that_drains_gives_up_a_partition_once_that_it_is_about_to_release() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.opened()
        await hosted.assign(0, "b")
        await hosted.hosts.drain()
        await hosted.left()
        assert (await hosted.assignment()).session == ""

    hosting(work)


def test_a_broker_that_ends_opens_nothing_more() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.closed()
        hosted.failures = [QueueError("no answer")] * 2
        opening = asyncio.create_task(hosted.opened())
        await skip(0.01)
        await hosted.hosts.stop()
        await skip(10)
        assert (len(hosted.failures), opening.done(), opening.cancelled()) == (1, True, True)

    hosting(work)


def test_a_broker_does_not_release_what_another_owner_has_opened() -> None:
    """Perhaps it lost its session meanwhile."""

    async def work(hosted: Hosted) -> None:
        await hosted.opened()
        await hosted.assign(0, "b", session=OTHER.session)
        await hosted.left()
        assert (await hosted.assignment()).session == OTHER.session

    hosting(work)


def test_a_broker_that_can_not_release_a_partition_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.opened()
        set_assignment = hosted.services.coordinator.set_assignment

        async def failing(assignment: Assignment, **options: Any) -> Assignment:
            if not assignment.session:
                raise StoreError("the coordinator is away")
            return await set_assignment(assignment, **options)

        hosted.services.coordinator.set_assignment = failing  # type: ignore[method-assign]
        await hosted.hosts.drain()
        assert hosted.hosts.held() == []

    hosting(work)
    assert events(caplog, "release-failed") == ["release-failed: service partition 0: the coordinator is away"]


@pytest.mark.parametrize("drains", [True, False])
def test_a_service_answers_nothing_after_the_end_of_its_broker(*, drains: bool) -> None:
    async def work(hosted: Hosted) -> None:
        service = await hosted.opened()
        if drains:
            await hosted.hosts.drain()
        await hosted.hosts.stop()
        with pytest.raises(NotReadyError):
            await service.groups()
        assert hosted.tasks[-1].stopped
        assert (await hosted.assignment()).session == ("" if drains else hosted.services.session)

    hosting(work)


# ---- other brokers -------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [True, False])
def test_a_broker_reports_another_one_whose_port_refuses(*, refused: bool) -> None:
    """A time-out is no evidence: the other broker may only be paused."""

    async def work(hosted: Hosted) -> None:
        error = UnreachableError("refused" if refused else "no route")
        error.refused = refused
        hosted.network.error = error
        with pytest.raises(UnreachableError):
            await hosted.hosts.link("b:1")
        report = asyncio.create_task(hosted.services.suspicions.next())
        await skip(1)
        assert report.done() == refused
        if refused:
            assert await report == "b:1"
        report.cancel()

    hosting(work)


def test_a_broker_connects_once_for_all_requests_that_wait() -> None:
    """One after another, they would each wait for the time-outs of those before them."""

    async def work(hosted: Hosted) -> None:
        hosted.network.delay_s, begin_s = 10.0, now_s()
        found = await asyncio.gather(*(hosted.hosts.link("b:1") for _ in range(5)), return_exceptions=True)
        assert {str(each) for each in found} == {"no route"}
        assert (hosted.network.attempts, now_s() - begin_s) == (1, 10.0)
        with pytest.raises(UnreachableError):
            await hosted.hosts.link("b:1")
        assert hosted.network.attempts == 2

    hosting(work)


def test_a_broker_that_ends_connects_to_no_other() -> None:
    """Its keepers may release records until they end, too."""

    async def work(hosted: Hosted) -> None:
        await hosted.hosts.stop()
        with pytest.raises(NotReadyError, match="broker 'a' ends"):
            await hosted.hosts.link("b:1")
        assert hosted.network.attempts == 0

    hosting(work)


def test_a_broker_replaces_a_connection_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(hosted: Hosted) -> None:
        made: list[Link] = []

        async def connect(runtime: Runtime, *arguments: Any, **options: Any) -> Link:
            made.append(StillLink(runtime, ("b", 1)))
            return made[-1]

        monkeypatch.setattr(hosts, "connect_link", connect)
        first = await hosted.hosts.link("b:1")
        assert await hosted.hosts.link("b:1") is first
        first.silent = True
        second = await hosted.hosts.link("b:1")
        assert (made, first.open) == ([first, second], False)
        assert await hosted.hosts.link("b:1") is second

    hosting(work)


# ---- the topic of the service partitions -----------------------------------------------------------


def test_a_broker_learns_of_service_partitions_that_another_one_has_created() -> None:
    """Else it would say that no records are delayed, and that no transaction is open."""

    async def work(hosted: Hosted) -> None:
        known = hosted.partitions.topics()
        assert [topic.name for topic in known] == [STATE_TOPIC]
        await hosted.services.coordinator.delete_topic(STATE)
        await hosted.partitions.refresh()
        assert await hosted.hosts.service_topic(create=False) is None
        other = msgspec.structs.replace(STATE, id="cd" * 16)
        await hosted.services.coordinator.create_topic(other)
        assert hosted.partitions.topics() == []
        found = await hosted.hosts.service_topic(create=False)
        assert found is not None
        assert found.id == other.id
        assert await hosted.hosts.service_topic(create=True) == found

    hosting(work)


def test_a_request_that_needs_a_service_creates_the_service_partitions() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.services.coordinator.delete_topic(STATE)
        await hosted.partitions.refresh()
        made = await hosted.hosts.service_topic(create=True)
        assert made is not None
        assert (made.name, len(made.partitions), made.settings.retention_ms) == (STATE_TOPIC, STATE_PARTITIONS, 0)

    hosting(work)


def test_a_broker_reads_the_owners_again_after_a_pause() -> None:
    async def work(hosted: Hosted) -> None:
        assert await hosted.service(1) == "b:1"
        await hosted.change(1, broker="a")
        assert await hosted.service(1) == "b:1", "it has not learned it"
        pauses = []
        for tries in (1, 3, 30):
            begin_s = now_s()
            await hosted.hosts.look_again(tries)
            pauses.append(now_s() - begin_s)
        assert 0 < pauses[0] < pauses[1] < pauses[2] <= 2
        assert isinstance(await hosted.service(1), GroupCoordinator)

        async def away() -> list[Topic]:
            raise TimedOutError("the coordinator is away")

        hosted.services.coordinator.topics = away  # type: ignore[method-assign]
        await hosted.hosts.look_again(1)

    hosting(work)
