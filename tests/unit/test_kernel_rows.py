"""Compiled rows and rows in Python: the same blocks, the same refusals, from the same records."""

from __future__ import annotations

import gc
import inspect
import random
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.client.producer.fields import check_fields
from memq.client.producer.open_block import native
from memq.client.producer.sender import PythonSender
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import open_block
from memq.format.blocks.header import CODECS, parse_header
from memq.kernel.rows import KEYED, PLAIN, TIMED, Rows
from memq.limits import BLOCK_RAW_BYTES_MAX, BLOCK_RECORDS_MAX, KIB, MIB, TIME_MS_END
from memq.topic import slot_of_key
from tests.unit.producer_parts import Hands, compiled_path

pytestmark = pytest.mark.skipif(native is None, reason="memq-native is not installed, or MEMQ_NATIVE switches it off")

Record = tuple[bytes | None, bytes | None, int | None]
SLOTS = (7, 70)


def records_of(shape: int) -> st.SearchStrategy[list[Record]]:
    value = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=200, max_size=300))
    key = st.binary(max_size=20) if shape > PLAIN else st.none()
    time = st.integers(1 - TIME_MS_END, TIME_MS_END - 1) | st.integers(0, 5) if shape == TIMED else st.none()
    return st.lists(st.tuples(value, key, time), min_size=1, max_size=60)


def columns_of(records: Sequence[Record], shape: int) -> tuple[Any, Any, Any]:
    values, keys, times = ([record[number] for record in records] for number in range(3))
    return values, keys if shape > PLAIN else None, times if shape == TIMED else None


def sealed_in_python(records: Sequence[Record], codec: str) -> bytes:
    builder = BlockBuilder()
    for value, key, time in records:
        builder.append(value, key, None, time)
    origin = {"producer_id": 5, "first_sequence": 9, "scope": 3, "now_ms": 77, "producer_epoch": 2}
    return bytes(builder.seal(**origin, codec=codec, slot_range=SLOTS).data)


def seal(rows: Any, codec: str) -> tuple[bytes, int]:
    block, memory_bytes = rows.seal(CODECS[codec], 5, 2, 9, 3, 77, SLOTS)
    return bytes(block), memory_bytes


@pytest.mark.parametrize("shape", [PLAIN, KEYED, TIMED])
@given(st.data())
def test_the_same_records_make_the_same_block(shape: int, data: st.DataObject) -> None:
    records = data.draw(records_of(shape))
    limit, front = data.draw(st.integers(16, 20_000)), data.draw(st.integers(0, 3_000))
    compiled, python = native.Rows(shape, limit, None, front), Rows(shape, limit)
    at = 0
    while at < len(records):
        many = records[at : at + data.draw(st.integers(1, 5))]
        size = sum(len(value or b"") + len(key or b"") for value, key, _ in many)
        for rows in (compiled, python):
            if len(many) == 1:
                assert rows.append(*many[0], size)
            else:
                assert rows.extend(*columns_of(many, shape), size)
        if data.draw(st.booleans()):
            limit = max(limit, data.draw(st.integers(16, 20_000)))
            compiled.grow(limit)
            python.grow(limit)
        at += len(many)
    assert (compiled.count, compiled.room, compiled.shape, compiled.row_cost) == (
        (python.count, python.room, python.shape, python.row_cost)
    )
    compiled.close()
    python.close()
    assert compiled.columns() == python.columns() == columns_of(records, shape)
    expected = sealed_in_python(records, "none")
    block, memory_bytes = seal(compiled, "none")
    assert block == expected
    assert memory_bytes >= len(block)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("shape", [PLAIN, KEYED, TIMED])
@given(st.data())
def test_packed_blocks_say_the_same(shape: int, codec: str, data: st.DataObject) -> None:
    records = data.draw(records_of(shape)) * data.draw(st.sampled_from([1, 1, 30]))
    rows = native.Rows(shape, 1 * MIB, None)
    assert rows.extend(*columns_of(records, shape), 0)
    block, memory_bytes = seal(rows, codec)
    header, expected = parse_header(block), parse_header(sealed_in_python(records, codec))
    lengths = {"checksum": 0, "payload_length": 0, "codec": 0}
    assert header._replace(**lengths) == expected._replace(**lengths)
    assert list(open_block(block).records()) == list(open_block(sealed_in_python(records, codec)).records())
    assert memory_bytes == len(block) <= header.raw_length + 72


