"""Input of every pipeline: a topic, its cluster, positions of its groups, and a Spark session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from memq.client.io_thread import io_thread
from memq.errors import InvalidRequestError, NotFoundError
from memq.groups import OUTSIDE_GENERATION
from memq.runtime.runtime import Runtime
from memq.spark.access import GroupPositions, open_access
from memq.spark.options import ReadOptions, read_options
from memq.spark.pipelines.rounds import ROUND_TASKS, topic_of
from memq.topic import Committed, Position, ReadPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

# Without any of these variables, the local Spark from pip runs. For tasks it takes the `python3` of PATH, which lacks
# memq if the virtual environment is not activated. So tasks then run the Python of this process.
_SET_UP = frozenset(
    ("PYSPARK_PYTHON", "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE")
)


def topic_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the topic and its cluster: brokers, or any option of `format("memq")`."""
    function = click.option(
        "-o",
        "--option",
        "given",
        multiple=True,
        metavar="NAME=VALUE",
        help='Option of format("memq"), such as queue, store, config, start, end, partitionBytes.',
    )(function)
    function = click.option("-b", "--brokers", metavar="HOST:PORT", help="A broker; default: MEMQ_BROKERS.")(function)
    return click.argument("topic")(function)


def tasks_option(of_rounds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the number of tasks of one round; `of_rounds` ends the help."""
    help_ = f"Tasks of one round{of_rounds}."
    return click.option("--tasks", type=click.IntRange(1), default=ROUND_TASKS, show_default=True, help=help_)


def options_of(topic: str, brokers: str | None, given: Sequence[str]) -> tuple[dict[str, str], ReadOptions]:
    """Return the options of `format("memq")`, as text and as parsed.

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
def spark_session(name: str, options: ReadOptions) -> Iterator[SparkSession]:
    """Give the session of spark-submit or of the caller, else a local one, which ends with the work.

    The topic of `options` is requested first, because Spark takes seconds to start. Spark shows the progress of its
    stages. A session that existed before stays open. Raises: as `topic_of`.
    """
    from pyspark.sql import SparkSession

    io_thread().run(topic_of(options))
    there = SparkSession.getActiveSession()
    if there is None and not _SET_UP & os.environ.keys():
        os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(f"memq {name}").config("spark.ui.showConsoleProgress", "true")
    spark = there or builder.getOrCreate()
    try:
        yield spark
    finally:
        if there is None:
            spark.stop()


def print_progress(text: str) -> None:
    """Print a line of progress on stderr: stdout is for results."""
    click.echo(text, err=True)


async def stored_positions(
    groups: GroupPositions, group: str, partitions: Sequence[ReadPartition]
) -> dict[ReadPartition, Position]:
    """Return the group's positions in those of `partitions` that it has committed.

    Raises: as `Groups.committed`.
    """
    stored = await groups.committed(group, partitions)
    return {partition: committed.marked_position for partition, committed in stored.items()}


async def positions_of(options: ReadOptions, group: str) -> dict[int, Position]:
    """Return the group's positions in the topic of `options`, by read partition; none for a new group.

    Raises: InvalidRequestError while the group has members; UnreachableError, NotFoundError of the topic.
    """
    async with open_access(options, Runtime()) as access:
        groups = access.groups
        with suppress(NotFoundError):  # a new group, if nothing of it is stored either
            state = await groups.describe(group)
            if state.members:
                raise InvalidRequestError(
                    f"group '{group}' has {len(state.members)} members",
                    hint="stop them: they would read the same records",
                )
        stored = await stored_positions(groups, group, list(access.topics[options.topics[0]].partitions))
        return {partition.partition: position for partition, position in stored.items()}


async def commit_positions(options: ReadOptions, group: str, positions: Mapping[int, Position]) -> None:
    """Move a group forward to these positions by read partition; never move it back.

    Raises: as `positions_of`; as `Groups.commit`.
    """
    stored = await positions_of(options, group)
    async with open_access(options, Runtime()) as access:
        topic = access.topics[options.topics[0]]
        commits: dict[ReadPartition, Committed] = {}
        for partition, writers in topic.partitions.items():
            position = positions.get(partition.partition)
            before = stored.get(partition.partition)
            if position is not None and (before is None or before < position):
                offset = position.pointer_offset
                totals = await access.resolver.totals_before(partition, offset, topic.settings, writers)
                mark = await access.resolver.checked_mark(partition, position)
                covered = await access.resolver.covered_before(partition, offset, topic.settings, writers)
                commits[partition] = Committed(position, totals.plus(position.record_index, 0), mark, covered)
        if commits:
            await access.groups.commit(group, "", OUTSIDE_GENERATION, commits)
