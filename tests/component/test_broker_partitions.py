"""The partitions of a broker: those that it takes and releases, and its answers to clients and forwarders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memq.broker.partitions import DROP_RETRY_S, DROP_RETRY_S_MAX
from memq.errors import (
    AlreadyExistsError,
    DrainingError,
    InvalidSettingError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    QueueError,
    StoreError,
    UnreachableError,
)
from memq.governor import BrokerEntry
from memq.protocol.messages import Owner
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots
from tests.brokers import BareClient, GatedStore, block_of, events_of, run, running_broker, until, write_frame
from tests.component.scripted_coordinator import NEAR, ScriptedCoordinator, owned_by
from tests.partition_owners import failing, turns

# ---- what the coordinator says -----------------------------------------------------------------------


def test_of_two_looks_the_one_that_began_last_holds_whichever_ends_last() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            for last_ends_first in (True, False):
                gates = [asyncio.Event(), asyncio.Event()]
                answers = iter(gates)
                seen = iter(("old", "new"))

                async def topics(answers: Any = answers, seen: Any = seen) -> list[Topic]:
                    gate, name = next(answers), next(seen)
                    await gate.wait()
                    return [msgspec.structs.replace(said.topic, name=name)]

                said.services.coordinator.topics = topics  # type: ignore[method-assign]
                looks = [asyncio.create_task(said.partitions.refresh()) for _ in gates]
                await turns()
                for look, gate in list(zip(looks, gates, strict=True))[:: -1 if last_ends_first else 1]:
                    gate.set()
                    await look
                assert [topic.name for topic in said.partitions.topics()] == ["new"]

    run(work())


def test_refresh_of_the_partitions_is_what_clients_get() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            settings = TopicSettings(limit_mode="hard", limit_bytes_s=1_000)
            said = await ScriptedCoordinator.to(broker, partitions=3, settings=settings)
            owned_by(said, 1, "near")
            owned_by(said, 2, "gone")
            said.topics_.append(msgspec.structs.replace(said.topic, name="a-first", id="b" * 32))
            said.brokers_.append(BrokerEntry(id="leaves", session="s", address="leaves:1", draining=True))
            partitions = said.partitions
            partitions.changed.clear()
            await partitions.refresh()
            assert partitions.changed.is_set()
            assert [topic.name for topic in partitions.topics()] == ["a-first", "clicks"]
            assert [partitions.owns(said.topic, number) for number in range(4)] == [True, False, False, False]
            assert partitions.brokers() == {"here:1": "", NEAR: "z", "leaves:1": ""}
            assert partitions.heirs == ["near"]
            assert partitions.namesake is None
            assert partitions.owners(said.topic) == [
                Owner(partition=0, epoch=4, broker=said.id, address="here:1"),
                Owner(partition=1, epoch=4, broker="near", address=NEAR),
                Owner(partition=2, epoch=4, broker="gone", address=""),
            ]
            nobody_s = msgspec.structs.replace(said.topic, id="c" * 32, partitions=equal_slots(1))
            assert partitions.owners(nobody_s) == [Owner(partition=0, epoch=0, broker="", address="")]
            assert len(broker.services.limits.of_topic(said.topic.id)) == 1
            said.brokers_.append(BrokerEntry(id=said.id, session="another", address="there:1"))
            await partitions.refresh()
            assert partitions.namesake == said.brokers_[-1]

    run(work())


@pytest.mark.parametrize(
    ("owner", "session", "at_work", "given_back"),
    [
        ("near", "mine", False, True),  # a release that failed
        ("near", "mine", True, False),  # its drain does it
        ("near", "", False, False),
        ("near", "theirs", False, False),
        ("mine", "mine", False, False),
        ("mine", "theirs", False, False),
    ],
)
def test_the_session_of_a_partition_that_went_is_given_back_when_nothing_works_there(
    owner: str, session: str, at_work: bool, given_back: bool
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            names = {"mine": said.id}
            client, store = await BareClient.connect(broker), GatedStore()
            if at_work:
                broker.services.stores["main"] = store
                await said.partitions.refresh()
                await client.open(said.topic)
                client.write(write_frame(block_of(said.topic, 0, [b"v"])))
                await store.begun.wait()
                said.written.clear()
            sessions = {"mine": said.session}
            owned_by(said, 0, names.get(owner, owner), sessions.get(session, session))
            await said.partitions.refresh()
            back = [(said.topic.id, 0, names.get(owner, owner), "")]
            assert said.written == back * given_back
            assert ((said.topic.id, 0) in said.partitions.held()) == (
                at_work or owner == "mine" or (session == "mine" and not given_back) or given_back
            )
            if at_work:
                store.gate.set()
                await until(lambda: not said.leaving())
                assert said.written == back, "by its drain"
            await client.close()

    run(work())


def test_a_coordinator_that_refuses_one_session_is_asked_for_the_next_one() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            for number in (0, 1):
                owned_by(said, number, "near", said.session)
            said.fails = [UnreachableError("not now")]
            await said.partitions.refresh()
            assert [partition for _, partition, _, _ in said.written] == [1]
            await said.partitions.refresh()
            assert [partition for _, partition, _, _ in said.written] == [1, 0]

    run(work())


def test_a_partition_follows_what_is_said_of_it() -> None:
    """Deleted, it ends and says so; moved, it drains and knows where to; failed, the next stream opens it again."""

    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=3)
            deleted, failed, moved = [await said.opened(number) for number in range(3)]
            assert said.partitions.stored_bytes() == dict.fromkeys([(said.topic.id, number) for number in range(3)], 0)
            altered = msgspec.structs.replace(said.topic, settings=TopicSettings(ring_slots=3))
            said.topics_ = [altered]
            await said.partitions.refresh()
            assert deleted.ring.limits.slots == 3
            del said.owners[0]
            owned_by(said, 2, "near", said.session)
            failed.fail(StoreError("gone"))
            await said.partitions.refresh()
            assert said.partitions.processors == {}
            assert {each.partition for each in said.partitions.at_work()} == {0, 1, 2}
            assert isinstance(deleted.failure, NotFoundError)
            assert "was deleted" in str(deleted.failure)
            assert moved.moved_to == NEAR
            assert (moved.draining, failed.draining) == (False, False)
            said.partitions.changed.clear()
            await until(lambda: not said.leaving())
            assert said.partitions.changed.is_set()
            assert [each.own for each in (deleted, moved, failed)] == [None] * 3
            assert moved.draining
            assert said.owners[2] == ("near", "")
            again = said.partitions.processor(said.topic, 1)
            assert again is not failed
            assert said.partitions.stored_bytes() == {}
            await again.ready()
            again.fail(StoreError("gone, and no look has seen it"))
            assert said.partitions.processor(said.topic, 1).failure is None
            assert said.partitions.at_work()[1:] == [again]

    run(work())


@pytest.mark.parametrize("opened_there", [0, 2])
def test_a_partition_that_went_to_another_broker_and_back_is_opened_again(opened_there: int) -> None:
    """The owner saw only its own name, and no end was ever proved again: the assignment had no session."""

    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            before = await said.opened()
            epoch = before.own.epoch
            assert said.owners[0] == (said.id, said.session)
            await said.partitions.refresh()
            assert said.partitions.processor(said.topic, 0) is before
            owned_by(said, 0, said.id)
            said.epoch += opened_there
            with pytest.raises(MovedError):
                await before.proven_end()
            await said.partitions.refresh()
            after = await said.opened()
            assert after is not before
            assert await after.proven_end() >= 2
            assert after.own.epoch == epoch + opened_there + 1
            assert said.owners[0] == (said.id, said.session)
            await until(lambda: not said.leaving())
            assert before.own is None
            after.start_draining()
            owned_by(said, 0, said.id)
            await said.partitions.refresh()
            assert said.partitions.processors == {(said.topic.id, 0): after}

    run(work())


def test_a_drain_of_a_partition_whose_topic_is_deleted_meanwhile_ends_and_what_failed_there_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            client, store = await BareClient.connect(broker), GatedStore()
            broker.services.stores["main"] = store
            await said.partitions.refresh()
            await client.open(said.topic)
            client.write(write_frame(block_of(said.topic, 0, [b"v"])))
            await store.begun.wait()
            owned_by(said, 0, "near", said.session)
            await said.partitions.refresh()
            await turns()
            assert len(said.partitions.at_work()) == 1
            said.owners.clear()
            caplog.clear()
            await said.partitions.refresh()
            await until(lambda: not said.partitions.at_work())
            assert events_of(caplog).count("drain-failed") == 1
            await client.close()

    run(work())


# ---- what connections ask ------------------------------------------------------------------------------


def test_a_name_is_compared_with_the_coordinator_and_read_again_when_it_is_another_topic_now() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            await said.partitions.refresh()
            looks = said.looks
            assert await said.partitions.confirm(["clicks", "views"], {}) == []
            assert said.looks == looks, "it is as it was read"
            newer = msgspec.structs.replace(said.topic, id="d" * 32)
            said.current, said.topics_ = newer, [newer]
            assert await said.partitions.confirm(["clicks"], {"clicks": said.topic.id}) == []
            assert said.looks == looks, "the client knows it"
            assert await said.partitions.confirm(["clicks"], {}) == []
            assert said.partitions.topic("clicks").id == newer.id
            assert said.looks <= looks + 1, "once, unless the broker's own task has just read it"
            looks = said.looks
            failing(said.services.coordinator, "current_topic", UnreachableError("not now"))
            assert await said.partitions.confirm(["clicks"], {}) == ["clicks"]
            assert said.looks == looks

    run(work())


@pytest.mark.parametrize(
    ("partition", "owner", "state", "error", "text"),
    [
        (0, "mine", "", None, ""),
        (0, "mine", "starting", NotReadyError, "is starting"),
        (0, "mine", "draining", DrainingError, "is being drained"),
        (2, "mine", "", NotFoundError, "has 2 partitions, none is 2"),
        (-1, "mine", "", NotFoundError, "none is -1"),
        (1, "near", "", MovedError, "is not at this broker"),
        (1, "near", "draining", MovedError, "is not at this broker"),
        (1, "gone", "", NotReadyError, "has no owner now"),
        (1, "", "", NotReadyError, "has no owner now"),
        (1, "-", "", NotReadyError, "has no owner now"),
    ],
)
def test_a_client_hears_where_a_partition_is(
    partition: int, owner: str, state: str, error: type[MemqError] | None, text: str
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            owned_by(said, 1, said.id if owner == "mine" else owner)
            if owner == "-":
                del said.owners[1]
            await said.partitions.refresh()
            said.partitions.serving = state != "starting"
            said.partitions.draining = state == "draining"
            if error is None:
                processor = said.partitions.processor(said.topic, partition)
                assert said.partitions.processor(said.topic, partition) is processor
                return
            with pytest.raises(error, match=text) as caught:
                said.partitions.processor(said.topic, partition)
            assert getattr(caught.value, "address", "") == (NEAR if owner == "near" else "")
            if state == "draining" and owner == "mine":
                assert said.partitions.processor(said.topic, partition, to_end=True).partition == partition

    run(work())


@pytest.mark.parametrize(
    ("owner", "draining", "heirs", "found"),
    [
        ("mine", False, True, "processor"),
        ("near", False, True, NEAR),
        ("near", True, False, NEAR),  # it leaves too, but what it has it has
        ("gone", False, True, "no live owner"),
        ("gone", True, True, "no live owner"),
        ("gone", False, False, "no live owner"),
        ("gone", True, False, "taken"),
        ("-", True, False, "was deleted"),
    ],
)
def test_held_blocks_go_to_the_owner_and_the_last_broker_takes_what_nobody_has(
    owner: str, draining: bool, heirs: bool, found: str
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            owned_by(said, 0, said.id if owner == "mine" else owner)
            if owner == "-":
                said.owners.clear()
            if not heirs:
                said.brokers_[1] = msgspec.structs.replace(said.brokers_[1], draining=True)
            said.partitions.draining = draining
            looks = said.looks
            callers = [asyncio.create_task(said.partitions.locate(said.topic, 0)) for _ in range(3)]
            results = await asyncio.gather(*callers, return_exceptions=True)
            assert said.looks < looks + len(callers), "they share it"
            for result in results:
                if isinstance(result, BaseException):
                    assert isinstance(result, MovedError | NotFoundError)
                    assert found in str(result)
                elif isinstance(result, str):
                    assert result == found
                else:
                    assert result is said.partitions.processors[said.topic.id, 0]
                    assert found in ("processor", "taken")
            assert said.partitions.owns(said.topic, 0) == (found in ("processor", "taken"))
            assert {entry[2] for entry in said.written} <= {said.id}
            if found == "taken":
                assert (said.topic.id, 0) in said.partitions.held()

    run(work())


def test_while_the_coordinator_is_away_what_it_said_last_must_do() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker)
            owned_by(said, 0, "near")
            await said.partitions.refresh()
            failing(said.services.coordinator, "topics", UnreachableError("not now"))
            assert await said.partitions.locate(said.topic, 0) == NEAR

    run(work())


# ---- topics --------------------------------------------------------------------------------------------


def asked(part: Any, name: str) -> list[tuple[Any, ...]]:
    """Note the arguments of a method's calls."""
    method, calls = getattr(part, name), list[tuple[Any, ...]]()

    async def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return await method(*arguments)

    setattr(part, name, call)
    return calls


