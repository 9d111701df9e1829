"""What every pipeline is given: a topic, where it is, and a session of Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from memq.spark.options import ReadOptions, read_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


def topic_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the topic, and where it is: brokers, or any option of `format("memq")`."""
    function = click.option(
        "-o",
        "--option",
        "given",
        multiple=True,
        metavar="NAME=VALUE",
        help='Option of format("memq"), such as queue, store, config, start, end, partitionBytes.',
    )(function)
    function = click.option("-b", "--brokers", metavar="HOST:PORT", help="A broker; else MEMQ_BROKERS.")(function)
    return click.argument("topic")(function)


def options_of(topic: str, brokers: str | None, given: Sequence[str]) -> tuple[dict[str, str], ReadOptions]:
    """Return the options of `format("memq")`, as they are and as they were read.

    Raises: UsageError; as `read_options`.
    """
    options = {"topics": topic} | ({"brokers": brokers} if brokers else {})
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"option '{each}' is not NAME=VALUE")
        options[name] = value
    return options, read_options(options, "batch")


@contextmanager
def spark_session(name: str) -> Iterator[SparkSession]:
    """Give the session that spark-submit or the caller set up, else a local one, which ends with the work.

    Spark shows the progress of its stages; a session that was there before stays.
    """
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    builder = SparkSession.builder.appName(f"memq {name}").config("spark.ui.showConsoleProgress", "true")
    spark = there or builder.getOrCreate()
    try:
        yield spark
    finally:
        if there is None:
            spark.stop()


def tell(text: str) -> None:
    """Print a line of progress on stderr: stdout is for results."""
    click.echo(text, err=True)
