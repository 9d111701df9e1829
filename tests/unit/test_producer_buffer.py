"""The caller's side of a producer: accepted records, cut and sealed blocks, counts; no I/O."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.client.producer import open_block as open_block_module
from memq.client.producer import producer as producer_module
from memq.client.producer.fields import as_bytes, check_fields, check_many
from memq.client.producer.open_block import OpenBlock, PendingBlock
from memq.client.producer.partitioner import PartitionMap
from memq.client.producer.producer import Producer
from memq.client.producer.send_buffer import BLOCK_COST_BYTES
from memq.client.producer.sender import PythonSender
from memq.errors import BufferFullError, ClosedError, InvalidRequestError, TooLargeError
from memq.format.blocks.columns import BlockReader, open_block
from memq.kernel import rows as python_rows
from memq.runtime.clock import SystemClock
from memq.topic import slot_of_key
from tests.unit.producer_parts import Hands
from tests.unit.toy_broker import toy_topic

Sent = tuple[bytes | None, bytes | None, int | None]


def sealed(block: OpenBlock) -> BlockReader:
    """What a reader finds in a block when it is sealed now."""
    return open_block(block.seal(producer_id=5, first_sequence=0, scope=1, now_ms=0, codec="none").data)


@pytest.fixture
def rows_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the rows in Python, also where compiled ones are installed."""
    monkeypatch.setattr(open_block_module, "kernel", python_rows)
    monkeypatch.setattr(OpenBlock, "rows_of_all_shapes", False)
    monkeypatch.setattr(producer_module, "native", None)
    monkeypatch.setattr(Producer, "send", PythonSender.send)


def test_the_io_side_is_woken_once_for_many_records() -> None:
    hands = Hands()
    for _ in range(100):
        hands.send(b"x")
    assert hands.wakes == 1
    assert len(hands.values()) == 100
    hands.send(b"x")
    assert hands.wakes == 2


@pytest.mark.parametrize("key", [None, b"k"])
def test_blocks_follow_on_each_other_and_memory_comes_back(key: bytes | None) -> None:
    hands = Hands(block_bytes=4_096)
    for number in range(1_000):
        hands.send(b"%d" % number * 10, key)
    (readers,) = hands.collect().values()
    assert len(readers) > 5
    expected = 0
    for reader in readers:
        assert reader.header.first_sequence == expected
        assert reader.header.raw_length <= 4_096
        expected = reader.header.next_sequence
    assert expected == 1_000
    assert hands.buffer.pending_bytes == 0


def test_pending_bytes_are_counted_and_bounded() -> None:
    hands = Hands(block_bytes=8_192, pending_bytes_max=50_000)
    with pytest.raises(BufferFullError):  # noqa: PT012  # how many fit is the question
        for _ in range(1_000):
            hands.send(b"x" * 1_000)
    assert hands.buffer.pending_bytes <= 50_000
    taken = len(hands.collect(release=False)[0])
    stored = sum(reader.header.length for reader in hands.sealed[0])
    held = hands.buffer.pending_bytes - taken * BLOCK_COST_BYTES
    assert stored <= held == sum(pending.claimed for pending in hands.taken) < stored * 5 // 4
    assert 30 <= len(hands.values()) < 50


def test_a_record_that_can_never_fit_is_too_large() -> None:
    hands = Hands(block_bytes=8_192, pending_bytes_max=50_000)
    with pytest.raises(TooLargeError, match="pending_bytes_max"):
        hands.send(bytes(60_000))
    with pytest.raises(TooLargeError, match="record_bytes_max"):
        hands.send(bytes((1 << 20) + 1))


def test_a_record_larger_than_a_block_gets_a_block_of_its_size() -> None:
    hands = Hands(block_bytes=8_192)
    hands.send(b"small")
    hands.send(bytes(100_000))
    for _ in range(500):
        hands.send(b"small")
    first, second = hands.collect()[0][:2]
    assert first.count == 1
    assert second.header.raw_length < 100_000 + 2_048


def test_thousands_of_open_blocks_claim_little() -> None:
    hands = Hands(partitions=1_000)
    for number in range(20_000):
        hands.send(b"v", key=b"%d" % number)
    assert hands.buffer.pending_bytes < 1_000 * 10_000