def test_zstd_has_the_parameters_that_it_has_in_python() -> None:
    """A wrong level or hash table decodes as well, and only costs bytes or time. Sizes ascend: the memory grows."""
    dice = random.Random(5)
    words = [dice.randbytes(dice.randrange(2, 9)) for _ in range(3_000)]
    text = b"".join(words[min(int(dice.expovariate(0.004)), 2_999)] for _ in range(200_000))
    edge = 256 * KIB - 4  # the length of the value is in the block, too

    def packed_sizes(size: int) -> tuple[int, int]:
        rows = native.Rows(PLAIN, 2 * MIB, None)
        assert rows.append(text[:size], None, None, size)
        return len(seal(rows, "zstd")[0]), len(sealed_in_python([(text[:size], None, None)], "zstd"))

    with ThreadPoolExecutor(1) as thread:  # a new one: it has compressed nothing
        for size in (100, 3_000, 40_000, edge, edge + 1, 700_000):
            found, expected = thread.submit(packed_sizes, size).result()
            assert abs(found - expected) <= expected // 500, size


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_payload_with_a_codec_is_smaller_than_its_records(codec: str) -> None:
    """Near the size at which it is worth it: equal sizes are among them."""
    used = set()
    for size in range(60):
        rows = native.Rows(PLAIN, 1_000, None)
        assert rows.append(bytes(size), None, None, size)
        header = parse_header(seal(rows, codec)[0])
        assert header.payload_length < header.raw_length or header.codec == CODECS["none"]
        used.add(header.codec)
    assert used == {CODECS["none"], CODECS[codec]}


