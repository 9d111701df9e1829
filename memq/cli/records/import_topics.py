"""`memq import`: copies topics of other systems into a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from memq.cli.commands import INTERRUPTED
from memq.cli.options import broker_options, json_option, settings_of
from memq.cli.output import GrowingCount, count_text, print_json, print_message, print_table
from memq.errors import InvalidSettingError
from memq.notification.kafka.settings import KafkaSettings, kafka_settings
from memq.runtime.clock import SystemClock
from memq.settings import Value
from memq.topic import check_name, check_resource_name

if TYPE_CHECKING:
    from memq.client.bulk.kafka_import import ImportedPartition


STEP_S = 2.0  # a step that takes longer gets a line


@click.group("import")
def import_topics() -> None:
    """Copy topics from other systems into a topic."""


@import_topics.command(short_help="Copy Kafka topics with keys, headers and timestamps.")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--into", required=True, metavar="TOPIC", help="Topic to copy into; created if it does not exist.")
@click.option("--from", "servers", required=True, metavar="HOST:PORT,...", help="Kafka cluster with the topics.")
@click.option("--groups", is_flag=True, help="Copy the positions of the consumer groups, too.")
@broker_options
@json_option
def kafka(
    topics: tuple[str, ...],
    into: str,
    servers: str,
    *,
    groups: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Copy all records that Kafka topics hold now, with keys, headers, timestamps and partitions.

    After Ctrl-C or a kill at any moment, start it again: it continues, and copies nothing twice. A later run copies the
    records that have come since. Kafka shows the progress as the lag of the group memq-import.ID. Settings of the
    connection (TLS, login) go into the section [source], under librdkafka's names.
    """
    check_resource_name(into)
    for topic in topics:
        check_name(topic)  # Kafka's
    settings = settings_of(config, profile, **flags)
    chosen = kafka_settings(f"kafka://{servers.removeprefix('kafka://')}", settings.parts().section("source"), "source")
    with GrowingCount("import", "records") as counted:
        try:
            done, copied = asyncio.run(
                _import(chosen, settings.client().brokers, topics, into, groups=groups, counted=counted)
            )
        except KeyboardInterrupt:
            print_message(f"interrupted: {count_text(counted.count, 'record')} read; the next run continues")
            return INTERRUPTED
    if as_json:
        print_json({"partitions": [asdict(one) for one in done], "groups": copied})
        return 0
    heads = ("topic", "partition", "records", "from offset", "to offset")
    print_table(heads, [(one.topic, one.partition, one.records, one.begin, one.end) for one in done])
    for group, partitions in copied.items():
        print_message(f"group {group}: {count_text(partitions, 'position')} copied")
    return 0


async def _import(
    chosen: KafkaSettings,
    brokers: str,
    topics: Sequence[str],
    into: str,
    *,
    groups: bool,
    counted: GrowingCount,
) -> tuple[list[ImportedPartition], dict[str, int]]:
    try:
        from memq.client.bulk.kafka_import import import_topics as copy
        from memq.notification.kafka.reading.import_source import KafkaSource
    except ModuleNotFoundError as error:
        raise InvalidSettingError(
            f"an import from Kafka needs {error.name}, which is not installed", hint="pip install 'memq[kafka]'"
        ) from error
    steps = StepLines("import")

    def moved(records: int) -> None:
        if records:
            steps.end()  # from here on, the number of records shows the progress
        counted.move(records)

    source = KafkaSource(chosen, SystemClock())
    try:
        return await copy(source, brokers, topics, into, groups=groups, moved=moved, step=steps.begin)
    finally:
        steps.end()


class StepLines:
    """Names a step of long work on stderr once it has lasted for `STEP_S`, on a running event loop."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, text: str) -> None:
        """Begin a step, and end the previous one."""
        self.end()
        self._timer = asyncio.get_running_loop().call_later(STEP_S, print_message, f"{self._label}: {text} …")

    def end(self) -> None:
        """End the step that was begun last."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