@given(
    st.lists(st.tuples(st.binary(max_size=300) | st.none(), st.binary(max_size=20) | st.none()), max_size=60),
    st.integers(1, 4),
    st.booleans(),
)
def test_many_at_once_equals_one_by_one(
    pairs: list[tuple[bytes | None, bytes | None]], partitions: int, keyed: bool
) -> None:
    values = [value for value, _ in pairs]
    keys = [key for _, key in pairs] if keyed else None
    one, many = Hands(partitions, block_bytes=1_024), Hands(partitions, block_bytes=1_024)
    for value, key in pairs:
        one.send(value, key if keyed else None)
    taken, delivered = many.send_many(values, keys)
    assert taken == len(values)
    assert len(delivered) <= len(values)
    if keyed and None not in (keys or ()):
        assert one.collect().keys() == many.collect().keys()
        for number in one.sealed:
            flat = [[v for r in hands.sealed[number] for v in r.values()] for hands in (one, many)]
            assert flat[0] == flat[1]
    assert sorted(map(repr, one.values())) == sorted(map(repr, many.values()))


def test_many_takes_what_there_is_room_for_and_says_so() -> None:
    hands = Hands(block_bytes=8_192, pending_bytes_max=50_000)
    taken, delivered = hands.send_many([b"%d" % number * 200 for number in range(1_000)])
    assert 20 < taken < 1_000
    assert len(delivered) > 2
    assert hands.values() == [b"%d" % number * 200 for number in range(taken)]


def test_columns_may_come_and_go_within_a_block() -> None:
    hands = Hands()
    sent: list[Sent] = [(b"a", None, None), (b"b", b"k", None), (None, None, 5), (b"d", b"", 6), (b"", None, None)]
    for value, key, time in sent:
        hands.send(value, key, time)
    (reader,) = hands.collect()[0]
    assert [(record[0], record[1]) for record in reader.records()] == [(value, key) for value, key, _ in sent]
    assert [record[3] for record in reader.records()][2:4] == [5, 6]


def test_the_fast_way_for_keys_is_the_same_block() -> None:
    hands = Hands()
    for timestamp_ms in (None, 7):
        assert hands.put_fast(b"v", b"k", timestamp_ms) is None  # no block is made for it yet
        hands.send(b"first", b"k", timestamp_ms)
        for _ in range(5):
            assert hands.put_fast(b"v", b"k", timestamp_ms) is not None
        assert hands.put_fast(b"v", b"k", 9 if timestamp_ms is None else None) is None
        assert hands.put_fast(b"v", b"k", None, "nothing") is None
        hands.collect()
    first, second = hands.sealed[0]
    assert first.values() == second.values() == [b"first"] + [b"v"] * 5
    assert second.timestamps() == [7] * 6


def test_the_fast_way_keeps_the_bounds() -> None:
    hands = Hands(block_bytes=2_048, record_bytes_max=100)
    hands.send(b"v", b"k")
    assert hands.put_fast(bytes(101), b"", None) is None
    while hands.put_fast(bytes(90), b"k", None) is not None:
        pass
    assert hands.collect()[0][0].header.raw_length <= 2_048
    assert not hands.keyless()


def test_nothing_goes_in_after_the_end() -> None:
    hands = Hands()
    hands.send(b"v", b"k")
    hands.send(b"v")
    hands.buffer.refuse(ClosedError("closed"))
    assert not hands.keyless()
    assert hands.put_fast(b"v", b"k", None) is None
    with pytest.raises(ClosedError):
        hands.buffer.route("clicks")
    with pytest.raises(ClosedError):
        hands.send(b"v")
    assert hands.values() == [b"v", b"v"]


def test_threads_lose_and_double_nothing() -> None:
    hands = Hands(partitions=3, block_bytes=4_096)

    def work(name: int) -> None:
        for number in range(500):
            hands.send(b"%d-%d" % (name, number), key=b"%d" % name if name % 2 else None)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = hands.values()
    assert sorted(value or b"" for value in values) == sorted(b"%d-%d" % (t, n) for t in range(6) for n in range(500))
    for name in (1, 3, 5):  # one key, one partition, in order
        mine = [value for value in values if (value or b"").startswith(b"%d-" % name)]
        assert mine == [b"%d-%d" % (name, number) for number in range(500)]
    for readers in hands.sealed.values():
        ends = [0] + [reader.header.next_sequence for reader in readers]
        assert ends[:-1] == [reader.header.first_sequence for reader in readers]


