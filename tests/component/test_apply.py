"""`memq apply`: a plan, its changes, and no drift afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from memq.cli import main
from memq.cli.declared.apply import WOULD_CHANGE
from memq.cli.declared.declaration import SECTIONS
from memq.testing import Cluster

WHOLE = """
[topics.clicks]
partitions = 2
retention_ms = "7d"
shared_objects = true

[topics.views]

[groups.report]
topics = ["clicks", "views"]
start = "end"

[[permissions]]
principal = "alice"
role = "producer"
topic = ["clicks"]

[[permissions]]
principal = "bob"
permission = "read"
effect = "deny"
group = ["*"]

[quotas.alice]
bytes_in_s = "10MiB"
connections = 5
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    with Cluster() as cluster:
        monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
        yield cluster


def applied(capsys: pytest.CaptureFixture[str], content: str, *arguments: str) -> tuple[int, list[str], str]:
    """Run it with a file of this content; return the exit code, the changes and the message."""
    Path("memq-state.toml").write_text(content)
    code = main(["apply", "memq-state.toml", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.strip()


def test_a_plan_its_changes_and_no_drift(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, said = applied(capsys, WHOLE, "--dry-run")
    assert (code, said) == (WOULD_CHANGE, f"nothing was changed (--dry-run): {len(plan)} changes left")
    assert "+ topic 'clicks': partitions = 2, retention_ms = 7 d, shared_objects = on" in plan
    with memq.Admin(cluster.address) as admin:
        assert (admin.topics(), admin.groups(), admin.permissions(), admin.quotas()) == ([], [], [], [])
    assert applied(capsys, WHOLE) == (0, plan, f"{len(plan)} changes made")
    with memq.Admin(cluster.address) as admin:
        topic = admin.topic("clicks").topic
        assert (len(topic.taking), topic.settings.retention_ms, topic.settings.shared_objects) == (
            2,
            7 * 86_400_000,
            True,
        )
        assert all(each.position is not None for each in admin.group("report").partitions)
        assert "deny bob read group '*'" in map(str, admin.permissions())
        assert [(each.name, each.bytes_in_s, each.connections) for each in admin.quotas()] == [("alice", 10 << 20, 5)]
    for more in ([], ["--dry-run"], ["--prune"]):
        assert applied(capsys, WHOLE, *more) == (0, [], "no changes: the cluster agrees with the file"), more


def test_only_what_differs_is_changed(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    applied(capsys, WHOLE)
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", "a", partition=0).result(timeout=20)
    with memq.Admin(cluster.address) as admin:
        admin.alter_topic("clicks", settings={"retention_ms": 1_000_000, "batch_bytes_max": 1 << 20})
        before = {each.topic_partition: each.position for each in admin.group("report").partitions}
    code, changes, _ = applied(capsys, WHOLE)
    assert (code, changes) == (0, ["~ topic 'clicks': retention_ms 1,000 s -> 7 d"])
    with memq.Admin(cluster.address) as admin:
        settings = admin.topic("clicks").topic.settings
        assert (settings.retention_ms, settings.batch_bytes_max) == (7 * 86_400_000, 1 << 20), "unnamed settings stay"
        assert {each.topic_partition: each.position for each in admin.group("report").partitions} == before


def test_pruning_removes_rules_and_quotas_only(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    applied(capsys, WHOLE)
    less = '[topics.views]\n[quotas.alice]\nbytes_in_s = "20MiB"\n[quotas.carol]\nconnections = 1\n'
    code, changes, _ = applied(capsys, less)
    assert (code, [each[0] for each in changes]) == (0, ["~", "+"])
    bare = "permissions = []\n[topics.views]\n[quotas.carol]\nconnections = 1\n"
    assert applied(capsys, bare)[:2] == (0, []), "without --prune what the file leaves out stays"
    code, _, said = applied(capsys, bare, "--prune")
    assert code == 2
    assert "add --yes" in said
    code, changes, _ = applied(capsys, bare, "--prune", "--yes")
    assert (code, {each[0] for each in changes}) == (0, {"-"})
    with memq.Admin(cluster.address) as admin:
        assert admin.permissions() == []
        assert [each.name for each in admin.quotas()] == ["carol"]
        assert [topic.name for topic in admin.topics()] == ["clicks", "views"]
        assert admin.groups() == ["report"]


def test_json(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, (line,), _ = applied(capsys, "[topics.t]\n", "--dry-run", "--json")
    assert code == WOULD_CHANGE
    assert json.loads(line) == {"changes": [{"action": "+", "change": "topic 't': partitions = 1"}], "applied": False}


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("[topcs.t]", 1, "unknown section 'topcs' (did you mean 'topics'?)"),
        ("[topics.t", 1, "is not TOML"),
        ("topics.one = 5", 1, "topics has no tables (write [topics.NAME])"),
        ("[topics.t]\npartitons = 2", 1, "topics.t: unknown topic setting 'partitons'"),
        ("[topics.t]\nretention_ms = 'weekly'", 1, "topics.t: topic setting retention_ms = 'weekly' can't be read"),
        ("[topics.t]\npartitions = 0", 1, "topics.t: partitions = 0 is not within 1 to"),
        ("[topics.'a b']", 1, "topics.a b: topic name 'a b' is not allowed"),
        ("[groups.g]", 1, "groups.g: Object missing required field `topics`"),
        ("[groups.g]\ntopics = ['nowhere']", 3, "topic 'nowhere' of group 'g' does not exist (declare it, too)"),
        ("[groups.g]\ntopics = ['one']\nstart = 'middle'", 1, "groups.g: bad target 'middle'"),
        ("[quotas.q]\nbytes = 1", 1, "quotas.q: unknown amount 'bytes'"),
        ("[quotas.q]\nbytes_in_s = 'fast'", 1, "quotas.q: bytes_in_s = 'fast' can't be read"),
        ("[permissions]\nx = 1", 1, "permissions is no list (write [[permissions]] before each)"),
        ("[[permissions]]\nprincipal = 'a'\nrole = 'king'\ntopic = ['one']", 1, "permissions, entry 1: role 'king'"),
        ("[topics.one]\npartitions = 4", 1, "topic 'one' has 1 partitions, and the file wants 4"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_faulty_file_changes_nothing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], content: str, code: int, said: str, more: list[str]
) -> None:
    """No fault ends with the code that means changes."""
    with memq.Admin(cluster.address) as admin:
        admin.create_topic("one")
    content += "\n[topics.fine]\n"
    found, out, err = applied(capsys, content, *more)
    assert (found, out) == (code, [])
    assert err.startswith("memq: error: ")
    assert "\n" not in err
    assert said in err
    with memq.Admin(cluster.address) as admin:
        assert [topic.name for topic in admin.topics()] == ["one"]


def test_a_missing_file(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "nowhere.toml"]) == 3
    assert "no file 'nowhere.toml'" in capsys.readouterr().err
    assert set(SECTIONS) == {"topics", "groups", "permissions", "quotas"}
