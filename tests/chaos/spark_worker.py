"""Spark in a chaos run: `python -m tests.chaos.spark_worker stream …`; SIGTERM ends it once all was read.

Two streaming queries, each with a checkpoint of its own: one follows all topics into files, which the judge compares
with the acks; the other copies the first topic into the topic `copies`, by staged commits. A life that is killed leaves
the rest to the next one. Journals have the lines `R`, `X` and `E` of other workers.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import memq.errors
from memq_localstack.java import spark_environment
from tests.chaos.clients import QUERIES
from tests.chaos.journal import COPIES
from tests.chaos.workers import PASSING, Worker, run_worker
from tests.spark.conftest import CONFIG, ROOT

EVERY = "5 seconds"
RECORDS_MAX = "50000"  # of a micro-batch
POLL_S = 1.0
END_S = 600
SETTINGS = {**CONFIG, "spark.driver.memory": "1g"}
NAMED = re.compile(r"\b\w+Error\b")
NOT_STARTED = (
    "Python worker failed",
    "Python worker exited unexpectedly",
)  # a Python that an overloaded machine starts


class Queries:
    """The session, and the two queries as they are started."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._folder = Path(worker.options.journal).parent / worker.name
        os.environ.update(spark_environment(self._folder / "python"))
        os.environ["PYTHONPATH"] = str(ROOT)
        os.environ["PYSPARK_SUBMIT_ARGS"] = "--master local[2,8] pyspark-shell"
        builder = SparkSession.builder.config("spark.sql.warehouse.dir", str(self._folder / "warehouse"))
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")

    def follow(self) -> None:
        """Keep both running until the end is wished for; one that failed is started again.

        They start one after another: Spark gives the Python of a source 10 s to start, which two at once may exceed.
        """
        found: dict[str, StreamingQuery] = {}
        while not self._worker.ending.wait(POLL_S):
            for name in QUERIES:
                query = found.get(name)
                if query is not None and query.isActive:
                    if query.lastProgress is None:
                        break  # it still starts
                    continue
                if query is not None:
                    self._note(query.exception())
                found[name] = self._writer(name).trigger(processingTime=EVERY).start()
                break
        for query in found.values():
            query.stop()

    def finish(self) -> None:
        """Run each to the end of what was written."""
        for name in QUERIES:
            done = False
            while not done:
                query = self._writer(name).trigger(availableNow=True).start()
                try:
                    done = bool(query.awaitTermination(END_S))
                except PySparkException as error:
                    self._note(error)
                query.stop()

    def _note(self, error: PySparkException | None) -> None:
        if error is not None:
            self._worker.journal.write("R", reason(str(error)))

    def _writer(self, name: str) -> DataStreamWriter:
        brokers, topics = self._worker.brokers, self._worker.topic
        if name == "files":
            writer = self._source(topics).writeStream.format("parquet").option("path", str(self._folder / "sink"))
        else:
            value = "concat(cast(partition as string), ':', cast(value as string)) as value"
            writer = self._source(topics.split(",")[0]).selectExpr(value).writeStream.format("memq")
            writer = writer.options(brokers=brokers, topic=COPIES, writer="chaos-copies")
        return writer.option("checkpointLocation", str(self._folder / name))

    def _source(self, topics: str) -> DataFrame:
        options = {"brokers": self._worker.brokers, "topics": topics, "maxRecordsPerTrigger": RECORDS_MAX}
        return self.spark.readStream.format("memq").options(**options, columns="value,topic,partition").load()


def stream(worker: Worker) -> None:
    """Run both queries until the end is wished for, then to the end of what was written by then."""
    os.setsid()  # driver, JVM and tasks are killed as one
    queries = Queries(worker)
    queries.follow()
    queries.finish()
    queries.spark.stop()


def reason(text: str) -> str:
    """Return the code of the error of memq that ended a query. Raises: RuntimeError when a user must not meet it."""
    for name in reversed(NAMED.findall(text)):
        kind = getattr(memq.errors, name, None)
        if kind is not None and issubclass(kind, PASSING):
            return str(kind.code)
        if kind is not None:
            break
    else:
        if any(known in text for known in NOT_STARTED):
            return "spark-python"
    raise RuntimeError(text)


if __name__ == "__main__":
    sys.exit(run_worker({"stream": stream}))
