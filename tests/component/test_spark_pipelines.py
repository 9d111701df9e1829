"""Errors of the pipelines' command line: one line with the remedy, without Spark's traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping

import click
import pytest

from memq.audit.released import ReleaseAnswer
from memq.client.producer.producer import AsyncProducer
from memq.errors import NotFoundError
from memq.spark.pipelines import __main__ as command_line
from memq.spark.pipelines.__main__ import INTERRUPTED, main, pipelines, sentence_of
from memq.spark.pipelines.audit import plan_again, plan_audit
from memq.spark.pipelines.inputs import options_of
from memq.topic import TopicSettings
from tests.brokers import run, running_broker

OF_A_TASK = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/v/memq/spark/read/task.py", line 53, in read_split
    raise UnreachableError("no")
memq.errors.UnreachableError: no answer
hint: try again

The above exception was the direct cause of the following exception:

memq.errors.DeniedError: the folder '/a' is not on this machine
hint: check the name (or the path)
 SQLSTATE: 38000
\tat org.apache.spark.Some.thing(Some.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OF_A_TASK, ("the folder '/a' is not on this machine", "check the name (or the path)")),
        ("memq.errors.CorruptDataError: block 3", ("block 3", "")),
        (
            "[TOO_FULL] The disk is full. SQLSTATE: 1\n\tat org.apache\n",
            ("[TOO_FULL] The disk is full. SQLSTATE: 1", ""),
        ),
        ("list index out of range", None),
    ],
)
def test_message_of_memq_or_spark_is_found_between_the_traces(text: str, said: tuple[str, str] | None) -> None:
    assert sentence_of(text) == said


def test_a_missing_java_is_named() -> None:
    sentence = sentence_of("[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.")
    assert sentence is not None
    assert "Java 17" in sentence[1]


@pytest.mark.parametrize(("package", "pipeline"), [("pyspark", "audit"), ("pyspark", "compact"), ("pyarrow", "replay")])
def test_missing_package_is_reported_in_one_line(package: str, pipeline: str) -> None:
    hidden = f"import sys; sys.modules['{package}'] = None"
    start = f"{hidden}; from memq.spark.pipelines import __main__ as it; sys.exit(it.main())"
    words = [pipeline, "clicks", "--brokers", "127.0.0.1:1", *(() if pipeline == "audit" else ("--to", "x"))]
    done = subprocess.run([sys.executable, "-c", start, *words], check=False, capture_output=True, text=True)
    needed = f"pipelines need {package}, which is not installed (pip install 'memq[spark]')"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"memq.spark.pipelines: {needed}\n")


def test_only_values_of_avro_need_fastavro() -> None:
    """Each read failed where it was not installed, such as a demo in a fresh clone."""
    code = "import sys; sys.modules['fastavro'] = None; import memq.spark.read.arrow_rows as rows; print('read')"
    words = [sys.executable, "-c", f"{code}; rows.avro_decoder('{{}}')"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.stdout == "read\n"
    assert "ImportError: valueFormat = avro needs fastavro (pip install 'memq[avro]')" in done.stderr


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "pipelines", interrupted)
    monkeypatch.setattr(sys, "argv", ["pipelines"])
    assert main() == INTERRUPTED
    assert capsys.readouterr().err.strip().startswith("memq.spark.pipelines: interrupted")


def test_a_fault_of_our_own_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def wrong() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(command_line, "pipelines", wrong)
    monkeypatch.setattr(sys, "argv", ["pipelines"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize("partitions", [1, 2])
def test_an_audit_of_a_topic_that_is_created_again_meanwhile_fails(partitions: int) -> None:
    """It ended with a KeyError, or judged the old records by the log of the new topic."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            options = options_of("clicks", broker.address, [])[1]
            plan = await plan_audit(options)
            assert (await plan_again(options, plan, [])).spans == plan.spans
            await broker.partitions.delete(topic)
            await broker.partitions.create("clicks", partitions, TopicSettings(), exist_ok=False)
            with pytest.raises(NotFoundError, match="was deleted during the audit, and created again"):
                await plan_again(options, plan, [])

    run(work())


def test_an_audit_of_held_records_has_the_words_of_their_shards() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address) as producer:
                for number in range(6):
                    await (await producer.send("clicks", b"x", partition=number % 2, deliver_after=0))
                await (await producer.send("clicks", b"x", partition=1, deliver_after=100))
            options = options_of("clicks", broker.address, [])[1]
            done: dict[int, list[tuple[int, int]]] = {}
            released: Mapping[int, ReleaseAnswer] = {}
            async with asyncio.timeout(20):
                while done != {0: [(0, 3)], 1: [(1, 3)]}:
                    released = (await plan_audit(options)).released
                    done = {
                        log: [(each.partition, each.done_records) for each in released[log].shards] for log in released
                    }
            assert [(released[log].waiting, released[log].error) for log in (0, 1)] == [(1, ""), (0, "")]

    run(work())


def test_a_topic_is_not_replayed_into_itself() -> None:
    with pytest.raises(click.UsageError, match="can't be replayed into itself"):
        pipelines.main(["replay", "clicks", "-b", "127.0.0.1:1", "--to-topic", "clicks"], standalone_mode=False)
