"""Mistakes at the command line: each gets one line that names the value and the cure.

`cli_mistakes.tsv` has what is typed, the exit code, and the line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from memq.cli import main
from memq.testing import Cluster

TABLE = Path(__file__).with_name("cli_mistakes.tsv")
MISTAKES = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        with memq.Admin(cluster.address) as admin:
            admin.create_topic("clicks")
            admin.create_topic("two", partitions=2)
        with memq.Producer(cluster.address) as producer:
            for number in range(3):
                producer.send("clicks", str(number))
        with memq.Consumer(cluster.address, "clicks", group="report", end="end") as consumer:
            assert sum(len(batch) for batch in consumer) == 3
        yield cluster


@pytest.mark.parametrize(("typed", "code", "said"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_gets_one_line_with_value_and_cure(
    cluster: Cluster,
    typed: str,
    code: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
    assert main(shlex.split(typed)) == int(code)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"memq: error: {said}\n")


def test_the_table_has_the_mistakes_of_newcomers() -> None:
    assert len(MISTAKES) >= 90
    assert len({typed for typed, _, _ in MISTAKES}) == len(MISTAKES)
