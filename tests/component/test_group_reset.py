"""Resets of groups: by records, by words of Kafka, and while the group has members."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

import memq
from memq.cli import main
from memq.client.group_admin import Shift
from memq.errors import InvalidRequestError
from memq.testing import Cluster

BATCHES, EACH = 5, 4


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
        with memq.Producer(cluster.address, audit=False) as producer:
            for batch in range(BATCHES):
                producer.send_many("clicks", [f"{batch * EACH + number}" for number in range(EACH)])
                producer.flush()
        yield cluster


def begin(cluster: Cluster) -> None:
    """Put the group at record 6, in the middle of the second batch."""
    with memq.Consumer(cluster.address, "clicks", group="report", end="end") as consumer:
        assert sum(len(batch) for batch in consumer) == BATCHES * EACH
    with memq.Admin(cluster.address) as admin:
        (reset,) = admin.reset_group("report", "clicks", memq.Position(0, 2, 2))
        assert admin.group("report").partitions[0].lag.records == BATCHES * EACH - 6, reset


def following(cluster: Cluster) -> int:
    """Return the number of the record that the group reads next; that after the last one at the end."""
    with memq.Consumer(cluster.address, "clicks", group="report", auto_commit=False, end="end") as consumer:
        values = [record.value for batch in consumer for record in batch]
    assert values == [str(number).encode() for number in range(BATCHES * EACH - len(values), BATCHES * EACH)]
    return BATCHES * EACH - len(values)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [(0, 6), (1, 7), (5, 11), (-1, 5), (-3, 3), (-6, 0), (-100, 0), (13, 19), (14, 20), (99, 20)],
)
def test_a_shift_counts_records(cluster: Cluster, shift: int, expected: int) -> None:
    begin(cluster)
    with memq.Admin(cluster.address) as admin:
        admin.reset_group("report", "clicks", Shift(shift))
        lag = admin.group("report").partitions[0].lag.records
    assert lag == BATCHES * EACH - expected
    assert following(cluster) == expected


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (["--to-earliest"], 0),
        (["--to-latest"], 20),
        (["--to", "beginning"], 0),
        (["--shift", "-2"], 4),
        (["--shift", "+2"], 8),
        (["--to-datetime", "2001-01-01T00:00:00Z"], 0),
        (["--to-datetime", "2999-01-01"], 20),
    ],
)
def test_the_command_line_has_kafkas_targets(
    cluster: Cluster, option: list[str], expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(cluster)
    planned, done = (
        (main(["group", "reset", "report", "clicks", *option, "--json", *more]), capsys.readouterr().out)
        for more in (["--dry-run"], [])
    )
    assert planned == done
    assert done[0] == 0
    (row,) = json.loads(done[1])
    assert (row["topic"], row["partition"]) == ("clicks", 0)
    assert following(cluster) == expected


def test_an_active_group_is_reset_only_by_force(cluster: Cluster) -> None:
    """Two members read on from the new positions, and no commit of before comes after the reset."""
    seen: list[str] = []
    again, stop = threading.Event(), threading.Event()

    def work() -> None:
        with memq.Consumer(cluster.address, "clicks", group="report") as consumer:
            while not stop.is_set():
                batch = consumer.poll(0.1)
                if batch is not None:
                    seen.extend(record.value.decode() for record in batch if record.value is not None)
                    consumer.commit()
                    if seen.count("0") == 2 and seen.count("19") == 2:
                        again.set()

    members = [threading.Thread(target=work) for _ in range(2)]
    for member in members:
        member.start()
    try:
        with memq.Admin(cluster.address) as admin:
            while seen.count("19") < 1 or len(admin.group("report").members) < 2:
                assert not stop.wait(0.05)
            with pytest.raises(InvalidRequestError, match="member"):
                admin.reset_group("report", "clicks", "beginning")
            assert seen.count("0") == 1
            admin.reset_group("report", "clicks", "beginning", force=True)
        assert again.wait(30), seen
    finally:
        stop.set()
        for member in members:
            member.join(30)
    assert sorted(seen, key=int) == sorted([*map(str, range(20))] * 2, key=int)
