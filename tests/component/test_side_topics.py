"""The retry topic and the dead-letter topic of a group: made with need, never those of a user, deleted on demand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memq
from memq.cli import main
from memq.errors import AlreadyExistsError, NotFoundError
from memq.testing import Cluster
from tests.component.test_listener import Handler, listener

SIDE_TOPICS = {"billing.dead-letters", "billing.retry"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def names(cluster: Cluster) -> set[str]:
    with memq.Admin(cluster.address) as admin:
        return {topic.name for topic in admin.topics()}


def listened(cluster: Cluster) -> None:
    """Handle a record, so that the group and its topics are there."""
    cluster.create_topic("orders")
    with memq.Producer(cluster.address, audit=False) as producer:
        producer.send("orders", "0").result(10)
    handler = Handler()
    with listener(cluster, handler) as started:
        started.start()
        handler.wait(1)


def test_a_listener_of_a_missing_topic_leaves_no_topics(cluster: Cluster) -> None:
    with listener(cluster, Handler()) as idle, pytest.raises(NotFoundError, match="'orders'"):
        idle.start()
    assert names(cluster) == set()
    with memq.Admin(cluster.address) as admin:
        assert admin.groups() == []


@pytest.mark.parametrize("name", sorted(SIDE_TOPICS))
def test_a_listener_does_not_take_a_users_topic_for_that_of_its_group(cluster: Cluster, name: str) -> None:
    cluster.create_topic("orders")
    cluster.create_topic(name, settings={"retention_groups": "other", "retention_groups_ms_max": 10**9})
    with (
        listener(cluster, Handler()) as refused,
        pytest.raises(AlreadyExistsError, match="no listener has made it") as caught,
    ):
        refused.start()
    assert "choose another group" in caught.value.hint
    missing = NotFoundError if name == "billing.retry" else AlreadyExistsError
    with memq.DeadLetterQueue(cluster.address, "billing") as queue, pytest.raises(missing):
        queue.purge()
    assert main(["group", "delete", "billing", "--with-topics", "--yes", "-b", cluster.address]) == 1
    assert name in names(cluster)

    settings: dict[str, int | bool | str] = {
        "retention_groups": name,
        "retention_groups_ms_max": 366 * 86_400_000,
    }  # as the hint says
    with memq.Admin(cluster.address) as admin:
        admin.alter_topic(name, settings=settings)
    with listener(cluster, Handler()) as taken:
        taken.start()


def test_the_command_line_deletes_a_group_and_on_demand_its_topics(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    listened(cluster)

    def deleted(*options: str) -> tuple[int, str]:
        code = main(["group", "delete", "billing", "--yes", *options, "-b", cluster.address])
        return code, capsys.readouterr().err

    code, said = deleted()
    assert (code, names(cluster)) == (0, SIDE_TOPICS | {"orders"})
    assert "stay: billing.retry, billing.dead-letters (memq group delete billing --with-topics)" in said
    assert deleted()[0] == 3, "it has no group any more"
    code, said = deleted("--with-topics")
    assert (code, names(cluster)) == (0, {"orders"})
    assert said == "topic billing.retry is deleted\ntopic billing.dead-letters is deleted\n"
    with memq.Admin(cluster.address) as admin:
        assert admin.groups() == []
    assert deleted("--with-topics")[0] == 3
