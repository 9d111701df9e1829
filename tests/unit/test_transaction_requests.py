"""The transactions of a producer: blocks, requests, retries, and one end each. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.producer.fields import RecordFields
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions import core as core_module
from memq.client.transactions.core import ABORT_S_MAX, TransactionalCore
from memq.client.transactions.transaction import AsyncTransaction, Transaction
from memq.errors import (
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    ProducerFencedError,
    ThrottledError,
    TimedOutError,
    TooLargeError,
    TransactionAbortedError,
    UnreachableError,
)
from memq.format.blocks.header import check_block, scope_of
from memq.notification.remote import wire_of
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import BeginTransactions, EndTransaction, HoldTransaction, WireTransaction
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, ReadPartition, Topic, equal_slots
from tests.skipping_loop import LoopClock, now_s, run_skipping, skip

TOPIC = Topic(name="clicks", id="ab" * 16, created_ms=0, partitions=equal_slots(4))
SETTINGS = ProducerSettings(
    codec="none",
    transactional_id="pay",
    transaction_group="g",
    transaction_timeout_ms=7_000,
    delivery_timeout_s=20.0,
)
INPUT = ReadPartition("in", "cd" * 16, 0)


class Cluster:
    """Answers requests about transactions; the next ones of a kind fail with `errors`."""

    def __init__(self, **settings: Any) -> None:
        self.asked: list[Any] = []
        self.times: list[float] = []
        self.errors: dict[type, list[BaseException]] = {}
        runtime = Runtime(clock=LoopClock(), random=Least(1))
        self.settings = replace(SETTINGS, **settings)
        self.core = TransactionalCore(self.settings, runtime, cast(Any, self.route))

    async def route(self, api: Api, request: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        assert (api, answer, timeout_s) == (Api.ADMIN, AdminAnswer, self.settings.open_timeout_s)
        self.asked.append(request.ask)
        self.times.append(now_s())
        await asyncio.sleep(0)
        errors = self.errors.get(type(request.ask))
        if errors:
            raise errors.pop(0)
        return AdminAnswer(transactional=77)

    def ends(self) -> list[tuple[int, bool, int]]:
        return [
            (each.transaction.number, each.commit, each.blocks)
            for each in self.asked
            if isinstance(each, EndTransaction)
        ]

    def held(self) -> list[list[tuple[int, int]]]:
        """Return partition and size of the blocks of each request."""
        return [
            [(block.partition, len(block.block)) for block in each.blocks]
            for each in self.asked
            if isinstance(each, HoldTransaction)
        ]


class Least(random.Random):
    """Draws the least of each range, and pauses of half of their longest time."""

    def uniform(self, a: float, b: float) -> float:
        return b / 2

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else start


class Way:
    """A route to the partitions of the topic."""

    def __init__(self, partitions: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.topic = TOPIC
        self.map = SimpleNamespace(index_of=partitions.index, index_of_key=lambda key: key[0] % len(partitions))
        self.buffers = [
            SimpleNamespace(partition=each, scope=scope_of(TOPIC.id_bytes, each), slots=(each, each + 5))
            for each in partitions
        ]


def fields(value: bytes, key: bytes | None = None) -> RecordFields:
    return RecordFields(value, key, None, 5, None)


def on_cluster(work: Callable[[Cluster], Awaitable[None]], **settings: Any) -> None:
    """Run a test."""

    async def run() -> None:
        await skip(1)
        await work(Cluster(**settings))

    run_skipping(run())


# ---- begin ---------------------------------------------------------------------------------------


def test_a_producer_begins_its_instance_once_and_numbers_its_transactions() -> None:
    async def work(cluster: Cluster) -> None:
        for number in (1, 2, 3):
            transaction = await cluster.core.begin()
            assert transaction.number == number
            await cluster.core.commit(transaction)
        assert cluster.asked[0] == BeginTransactions(
            name="pay", group="g", token=f"{Least(1).getrandbits(64):016x}", timeout_ms=7_000
        )
        assert cluster.ends() == [(1, True, 0), (2, True, 0), (3, True, 0)]
        assert cluster.asked[1].transaction == WireTransaction(name="pay", group="g", instance=77, number=1)
        assert len(cluster.asked) == 4

    on_cluster(work)


def test_a_producer_has_one_transaction_at_a_time() -> None:
    async def work(cluster: Cluster) -> None:
        first = await cluster.core.begin()
        with pytest.raises(InvalidRequestError, match="a transaction of this producer is open"):
            await cluster.core.begin()
        await cluster.core.abort(first)
        await cluster.core.abort(first)
        assert cluster.ends() == [(1, False, 0)]
        second = await cluster.core.begin()
        assert second.number == 2
        for call in (first.check_open, lambda: first.add(cast(Any, Way()), fields(b"x"), None)):
            with pytest.raises(InvalidRequestError, match="the transaction was rolled back"):
                call()
        for late in (cluster.core.hold, cluster.core.commit):
            with pytest.raises(InvalidRequestError, match="the transaction was rolled back"):
                await late(first)

    on_cluster(work)


def test_a_producer_without_an_id_has_no_transactions() -> None:
    async def work(cluster: Cluster) -> None:
        with pytest.raises(InvalidRequestError, match="this producer has no transactions"):
            await cluster.core.begin()

    on_cluster(work, transactional_id="")


def test_a_begin_that_fails_leaves_no_open_transaction() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.errors[BeginTransactions] = [InvalidRequestError("no")]
        with pytest.raises(InvalidRequestError, match="no"):
            await cluster.core.begin()
        assert (await cluster.core.begin()).number == 2

    on_cluster(work)


def test_a_fenced_producer_stays_fenced() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x"), 0)
        cluster.errors[HoldTransaction] = [ProducerFencedError("another one")]
        with pytest.raises(ProducerFencedError):
            await cluster.core.hold(transaction, everything=True)
        await cluster.core.abort(transaction, quietly=True)
        count = len(cluster.asked)
        with pytest.raises(ProducerFencedError, match="another one"):
            await cluster.core.begin()
        assert len(cluster.asked) == count

    on_cluster(work)


def test_requests_are_repeated_until_their_time_is_over() -> None:
    async def work(cluster: Cluster) -> None:
        throttled = ThrottledError("full")
        throttled.retry_after_ms = 500
        cluster.errors[BeginTransactions] = [UnreachableError("away"), throttled, UnreachableError("away")]
        await cluster.core.begin()
        assert cluster.times == pytest.approx([1, 1.05, 1.65, 1.85])
        other = Cluster()
        other.errors[BeginTransactions] = [UnreachableError("away")] * 100
        begin_s = now_s()
        with pytest.raises(TimedOutError, match="no answer about a transaction in 20 s: away"):
            await other.core.begin()
        assert 20 < now_s() - begin_s <= 20.6
        assert max(later - sooner for sooner, later in zip(other.times, other.times[1:], strict=False)) < 0.51

    on_cluster(work)


# ---- blocks --------------------------------------------------------------------------------------


def test_records_without_a_key_go_to_one_partition_and_those_with_a_key_to_that_of_the_key() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        way = cast(Any, Way())
        for value, key, partition in (
            (b"a", None, None),
            (b"b", b"\x06", None),
            (b"c", b"\x06", 3),
            (b"d", None, None),
        ):
            assert transaction.add(way, fields(value, key), partition) is False
        await cluster.core.commit(transaction)
        (request,) = cluster.held()
        assert sorted(partition for partition, _ in request) == [0, 2, 3]
        assert cluster.ends() == [(1, True, 3)]
        blocks = next(each for each in cluster.asked if isinstance(each, HoldTransaction)).blocks
        assert {(each.topic, each.topic_id) for each in blocks} == {("clicks", TOPIC.id)}

    on_cluster(work)


def test_a_block_is_sealed_at_its_size_and_before_a_record_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(core_module, "REQUEST_BYTES_MAX", 2_000)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        way = cast(Any, Way())
        assert not transaction.add(way, fields(b"x" * 600), 0)
        assert transaction.take(everything=False) == []
        assert not transaction.add(way, fields(b"x" * 600), 0)
        assert len(transaction.take(everything=False)) == 1
        assert not transaction.add(way, fields(b"x" * 500), 0)
        assert len(transaction.take(everything=False)) == 1, "the second record was sealed alone"
        assert not transaction.add(way, fields(b"x" * 1_000), 0)
        assert len(transaction.take(everything=False)) == 2, "a large record is sealed at once"
        assert transaction.take(everything=True) == []
        assert transaction.blocks == 4
        added = [transaction.add(way, fields(b"x" * 1_000), 0) for _ in range(3)]
        assert added == [False, True, True]

    on_cluster(work)


def test_the_blocks_of_a_partition_are_of_one_producer_with_growing_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BLOCK_BYTES", 10)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        for partition in (0, 0, 1):
            transaction.add(cast(Any, Way()), fields(b"x" * 20), partition)
        headers = [check(each.block, each.partition) for each in transaction.take(everything=True)]
        assert [(each.producer_id, each.first_sequence, each.next_sequence) for each in headers] == [
            (1, 0, 1),
            (1, 1, 2),
            (1, 0, 1),
        ]

    on_cluster(work)


def check(block: bytes, partition: int) -> Any:
    return check_block(block, scope_of(TOPIC.id_bytes, partition))


def test_a_block_covers_the_slots_of_its_partition_unless_a_caller_chose_it() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x", b"\x02"), None)
        transaction.add(cast(Any, Way()), fields(b"x", b"\x01"), None)
        transaction.add(cast(Any, Way()), fields(b"x"), 1)
        found = {each.partition: check(each.block, each.partition) for each in transaction.take(everything=True)}
        assert (found[2].slot_first, found[2].slot_last) == (2, 7)
        assert (found[1].slot_first, found[1].slot_last) == (0, 65_535)
        transaction.add(cast(Any, Way()), fields(b"x", b"\x01"), None)
        (again,) = transaction.take(everything=True)
        header = check(again.block, 1)
        assert (header.slot_first, header.slot_last) == (1, 6), "each block has its own"

    on_cluster(work)


def test_requests_have_bounded_bytes_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BLOCK_BYTES", 10)
    monkeypatch.setattr(core_module, "HOLDS_PER_REQUEST_MAX", 3)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        for _ in range(7):
            transaction.add(cast(Any, Way()), fields(b"x" * 20), 0)
        await cluster.core.hold(transaction, everything=True)
        assert [len(each) for each in cluster.held()] == [3, 3, 1]
        size = cluster.held()[0][0][1]
        for bound, counts in ((2 * size, [2, 1]), (2 * size - 1, [1, 1, 1]), (1, [1, 1, 1])):
            monkeypatch.setattr(core_module, "REQUEST_BYTES_MAX", 1 << 30)
            for _ in range(3):
                transaction.add(cast(Any, Way()), fields(b"x" * 20), 0)
            monkeypatch.setattr(core_module, "REQUEST_BYTES_MAX", bound)
            cluster.asked.clear()
            await cluster.core.hold(transaction)
            assert [len(each) for each in cluster.held()] == counts

    on_cluster(work)


@pytest.mark.parametrize("kind", ["bytes", "blocks", "record"])
def test_a_transaction_that_is_too_large_is_rolled_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x" * 100), 0)
        (block,) = transaction.take(everything=True)
        size = len(block.block)
        name = {"bytes": "TRANSACTION_TARGET_BYTES_MAX", "blocks": "POINTER_RANGES_MAX", "record": "HOLD_BYTES_MAX"}[
            kind
        ]
        monkeypatch.setattr(core_module, name, {"bytes": 2 * size, "blocks": 2, "record": size}[kind])
        transaction.add(cast(Any, Way()), fields(b"x" * 100), 0)
        assert len(transaction.take(everything=True)) == 1
        transaction.add(cast(Any, Way()), fields(b"x" * (101 if kind == "record" else 100)), 0)
        with pytest.raises(TooLargeError):
            await cluster.core.commit(transaction)
        assert cluster.ends() == [(1, False, 0)]
        assert (await cluster.core.begin()).number == 2

    on_cluster(work)


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [TransactionAbortedError("old"), GenerationFencedError("moved"), TooLargeError("big")]
)
def test_a_commit_that_is_refused_is_rolled_back(error: MemqError) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        cluster.errors[EndTransaction] = [error]
        with pytest.raises(type(error)):
            await cluster.core.commit(transaction)
        assert transaction.ended == "was rolled back"
        await cluster.core.commit(await cluster.core.begin())
        assert cluster.ends() == [(1, True, 0), (2, True, 0)], "it is settled: the next one rolls nothing back"

    on_cluster(work)


def test_a_commit_without_an_answer_is_settled_before_the_next_transaction() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(OutcomeUnknownError, match="no broker said whether transaction 1 is committed"):
            await cluster.core.commit(transaction)
        assert transaction.ended == "has an unknown end"
        cluster.asked.clear()
        cluster.errors[EndTransaction] = [InvalidRequestError("it is committed")]
        second = await cluster.core.begin()
        assert cluster.ends() == [(1, False, 0)]
        await cluster.core.commit(second)
        await cluster.core.begin()
        assert cluster.ends() == [(1, False, 0), (2, True, 0)]

    on_cluster(work)


def test_a_commit_that_is_cancelled_is_settled_before_the_next_transaction() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        cluster.errors[EndTransaction] = [asyncio.CancelledError()]
        with pytest.raises(asyncio.CancelledError):
            await cluster.core.commit(transaction)
        assert transaction.ended == "has an unknown end"
        cluster.asked.clear()
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(TimedOutError):
            await cluster.core.begin()
        cluster.errors.clear()
        cluster.asked.clear()
        await cluster.core.begin()
        assert cluster.ends() == [(1, False, 0)]

    on_cluster(work)


def test_an_abort_that_has_no_answer_is_quiet_on_demand_and_repeated() -> None:
    async def work(cluster: Cluster) -> None:
        for quietly in (True, False):
            transaction = await cluster.core.begin()
            cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
            begin_s = now_s()
            if quietly:
                await cluster.core.abort(transaction, quietly=True)
            else:
                with pytest.raises(TimedOutError):
                    await cluster.core.abort(transaction)
            assert ABORT_S_MAX < now_s() - begin_s < ABORT_S_MAX + 0.6
            cluster.errors.clear()
            cluster.asked.clear()
        await cluster.core.begin()
        assert cluster.ends() == [(2, False, 0)]

    on_cluster(work)


# ---- positions -----------------------------------------------------------------------------------


class Reader:
    """A consumer whose finished batches end at `offset`."""

    def __init__(self, group: str = "g", *, auto_commit: bool = False) -> None:
        self.settings = SimpleNamespace(group=group, auto_commit=auto_commit)
        self.offset = 5
        self.stored: list[Any] = []
        self.batches: list[object] = []

    async def finish(self, batch: object) -> tuple[Any, object]:
        self.batches.append(batch)
        return self, "only"

    def take(self, only: object) -> Any:
        assert only == "only"
        at = {INPUT: Committed(Position(0, self.offset))}
        self.offset += 1
        before = {INPUT: Committed(Position(0, 2))}
        return SimpleNamespace(before=before, after=at, member="m", generation=3)

    def note_stored(self, positions: Any) -> None:
        self.stored.append(positions)


def test_positions_move_with_the_commit() -> None:
    async def work(cluster: Cluster) -> None:
        transaction, reader = await cluster.core.begin(), Reader()
        for batch in (None, "batch"):
            await cluster.core.take_positions(transaction, cast(Any, reader), cast(Any, batch))
        assert reader.batches == [None, "batch"]
        with pytest.raises(InvalidRequestError, match="a transaction moves the positions of one consumer"):
            await cluster.core.take_positions(transaction, cast(Any, Reader()), None)
        await cluster.core.commit(transaction)
        end = cluster.asked[-1]
        assert (end.member, end.generation) == ("m", 3)
        assert end.before == [wire_of(INPUT, Committed(Position(0, 2)))]
        assert end.after == [wire_of(INPUT, Committed(Position(0, 6)))]
        assert reader.stored == [{INPUT: Committed(Position(0, 6))}]
        with pytest.raises(InvalidRequestError, match="the transaction is committed"):
            await cluster.core.take_positions(transaction, cast(Any, reader), None)
        other = await cluster.core.begin()
        for wrong in (Reader("h"), Reader(auto_commit=True)):
            with pytest.raises(InvalidRequestError):
                await cluster.core.take_positions(other, cast(Any, wrong), None)

    on_cluster(work)


def test_a_producer_without_a_group_moves_no_positions() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        with pytest.raises(InvalidRequestError, match="can't move in a transaction of group ''"):
            await cluster.core.take_positions(transaction, cast(Any, Reader("")), None)

    on_cluster(work, transaction_group="")


# ---- blocks of code ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "error", "abort"])
def test_the_end_of_a_with_block_ends_its_transaction(end: str) -> None:
    async def work(cluster: Cluster) -> None:
        async def route(topic: str) -> Any:
            return Way()

        transaction = AsyncTransaction(cluster.core, route)
        with pytest.raises(InvalidRequestError, match="has not begun"):
            await transaction.flush()
        try:
            async with transaction as t:
                await t.send("clicks", b"x")
                await t.flush()
                assert cluster.held() == [[(0, cluster.held()[0][0][1])]]
                if end == "abort":
                    await t.abort()
                if end == "error":
                    raise KeyError
        except KeyError:
            assert end == "error"
        assert cluster.ends() == [(1, end == "commit", 1 if end == "commit" else 0)]
        with pytest.raises(InvalidRequestError, match="a transaction is used once"):
            await transaction.__aenter__()

    on_cluster(work)


@pytest.mark.parametrize("end", ["commit", "error", "abort"])
def test_the_end_of_a_blocking_with_block_ends_its_transaction(end: str) -> None:
    async def work(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()

        def begin(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(20)

        def program() -> None:
            transaction = Transaction(cluster.core, begin, lambda topic: cast(Any, Way()))
            try:
                with transaction as t:
                    t.send("clicks", b"x")
                    t.flush()
                    assert len(cluster.held()) == 1
                    if end == "abort":
                        t.abort()
                    if end == "error":
                        raise KeyError
            except KeyError:
                assert end == "error"
            with pytest.raises(InvalidRequestError, match="a transaction is used once"):
                transaction.__enter__()

        await asyncio.to_thread(program)
        assert cluster.ends() == [(1, end == "commit", 1 if end == "commit" else 0)]

    async def run() -> None:
        await work(Cluster())

    asyncio.run(run())