def test_a_topic_that_exists_is_returned_where_that_is_allowed() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            create: Callable[..., Any] = broker.partitions.create
            logs = asked(broker.services.queue, "create")
            settings = TopicSettings(stale_publish_ms=20_000)
            begin_ms = broker.services.runtime.clock.wall_ms()
            made = await create("clicks", 2, settings, exist_ok=False)
            assert begin_ms <= made.created_ms <= broker.services.runtime.clock.wall_ms()
            assert [len(partitions) for partitions, _ in logs] == [2]
            assert logs[0][1] == 20_000
            assert all(owner.address == broker.address for owner in broker.partitions.owners(made))
            assert await create("clicks", 5, TopicSettings(), exist_ok=True) == made
            with pytest.raises(AlreadyExistsError):
                await create("clicks", 2, settings, exist_ok=False)
            for disk in (
                broker.partitions.alter(made, TopicSettings(ack1="disk")),
                create("views", 1, TopicSettings(ack1="disk"), exist_ok=False),
            ):
                with pytest.raises(InvalidSettingError, match="needs a spool"):
                    await disk
            logs.clear()
            altered = await broker.partitions.alter(made, TopicSettings(stale_publish_ms=25_000))
            assert broker.partitions.topic("clicks") == altered
            assert logs == [(logs[0][0], 25_000)]

    run(work())


