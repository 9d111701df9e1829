"""The releaser of units: to the owner of the target, here or at another broker; a deleted topic ends a unit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.holds import releasing
from memq.broker.holds.releasing import RELEASE_TIMEOUT_S, UnitReleaser
from memq.broker.holds.taking import IncomingUnit, UnitBlock
from memq.errors import MemqError, MovedError, NotFoundError, NotReadyError, UnreachableError
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.key import manifest_key
from memq.holds.decisions import Hold, ReleasedUnit, Unit
from memq.holds.machine import HoldMachine
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.hold_messages import ReleaseUnit, WireHoldId, WireUnitBlock

TARGET = Target("clicks", "ab" * 16, 2)
SHARD = 0xAB
HOLDS = [
    Hold(HeldBlock(HoldId(producer, 0), 1, 5, offset, length), TARGET, "", key)
    for producer, offset, length, key in ((1, 0, 10, "a"), (2, 10, 4, "a"), (3, 7, 9, "b"))
]
RELEASED = ReleasedUnit(Unit(TARGET, 4, (HoldId(1, 0), HoldId(2, 0), HoldId(3, 0))), HOLDS)
BLOCKS = [
    UnitBlock("a", 0, 10, HoldId(1, 0)),
    UnitBlock("a", 10, 4, HoldId(2, 0)),
    UnitBlock("b", 7, 9, HoldId(3, 0)),
]


class Cluster:
    """The partitions of a broker, its links, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: MemqError | None = None  # of the lookup of the topic
        self.deleted = False
        self.own = True
        self.address = "there:1"
        self.refusal: MemqError | None = None  # of the owner
        self.refresh_error: MemqError | None = None
        self.taken: list[tuple[str, IncomingUnit]] = []
        self.requests: list[tuple[str, Api, AdminRequest, type, float]] = []
        self.refreshed = 0
        self.events: list[tuple[str, str]] = []
        self.machine = HoldMachine()
        monkeypatch.setattr(releasing, "take_unit", self.take)
        services = SimpleNamespace(events=SimpleNamespace(warning=self.note, info=self.note))
        self.forwarder = SimpleNamespace(deleted=self.was_deleted)
        self.releaser = UnitReleaser(cast(Any, services), cast(Any, self), cast(Any, self.link), SHARD, self.machine)

    def note(self, event: str, text: str) -> None:
        self.events.append((event, text))

    async def current_topic(self, name: str, topic_id: str) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(name=name, id=topic_id)

    async def was_deleted(self, topic_id: str) -> bool:
        assert topic_id == TARGET.topic_id
        return self.deleted

    def owns(self, topic: Any, partition: int) -> bool:
        return self.own

    def processor(self, topic: Any, partition: int) -> Any:
        return f"{topic.name}/{partition}"

    def owners(self, topic: Any) -> list[Any]:
        return [SimpleNamespace(address=address) for address in ("x:1", "x:2", self.address)]

    async def refresh(self) -> None:
        self.refreshed += 1
        if self.refresh_error is not None:
            raise self.refresh_error

    async def take(self, processor: str, unit: IncomingUnit) -> None:
        self.taken.append((processor, unit))
        if self.refusal is not None:
            raise self.refusal

    async def link(self, address: str) -> Any:
        async def request(api: Api, message: AdminRequest, answer: type, *, timeout_s: float) -> None:
            self.requests.append((address, api, message, answer, timeout_s))
            if self.refusal is not None:
                raise self.refusal

        return SimpleNamespace(request=request)

    def release(self) -> None:
        asyncio.run(self.releaser.release(RELEASED))


def test_a_unit_goes_to_the_owner_at_this_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.release()
    assert cluster.taken == [("clicks/2", IncomingUnit(SHARD, 4, 3, BLOCKS))]
    assert (cluster.requests, cluster.refreshed) == ([], 0)


def test_a_unit_goes_to_the_owner_at_another_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.own = False
    cluster.release()
    blocks = [
        WireUnitBlock(key="a", offset=0, length=10, hold=WireHoldId(producer="0000000000000001", first=0)),
        WireUnitBlock(key="a", offset=10, length=4, hold=WireHoldId(producer="0000000000000002", first=0)),
        WireUnitBlock(key="b", offset=7, length=9, hold=WireHoldId(producer="0000000000000003", first=0)),
    ]
    ask = ReleaseUnit(
        topic="clicks",
        topic_id=TARGET.topic_id,
        partition=2,
        shard="00000000000000ab",
        number=4,
        behind=3,
        blocks=blocks,
    )
    assert cluster.requests == [("there:1", Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, RELEASE_TIMEOUT_S)]
    assert cluster.taken == []


def test_a_target_without_an_owner_lets_the_keeper_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.own, cluster.address = False, ""
    with pytest.raises(NotReadyError, match="partition 2 of topic 'clicks' has no owner now"):
        cluster.release()
    assert cluster.requests == []


@pytest.mark.parametrize("own", [True, False])
def test_a_target_that_has_moved_is_looked_up_again(*, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.own, cluster.refusal = own, MovedError("elsewhere")
    with pytest.raises(MovedError, match="elsewhere"):
        cluster.release()
    assert (cluster.refreshed, cluster.events) == (1, [])
    cluster.refresh_error = UnreachableError("the coordinator is away")
    with pytest.raises(MovedError, match="elsewhere"):
        cluster.release()
    assert cluster.events == [("refresh-failed", "the coordinator is away")]
    cluster.refusal = NotReadyError("it opens")
    with pytest.raises(NotReadyError):
        cluster.release()
    assert cluster.refreshed == 2


def test_a_unit_of_a_deleted_topic_is_dropped_once_the_deletion_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.error = NotFoundError("topic 'clicks' does not exist")
    with pytest.raises(NotFoundError):
        cluster.release()
    assert cluster.events == []
    cluster.deleted = True
    cluster.release()
    text = "3 held blocks of topic 'clicks' are dropped: topic 'clicks' does not exist"
    assert cluster.events == [("held-gone", text)]
    assert cluster.taken == []


def test_a_transaction_is_marked_as_committed_before_its_first_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that unit has held blocks, and another one the staged part."""
    cluster, marked = Cluster(monkeypatch), list[tuple[str, int]]()

    async def mark(services: object, manifest: str) -> None:
        marked.append((manifest, len(cluster.taken)))

    monkeypatch.setattr(releasing, "mark_committed", mark)
    other, keys = Target("clicks", "ab" * 16, 1), [manifest_key("memq", "w", number) for number in (1, 2, 3)]
    block = HeldBlock(HoldId(9, 0), 1, 0, 0, 10)
    first = ReleasedUnit(Unit(TARGET, 4, (block.id,)), [Hold(block, TARGET, "5.1", "a")])
    for number, (lane, key) in enumerate((("5.1", keys[0]), ("5.1", keys[1]), ("6.1", keys[2]))):
        unit = ReleasedUnit(Unit(other, number, (block.id,)), [Hold(block, other, lane, key)])
        cluster.machine.units.setdefault(other, {})[number] = unit
    cluster.machine.units[TARGET] = {4: first}
    for _ in range(2):
        asyncio.run(cluster.releaser.release(first))
    assert marked == [(keys[0], 0), (keys[1], 0)]
    assert len(cluster.taken) == 2
