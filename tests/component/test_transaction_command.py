"""Transactions of the blocking producer on one broker, and `memq transaction`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import memq
from memq.cli.cluster.transaction import transaction as command
from memq.errors import MemqError, NotFoundError, TransactionAbortedError
from memq.testing import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.create_topic("in")
        cluster.create_topic("out")
        yield cluster


def values(cluster: Cluster, count: int) -> list[bytes | None]:
    """Return the values of the topic `out`, which has `count` records soon."""
    found: list[bytes | None] = []
    with memq.Consumer(cluster.address, "out", start="beginning") as consumer:
        while len(found) < count:
            batch = consumer.poll(20)
            assert batch is not None
            found += batch.values()
    return found


def test_a_blocking_producer_commits_and_rolls_back() -> None:
    with Cluster() as cluster:
        cluster.create_topic("out")
        with memq.Producer(cluster.address, transactional_id="pay") as producer:
            with producer.transaction() as transaction:
                transaction.send("out", "a")
                transaction.flush()
                transaction.send("out", b"b", headers={"n": "1"}, tag="web")
            with pytest.raises(ZeroDivisionError), producer.transaction() as transaction:
                transaction.send("out", str(1 // 0))
            with producer.transaction() as transaction:
                transaction.send("out", "never")
                transaction.abort()
            with producer.transaction(visible=True) as transaction:
                transaction.send_many("out", ["c", "d"], timestamps_ms=[1, 2], tag="web")
        assert values(cluster, 4) == [b"a", b"b", b"c", b"d"]
        assert [(each.timestamp_ms, each.tag) for each in cluster.records("out")][2:] == [(1, "web"), (2, "web")]


def test_a_blocking_consumer_moves_its_positions_with_the_records(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send_many("in", ["1", "2"])
    consumer = memq.Consumer(cluster.address, "in", group="g", auto_commit=False, start="beginning")
    with consumer, memq.Producer(cluster.address, transactional_id="pay", transaction_group="g") as producer:
        batch = consumer.poll(20)
        assert batch is not None
        with producer.transaction() as transaction:
            for value in batch.values():
                transaction.send("out", value)
            transaction.commit_positions(consumer, batch)
            assert consumer.committed() == {}
        assert list(map(str, consumer.committed().values())) == [str(batch.next)]
    assert values(cluster, 2) == [b"1", b"2"]


def test_an_operator_lists_commits_and_rolls_back(cluster: Cluster) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(command, [*words, "--brokers", cluster.address])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    with memq.Producer(cluster.address, transactional_id="pay") as producer:
        with producer.transaction() as transaction:
            transaction.send("out", "a")
            transaction.flush()
            (shown,) = json.loads(run("list", "--json"))
            assert (shown["transactional_id"], shown["group"], shown["blocks"]) == ("pay", "", {"out": 1})
            assert "out: 1" in run("list")
            run("commit", "pay", "--yes")
        with producer.transaction() as transaction:
            transaction.send("out", "b")
            transaction.flush()
            run("abort", "pay", "--yes")
            transaction.send("out", "c")
            with pytest.raises(TransactionAbortedError, match="by an operator"):
                transaction.flush()
            transaction.abort()
    assert json.loads(run("list", "--json")) == []
    with pytest.raises(MemqError) as error:
        run("abort", "pay", "--yes")
    assert isinstance(error.value, NotFoundError)
    assert values(cluster, 1) == [b"a"]
