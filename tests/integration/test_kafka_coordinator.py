"""A Kafka that hangs or dies during the search for a group's coordinator: no process ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from memq_localstack.servers import Server
from tests.contract.queues import HANG_S
from tests.integration.kafka import kafka_queue, running_kafka

# The process stops between the question whether Kafka is there and the one about the group, which is a new one: nobody
# has asked for its coordinator. Behind the failure it asks again, until Kafka has answered.
_ASKER = """
import asyncio, sys
from memq.errors import NotFoundError, QueueError
from memq.notification.kafka.admin import KafkaAdmin
from tests.integration.kafka import kafka_queue

seen = KafkaAdmin.check

async def check(self):
    await seen(self)
    print("is there", flush=True)
    assert sys.stdin.readline()

async def main():
    queue = kafka_queue(sys.argv[1], prefix="coordinator.", request_timeout_ms=1_000)
    KafkaAdmin.check = check
    try:
        await ask(queue)
    except QueueError as error:
        print("failed:", error, flush=True)
    KafkaAdmin.check = seen
    assert sys.stdin.readline()
    for _ in range(20):  # what came late is served meanwhile
        try:
            await ask(queue)
        except QueueError:
            continue
        except NotFoundError as error:
            print("answered:", error, flush=True)
            break
    await queue.close()

async def ask(queue):
    if sys.argv[2] == "describe":
        await queue.former.read("new")
    else:
        await queue.former.remove("new")

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_kafka(tmp_path_factory.mktemp("kafka")) as server:
        asyncio.run(ask_first(server))
        yield server


async def ask_first(kafka: Server) -> None:
    """Have Kafka make the log of all groups."""
    queue = kafka_queue(kafka.address)
    try:
        await queue.check()
    finally:
        await queue.close()


@pytest.mark.parametrize("request_", ["describe", "delete"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_kafka_that_goes_away_meanwhile_ends_nobody(own_kafka: Server, request_: str, dies: bool) -> None:
    with asker(own_kafka, request_) as process:
        assert line_of(process) == "is there"
        if dies:
            own_kafka.kill()
        else:
            own_kafka.pause()
        say(process)
        try:
            assert line_of(process).startswith("failed: "), "the request was answered"
        finally:
            if dies:
                own_kafka.restart()
            else:
                own_kafka.resume()
        say(process)
        assert "group 'new' is not in Kafka" in line_of(process)
        assert process.wait(HANG_S) == 0


@contextmanager
def asker(kafka: Server, request: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that asks."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _ASKER, kafka.address, request]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[str]) -> None:
    """Let it continue."""
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return what it says next; nothing when it has ended."""
    said: IO[str] | None = process.stdout
    assert said is not None
    return said.readline().strip()