def producer_on(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> Producer:
    """Return a producer that puts records into the buffer of `hands`; it reaches no broker."""
    monkeypatch.setattr("memq.client.producer.core.SendBuffer", lambda *_: hands.buffer)
    return Producer("127.0.0.1:1", codec="none")


@pytest.mark.usefixtures("rows_in_python")
@pytest.mark.parametrize("key", [None, b"k"])
def test_a_seal_at_any_point_of_a_send_loses_and_doubles_nothing(
    key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock-free path, interrupted after each bytecode by what the I/O thread does."""
    points = 0
    for point in range(1, 1_000):
        hands = Hands()
        producer = producer_on(hands, monkeypatch)
        hands.send(b"first", key)
        (partition,) = hands.buffer.buffers()
        steps = iter(range(1, point + 1))

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            frame.f_trace_lines = False
            if event == "call" and frame.f_code.co_name in ("send", "put_keyed"):
                frame.f_trace = interrupt  # since Python 3.12 the next line takes effect in a frame with a trace,
                frame.f_trace_opcodes = True
                sys.settrace(interrupt)  # and from the next settrace on
            if event == "opcode" and next(steps, 0) == point:  # noqa: B023  # it is used within this turn only
                sys.settrace(None)
                hands.buffer.seal_open(partition)  # noqa: B023
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        delivery = producer.send("clicks", b"second", key)
        reached = sys.gettrace() is None
        sys.settrace(before)
        assert hands.values() == [b"first", b"second"], point
        assert delivery in [pending.delivery for pending in hands.taken[-1:]]
        producer.close(0)
        if not reached:
            break
        points = point
    assert points > 40


@pytest.mark.parametrize("key", [None, b"k"])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 6, 700])
def test_no_block_is_over_its_bound_by_the_way_without_the_lock(
    size: int, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands(block_bytes=4_096)
    producer = producer_on(hands, monkeypatch)
    count = 3 * 4_096 // (size + 5)
    hands.send(bytes(size), key)
    for _ in range(count - 1):
        producer.send("clicks", bytes(size), key)
    assert len(hands.values()) == count
    producer.close(0)
    raw = [reader.header.raw_length for readers in hands.sealed.values() for reader in readers]
    assert max(raw) <= 4_096
    assert min(raw[:-1]) > 3_000 or key is not None, "each is filled before the next"


@pytest.mark.usefixtures("rows_in_python")
def test_rows_that_come_late_are_taken_back_once_each() -> None:
    hands = Hands()
    hands.send(b"in time")
    (partition,) = hands.buffer.buffers()
    block = partition.open
    assert block is not None
    assert block.rows is not None
    block.close()
    same, rows = b"late", block.rows
    rows.cells += [same, same]
    assert sealed(block).values() == [b"in time"]
    assert [rows.take_late((same,)) for _ in range(3)] == [True, True, False]
    assert not rows.take_late((rows.cells[0],))


@pytest.mark.usefixtures("rows_in_python")
def test_of_late_rows_with_a_key_and_a_time_the_right_one_is_taken_back() -> None:
    hands = Hands()
    hands.send(b"in time", b"k", timestamp_ms=1)
    (partition,) = hands.buffer.buffers()
    block = partition.open
    assert block is not None
    assert block.rows is not None
    block.close()
    value, key, times, rows = b"late", b"key", [object() for _ in range(3)], block.rows
    for time in times:
        rows.cells += (value, key, time)
    assert not rows.take_late((key, value, times[0]))  # what lies across two rows is none
    assert rows.take_late((value, key, times[1]))
    assert rows.cells[3:] == [value, key, times[0], value, key, times[2]]
    assert not rows.take_late((value, key, times[1]))
    built = sealed(block)
    assert (built.values(), built.keys(), built.timestamps()) == ([b"in time"], [b"k"], [1])


@pytest.mark.usefixtures("rows_in_python")
def test_a_row_that_comes_while_rows_become_columns_is_taken_back() -> None:
    """Its thread saw the block of keyed records; another one put a record with a header there, with the lock."""
    hands = Hands()
    hands.send(b"in time", b"k")
    (partition,) = hands.buffer.buffers()
    block = partition.open
    assert block is not None
    assert block.rows is not None
    rows = block.rows
    hands.buffer.put(hands.route, check_fields(b"other", headers={"h": b""}), None)
    assert partition.open is block, "the same block continues, with its promise"
    late = (b"late", b"k")
    rows.cells.extend(late)
    assert (rows.closed, block.count) == (True, 2)
    assert hands.buffer.put_late(rows, late) is None
    assert (rows.cells, sealed(block).values()) == ([b"in time", b"k"], [b"in time", b"other"])


@pytest.mark.usefixtures("rows_in_python")
def test_a_block_is_closed_before_its_rows_are_counted() -> None:
    class Cells(list[object]):
        def __len__(self) -> int:
            seen.append(rows.closed)
            return super().__len__()

    seen: list[bool] = []
    hands = Hands()
    hands.send(b"v")
    (partition,) = hands.buffer.buffers()
    block = partition.open
    assert block is not None
    assert block.rows is not None
    rows = block.rows
    rows.cells = Cells(rows.cells)
    block.close()
    assert seen == [True]


def test_a_block_that_is_sealed_early_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(block_bytes=1_024)
    cut: list[PendingBlock] = []
    seal = hands.buffer.seal
    monkeypatch.setattr(hands.buffer, "seal", cut.extend)
    for number in range(200):
        hands.send(b"%0100d" % number)
    (partition,) = hands.buffer.buffers()
    seal(cut[1:])
    assert hands.buffer.take_ready(partition) == []
    seal(cut[:1])
    assert hands.buffer.take_ready(partition) == cut


@pytest.mark.usefixtures("rows_in_python")
def test_a_block_that_cannot_be_sealed_fails_alone() -> None:
    hands = Hands()
    hands.send(b"v")
    (partition,) = hands.buffer.buffers()
    assert partition.open is not None
    assert partition.open.rows is not None
    partition.open.rows.cells[0] = 5  # as a careless fast caller would
    hands.buffer.seal_open(partition)
    (pending,) = hands.buffer.take_ready(partition)
    assert isinstance(pending.error, InvalidRequestError)
    hands.send(b"next")
    hands.buffer.seal_open(partition)
    (following,) = hands.buffer.take_ready(partition)
    assert (following.error, following.first) == (None, 1)


def test_an_interrupt_in_a_seal_fails_that_block_and_keeps_the_others_from_waiting() -> None:
    class Interrupted(SystemClock):
        times = 0

        def wall_ms(self) -> int:  # the seal asks for it
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt
            return super().wall_ms()

    hands = Hands(2, clock=Interrupted())
    for partition in (0, 1):
        hands.buffer.put(hands.route, check_fields(b"v"), partition)
    with pytest.raises(KeyboardInterrupt):
        hands.buffer.add_route(toy_topic(partitions=3))  # ends both blocks
    first, second = (hands.buffer.take_ready(partition)[0] for partition in hands.buffer.buffers()[:2])
    assert "interrupted" in str(first.error)
    assert second.error is None
    for pending in (first, second):
        hands.buffer.release(pending)
    assert hands.buffer.pending_bytes == 0


def test_a_refused_first_record_leaves_no_block_that_nobody_looks_at() -> None:
    hands = Hands()
    many = check_many([b"v"], None, None, "t" * 70_000)
    for refused in (
        lambda: hands.buffer.put(hands.route, check_fields(b"v", tag="t" * 70_000), None),
        lambda: hands.buffer.put_many(hands.route, many, []),
    ):
        with pytest.raises(TooLargeError, match="70000 bytes"):
            refused()
        assert hands.buffer.pending_bytes == 0
        hands.buffer.take_dirty()  # the I/O side looks, and finds nothing to do
        wakes = hands.wakes
        hands.send(b"next")
        assert hands.wakes == wakes + 1
        (partition,) = hands.buffer.take_dirty()
        hands.buffer.seal_open(partition)
        (taken,) = hands.buffer.take_ready(partition)
        hands.buffer.release(taken)


@given(st.binary(max_size=20), st.integers(1, 40))
def test_a_key_has_one_index_that_holds_its_slot(key: bytes, count: int) -> None:
    topic = toy_topic(partitions=count)
    found = PartitionMap(topic)
    index = found.index_of_key(key)
    assert found.slots[index][0] <= slot_of_key(key) <= found.slots[index][1]
    holders = [part.partition for part in topic.partitions if part.slot_first <= slot_of_key(key) <= part.slot_last]
    assert [found.partitions[index]] == holders


def test_the_turn_passes_over_stalled_partitions_unless_all_are() -> None:
    found = PartitionMap(toy_topic(partitions=4))
    assert [found.next_index(index, lambda _: False) for index in range(4)] == [1, 2, 3, 0]
    assert found.next_index(0, lambda index: index in (1, 2)) == 3
    assert found.next_index(0, lambda _: True) == 1
    assert found.next_index(3, lambda index: index != 3) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [(b"a", b"a"), (bytearray(b"a"), b"a"), (memoryview(b"abc")[1:2], b"b"), ("ä", b"\xc3\xa4"), (None, None)],
)
def test_bytes_like_is_copied_and_text_is_utf8(given: object, expected: bytes | None) -> None:
    assert as_bytes(given, "value") == expected  # type: ignore[arg-type]


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        as_bytes("\ud800", "key")
