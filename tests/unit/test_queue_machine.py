"""The queue machine: exact outcomes of each decision, and what a snapshot keeps."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues import recent
from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    Dedupe,
    EndDecision,
    EnqueueDecision,
    ExtendDecision,
    GrantDecision,
    GrantedItems,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemStatus,
    ItemTerms,
    LeasedItems,
    NackDecision,
    PurgeDecision,
    QueueDecision,
    RedriveDecision,
    SavedReturn,
    decode_decision,
    encode_decision,
    ranges_of,
    terms_of,
)
from memq.queues.machine import QueueMachine
from tests.unit.queue_shard import each_outcome

O = ItemOutcome  # noqa: E741


def decided(machine: QueueMachine, decision: QueueDecision) -> object:
    """Decide; return the answer, with the outcome of each item."""
    answer = machine.apply(encode_decision(decision))
    return answer if isinstance(decision, EnqueueDecision | GrantDecision) else each_outcome(answer)


def next_owner(machine: QueueMachine) -> QueueMachine:
    """Return the machine of the next owner."""
    made = QueueMachine()
    made.restore(machine.snapshot())
    return made


def enqueue(
    machine: QueueMachine, block: int, count: int, key: str = "k", before_ms: int = 0, terms: ItemTerms | None = None
) -> object:
    held = HeldBlock(HoldId(block, 0), count, 1_000, 0, 10)
    lane = HeldLane(Target("jobs", "", 0), (terms or ItemTerms(5, 1_000, 0, 0)).lane(), (held,))
    return decided(machine, EnqueueDecision(key, before_ms, (lane,)))


def items(block: int, *numbers: int) -> ItemRanges:
    return ranges_of(block, numbers)


def lease(block: int, grant: int, *numbers: int) -> tuple[LeasedItems, ...]:
    return (LeasedItems(items(block, *numbers), grant),)


def grant(machine: QueueMachine, number: int, *granted: ItemRanges) -> list[int]:
    """Grant items; return the numbers of those that are leased."""
    found = decided(machine, GrantDecision(number, 2_000, granted))
    assert isinstance(found, tuple)
    return [number for block in found for run in block.items for number in range(run.begin, run.end)]


def test_an_item_is_acked_under_its_latest_grant_only() -> None:
    machine = QueueMachine()
    assert enqueue(machine, 1, 3) == (True,)
    assert grant(machine, 1, items(1, 0, 1, 2)) == [0, 1, 2]
    assert grant(machine, 2, items(1, 1)) == [1]  # its lease was over
    assert decided(machine, AckDecision(5, lease(1, 1, 0, 1))) == (O.ACKED, O.LEASE_LOST)
    assert decided(machine, AckDecision(5, lease(1, 1, 0))) == (O.ALREADY_ACKED,)
    assert decided(machine, AckDecision(5, lease(1, 7, 0))) == (O.LEASE_LOST,)
    assert grant(machine, 3, items(1, 0, 2)) == [2]
    assert grant(machine, 3, items(1, 2)) == []  # numbers grow
    assert decided(machine, AckDecision(5, lease(1, 2, 1))) == (O.ACKED,)
    assert machine.objects == {"k": 1}
    assert machine.topics == {"jobs": 1}
    assert decided(machine, AckDecision(6, lease(1, 3, 2))) == (O.ACKED,)
    assert (machine.objects, machine.topics, machine.blocks) == ({}, {}, {})
    assert machine.totals == {"acked": 3}
    assert decided(machine, AckDecision(7, lease(1, 2, 0, 1, 2))) == (O.LEASE_LOST, O.ALREADY_ACKED, O.LEASE_LOST)
    assert decided(machine, AckDecision(7, lease(1, 3, 3))) == (O.UNKNOWN,)
    assert decided(machine, AckDecision(7, lease(9, 3, 0))) == (O.UNKNOWN,)
    assert enqueue(machine, 1, 3) == (False,)
    assert enqueue(machine, 2, 1, before_ms=6) == (True,)
    assert machine.is_known(1)
    assert enqueue(machine, 1, 3, before_ms=7) == (True,)  # forgotten


def test_a_nack_that_comes_again_says_what_the_first_one_did() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 6, terms=ItemTerms(0, 1_000, 2, 0))
    grant(machine, 1, items(1, 0, 1, 2, 3, 4))
    assert decided(machine, NackDecision(0, b"", lease(1, 1, 3, 4))) == (O.RETURNED,) * 2
    assert decided(machine, NackDecision(0, b"", lease(1, 1, 0, 1))) == (O.RETURNED,) * 2
    grant(machine, 2, items(1, 0, 1, 5))
    assert decided(machine, NackDecision(0, b"", lease(1, 2, 0))) == (O.DEAD,)
    decided(machine, AckDecision(6, lease(1, 2, 1)))
    decided(machine, RedriveDecision(7, (items(1, 0),)))
    for state in (machine, next_owner(machine)):
        repeated = NackDecision(9_000, b"", lease(1, 1, 0, 1, 2, 3, 4, 5))
        assert decided(state, repeated) == (*[O.RETURNED] * 5, O.LEASE_LOST), "2 is given back now, 5 has another grant"
        assert decided(state, NackDecision(9_000, b"", lease(1, 2, 0))) == (O.DEAD,), "it was redriven"
        assert state.blocks[1].status(0).due_ms == 7


def test_few_nacks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "RECENT_MAX", 2)
    returns = recent.RecentReturns()
    for block in (1, 2, 3):
        returns.add(SavedReturn(block, 5, 0, 2, O.RETURNED))
    returns.add(SavedReturn(3, 5, 2, 4, O.RETURNED))
    assert [(each.block, each.begin, each.end) for each in returns.saved()] == [(2, 0, 2), (3, 0, 4)]
    assert list(returns.split(items(1, 0), 5)) == [(0, 1, None)]
    assert list(returns.split(ItemRanges(3, (3, 6)), 5)) == [(3, 4, O.RETURNED), (4, 6, None)]


def test_an_item_that_is_given_back_keeps_its_note_and_counts_its_attempts() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 1, terms=ItemTerms(0, 1_000, 2, 0))
    grant(machine, 1, items(1, 0))
    assert decided(machine, ExtendDecision(9_000, lease(1, 1, 0))) == (O.EXTENDED,)
    assert machine.blocks[1].status(0).lease_ms == 9_000
    assert decided(machine, NackDecision(4_000, b"half", lease(1, 1, 0))) == (O.RETURNED,)
    assert decided(machine, NackDecision(8_000, b"", lease(1, 1, 0))) == (O.RETURNED,), "it comes again"
    assert decided(machine, AckDecision(4, lease(1, 1, 0))) == (O.LEASE_LOST,)
    assert decided(machine, ExtendDecision(9_000, lease(1, 1, 0))) == (O.LEASE_LOST,)
    block = machine.blocks[1]
    assert (block.state(0), block.status(0).due_ms) == (ItemState.READY, 4_000)
    assert decided(machine, GrantDecision(2, 3_999, (items(1, 0),))) == (), "it is not due"
    found = decided(machine, GrantDecision(3, 5_000, (items(1, 0),)))
    assert isinstance(found, tuple)
    assert found[0].items == (GrantedItems(0, 1, 2, b"half"),)
    assert block.status(0).lease_ms == 1_000
    assert decided(machine, NackDecision(4_000, b"", lease(1, 3, 0))) == (O.DEAD,)
    assert grant(machine, 4, items(1, 0)) == []
    assert decided(machine, AckDecision(5, lease(1, 3, 0))) == (O.DEAD,)
    assert machine.objects == {"k": 1}, "the payload of a dead item stays"
    assert decided(machine, CancelDecision(6, (items(1, 0),))) == (O.CANCELLED,)
    assert machine.objects == {}


def test_at_most_once_the_grant_is_the_ack() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 2, terms=ItemTerms(0, 0, 0, 0))
    assert grant(machine, 1, items(1, 0)) == [0]
    assert grant(machine, 2, items(1, 0, 1)) == [1]
    assert machine.blocks == {}
    assert decided(machine, AckDecision(5, lease(1, 1, 0))) == (O.ALREADY_ACKED,)


def test_items_end_by_their_life_or_a_cancel() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 4)
    grant(machine, 1, items(1, 0))
    assert decided(machine, EndDecision(9, False, lease(1, 0, 0, 1))) == (O.UNKNOWN, O.EXPIRED)
    assert decided(machine, CancelDecision(9, (items(1, 0, 1, 2, 4),))) == (
        *(O.LEASED, O.EXPIRED, O.CANCELLED, O.UNKNOWN),
    )
    assert decided(machine, EndDecision(9, True, lease(1, 1, 0))) == (O.DEAD,)
    assert decided(machine, EndDecision(9, False, lease(1, 0, 3))) == (O.EXPIRED,)
    assert machine.topics == {"jobs": 1}
    assert machine.totals == {"expired": 2, "cancelled": 1, "dead": 1}
    assert decided(machine, CancelDecision(9, (items(1, 0),))) == (O.CANCELLED,)
    assert decided(machine, CancelDecision(9, (items(1, 1, 2), items(8, 0)))) == (O.EXPIRED, O.CANCELLED, O.UNKNOWN)
    assert decided(machine, AckDecision(9, lease(1, 0, 1, 2))) == (O.EXPIRED, O.CANCELLED)


def test_dead_items_are_sent_back_or_purged_and_no_others() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 4, terms=ItemTerms(5, 1_000, 1, 9_000))
    grant(machine, 1, items(1, 0, 1, 2))
    assert decided(machine, NackDecision(4_000, b"bad", lease(1, 1, 0, 1))) == (O.DEAD, O.DEAD)
    assert machine.dead == {"jobs": {1: None}}
    again = QueueMachine()
    again.restore(machine.snapshot())
    assert again.dead == machine.dead
    assert decided(machine, PurgeDecision(5, (items(1, 1, 2, 3, 7), items(9, 0)))) == (
        *(O.CANCELLED, O.LEASED, O.RETURNED, O.UNKNOWN, O.UNKNOWN),
    )
    assert machine.blocks[1].state(3) is ItemState.READY
    assert decided(machine, RedriveDecision(9_000, (items(1, 0),))) == (O.EXPIRED,), "its life is over: it stays dead"
    assert decided(machine, RedriveDecision(8_000, (items(1, 0, 1, 2, 3),))) == (
        *(O.RETURNED, O.CANCELLED, O.LEASED, O.RETURNED),
    )
    assert decided(machine, RedriveDecision(8_500, (items(1, 0),))) == (O.RETURNED,), "it came again"
    assert machine.dead == {}
    assert machine.totals == {"dead": 2, "cancelled": 1, "redriven": 1}
    assert machine.blocks[1].status(0).due_ms == 8_000
    assert decided(machine, AckDecision(5, lease(1, 1, 0))) == (O.LEASE_LOST,)
    found = decided(machine, GrantDecision(2, 8_000, (items(1, 0),)))
    assert isinstance(found, tuple)
    assert found[0].items == (GrantedItems(0, 1, 1, b"bad"),), "its attempts begin again, and the note stays"
    assert decided(machine, NackDecision(4_000, b"", lease(1, 2, 0))) == (O.DEAD,)


def test_a_block_that_comes_again_gets_another_object_and_nothing_else() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 2, "first")
    grant(machine, 1, items(1, 0))
    assert enqueue(machine, 1, 2, "second", terms=ItemTerms(9, 9, 9, 9)) == (False,)
    assert machine.objects == {"second": 1}
    assert (machine.blocks[1].status(0).grant, machine.blocks[1].terms.priority) == (1, 5)


def test_a_snapshot_gives_a_machine_that_behaves_the_same() -> None:
    machine = QueueMachine()
    assert machine.snapshot() == b"", "an empty machine is not part of a snapshot"
    for block in (1, 2, 3):
        enqueue(machine, block, 2, f"key-{block}")
    grant(machine, 1, items(1, 0, 1), items(2, 0))
    decided(machine, AckDecision(5, lease(1, 1, 0, 1)))
    decided(machine, NackDecision(1_500, b"n", lease(2, 1, 0)))
    again = QueueMachine()
    again.restore(machine.snapshot())
    assert again.snapshot() == machine.snapshot()
    assert (again.objects, again.topics, again.totals) == (machine.objects, machine.topics, machine.totals)
    assert again.last_grant == 1
    for each in (machine, again):
        assert decided(each, AckDecision(6, lease(1, 1, 0))) == (O.ALREADY_ACKED,)
        assert grant(each, 2, items(2, 0, 1), items(3, 1)) == [0, 1, 1]
        assert enqueue(each, 4, 1) == (True,)
    assert again.snapshot() == machine.snapshot()


def test_foreign_bytes_are_refused() -> None:
    machine = QueueMachine()
    with pytest.raises(CorruptDataError, match="decision about queue items"):
        machine.apply(b"\xff")
    with pytest.raises(CorruptDataError, match="no terms of queue items"):
        terms_of("7")
    enqueue(machine, 1, 1)
    with pytest.raises(UnsupportedFormatError, match="version 5"):
        QueueMachine().restore(machine.snapshot().replace(b"version\x03", b"version\x05"))


@pytest.mark.parametrize(
    "terms",
    [
        ItemTerms(0, 0, 0, 0),
        ItemTerms(9, 1_000, 3, 77, "a key=1 %2F"),
        ItemTerms(9, 1_000, 3, 77, "ü", ordered=True),
        ItemTerms(5, 1, 0, 0, "k", True, Dedupe(b"d" * 16, 5, 9)),
        ItemTerms(5, 1, 0, 0, dedupe=Dedupe(b"d" * 16, 0, 9)),
    ],
)
def test_a_lane_has_the_terms(terms: ItemTerms) -> None:
    assert terms_of(terms.lane()) == terms


@given(st.text("queu 0123456789=.keyordp%f", max_size=60))
def test_any_other_lane_is_refused(lane: str) -> None:
    for text in (lane, f"queue 1 2 3 4 {lane}"):
        with suppress(CorruptDataError):
            assert isinstance(terms_of(text), ItemTerms)


@pytest.mark.parametrize(
    "lane",
    [
        *("queue 1 2 3", "hold 1 2 3 4", "queue 1 2 3 4 other=x", "queue 1 2 3 4 key=%ff", "queue 1 2 3 4 ordered="),
        *("queue 1 2 3 4 dedupe=00.1.2", "queue 1 2 3 4 dedupe=1.2", f"queue 1 2 3 4 dedupe={'00' * 16}.x.2"),
    ],
)
def test_a_lane_of_a_later_release_is_refused(lane: str) -> None:
    with pytest.raises(CorruptDataError, match="no terms of queue items"):
        terms_of(lane)


# As the release wrote them that had no keys.
FORMER_DECISIONS = (
    (
        "84a474797065a7656e7175657565a36b6579a26b31a96265666f72655f6d7300a56c616e6573919393a46a6f6273a000b071"
        "756575652035203130303020312030919592010003cd03e8000a"
    ),
    (
        "84a474797065a7656e7175657565a36b6579a26b32a96265666f72655f6d7300a56c616e6573919393a46a6f6273a000b471"
        "75657565203020323030302030203939303030919592020001cd03e8000a"
    ),
    "84a474797065a56772616e74a66e756d62657207a66e6f775f6d73cd07d0a56974656d73919201920002",
    "83a474797065a361636ba66e6f775f6d73cd0834a66c65617365739192920192000107",
    "84a474797065a46e61636ba66475655f6d73cd0898a46e6f7465c4016ea66c65617365739192920192010207",
    "84a474797065a56772616e74a66e756d62657208a66e6f775f6d73cd08fca56974656d73919202920001",
    "83a474797065a6657874656e64a86c656173655f6d73cd2328a66c65617365739192920292000108",
    "84a474797065a3656e64a66e6f775f6d73cd09c4a464656164c2a66c65617365739192920192020300",
    "83a474797065a663616e63656ca66e6f775f6d73cd0a28a56974656d73919201920102",
    (
        "84a474797065a7656e7175657565a36b6579a26b33a96265666f72655f6d7300a56c616e6573919393a46a6f6273a000b071"
        "756575652035203130303020302030919592030002cd03e8000a"
    ),
)
FORMER_SNAPSHOT = (
    "86a776657273696f6e01aa6c6173745f6772616e7408a86172726976616c7303a6626c6f636b739299029393a46a6f6273a0"
    "00b47175657565203020323030302030203939303030919592020001cd03e8000aa26b32c4010191089101808100cd232880"
    "99039393a46a6f6273a000b071756575652035203130303020302030919592030002cd03e8000aa26b33c4009090808080a5"
    "656e64656491920192cd0a2893930207019304070193030001a6746f74616c7384a561636b656401a46465616401a7657870"
    "6972656401a963616e63656c6c656401"
)


# With a dedupe key, and in versions 1 and 2 with a state for each item.
FORMER_SNAPSHOT_WITH_KEYS = (
    "87a776657273696f6e02aa6c6173745f6772616e7402a86172726976616c7304a6626c6f636b739499019393a46a6f6273a0"
    "00b671756575652035203430303020322030206b65793d6b919592010004cd27100064a36b6579c404020100009401020200"
    "94010101008102cd2ee08101cd23288102c40468616c6699029393a46a6f6273a000b4717565756520312034303030203120"
    "3930303030919592020003cd27100064a36b6579c403010501930101019301010180808101c4046e6f746599039393a46a6f"
    "6273a000d94571756575652035203430303020302030206465647570653d3634363436343634363436343634363436343634"
    "3634363436343634363436342e31303030302e333130303030919592030001cd27100064a36b6579c4009090808080990493"
    "93a46a6f6273a000b071756575652035203430303020302030919592040002cd27100064a36b6579c4020004920000920000"
    "808080a5656e64656490a6746f74616c7383a561636b656401a46465616401a963616e63656c6c656401a666697273747391"
    "93c4106464646464646464646464646464646403ce0004baf0"
)


def restored(state: str) -> QueueMachine:
    machine = QueueMachine()
    machine.restore(bytes.fromhex(state))
    return machine


def test_a_log_of_the_release_without_keys_is_read_and_written_as_it_was() -> None:
    machine, former = QueueMachine(), restored(FORMER_SNAPSHOT)
    for body in FORMER_DECISIONS:
        assert encode_decision(decode_decision(bytes.fromhex(body))).hex() == body
        machine.apply(bytes.fromhex(body))
    state = msgspec.msgpack.decode(machine.snapshot())
    assert len(state.pop("returns")) == 1, "that release did not keep nacks"
    assert msgspec.msgpack.decode(former.snapshot()) == state, "a state for each item is read as ranges"
    assert (former.items, former.topics) == (machine.items, machine.topics) == (3, {"jobs": 3})


def test_a_snapshot_with_a_state_for_each_item_is_read() -> None:
    machine = restored(FORMER_SNAPSHOT_WITH_KEYS)
    leased, ready = ItemStatus(ItemState.LEASED, 1, 1, 10_000, 4_000), ItemStatus(ItemState.READY, 0, 0, 10_000, 4_000)
    assert {id_: [status for *_, status in block.ranges()] for id_, block in machine.blocks.items()} == {
        1: [
            leased._replace(state=ItemState.ACKED),
            leased._replace(grant=2, lease_ms=9_000),
            ItemStatus(ItemState.READY, 2, 1, 12_000, 4_000, b"half"),
            ready,
        ],
        2: [leased, leased._replace(state=ItemState.DEAD, note=b"note"), leased],
        3: [ready],
        4: [ready, ready._replace(state=ItemState.CANCELLED)],
    }
    assert machine.dead == {"jobs": {2: None}}
    assert machine.items == 8
    assert len(machine.firsts) == 1
    assert restored(machine.snapshot().hex()).snapshot() == machine.snapshot()


SNAPSHOT = (
    "87a776657273696f6e03aa6c6173745f6772616e7401a86172726976616c7301a6626c6f636b7390a5656e64656490a6746f"
    "74616c7381a561636b6564cd01f4a672616e6765649194019393a46a6f6273a000b071756575652035203130303020302030"
    "9195920100cd03e8cd03e8000aa16b9392cd01f496020101cd03e8cd03e8c40092cd019096010101cd03e8cd03e8c4009264"
    "96000000cd03e8cd03e8c400"
)


def test_a_snapshot_has_a_range_for_items_with_the_same_status() -> None:
    machine = QueueMachine()
    enqueue(machine, 1, 1_000)
    grant(machine, 1, ItemRanges(1, (0, 900)))
    decided(machine, AckDecision(5, (LeasedItems(ItemRanges(1, (0, 500)), 1),)))
    assert machine.snapshot().hex() == SNAPSHOT
    assert restored(SNAPSHOT).snapshot().hex() == SNAPSHOT
