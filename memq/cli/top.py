"""`memq top`: topics, brokers and the lag of groups on a terminal, again and again."""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import click
import msgspec

from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_message, print_table, size_text, time_text
from memq.client.admin import Admin
from memq.client.group_admin import GroupDescription
from memq.client.topic_extents import TopicExtent
from memq.errors import NotFoundError
from memq.protocol.wire_types import WireBroker
from memq.runtime.clock import SystemClock
from memq.settings import Value
from memq.topic import STATE_TOPIC

CLEAR = "\x1b[H\x1b[2J"  # cursor to the top, and an empty screen


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of a cluster at one time, in Unix ms."""

    at_ms: int
    brokers: list[WireBroker]
    topics: dict[str, TopicExtent]
    groups: list[GroupDescription] = field(default_factory=list)


def look(admin: Admin, now_ms: int, *, internal: bool) -> Sight:
    """Ask a cluster for its present state."""
    groups = []
    for name in admin.groups(internal=internal, proven=False):
        with suppress(NotFoundError):  # deleted meanwhile
            groups.append(admin.group(name, proven=False))
    topics = [topic for topic in admin.topics(internal=internal) if topic.name != STATE_TOPIC]
    return Sight(now_ms, admin.brokers(), admin.extents(topics), groups)


def rates_of(before: Sight | None, now: Sight) -> dict[str, float | None]:
    """Return the records per second that each topic got since `before`; None where that is unknown."""
    rates: dict[str, float | None] = {}
    for name, extent in now.topics.items():
        known = None if before is None else before.topics.get(name)
        if before is None or known is None or known.unknown or extent.unknown or now.at_ms <= before.at_ms:
            rates[name] = None
        else:
            rates[name] = max(0, extent.written - known.written) * 1_000 / (now.at_ms - before.at_ms)
    return rates


def show(before: Sight | None, now: Sight, lines: int) -> None:
    """Print a state: brokers, then the busiest topics, then the partitions with the largest lag."""
    click.echo(f"memq top  {time_text(now.at_ms)[:19]}Z  {len(now.topics)} topics, {len(now.groups)} groups")
    click.echo()
    print_table(
        ("broker", "address", "partitions", "bytes/s", "state"),
        [(each.broker, each.address, each.partitions, each.bytes_s, _state(each)) for each in now.brokers],
    )
    click.echo()
    left = max(2, (lines - len(now.brokers) - 8) // 2)
    rates = rates_of(before, now)
    busiest = sorted(now.topics, key=lambda name: (-(rates[name] or 0), name))
    rows = [(name, _rate(rates[name]), *_counts(now.topics[name])) for name in busiest[:left]]
    print_table(("topic", "records/s", "records", "bytes", "PUTs/h"), rows)
    click.echo()
    progress = [(group.group, each) for group in now.groups for each in group.partitions]
    progress.sort(key=lambda pair: (pair[1].error is None, -(0 if pair[1].error else pair[1].lag.records), pair[0]))
    print_table(
        ("group", "topic", "partition", "lag records", "lag seconds", "member"),
        [
            (
                *(name, each.topic_partition.topic, each.topic_partition.partition),
                *(("unknown", "unknown") if each.error else (each.lag.records, round(each.lag.seconds))),
                each.member or None,
            )
            for name, each in progress[:left]
        ],
    )


def _counts(extent: TopicExtent) -> tuple[object, ...]:
    if extent.unknown:
        return ("unknown",) * 3
    return extent.records, size_text(extent.bytes), extent.hour_batches


def _rate(rate: float | None) -> object:
    return "-" if rate is None else round(rate)


def _state(broker: WireBroker) -> str:
    words = (("governs", broker.governs), ("draining", broker.draining))
    return ", ".join(word for word, holds in words if holds) or "-"


def sight_json(before: Sight | None, now: Sight) -> dict[str, object]:
    """Return a state as JSON; an unknown number is null."""
    rates = rates_of(before, now)
    return {
        "at_ms": now.at_ms,
        "brokers": msgspec.to_builtins(now.brokers),
        "topics": [
            {
                "topic": name,
                "records_per_second": rates[name],
                "records": None if extent.unknown else extent.records,
                "bytes": None if extent.unknown else extent.bytes,
                "puts_per_hour": None if extent.unknown else extent.hour_batches,
            }
            for name, extent in now.topics.items()
        ],
        "groups": [
            {
                "group": group.group,
                "topic": each.topic_partition.topic,
                "partition": each.topic_partition.partition,
                "lag_records": None if each.error else each.lag.records,
                "lag_seconds": None if each.error else round(each.lag.seconds, 3),
            }
            for group in now.groups
            for each in group.partitions
        ],
    }


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 3_600),
    default=2.0,
    metavar="SECONDS",
    help="Time between two states (default 2).",
)
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="COUNT", help="Stop after COUNT states.")
@click.option("--all", "internal", is_flag=True, help="Also memq's own topics and groups.")
@broker_options
@json_option
def top(
    interval_s: float,
    count: int | None,
    internal: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Watch brokers, the busiest topics, and the partitions with the largest lag, until Ctrl-C.

    On a terminal each state replaces the last one; elsewhere it follows. With --json each state is one line.
    """
    clock, pause = SystemClock(), threading.Event()
    before: Sight | None = None
    shown = 0
    try:
        with Admin(brokers_of(config, profile, flags)) as admin:
            while True:
                now = look(admin, clock.wall_ms(), internal=internal)
                if as_json:
                    print_json(sight_json(before, now))
                else:
                    if sys.stdout.isatty():
                        click.echo(CLEAR, nl=False)
                    show(before, now, shutil.get_terminal_size().lines)
                sys.stdout.flush()
                before, shown = now, shown + 1
                if count is not None and shown >= count:
                    return
                pause.wait(interval_s)
    except KeyboardInterrupt:
        print_message(f"interrupted: {shown} states shown")
        raise
