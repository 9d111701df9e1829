"""The transactions of a producer: blocks, requests, retries, and one end each. On virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from memq.client.transactions.core import ABORT_S_MAX
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
from memq.format.blocks.builder import BlockBuilder
from memq.format.held_sequences import transactional_sequence
from memq.groups.remote import wire_of
from memq.protocol.transaction_messages import BeginTransactions, EndTransaction, HoldTransaction, WireTransaction
from memq.topic import Committed, Position
from tests.skipping_loop import now_s
from tests.unit.transactional_cluster import (
    INPUT,
    TOPIC,
    Cluster,
    Least,
    Reader,
    Way,
    check,
    fields,
    on_cluster,
    set_bound,
)


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
        await cluster.core.abort(transaction, after=ValueError())
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
    set_bound(monkeypatch, "BLOCK_BYTES", 1_000)
    set_bound(monkeypatch, "REQUEST_BYTES_MAX", 2_000)

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


def test_a_transaction_takes_no_more_bytes_for_a_partition_than_fit_into_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 10)
    set_bound(monkeypatch, "TRANSACTION_STAGED_BYTES_MAX", 1_000)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        way = cast(Any, Way())
        transaction.add(way, fields(b"x" * 700), 0)
        transaction.add(way, fields(b"x" * 700), 1)
        with pytest.raises(TooLargeError, match="bytes in topic 'clicks' partition 1, 1000 are allowed") as refused:
            transaction.add(way, fields(b"x" * 700), 1)
        assert "fewer records" in refused.value.hint

    on_cluster(work)


def test_a_block_is_filled_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x" * 100), 0)
        builder = BlockBuilder()
        builder.append(*fields(b"x" * 100))
        set_bound(monkeypatch, "BLOCK_BYTES", builder.raw_bytes + 50)
        transaction.add(cast(Any, Way()), fields(b"x" * 50), 0)
        (block,) = transaction.take(everything=False)
        assert check(block.block, 0).count == 2

    on_cluster(work)


def test_the_blocks_of_a_partition_are_of_one_producer_with_growing_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 10)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        for partition in (0, 0, 1):
            transaction.add(cast(Any, Way()), fields(b"x" * 20), partition)
        headers = [check(each.block, each.partition) for each in transaction.take(everything=True)]
        first = transactional_sequence(cluster.clock.wall_ms())
        assert [(each.producer_id, each.first_sequence, each.count) for each in headers] == [
            (1, first, 1),
            (1, first + 1, 1),
            (1, first, 1),
        ]

    on_cluster(work)


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
        transaction.add(cast(Any, Way()), fields(b"x", b"\x02"), 1)
        (chosen,) = transaction.take(everything=True)
        header = check(chosen.block, 1)
        assert (header.slot_first, header.slot_last) == (0, 65_535), "its key is of another partition"
        way = Way()
        transaction.add(cast(Any, way), fields(b"x", b"\x01"), None)
        way.buffers[1].slots = (1, 3)
        transaction.add(cast(Any, way), fields(b"x", b"\x01"), None)
        (widened,) = transaction.take(everything=True)
        header = check(widened.block, 1)
        assert (header.slot_first, header.slot_last) == (0, 65_535), "the map of the topic has changed"

    on_cluster(work)


def test_requests_have_bounded_bytes_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "BLOCK_BYTES", 10)
    set_bound(monkeypatch, "HOLDS_PER_REQUEST_MAX", 3)

    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        for _ in range(7):
            transaction.add(cast(Any, Way()), fields(b"x" * 20), 0)
        await cluster.core.hold(transaction, everything=True)
        assert [len(each) for each in cluster.held()] == [3, 3, 1]
        size = cluster.held()[0][0][1]
        for bound, counts in ((2 * size, [2, 1]), (2 * size - 1, [1, 1, 1]), (1, [1, 1, 1])):
            set_bound(monkeypatch, "REQUEST_BYTES_MAX", 1 << 30)
            for _ in range(3):
                transaction.add(cast(Any, Way()), fields(b"x" * 20), 0)
            set_bound(monkeypatch, "REQUEST_BYTES_MAX", bound)
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
        set_bound(monkeypatch, name, {"bytes": 2 * size, "blocks": 2, "record": size}[kind])
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
        cluster.errors.clear()
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


def test_a_roll_back_that_is_cancelled_after_a_refusal_leaves_no_open_transaction() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        cluster.errors[EndTransaction] = [InvalidRequestError("no"), asyncio.CancelledError()]
        with pytest.raises(asyncio.CancelledError):
            await cluster.core.commit(transaction)
        assert transaction.ended == "has an unknown end"
        assert (await cluster.core.begin()).number == 2
        assert cluster.ends() == [(1, True, 0), (1, False, 0), (1, False, 0)]

    on_cluster(work)


def test_an_abort_that_has_no_answer_is_quiet_on_demand_and_repeated() -> None:
    async def work(cluster: Cluster) -> None:
        for quietly in (True, False):
            transaction = await cluster.core.begin()
            cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
            begin_s = now_s()
            if quietly:
                await cluster.core.abort(transaction, after=ValueError())
            else:
                with pytest.raises(TimedOutError):
                    await cluster.core.abort(transaction)
            assert transaction.ended == "has an unknown end"
            assert ABORT_S_MAX < now_s() - begin_s < ABORT_S_MAX + 0.6
            cluster.errors.clear()
            cluster.asked.clear()
        await cluster.core.begin()
        assert cluster.ends() == [(2, False, 0)]

    on_cluster(work)


# ---- positions -----------------------------------------------------------------------------------


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
        with pytest.raises(InvalidRequestError, match="the consumer has no group"):
            await cluster.core.take_positions(transaction, cast(Any, Reader("")), None)

    on_cluster(work, transaction_group="")


def test_a_commit_whose_blocks_are_refused_says_why_also_without_an_answer_to_its_roll_back() -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x"), 0)
        cluster.errors[HoldTransaction] = [TransactionAbortedError("it was too old")]
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(TransactionAbortedError, match="it was too old"):
            await cluster.core.commit(transaction)

    on_cluster(work)


# ---- reports to the audit ------------------------------------------------------------------------


def test_a_producer_reports_how_its_transactions_ended() -> None:
    async def work(cluster: Cluster) -> None:
        minute = cluster.clock.wall_ms() // 60_000
        for committed in (True, False):
            transaction = await cluster.core.begin()
            for partition in (2, 2, 1):
                transaction.add(cast(Any, Way()), fields(b"x"), partition)
            await cluster.core.hold(transaction, everything=True)
            transaction.add(cast(Any, Way()), fields(b"y"), 1)
            await (cluster.core.commit(transaction) if committed else cluster.core.abort(transaction))
        found = [(partition, minute, 2) for partition in (2, 1)]
        assert cluster.noted == [
            *((partition, "committed", at, records) for partition, at, records in found),
            *((partition, "rolled-back", at, records) for partition, at, records in found),
        ]

    on_cluster(work)


@pytest.mark.parametrize("committed", [False, True])
def test_a_producer_reports_the_end_of_a_transaction_once_it_knows_it(committed: bool) -> None:
    async def work(cluster: Cluster) -> None:
        transaction = await cluster.core.begin()
        transaction.add(cast(Any, Way()), fields(b"x"), 3)
        cluster.errors[EndTransaction] = [UnreachableError("away")] * 100
        with pytest.raises(OutcomeUnknownError):
            await cluster.core.commit(transaction)
        assert [each[1] for each in cluster.noted] == ["unsure"]
        cluster.errors.clear()
        cluster.committed = {1} if committed else set()
        await cluster.core.abort(await cluster.core.begin())
        await cluster.core.begin()
        assert [each[1] for each in cluster.noted] == ["unsure", "committed" if committed else "rolled-back"]

    on_cluster(work)
