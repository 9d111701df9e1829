"""A fault of a chaos run is injected only into a part that is ready and has no other fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.clients import QUERIES, SparkClient
from tests.chaos.plan import Fault
from tests.chaos.run import START_DELAY_S_MAX, ChaosRun
from tests.chaos.stack import ChaosBroker, Stack


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChaosRun]:
    """A run that has not begun, whose faults do nothing."""
    monkeypatch.setattr(Stack, "begin", lambda *_: None)
    monkeypatch.setattr(Stack, "end", lambda *_: None)
    found = ChaosRun(tmp_path / "run", 1, 60.0, 100.0, None)
    yield found
    found.stack.close()


def struck(run: ChaosRun, kind: str, target: str, late_s: float = 0.0) -> bool:
    """Try to begin a fault, and return whether it was begun."""
    before = len(run.moments)
    run.begin_fault(Fault(5.0, kind, target, 0.0), 5.0 + late_s)
    return len(run.moments) > before


def test_a_part_in_other_hands_is_left_alone(run: ChaosRun) -> None:
    run.in_hand.append("broker-1")
    assert not struck(run, "link-cut", "broker-1:s3")
    assert not struck(run, "rolling-restart", "brokers")
    assert run.left_out == {"link-cut": 1, "rolling-restart": 1}
    assert struck(run, "kafka-kill", "kafka-1")


def test_a_fault_whose_time_is_past_is_left_out(run: ChaosRun) -> None:
    assert struck(run, "kafka-kill", "kafka-1", late_s=START_DELAY_S_MAX - 1)
    assert not struck(run, "kafka-kill", "kafka-2", late_s=START_DELAY_S_MAX + 1)


def test_brokers_of_the_revision_before_meet_kills_and_pauses_alone(run: ChaosRun, tmp_path: Path) -> None:
    old = ChaosBroker(tmp_path, "broker-1", 1, tmp_path / "broker.toml", tmp_path)
    run.stack.brokers["broker-1"] = old
    assert not struck(run, "kafka-kill", "kafka-1")
    assert struck(run, "broker-kill", "broker-1")
    old.tree = run.stack.tree
    assert struck(run, "kafka-kill", "kafka-1")


def test_spark_is_killed_once_its_life_has_committed_something(tmp_path: Path) -> None:
    spark = SparkClient(tmp_path, "spark", "stream", "all", "")
    assert not spark.may_be_struck
    for query in QUERIES:
        commits = tmp_path / "spark" / query / "commits"
        commits.mkdir(parents=True)
        (commits / ".0.tmp").touch()
        assert not spark.may_be_struck
        (commits / "0").touch()
    assert spark.may_be_struck
