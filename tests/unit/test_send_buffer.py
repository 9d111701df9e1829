"""The blocks of a producer: bounds of blocks and memory, for records of every shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memq.client.producer.delivery import Delivery
from memq.client.producer.fields import RecordColumns, check_fields, check_many
from memq.client.producer.open_block import PendingBlock
from memq.client.producer.send_buffer import ASIDE_BYTES_MIN, BLOCK_COST_BYTES, FIRST_LIMIT_BYTES
from memq.errors import BufferFullError, ClosedError, InvalidRequestError, TooLargeError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import BlockReader, open_block
from memq.limits import BLOCK_RAW_BYTES_MAX, KIB, TIME_MS_END
from memq.topic import Topic, TopicSettings, slot_of_key
from tests.unit.producer_parts import Hands
from tests.unit.toy_broker import toy_topic

BLOCK = 4 * KIB
Row = tuple[bytes | None, bytes | None, dict[str, bytes | None] | None, int | None, str | None]


def rows(rng: random.Random, shape: str, count: int) -> list[Row]:
    """Records of a shape: `plain`, `keyed`, `timed`, `full`, or all of them in turn."""
    found: list[Row] = []
    for number in range(count):
        kind = rng.choice(("plain", "keyed", "timed", "full")) if shape == "mixed" else shape
        value = b"%05d" % number + bytes(rng.choice((0, 5, 50, 600)))
        key = None if kind == "plain" else b"k%d" % rng.randrange(5)
        headers: dict[str, bytes | None] | None = None
        tag = None
        if kind == "full":
            headers = {f"header-{each}": rng.choice((None, b"", bytes(40))) for each in range(rng.randrange(6))}
            tag = "t" * rng.randrange(1, 60)
        found.append((value, key, headers, 1_000 + number if kind in ("timed", "full") else None, tag))
    return found


def put(hands: Hands, row: Row, partition: int | None = None) -> None:
    """Put a record as the producers do: on the lock-free path where it is open."""
    value, key, headers, timestamp_ms, tag = row
    buffer = hands.buffer
    fast = headers is None and tag is None and partition is None
    taken = None
    if fast and value is not None and key is not None:
        taken = hands.put_fast(value, key, timestamp_ms)
    if taken is None:
        buffer.put(hands.route, check_fields(value, key, headers, timestamp_ms, tag), partition)


def filled(readers: list[BlockReader], block_bytes: int) -> float:
    """Return how full the blocks are on average, but for the last one; none is over its bound."""
    raw = [reader.header.raw_length for reader in readers]
    assert all(size <= block_bytes for size in raw), max(raw)
    return sum(raw[:-1]) / max(1, len(raw) - 1) / block_bytes


@pytest.mark.parametrize("shape", ["plain", "keyed", "timed", "full", "mixed"])
def test_blocks_of_every_shape_are_full_and_within_their_bound(shape: str) -> None:
    sent = rows(random.Random(shape), shape, 400)
    hands = Hands(block_bytes=BLOCK)
    for row in sent:
        put(hands, row)
    readers = hands.collect()[0]
    assert filled(readers, BLOCK) > 0.6
    found = [record for reader in readers for record in reader.records()]
    assert [(record[0], record[1]) for record in found] == [row[:2] for row in sent]
    assert [record[3] for record, row in zip(found, sent, strict=True) if row[3] is not None] == [
        row[3] for row in sent if row[3] is not None
    ]
    assert hands.buffer.pending_bytes == 0


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("partitions", [1, 3])
def test_columns_fill_blocks_as_single_records_do(keyed: bool, timed: bool, partitions: int) -> None:
    rng = random.Random(7)
    values: list[bytes | None] = [b"%05d" % number + bytes(rng.choice((0, 9, 90, 900))) for number in range(2_100)]
    keys: list[bytes | None] | None = [b"k%d" % rng.randrange(40) for _ in values] if keyed else None
    times = list(range(1_000, 3_100)) if timed else None
    hands = Hands(partitions, block_bytes=BLOCK)
    delivered: list[Delivery] = []
    assert hands.buffer.put_many(hands.route, check_many(values, keys, times, None), delivered) is None
    hands.collect()
    for readers in hands.sealed.values():
        assert filled(readers, BLOCK) > 0.75
        found = [record[0] for reader in readers for record in reader.records()]
        if keyed:
            assert found == sorted(found, key=lambda value: (value or b"")[:5]), "each partition keeps the order"
    records = [record for readers in hands.sealed.values() for reader in readers for record in reader.records()]
    assert sorted(record[0] or b"" for record in records) == sorted(value or b"" for value in values)
    if keys:
        assert {record[0]: record[1] for record in records} == dict(zip(values, keys, strict=True))
    if times:
        assert {record[0]: record[3] for record in records} == dict(zip(values, times, strict=True))
    blocks = [pending.delivery for pending in hands.taken]
    assert sorted(map(id, delivered)) == sorted(map(id, blocks)), "each block is reported once"
    if not keyed:
        counts = [len(readers) for readers in hands.sealed.values()]
        assert max(counts) - min(counts) <= 1, "blocks without keys go in turn"


def test_a_block_is_filled_to_its_last_byte() -> None:
    hands = Hands(block_bytes=16 * KIB)
    for _ in range(17):
        hands.send_many([bytes(1_018)])
    assert [reader.count for reader in hands.collect()[0]] == [16, 1]


def test_a_block_that_changes_its_shape_is_cut_once() -> None:
    hands = Hands(block_bytes=16 * KIB)
    sent = [b"%05d" % number + bytes(1_000) for number in range(15)]
    for value in sent:
        hands.send(value)
    hands.send(b"keyed", b"k")
    hands.send(bytes(2_000))
    assert hands.values() == [*sent, b"keyed", bytes(2_000)]


def test_records_with_keys_leave_those_without_where_they_are() -> None:
    hands = Hands(4)
    for number in range(40):
        hands.send(b"plain")
        put(hands, (b"keyed", b"k%d" % number, None, None, None))
    hands.collect()
    homes = {number for number, readers in hands.sealed.items() for each in readers if b"plain" in each.values()}
    assert len(homes) == 1


@pytest.mark.parametrize("shape", ["plain", "keyed", "timed", "full"])
@pytest.mark.parametrize("many", [False, True])
def test_the_largest_record_leaves_those_behind_it_to_another_block(shape: str, many: bool) -> None:
    """At the bound of the format, one record more would make the whole block invalid."""
    bound = BLOCK_RAW_BYTES_MAX - 64
    hands = Hands(record_bytes_max=bound)
    for number, (value, key, headers, timestamp_ms, tag) in enumerate(rows(random.Random(3), shape, 20)):
        if number == 0:
            value = bytes(bound - len(key or b"") - 2_000 * (shape == "full"))
        if many:
            times = None if timestamp_ms is None else [timestamp_ms]
            columns = check_many([value], None if key is None else [key], times, tag)
            assert hands.buffer.put_many(hands.route, columns, []) is None
        else:
            put(hands, (value, key, headers, timestamp_ms, tag))
    assert [reader.count for reader in hands.collect()[0]] == [1, 19]
    assert hands.buffer.pending_bytes == 0


def test_a_tag_for_many_is_on_each() -> None:
    hands = Hands(block_bytes=BLOCK)
    assert hands.buffer.put_many(hands.route, check_many([b"v"] * 200, None, None, "t" * 30), []) is None
    readers = hands.collect()[0]
    filled(readers, BLOCK)
    assert [record[4] for reader in readers for record in reader.records()] == ["t" * 30] * 200


# ---- memory --------------------------------------------------------------------------------------


def test_a_block_claims_little_at_first_and_doubles() -> None:
    hands = Hands(block_bytes=64 * KIB)
    claims: list[int] = []
    for _ in range(600):
        hands.send(bytes(95))
        if not claims or claims[-1] != hands.buffer.pending_bytes:
            claims.append(hands.buffer.pending_bytes)
    assert claims == [limit + BLOCK_COST_BYTES for limit in (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)]
    hands.collect()
    hands.send(b"v")
    assert hands.buffer.pending_bytes == hands.claim(64 * KIB), "the next one is likely to become as large"


def test_a_block_claims_at_once_what_many_records_need() -> None:
    hands = Hands(block_bytes=64 * KIB)
    hands.send(b"v")
    (partition,) = hands.buffer.buffers()
    assert partition.open is not None
    raw = partition.open.raw_bytes
    hands.send_many([bytes(95)] * 400)
    assert hands.buffer.pending_bytes == raw + 400 * 100 + BLOCK_COST_BYTES, "and not the next power of two"


def test_the_next_block_claims_no_more_than_the_last_one_needed_nor_half_of_the_memory() -> None:
    hands = Hands(block_bytes=64 * KIB, pending_bytes_max=200 * KIB)
    for _ in range(300):
        hands.send(bytes(95))
    hands.collect()
    hands.send(b"v")
    assert hands.claim(37_000) < hands.buffer.pending_bytes < hands.claim(38_000), "five quarters of the last one"
    hands.collect()
    for _ in range(600):
        hands.send(bytes(95))
    hands.collect(release=False)
    before = hands.buffer.pending_bytes
    hands.send(b"v")
    assert hands.buffer.pending_bytes - before == hands.claim(FIRST_LIMIT_BYTES), "half of the memory is in use"


def test_the_next_block_claims_as_much_as_the_last_while_half_of_the_memory_is_free() -> None:
    hands = Hands(block_bytes=64 * KIB, pending_bytes_max=300 * KIB)
    for _ in range(600):
        hands.send(bytes(95))
    hands.collect(release=False)
    before = hands.buffer.pending_bytes
    assert 100 * KIB < before + 64 * KIB < 150 * KIB
    hands.send(b"v")
    assert hands.buffer.pending_bytes - before == hands.claim(64 * KIB)


@pytest.mark.parametrize("many", [False, True])
def test_memory_is_claimed_up_to_its_last_byte(many: bool) -> None:
    room = FIRST_LIMIT_BYTES + BLOCK_COST_BYTES

    def send(hands: Hands) -> bool:
        if many:
            return hands.send_many([b"v"])[0] == 1
        try:
            hands.send(b"v")
        except BufferFullError:
            return False
        return True

    hands = Hands(block_bytes=BLOCK * 4, pending_bytes_max=2 * room)
    assert send(hands)
    assert hands.buffer.pending_bytes == room
    hands.collect(release=False)
    used = hands.buffer.pending_bytes
    tight = Hands(block_bytes=BLOCK * 4, pending_bytes_max=used + hands.claim(FIRST_LIMIT_BYTES))
    assert send(tight)
    tight.collect(release=False)
    assert send(tight), "exactly as much as is left"
    narrow = Hands(block_bytes=BLOCK * 4, pending_bytes_max=used + room - 1)
    assert send(narrow)
    narrow.collect(release=False)
    assert not send(narrow)
    assert narrow.buffer.pending_bytes == used
    for pending in narrow.taken:
        narrow.buffer.release(pending)
    assert send(narrow)
    with pytest.raises(TooLargeError, match="over pending_bytes_max"):
        Hands(block_bytes=BLOCK * 4, pending_bytes_max=room - 1).send(b"v")
    assert str(narrow.buffer.full_error()).startswith(f"{narrow.claim(FIRST_LIMIT_BYTES)} of ")


def test_only_waiting_senders_are_notified_of_room() -> None:
    hands = Hands()
    hands.send(b"v")
    hands.collect()
    assert hands.rooms == 0
    hands.buffer.waiting = 1
    hands.send(b"v")
    seen = hands.buffer.releases
    hands.collect()
    assert hands.rooms >= 1
    assert hands.buffer.releases != seen
    calls = hands.rooms
    hands.buffer.refuse(ClosedError("closed"))
    assert hands.rooms == calls + 1, "who waits when it closes learns that it is closed"


# ---- bounds of records ---------------------------------------------------------------------------


def test_a_record_is_as_large_as_its_topic_allows_by_every_way() -> None:
    bound = 2_000
    fits, over = bytes(bound - 1), bytes(bound)
    hands = Hands(2, record_bytes_max=bound, block_bytes=BLOCK)
    hands.send(fits, b"k")
    assert hands.send_many([b"v", fits], [b"k", b"k"])[0] == 2
    assert hands.send_many([bytes(bound)])[0] == 1
    assert hands.send_many([b"v"] * 2_100 + [bytes(bound)])[0] == 2_101
    many_keys: list[bytes | None] = [b"k%d" % number for number in range(3_000)]
    before = hands.buffer.pending_bytes
    refused: list[Callable[[], object]] = [
        lambda: hands.send(over, b"k"),
        lambda: hands.send_many([b"v", over], [b"k", b"k"]),
        lambda: hands.send_many([b"v", bytes(bound + 1)]),
        lambda: hands.send_many([b"v"] * 2_999 + [over], many_keys),
        lambda: hands.send_many([b"v"] * 2_999 + [bytes(bound + 1)]),
        lambda: hands.send_many([over] + [b"v"] * 2_999, many_keys),
        lambda: hands.send_many([b"v"] * 2_047 + [over] + [b"v"] * 952, many_keys),
        lambda: hands.send_many([b"v"] * 2_048 + [over] + [b"v"] * 951, many_keys),
    ]
    for number, send in zip((None, 1, 1, 2_999, 2_999, 0, 2_047, 2_048), refused, strict=True):
        with pytest.raises(TooLargeError, match=f"record_bytes_max = {bound} of 'clicks'") as caught:
            send()
        assert number is None or str(caught.value).startswith(f"record values[{number}] of 200")
    assert hands.buffer.pending_bytes == before, "nothing of them is taken"


@pytest.mark.parametrize(("record_bytes_max", "open_way"), [(BLOCK - 1, False), (BLOCK, True)])
def test_the_fast_way_is_open_where_what_fits_into_a_block_is_never_too_large(
    record_bytes_max: int, open_way: bool
) -> None:
    hands = Hands(record_bytes_max=record_bytes_max, block_bytes=BLOCK)
    hands.send(b"v")
    assert hands.keyless() is open_way
    hands = Hands(record_bytes_max=record_bytes_max, block_bytes=BLOCK)
    hands.send(b"v", b"k")
    assert (hands.put_fast(b"v", b"k", None) is not None) is open_way


def test_the_fast_way_takes_what_fits_exactly_and_times_within_their_bounds() -> None:
    hands = Hands(block_bytes=FIRST_LIMIT_BYTES)
    hands.send(b"v", b"k")
    block = hands.buffer.buffers()[0].open
    assert block is not None
    assert block.rows is not None
    room = FIRST_LIMIT_BYTES - block.raw_bytes - block.rows.row_cost
    assert hands.put_fast(bytes(room), b"k", None) is None
    assert hands.put_fast(bytes(room - 1), b"k", None) is not None
    assert hands.collect()[0][0].header.raw_length <= FIRST_LIMIT_BYTES
    hands.send(b"v", b"k", 5)
    for refused in (TIME_MS_END, -TIME_MS_END):
        assert hands.put_fast(b"v", b"k", refused) is None
    for taken in (TIME_MS_END - 1, 1 - TIME_MS_END):
        assert hands.put_fast(b"v", b"k", taken) is not None
    assert hands.collect()[0][-1].timestamps() == [5, TIME_MS_END - 1, 1 - TIME_MS_END]


def test_keys_find_their_partition_by_every_way() -> None:
    hands = Hands(5)
    places = {part.partition: (part.slot_first, part.slot_last) for part in hands.route.topic.partitions}
    for turn in range(3):
        for number in range(40):
            put(hands, (b"%d" % turn, b"key-%d" % number, None, None, None))
    hands.send_many([b"m"] * 40, [b"key-%d" % number for number in range(40)])
    for partition, readers in hands.collect().items():
        for reader in readers:
            for _, key, *_ in reader.records():
                assert key is not None
                assert places[partition][0] <= slot_of_key(key) <= places[partition][1]
    assert len(hands.sealed) == 5


def test_a_chosen_partition_takes_any_key_and_says_so() -> None:
    hands = Hands(2)
    key = next(b"%d" % number for number in range(100) if slot_of_key(b"%d" % number) < 1 << 15)
    put(hands, (b"v", key, None, None, None), partition=1)
    hands.collect()
    assert list(hands.sealed) == [1]
    assert hands.taken[0].slots == (0, (1 << 16) - 1)
    put(hands, (b"v", key, None, None, None))
    hands.collect()
    assert hands.taken[1].slots == (0, (1 << 15) - 1)


# ---- maps that change, topics that go --------------------------------------------------------------


def test_a_topic_that_is_heard_of_again_keeps_its_route_and_a_new_one_gets_its_own() -> None:
    hands = Hands()
    hands.send(b"of the first")
    assert hands.buffer.add_route(toy_topic(settings=TopicSettings(record_bytes_max=1 << 20))) is hands.route
    (old,) = hands.buffer.buffers()
    again = hands.buffer.add_route(toy_topic(topic_id="cd" * 16))
    assert again is not hands.route
    assert hands.buffer.route("clicks") is again
    assert not hands.keyless(), "no record takes the fast path to the topic that was"
    hands.buffer.put(again, check_fields(b"of the second"), None)
    assert len(hands.buffer.buffers()) == 2
    (new,) = [buffer for buffer in hands.buffer.buffers() if buffer is not old]
    hands.buffer.seal_open(new)
    assert len(hands.buffer.take_ready(new)) == 1, "it waits for nothing of the other topic"
    hands.buffer.drop_route("clicks")
    assert hands.buffer.route("clicks") is None
    assert hands.put_fast(b"v", b"k", None) is None
    hands.buffer.drop_route("nothing")


def test_a_topic_that_is_altered_keeps_its_partitions() -> None:
    hands = Hands(2)
    hands.send(b"v", b"k")
    before = hands.buffer.buffers()
    altered = msgspec.structs.replace(hands.route.topic, settings=TopicSettings(delivery_timeout_ms=5_000), version=9)
    route = hands.buffer.add_route(altered)
    assert hands.buffer.buffers() == before
    hands.route = route
    for buffer in before:
        assert buffer.gates == []
    opened_s = [buffer.open.opened_s for buffer in before if buffer.open]
    hands.collect()
    assert [pending.deadline_s - since for pending, since in zip(hands.taken, opened_s, strict=True)] == [5.0]


def test_a_block_of_a_topic_that_is_gone_has_the_producers_own_timeout() -> None:
    hands = Hands()
    hands.send(b"v")
    (buffer,) = hands.buffer.buffers()
    assert buffer.open is not None
    since = buffer.open.opened_s
    hands.buffer.drop_route("clicks")
    assert not hands.keyless(), "the next record asks for the topic again"
    hands.collect()
    assert hands.taken[0].deadline_s == since + hands.settings.delivery_timeout_s


def cut_at(slot: int) -> Topic:
    """Return a topic whose second partition begins at a slot."""
    parts = toy_topic(partitions=2).partitions
    first = msgspec.structs.replace(parts[0], slot_last=slot - 1)
    second = msgspec.structs.replace(parts[1], slot_first=slot)
    return msgspec.structs.replace(toy_topic(partitions=2), partitions=[first, second], map_version=slot)


@pytest.mark.parametrize(("before", "after", "gains"), [(101, 100, 1), (100, 101, 0), (100, 50, 1), (100, 900, 0)])
def test_a_slot_that_moves_takes_its_order_along(before: int, after: int, gains: int) -> None:
    """However few slots move: what is put into the partition that gains them waits for the one that had them."""
    hands = Hands(2)
    hands.route = hands.buffer.add_route(cut_at(before))
    for partition in (0, 1):
        put(hands, (b"v", None, None, None, None), partition)
    hands.route = hands.buffer.add_route(cut_at(after))
    homes = {buffer.partition: buffer for buffer in hands.buffer.buffers()}
    early = {number: hands.buffer.take_ready(home) for number, home in homes.items()}
    assert [len(early[number]) for number in (0, 1)] == [1, 1], "both blocks ended with the map that was"
    for partition in (0, 1):
        put(hands, (b"v", None, None, None, None), partition)
        hands.buffer.seal_open(homes[partition])
    assert hands.buffer.take_ready(homes[gains]) == []
    assert len(hands.buffer.take_ready(homes[1 - gains])) == 1
    hands.buffer.release(early[1 - gains][0])
    assert len(hands.buffer.take_ready(homes[gains])) == 1


def test_a_key_that_is_sent_at_once_by_the_new_map_waits_for_its_older_records() -> None:
    class Lanes(dict[str, Any]):
        """Calls back when a lane is there: what a thread may do that sends all the time."""

        def __setitem__(self, topic: str, lane: Any) -> None:
            super().__setitem__(topic, lane)
            sent.append(hands.put_fast(b"new", key, None))

    hands = Hands(2)
    hands.route = hands.buffer.add_route(cut_at(20_000))
    key = next(key for key in (b"%d" % number for number in range(1_000)) if 10_000 < slot_of_key(key) < 20_000)
    other = next(key for key in (b"%d" % number for number in range(1_000)) if slot_of_key(key) > 20_000)
    hands.send(b"old", key)
    hands.send(b"of the gaining partition", other)
    sent: list[object] = []
    hands.buffer.lanes = Lanes(hands.buffer.lanes)
    hands.route = hands.buffer.add_route(cut_at(10_000))
    if sent == [None]:
        hands.send(b"new", key)
    before, gains = hands.buffer.buffers()
    hands.buffer.seal_open(gains)
    for pending in hands.buffer.take_ready(gains):
        assert b"new" not in open_block(pending.data).values(), "its older record is not even sent"
    hands.buffer.release(hands.buffer.take_ready(before)[0])
    assert [open_block(pending.data).values() for pending in hands.buffer.take_ready(gains)] == [[b"new"]]


# ---- sealing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [True, False])
def test_large_blocks_are_sealed_aside_when_somebody_is_free(free: bool) -> None:
    hands = Hands(block_bytes=4 * ASIDE_BYTES_MIN, pending_bytes_max=64 << 20)
    offered: list[tuple[Callable[[PendingBlock], None], PendingBlock]] = []

    def aside(seal: Callable[[PendingBlock], None], pending: PendingBlock) -> bool:
        offered.append((seal, pending))
        return free

    hands.buffer.aside = aside
    hands.send(bytes(ASIDE_BYTES_MIN - 2 * KIB))
    (buffer,) = hands.buffer.buffers()
    hands.buffer.seal_open(buffer)
    assert offered == []
    (small,) = hands.buffer.take_ready(buffer)
    assert small.ready
    hands.send(bytes(2 * ASIDE_BYTES_MIN))
    hands.buffer.seal_open(buffer)
    ((seal, large),) = offered
    exact = Hands(block_bytes=ASIDE_BYTES_MIN)
    exact.buffer.aside = aside
    for _ in range(ASIDE_BYTES_MIN // KIB - 1):
        exact.send(bytes(1_000))
    assert exact.buffer.pending_bytes == ASIDE_BYTES_MIN + BLOCK_COST_BYTES
    exact.buffer.seal_open(exact.buffer.buffers()[0])
    assert len(offered) == 2
    assert large.ready is not free
    if free:
        assert hands.buffer.take_ready(buffer) == []
        assert [records for _, records in hands.buffer.unsettled()] == [1]
        seal(large)
    assert hands.buffer.take_ready(buffer) == [large]


def test_unsettled_blocks_are_listed_with_their_records() -> None:
    hands = Hands(2)
    for _ in range(3):
        hands.send(b"v", b"a")
    hands.send_many([b"v"] * 5, [b"b"] * 5)
    assert sum(records for _, records in hands.buffer.unsettled()) == 8
    for buffer in hands.buffer.buffers():
        hands.buffer.seal_open(buffer)
        hands.buffer.seal_open(buffer)
    assert sum(records for _, records in hands.buffer.unsettled()) == 8
    hands.collect(release=False)
    assert hands.buffer.unsettled() == []


def test_a_refused_column_leaves_what_was_taken_before_it() -> None:
    hands = Hands()
    hands.send(b"before")
    with pytest.raises(TooLargeError):
        hands.buffer.put_many(hands.route, RecordColumns([b"v"], None, None, "t" * 70_000), [])
    with pytest.raises((InvalidRequestError, TooLargeError)):
        hands.buffer.put(hands.route, check_fields(b"v", tag="t" * 70_000), None)
    hands.send(b"after")
    assert hands.values() == [b"before", b"after"]
    assert hands.buffer.pending_bytes == 0


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_buffer_that_refuses_takes_no_record_by_any_way(key: bytes | None) -> None:
    hands = Hands()
    buffer = hands.buffer
    hands.send(b"1", key)
    if key is None:
        assert hands.keyless()
    else:
        assert hands.put_fast(b"2", key, None) is not None
    buffer.refuse(ClosedError("the producer is closed"))
    assert hands.put_fast(b"3", b"k", None) is None
    assert hands.put_fast(b"4", b"k", 1_000) is None
    assert not hands.keyless()
    with pytest.raises(ClosedError, match="the producer is closed"):
        hands.send(b"5", key)
    with pytest.raises(ClosedError):
        hands.send_many([b"6", b"7"])
    assert hands.values() == ([b"1"] if key is None else [b"1", b"2"]), "what was taken stays"


def test_a_finished_block_claims_its_bytes_and_its_cost_until_it_is_settled() -> None:
    """Writers with identities of their own wait for room by this: what is claimed once is given back once."""
    builder = BlockBuilder()
    builder.append(bytes(1_000))
    hands = Hands(block_bytes=BLOCK, pending_bytes_max=2 * BLOCK)
    before = hands.buffer.pending_bytes
    hands.buffer.put_block(hands.route, 0, 70, builder)
    assert hands.buffer.pending_bytes >= before + 1_000 + BLOCK_COST_BYTES
    (block,) = hands.collect()[0]
    assert (block.header.first_sequence, list(block.values())) == (70, [bytes(1_000)])
    assert hands.buffer.pending_bytes == before


def test_a_finished_block_below_an_earlier_one_is_refused() -> None:
    """Acks are cumulative: the caller waited without end for the ack of such a block."""
    builder = BlockBuilder()
    builder.append(b"a")
    hands = Hands(block_bytes=BLOCK)
    hands.buffer.put_block(hands.route, 0, 70, builder)
    again = BlockBuilder()
    again.append(b"b")
    with pytest.raises(AssertionError, match="sequence 69 is below 71"):
        hands.buffer.put_block(hands.route, 0, 69, again)


@pytest.mark.parametrize("headers", [None, {"h": b"1"}])
@pytest.mark.parametrize("many", [True, False])
def test_partitions_take_turns_with_full_blocks_of_records_without_keys(
    many: bool, headers: dict[str, bytes | None] | None
) -> None:
    """Else one owner would get all of them, for as long as its block is never found full."""
    hands = Hands(partitions=3, block_bytes=BLOCK)
    for number in range(30):
        if many:
            hands.send_many([bytes(1_000)])
        else:
            put(hands, (bytes(1_000), None, headers, None, str(number)))
    blocks = {partition: len(readers) for partition, readers in hands.collect().items()}
    assert sorted(blocks) == [0, 1, 2]
    assert max(blocks.values()) - min(blocks.values()) <= 1


def test_a_partition_in_which_a_single_block_waits_gets_no_turn() -> None:
    route = Hands(partitions=3).route
    first = route.next_turn()
    waiting = route.buffers[(route.turn + 1) % 3]
    waiting.backlog = 1
    assert len({first, waiting, route.next_turn()}) == 3
    assert route.next_turn() is first
    waiting.backlog = 0
    assert route.next_turn() is waiting
