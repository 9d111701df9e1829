"""Celery on leased queues: real workers of Celery, tasks that fail, wait, are killed with their worker."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

import memq
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from tests.memq_process import MemqProcess

HANG_S = 60
LEASE_S = 3  # of the tasks
PACE_S = 0.05


class Worker(MemqProcess):
    """`celery worker` with the tasks of `tests.celery_tasks`."""

    ready = "ready"

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        super().__init__(folder / "worker.log")
        self._environment = environment
        self._options = options

    def command(self) -> list[str]:
        """See `MemqProcess.command`."""
        script = (
            "import sys; from celery.signals import worker_ready\n"
            "out, sys.__stdout__, sys.stdout = sys.stdout, sys.stderr, sys.stderr\n"
            "worker_ready.connect(lambda **about: print('ready', file=out, flush=True), weak=False)\n"
            "from celery.__main__ import main; sys.argv[0] = 'celery'; main()"
        )
        options = ["-A", "tests.celery_tasks", "worker", "-P", "threads", "-c", "4", "-l", "info", *self._options]
        return ["-c", script, *options]

    def environment(self) -> dict[str, str]:
        """See `MemqProcess.environment`."""
        return self._environment


class Tasks:
    """The tasks as their caller sees them, and the notes that they wrote."""

    def __init__(self, folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.notes_file = folder / "notes"
        self.notes_file.touch()
        (folder / "results").mkdir()
        values = {
            "TASKS_BROKER": f"memq://{address}",
            "TASKS_RESULTS": f"file://{folder / 'results'}",
            "TASKS_NOTES": str(self.notes_file),
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        sys.modules.pop("tests.celery_tasks", None)
        self.module: Any = importlib.import_module("tests.celery_tasks")

    def worker(self, *options: str) -> Worker:
        """Return a worker that is not started."""
        return Worker(self.folder, dict(os.environ), *options)

    def notes(self) -> list[list[str]]:
        """Return the words of each line that tasks wrote."""
        return [line.split() for line in self.notes_file.read_text().splitlines()]

    def wait_for(self, count: int) -> list[list[str]]:
        """Wait for a number of lines."""
        clock = SystemClock()
        until_s = clock.monotonic() + HANG_S
        while len(self.notes()) < count:
            assert clock.monotonic() < until_s, f"{self.notes()}\n{(self.folder / 'worker.log').read_text()[-3000:]}"
            wait(PACE_S)
        return self.notes()


def wait(seconds: float) -> None:
    """Let processes work."""
    threading.Event().wait(seconds)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture
def tasks(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    found = Tasks(tmp_path, cluster.address, monkeypatch)
    yield found
    found.module.app.pool.force_close_all()
    found.module.app.close()


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    """Run a worker while the block runs."""
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def test_the_examples_of_celery_work(tasks: Tasks, cluster: Cluster) -> None:
    add, total, fails_twice, noted = (
        tasks.module.add,
        tasks.module.total,
        tasks.module.fails_twice,
        tasks.module.noted,
    )
    with running(tasks.worker()) as worker:
        assert add.delay(4, 4).get(timeout=HANG_S) == 8
        assert (add.s(2, 2) | add.s(4) | add.s(8)).apply_async().get(timeout=HANG_S) == 16
        assert chord([add.s(number, number) for number in range(10)], total.s()).apply_async().get(timeout=HANG_S) == 90
        sent_s = SystemClock().wall_ms() / 1_000
        noted.apply_async(["later"], countdown=2)
        assert fails_twice.delay("retried").get(timeout=HANG_S) == 3
        lines = tasks.wait_for(4)
        (later,) = [float(words[1]) for words in lines if words[0] == "later"]
        assert later - sent_s >= 2
        assert [words[1] for words in lines if words[0] == "retried"] == ["0", "1", "2"]
        assert worker.stop() == 0
    with memq.Queue(cluster.address) as queue:
        assert queue.queues() == {}, "all messages are acked"


def test_tasks_with_a_higher_priority_come_first(tasks: Tasks) -> None:
    for priority in (1, 9, 5, 0, 3):
        tasks.module.noted.apply_async([f"p{priority}"], priority=priority)
    with running(tasks.worker("-c", "1")) as worker:
        lines = tasks.wait_for(5)
        worker.stop()
    assert [words[0] for words in lines] == ["p9", "p5", "p3", "p1", "p0"]


def test_a_task_whose_worker_is_killed_runs_again_and_is_acked_once(tasks: Tasks, cluster: Cluster) -> None:
    tasks.module.slow.delay("a", LEASE_S * 2)
    with running(tasks.worker()) as worker:
        tasks.wait_for(1)
        worker.kill()
    with running(tasks.worker()) as worker:
        lines = tasks.wait_for(3)
        assert worker.stop() == 0
    assert [words[:2] for words in lines] == [["begin", "a"], ["begin", "a"], ["end", "a"]]
    assert lines[0][2] != lines[1][2] == lines[2][2]
    with memq.Queue(cluster.address) as queue:
        assert queue.queues() == {}
        assert queue.ends()["acked"] == 1


def test_a_worker_that_ends_gives_back_what_it_has_not_begun(tasks: Tasks, cluster: Cluster) -> None:
    for number in range(8):
        tasks.module.slow.delay(str(number), 1.0)
    with running(tasks.worker("-c", "1", "--prefetch-multiplier", "4")) as worker:
        tasks.wait_for(1)
        assert worker.stop() == 0
    done = sum(words[0] == "end" for words in tasks.notes())
    with memq.Queue(cluster.address) as queue:
        counts = queue.queues()["tasks.celery"]
        assert counts.ready == 8 - done, "nothing waits for the end of a lease"
        assert {item.attempt for item in queue.dequeue({"tasks.celery": 8})} == {1}, "no attempt is counted"


def opened(address: str, **options: object) -> Connection:
    """Return a connection of kombu."""
    importlib.import_module("memq.celery")
    return Connection(f"memq://{address}", transport_options={"visibility_timeout": LEASE_S, **options})


def test_kombu_consumers_ack_reject_and_return_messages(cluster: Cluster) -> None:
    with opened(cluster.address) as connection, connection.channel() as channel:
        exchange = Exchange("jobs", "topic")
        names = [Queue("small", exchange, routing_key="job.*"), Queue("all", exchange, routing_key="#")]
        for queue in names:
            queue(channel).declare()
        producer = Producer(channel, exchange)
        for word in ("job.a", "job.b", "other"):
            producer.publish({"word": word}, routing_key=word)
        assert [
            names[0](channel).queue_declare(passive=True).message_count,
            channel.queue_declare("all").message_count,
        ] == [2, 3]
        found: list[Any] = []

        def taken(body: dict[str, str], message: Any) -> None:
            found.append((body["word"], message))

        with Consumer(channel, names[1:], callbacks=[taken]):
            while len(found) < 3:
                connection.drain_events(timeout=HANG_S)
        words = dict(found)
        words["job.a"].ack()
        words["job.b"].reject()
        words["other"].requeue()
        again = names[1](channel).get()
        assert (again.payload, again.delivery_info["redelivered"]) == ({"word": "other"}, True)
        again.ack()
        assert names[1](channel).get() is None
        assert names[0](channel).purge() == 2
    with memq.Queue(cluster.address) as queue:
        (dead,) = queue.dead("all")
        assert b"job.b" in (queue.get(dead.id).payload or b"")


def test_messages_that_are_not_acked_come_again_after_a_close(cluster: Cluster) -> None:
    with opened(cluster.address) as connection, connection.SimpleQueue("once") as simple:
        simple.put({"n": 1})
        simple.get(timeout=HANG_S)
    with opened(cluster.address) as connection, connection.SimpleQueue("once") as simple:
        message = simple.get(timeout=HANG_S)
        assert message.payload == {"n": 1}
        message.ack()
    with opened(cluster.address) as connection, connection.SimpleQueue("once") as simple, pytest.raises(simple.Empty):
        simple.get(timeout=0.2)


def test_a_lease_is_renewed_while_a_message_is_held(cluster: Cluster) -> None:
    with opened(cluster.address) as connection, connection.SimpleQueue("long") as simple:
        simple.put({"n": 1})
        message = simple.get(timeout=HANG_S)
        wait(LEASE_S * 1.5)
        with opened(cluster.address) as other, other.SimpleQueue("long") as theirs, pytest.raises(theirs.Empty):
            theirs.get(timeout=0.2)
        message.ack()
    with memq.Queue(cluster.address) as queue:
        assert queue.ends()["acked"] == 1


def test_a_lease_that_the_publisher_chose_is_renewed_in_time(cluster: Cluster) -> None:
    with opened(cluster.address, visibility_timeout=1) as publisher, publisher.SimpleQueue("short") as simple:
        simple.put({"n": 1})
    with opened(cluster.address, visibility_timeout=60) as connection, connection.SimpleQueue("short") as simple:
        message = simple.get(timeout=HANG_S)
        wait(2.5)
        with memq.Queue(cluster.address) as queue:
            assert queue.dequeue("short") == []
        message.ack()
    with memq.Queue(cluster.address) as queue:
        assert queue.ends()["acked"] == 1


FOREIGN = [
    b"plain text",
    b"[1]",
    b"{}",
    b"[" * 100_000,
    b'{"__type__": "uuid", "__value__": {"hex": 5}}',
    b'{"__type__": "decimal", "__value__": "x"}',
    b'{"properties": {"delivery_info": {}, "body_encoding": "base64"}, "body": "x"}',
    b'{"properties": {"delivery_info": {}, "body_encoding": "other"}, "body": "x"}',
]


def test_an_item_that_is_no_message_is_dead_and_stops_no_consumer(cluster: Cluster) -> None:
    with memq.Queue(cluster.address) as queue:
        ids = [queue.enqueue("mixed", payload, priority=0) for payload in FOREIGN]
        with opened(cluster.address) as connection, connection.SimpleQueue("mixed") as simple:
            simple.put({"n": 1})
            message = simple.get(timeout=HANG_S)
            assert message.payload == {"n": 1}
            message.ack()
        assert {each.id for each in queue.dead("mixed")} == set(ids)


def test_a_url_may_have_several_addresses(cluster: Cluster) -> None:
    url = f"memq://127.0.0.1:1,{cluster.address}"
    with Connection(url) as connection, connection.SimpleQueue("several") as simple:
        assert connection.as_uri() == url
        simple.put({"n": 1})
        message = simple.get(timeout=HANG_S)
        message.ack()


def test_mistakes_have_errors_that_say_what_to_do(cluster: Cluster) -> None:
    with opened(cluster.address) as connection, connection.channel() as channel:
        with pytest.raises(InvalidRequestError, match="exchange 'all' is a fanout"):
            Exchange("all", "fanout")(channel).declare()
        with pytest.raises(memq.errors.InvalidNameError, match="queue name 'a b' is not allowed"):
            Producer(channel).publish({}, routing_key="a b")
    with pytest.raises(OperationalError, match="no broker answers"):
        Connection("memq://127.0.0.1:1", connect_timeout=0.5).ensure_connection(max_retries=1, interval_start=0)
    with pytest.raises(InvalidSettingError, match="broker_use_ssl has no 'cafile'"):
        Connection(f"memq://{cluster.address}", ssl={"cafile": "x"}).connect()