def test_a_block_of_the_greatest_size_is_sealed() -> None:
    records: list[Record] = [(random.Random(3).randbytes(BLOCK_RAW_BYTES_MAX // 2 - 20), None, None)] * 2
    for codec in CODECS:
        rows = native.Rows(PLAIN, BLOCK_RAW_BYTES_MAX, None)
        assert rows.extend(*columns_of(records, PLAIN))
        assert open_block(seal(rows, codec)[0]).values() == [value for value, _, _ in records]


def test_rows_decline_all_that_is_no_row() -> None:
    rows = native.Rows(KEYED, 1 * MIB, "delivery")
    assert rows.delivery == "delivery"
    assert rows.append(b"v", b"k", None, 2)
    for wrong in (
        (b"v", None, None),
        ("v", b"k", None),
        (b"v", "k", None),
        (b"v", b"k", 5),
        (bytearray(b"v"), b"k", None),
    ):
        assert not rows.append(*wrong, 2)
        assert not rows.extend([b"v", wrong[0]], [b"k", wrong[1]], None if wrong[2] is None else [1, 2], 4)
    assert not rows.extend([b"v"], [b"k", b"k"])
    assert not rows.extend([b"v"])
    assert not rows.extend([b"v"] * (BLOCK_RECORDS_MAX + 1), [b"k"] * (BLOCK_RECORDS_MAX + 1))
    assert not rows.append(bytes(BLOCK_RAW_BYTES_MAX), b"k", None, 0)
    timed = native.Rows(TIMED, 1 * MIB, None)
    for time in (None, True, 1.0, TIME_MS_END, -TIME_MS_END, 1 << 80):
        assert not timed.append(b"v", b"k", time, 2)
        assert not timed.extend([b"v"], [b"k"], [time])
    assert timed.count == 0
    assert rows.count == 1, "nothing of them was added"
    rows.close()
    assert not rows.append(b"v", b"k", None, 2)
    assert not rows.extend([b"v"], [b"k"])
    assert seal(rows, "none")[0] == sealed_in_python([(b"v", b"k", None)], "none")
    with pytest.raises(ValueError, match="sealed"):
        rows.columns()
    with pytest.raises(ValueError, match="sealed"):
        seal(rows, "none")


def test_rows_that_are_no_block_are_kept() -> None:
    empty = native.Rows(PLAIN, 100, None)
    assert empty.seal(0, 5, 2, 9, 3, 77, SLOTS) is None
    assert empty.columns() == ([], None, None)
    late = native.Rows(PLAIN, 100, None)
    assert late.append(b"v", None, None, 1)
    assert late.seal(0, 5, 2, 9, 3, TIME_MS_END, SLOTS) is None, "no time of the format"
    assert late.columns() == ([b"v"], None, None)


def test_values_outside_of_the_format_are_refused() -> None:
    for shape in (0, 4, 255):
        with pytest.raises(ValueError, match="shape"):
            native.Rows(shape, 100, None)
    with pytest.raises(ValueError, match="limit"):
        native.Rows(PLAIN, 1 << 40, None)
    for firsts in ([], [1], [0, 5, 3]):
        with pytest.raises(ValueError, match="ascend"):
            native.Lane(firsts, [native.OpenRows() for _ in firsts])
    with pytest.raises(ValueError, match="one partition each"):
        native.Lane([0, 5], [native.OpenRows()])


def test_threads_that_send_while_blocks_are_sealed_lose_and_double_nothing() -> None:
    hands = Hands(partitions=3, block_bytes=4_096)
    done = threading.Event()

    def work(name: int) -> None:
        for number in range(4_000):
            value, key = b"%d-%d" % (name, number), b"%d" % (number % 11) if name % 2 else None
            if hands.put_fast(value, key, None) is None:
                hands.buffer.put(hands.route, check_fields(value, key), None)

    def cut() -> None:
        while not done.is_set():
            for partition in hands.buffer.buffers():
                hands.buffer.seal_open(partition)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    cutter = threading.Thread(target=cut)
    for thread in (*threads, cutter):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    cutter.join()
    expected = sorted(b"%d-%d" % (name, number) for name in range(4) for number in range(4_000))
    assert sorted(value or b"" for value in hands.values()) == expected


def test_other_threads_run_while_a_block_is_sealed() -> None:
    """A thread that is not interrupted leaves the interpreter's lock to others only where compiled code releases it."""
    sealing = seen = False
    end = threading.Event()

    def watch() -> None:
        nonlocal seen
        while not end.wait(1e-6):
            seen = seen or sealing

    value, interval_s = random.Random(3).randbytes(4 * MIB), sys.getswitchinterval()
    watcher = threading.Thread(target=watch)
    sys.setswitchinterval(100)
    try:
        watcher.start()
        for _ in range(30):  # the watcher may get no core during a seal
            rows = native.Rows(PLAIN, 5 * MIB, None)
            assert rows.append(value, None, None, len(value))
            sealing = True
            seal(rows, "zstd")
            sealing = False
            if seen:
                break
    finally:
        sys.setswitchinterval(interval_s)
        end.set()
    watcher.join()
    assert seen


def test_a_sender_that_is_part_of_a_cycle_is_collected() -> None:
    lanes: dict[str, Any] = {}
    owner = compiled_path(lanes)
    slot = native.OpenRows()
    slot.rows = native.Rows(PLAIN, 100, owner)
    lanes["t"] = native.Lane([0], [slot])
    lanes["t"].keyless = slot.rows
    seen = weakref.ref(owner)
    del owner, lanes, slot
    gc.collect()
    assert seen() is None


def test_the_compiled_send_is_described_as_the_one_in_python() -> None:
    compiled, python = native.SenderBase.send, PythonSender.send
    expected = [(each.name, each.default) for each in inspect.signature(python).parameters.values()]
    found = [(each.name, each.default) for each in inspect.signature(compiled).parameters.values()]
    assert found == expected
    assert inspect.getdoc(compiled) == inspect.getdoc(python)


def test_records_that_are_not_plain_take_the_slow_path_as_they_were_given() -> None:
    calls: list[tuple[object, ...]] = []
    lane = native.Lane([0], [native.OpenRows()])
    lane.keyless = native.Rows(PLAIN, 1_000, "fast")
    send = compiled_path({"t": lane}, lambda *args: calls.append(args)).send
    assert send("t", b"v") == send(topic="t", value=b"v", key=None, partition=None) == "fast"
    given: list[tuple[tuple[object, ...], dict[str, object]]] = [
        (("t", "text"), {}),
        (("t", None), {}),
        (("t", b"v", b"k"), {}),
        (("t", b"v"), {"headers": {}}),
        (("t", b"v"), {"tag": "x"}),
        (("t", b"v"), {"partition": 0}),
        (("t", b"v"), {"timestamp_ms": 5}),
        (("other", b"v"), {}),
        ((["no hash"], b"v"), {}),
    ]
    for args, named in given:
        assert send(*args, **named) is None
    names = ("topic", "value", "key", "headers", "timestamp_ms", "tag", "partition")
    assert calls == [
        tuple({**dict(zip(names, args, strict=False)), **named}.get(name) for name in names) for args, named in given
    ]
    for delay in ({"deliver_after": 5}, {"deliver_at": 5}):
        assert send("t", b"v", **delay) is None
        assert calls[-1] == ("t", b"v", *[None] * 5, delay.get("deliver_at"), delay.get("deliver_after"), None)
    with pytest.raises(TypeError, match="value"):
        send("t")
    with pytest.raises(TypeError, match="colour"):
        send("t", b"v", colour=1)


def test_an_interrupt_while_a_topic_is_looked_up_is_not_lost() -> None:
    errors: list[BaseException] = [ValueError("no hash"), KeyboardInterrupt()]

    class Topic:
        def __hash__(self) -> int:
            raise errors.pop(0)

    send = compiled_path({}, lambda *args: "slow").send
    assert send(Topic(), b"v") == "slow"
    with pytest.raises(KeyboardInterrupt):
        send(Topic(), b"v")


@pytest.mark.parametrize("shape", [PLAIN, KEYED])
def test_rows_are_full_at_exactly_the_bounds_of_the_format(shape: int) -> None:
    key = b"" if shape == KEYED else None
    slot = native.OpenRows()
    lane = native.Lane([0], [slot])
    put = compiled_path({"t": lane}).put
    rows = slot.rows = native.Rows(shape, BLOCK_RAW_BYTES_MAX, "delivery")
    lane.keyless = rows if shape == PLAIN else None
    count = BLOCK_RECORDS_MAX - 1
    assert not rows.extend(*columns_of([(b"", key, None)] * (BLOCK_RECORDS_MAX + 1), shape))
    assert rows.extend(*columns_of([(b"", key, None)] * count, shape))
    assert put("t", b"", key) == "delivery"
    assert put("t", b"", key) is None
    assert not rows.append(b"", key, None, 0)
    assert not rows.extend(*columns_of([(b"", key, None)], shape))
    assert rows.count == BLOCK_RECORDS_MAX
    rest = BLOCK_RAW_BYTES_MAX - 16 - rows.row_cost
    for size, fits in ((rest, True), (rest + 1, False)):
        assert native.Rows(shape, 100, None).append(bytes(size), key, None, size) is fits
        assert native.Rows(shape, 100, None).extend(*columns_of([(bytes(size), key, None)], shape), size) is fits
    with pytest.raises(ValueError, match="limit"):
        rows.grow(1 << 40)


def test_closed_rows_and_ended_lanes_take_no_record() -> None:
    slot = native.OpenRows()
    lane = native.Lane([0], [slot])
    put = compiled_path({"t": lane}).put
    slot.rows, lane.keyless = native.Rows(KEYED, 1_000, "keyed"), native.Rows(PLAIN, 1_000, "plain")
    assert (put("t", b"v", b"k"), put("t", b"v")) == ("keyed", "plain")
    rows = lane.keyless
    lane.end()
    assert lane.keyless is None, "it holds no memory of the rows"
    assert put("t", b"v") is None
    assert put("t", b"v", b"k") is None
    assert (slot.rows.count, rows.count) == (1, 1)
    open_rows = native.OpenRows()
    open_rows.rows = native.Rows(KEYED, 1_000, "next")
    path = compiled_path({"t": native.Lane([0], [open_rows])})
    assert path.put("t", b"v", b"k") == "next"
    open_rows.rows.close()
    assert path.put("t", b"v", b"k") is None
    assert open_rows.rows.count == 1


def test_each_record_goes_to_the_lane_that_its_topic_has_now() -> None:
    def lane(name: str) -> Any:
        open_rows = native.OpenRows()
        open_rows.rows = native.Rows(KEYED, 1_000, name)
        return native.Lane([0], [open_rows])

    lanes = {"a": lane("a 1"), "b": lane("b 1")}
    path = compiled_path(lanes)
    topics = ["a", "a", "b", "".join("a"), "b", "b"]
    assert [path.put(topic, b"v", b"k") for topic in topics] == [f"{topic} 1" for topic in topics]
    lanes.pop("b").end()
    assert (path.put("b", b"v", b"k"), path.put("a", b"v", b"k")) == (None, "a 1")
    lanes.pop("a").end()
    lanes["a"] = lane("a 2")
    assert [path.put("a", b"v", b"k") for _ in range(2)] == ["a 2"] * 2
    path.use({"a": lane("a 3")})
    assert [path.put("a", b"v", b"k") for _ in range(2)] == ["a 3"] * 2


def test_a_key_at_the_first_slot_of_a_partition_goes_there() -> None:
    first = slot_of_key(b"k")
    slots = [native.OpenRows() for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.rows = native.Rows(KEYED, 1_000, number)
    for firsts, home in (([0, first, first + 1], 1), ([0, first - 1, first], 2), ([0, first + 1, first + 2], 0)):
        assert compiled_path({"t": native.Lane(firsts, slots)}).put("t", b"v", b"k") == home


@pytest.mark.parametrize(("shape", "column_bytes"), [(PLAIN, 2 * 4), (KEYED, 2 * 8 + 3), (TIMED, 2 * 16 + 3)])
def test_the_bytes_of_all_columns_but_the_values_are_counted(shape: int, column_bytes: int) -> None:
    rows = native.Rows(shape, 1_000, None)
    assert rows.extend(*columns_of([(b"value", b"k", 1), (b"", b"ey", 2)], shape))
    assert rows.column_bytes == column_bytes


def test_an_open_block_claims_at_most_a_quarter_more_for_its_columns() -> None:
    (buffer,) = Hands().buffer.buffers()
    for column_bytes, claimed in ((0, 0), (100, 100), (251, 250), (1 << 40, 250)):
        buffer.column_bytes = column_bytes
        assert buffer.front_bytes(1_000) == claimed


@pytest.mark.parametrize(("keys", "shape"), [(None, PLAIN), ([b"k", b"k"], KEYED)])
def test_many_records_at_once_are_compiled_rows_too(keys: list[bytes | None] | None, shape: int) -> None:
    hands = Hands()
    hands.send_many([b"v", b"v"], keys)
    (buffer,) = hands.buffer.buffers()
    assert buffer.open is not None
    assert buffer.open.shape == shape


def test_a_sealed_block_claims_all_memory_that_it_holds() -> None:
    hands = Hands()
    (buffer,) = hands.buffer.buffers()
    buffer.column_bytes = 2_000
    hands.send(bytes(20_000))
    hands.collect(release=False)
    (pending,) = hands.taken
    assert pending.claimed > 20_000 + 2_000 + 1_000, "the columns and the values left room"
    assert pending.claimed <= hands.buffer.pending_bytes
    hands.buffer.release(pending)
    assert hands.buffer.pending_bytes == 0


def test_a_sealed_block_says_what_memory_it_holds_and_gives_the_rest_back() -> None:
    full, small = native.Rows(PLAIN, 1_000, None, 200), native.Rows(PLAIN, 1 * MIB, None, 200)
    for rows, size in ((full, 900), (small, 10)):
        assert rows.append(bytes(size), None, None, size)
    block, memory_bytes = seal(full, "none")
    assert memory_bytes >= len(block) + 200, "the room that the columns did not need"
    assert memory_bytes >= 200 + 1_000, "and that the values did not need"
    block, memory_bytes = seal(small, "none")
    assert memory_bytes < 1_000