def test_the_logs_of_a_deleted_topic_are_dropped_as_often_as_the_queue_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[tuple[int, float, float]] = []

    def backoff_s(chance: Any, tries: int, *, base_s: float, most_s: float) -> float:
        waits.append((tries, base_s, most_s))
        return 0.0

    monkeypatch.setattr("memq.broker.partitions.backoff_s", backoff_s)

    async def work() -> None:
        async with running_broker() as broker:
            made = await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            failing(broker.services.queue, "drop", QueueError("not now"), QueueError("not yet"))
            failing(broker.services.coordinator, "topics", UnreachableError("not now"))
            dropped = asked(broker.services.queue, "drop")
            caplog.clear()
            await broker.partitions.delete(made)
            events = [event for event in events_of(caplog) if event == "drop-failed"]  # others may fail to read, too
            assert events == ["drop-failed"] * 2
            assert waits == [(1, DROP_RETRY_S, DROP_RETRY_S_MAX), (2, DROP_RETRY_S, DROP_RETRY_S_MAX)]
            assert dropped == [([ReadPartition("clicks", made.id, number) for number in (0, 1)],)] * 3

    run(work())


def test_a_deletion_is_answered_though_the_queue_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.broker.partitions.DROP_WAIT_S", 0.0)

    async def work() -> None:
        async with running_broker() as broker:
            made = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            failing(broker.services.queue, "drop", *[QueueError("not now")] * 1_000)
            await broker.partitions.delete(made)
            (drop,) = [task for task in asyncio.all_tasks() if task.get_name() == "drop the logs of clicks"]
            await broker.partitions.stop()
            assert drop.cancelled()

    run(work())


def test_a_topic_whose_coordinator_fails_is_not_made() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            for exist_ok in (True, False):
                failing(broker.services.coordinator, "create_topic", UnreachableError("not now"))
                with pytest.raises(UnreachableError):
                    await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=exist_ok)

    run(work())


# ---- the end -------------------------------------------------------------------------------------------


def test_a_stop_ends_all_that_is_at_work() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            said = await ScriptedCoordinator.to(broker, partitions=2)
            store = broker.services.stores["main"] = GatedStore()
            client = await BareClient.connect(broker)
            kept = await said.opened(1)
            await client.open(said.topic)
            client.write(write_frame(block_of(said.topic, 0, [b"v"])))
            await store.begun.wait()
            left = said.partitions.processors[said.topic.id, 0]
            owned_by(said, 0, "near", said.session)
            await said.partitions.refresh()
            await said.partitions.stop()
            assert (left.own, kept.own) == (None, None)
            await client.close()

    run(work())
