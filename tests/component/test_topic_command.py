"""`memq topic list` and `describe`: counts, times and units; JSON of commands that change something."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest

import memq
from memq.cli import main
from memq.cli.cluster.setting_text import retention_text, setting_text
from memq.cli.commands import COMMANDS
from memq.cli.run import program
from memq.client.topic_extents import TopicExtent
from memq.errors import QueueError
from memq.testing import Cluster
from memq.topic import TopicSettings

# They run until a signal, or print a script.
SERVERS = {"completion", "iam", "dev", "broker", "listen", "worker", "auditor", "auditor metrics"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
        yield cluster


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_counts_and_times_are_those_of_the_records(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with memq.Admin(cluster.address) as admin:
        admin.create_topic("clicks", partitions=2)
        admin.create_topic("empty")
    with memq.Producer(cluster.address) as producer:
        for number in range(6):
            producer.send("clicks", b"x" * 100, partition=number % 2)
            producer.flush()
    topics = {each["name"]: each for each in json.loads(shown(capsys, "topic", "list", "--json"))}
    clicks, empty = topics["clicks"], topics["empty"]
    assert (clicks["records"], clicks["puts_per_hour"], clicks["unknown_partitions"]) == (6, 6, [])
    with memq.Admin(cluster.address) as admin:
        stored = sum(each.bytes for each in admin.end_totals(admin.topic("clicks").topic).values())
    assert clicks["bytes"] == stored > 0
    assert clicks["created_ms"] <= clicks["oldest_ms"] <= clicks["newest_ms"]
    assert (empty["records"], empty["bytes"], empty["oldest_ms"], empty["newest_ms"]) == (0, 0, None, None)
    described = json.loads(shown(capsys, "topic", "describe", "clicks", "--json"))
    assert {name: described[name] for name in clicks} == clicks


def test_tables_have_units(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", "a")
    listed = shown(capsys, "topic", "list")
    assert listed.splitlines()[0].split() == [
        *("topic", "partitions", "records", "bytes", "oldest", "newest", "PUTs/h", "retention")
    ]
    lines = dict(line.split(maxsplit=1) for line in shown(capsys, "topic", "describe", "clicks").splitlines() if line)
    assert (lines["records"], lines["retention_ms"], lines["batch_bytes_max"]) == ("1", "7 d", "8.0 MiB")
    assert lines["bytes"].endswith("B, stored")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("retention_ms", 90_000, "90 s"),
        ("retention_ms", 0, "0 (no limit)"),
        ("retention_bytes", 1 << 30, "1.0 GiB"),
        ("batch_age_ms_max", 1_500, "1,500 ms"),
        ("limit_bytes_s", 2_048, "2.0 KiB/s"),
        ("limit_requests_s", 1_000, "1,000/s"),
        ("shared_objects", True, "on"),
        ("retention_groups", "", "-"),
        ("ring_slots", 16, "16"),
    ],
)
def test_settings_have_units(key: str, value: object, text: str) -> None:
    assert setting_text(key, value) == text


def test_retention_as_text() -> None:
    assert retention_text(TopicSettings(retention_ms=7_200_000, retention_bytes=1 << 20)) == "2 h or 1.0 MiB"
    assert retention_text(TopicSettings(retention_ms=0)) == "for ever"


def test_an_extent_names_the_partitions_that_it_leaves_out() -> None:
    silent = TopicExtent(unknown=((3, QueueError("no answer")),))
    both = TopicExtent(2, 20, 5, 9, 1).plus(silent).plus(TopicExtent(1, 10, 4, 8, 1))
    assert (both.records, both.bytes, both.oldest_ms, both.newest_ms, both.hour_batches) == (3, 30, 4, 9, 2)
    assert [number for number, _ in both.unknown] == [3]


def test_a_deleted_topic_is_shown_as_json(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with memq.Admin(cluster.address) as admin:
        made = admin.create_topic("clicks")
    assert json.loads(shown(capsys, "topic", "seal", "clicks", "--yes", "--json"))["ended"]
    assert json.loads(shown(capsys, "topic", "unseal", "clicks", "--json"))["sealed_ms"] == 0
    gone = json.loads(shown(capsys, "topic", "delete", "clicks", "--yes", "--json"))
    assert (gone["name"], gone["id"]) == ("clicks", made.id)
    assert json.loads(shown(capsys, "topic", "list", "--json")) == []


def test_every_command_that_ends_has_json() -> None:
    def without_json(command: click.Command, path: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from without_json(inner, f"{path} {name}")
            if not command.invoke_without_command:
                return
        if not any("--json" in part.opts for part in command.params):
            yield path

    context = click.Context(program)
    commands = {name: program.get_command(context, name) for name in COMMANDS}
    assert {path for name, each in commands.items() if each for path in without_json(each, name)} == SERVERS
