"""Items of queues at their clients: leases as ranges, and blocks that a worker has."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.api.stream_requests import producer_id_of, producer_ids_of
from memq.client.producer.fields import check_fields
from memq.client.queue import items
from memq.client.queue.items import ItemLease, RecentBlocks, blocks_of, items_of, outcomes_of, wire_leases
from memq.errors import InvalidRequestError, ProtocolError
from memq.limits import QUEUE_KNOWN_BLOCKS_MAX
from memq.protocol.queue_messages import QueueAnswer, WireGrant, WireGrantedItems
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.runtime import Runtime

LEASES = st.builds(ItemLease, st.sampled_from(["a", "b"]), st.integers(0, 6), st.integers(1, 2))


@given(st.lists(LEASES, max_size=20))
def test_ranges_name_the_leases_in_their_order(leases: list[ItemLease]) -> None:
    found = [
        ItemLease(each.block_id, number, each.grant)
        for each in wire_leases(leases)
        for begin, end in zip(each.ranges[::2], each.ranges[1::2], strict=True)
        for number in range(begin, end)
    ]
    assert found == leases


def test_many_items_of_a_block_are_one_range() -> None:
    (found,) = wire_leases(ItemLease("a", number, 7) for number in range(1_000))
    assert (found.block_id, found.grant, found.ranges) == ("a", 7, [0, 1_000])


def test_outcomes_are_one_for_each_item() -> None:
    answer = QueueAnswer(outcomes=[("acked", 2), ("lease-lost", 1)])
    assert outcomes_of(answer) == [ItemOutcome.ACKED, ItemOutcome.ACKED, ItemOutcome.LEASE_LOST]


def block_of(count: int, size: int = 10) -> tuple[str, bytes]:
    """Return the id and the bytes of a block of items that random bytes fill."""
    fields = [check_fields(random.Random(number).randbytes(size), None, None) for number in range(count)]
    ((data, ids),) = blocks_of("jobs", fields, Runtime())
    return ids[0].split(":")[1], data


def grant_of(block_id: str, length: int, *runs: WireGrantedItems) -> WireGrant:
    return WireGrant(
        queue="jobs", block_id=block_id, grant=3, lease_ms=2_000, waited_ms=500, items=list(runs), length=length
    )


def test_a_block_comes_once_and_is_known_from_then_on() -> None:
    id_, data = block_of(3)
    recent = RecentBlocks()
    first = grant_of(id_, len(data), WireGrantedItems(1, 2, 1, b""))
    ((item,), unreadable) = items_of([first], memoryview(data), recent.known(), recent, 10.0)
    assert not unreadable
    assert (item.id, item.payload) == (f"jobs:{id_}:1", random.Random(1).randbytes(10))
    assert (item.attempt, item.until_s, item.lease) == (1, 12.5, ItemLease(id_, 1, 3))
    known = recent.known()
    assert list(known) == [id_]
    again = grant_of(id_, 0, WireGrantedItems(0, 1, 2, b"note"), WireGrantedItems(2, 3, 1, b""))
    found, _ = items_of([again], memoryview(b""), known, RecentBlocks(), 0.0)
    assert [(each.payload, each.attempt, each.note) for each in found] == [
        (random.Random(0).randbytes(10), 2, b"note"),
        (random.Random(2).randbytes(10), 1, b""),
    ]


def test_a_block_whose_items_are_all_taken_is_not_kept() -> None:
    id_, data = block_of(2)
    recent = RecentBlocks()
    items_of([grant_of(id_, len(data), WireGrantedItems(0, 2, 1))], memoryview(data), {}, recent, 0.0)
    assert recent.known() == {}


def test_recent_blocks_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentBlocks()
    blocks = [block_of(2) for _ in range(40)]
    for id_, data in blocks:
        recent.opened(id_, memoryview(data), 1)
    assert list(recent.known()) == [id_ for id_, _ in blocks[-QUEUE_KNOWN_BLOCKS_MAX:]]
    monkeypatch.setattr(items, "RECENT_BYTES_MAX", 50)
    id_, data = block_of(2)
    recent.opened(id_, memoryview(data), 1)
    assert list(recent.known()) == [blocks[-1][0], id_]


def test_grants_without_their_items_are_refused() -> None:
    id_, data = block_of(2)
    run = WireGrantedItems(0, 1, 1, b"")
    for grant, blocks in (
        (grant_of(id_, 0, run), b""),  # not known
        (grant_of(id_, len(data), WireGrantedItems(1, 3, 1)), data),
        (grant_of(id_, len(data), WireGrantedItems(-1, 1, 1)), data),
    ):
        with pytest.raises(ProtocolError, match="comes without these items"):
            items_of([grant], memoryview(blocks), {}, RecentBlocks(), 0.0)
    found, (cut,) = items_of([grant_of(id_, len(data), run)], memoryview(data[:-1]), {}, RecentBlocks(), 0.0)
    assert (found, cut.kind, cut.leases[0].ranges) == ([], NackKind.FAILED, [0, 1])


@given(st.lists(st.one_of(st.integers(0, 1 << 64).map("{:016x}".format), st.text("0f -x", max_size=17)), max_size=4))
def test_ids_of_blocks_are_read_together_as_one_by_one(texts: list[str]) -> None:
    try:
        wanted = [producer_id_of(text) for text in texts]
    except InvalidRequestError as error:
        with pytest.raises(InvalidRequestError, match=re.escape(str(error))):
            producer_ids_of(texts)
    else:
        assert list(producer_ids_of(texts)) == wanted


def test_a_block_that_is_opened_again_counts_once_for_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "RECENT_BYTES_MAX", 100)
    recent = RecentBlocks()
    data = memoryview(block_of(4)[1])  # 40 bytes
    for _ in range(5):
        recent.opened("one", data, 1)
    recent.opened("two", data, 1)
    assert list(recent.known()) == ["one", "two"]
    recent.opened("three", data, 1)
    assert list(recent.known()) == ["two", "three"], "the oldest one leaves at the bound"
    recent.opened("four", data, 4)
    assert "four" not in recent.known(), "all its items are taken"
