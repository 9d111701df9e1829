"""`memq topic`: list, create, describe, alter, truncate, seal and delete topics; counts records."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click
import msgspec

from memq.cli.cluster.setting_text import retention_text, setting_text
from memq.cli.options import broker_options, brokers_of, json_option, parse_position, parse_reset_target, yes_option
from memq.cli.output import (
    confirm,
    count_text,
    print_json,
    print_message,
    print_pairs,
    print_table,
    size_text,
    time_text,
)
from memq.client.admin import Admin
from memq.client.topic_admin import SEAL_S
from memq.client.topic_extents import TopicExtent
from memq.errors import InvalidSettingError, UnknownSettingError
from memq.kafka_words import kafka_hint
from memq.limits import PARTITIONS_MAX
from memq.protocol.messages import TopicMetadata
from memq.runtime.clock import SystemClock
from memq.settings import Value, did_you_mean, parse_size, parse_time_ms
from memq.topic import HOLDS, NEXT_BATCH, STATE_TOPIC, Topic, TopicSettings

_FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
set_option = click.option(
    "--set", "texts", multiple=True, metavar="KEY=VALUE", help="A setting of the topic; repeatable."
)


@click.group()
def topic() -> None:
    """List, create, describe, alter, truncate, seal and delete topics; count records."""


@topic.command("list")
@click.option("--all", "internal", is_flag=True, help="Also memq's own topics, such as _memq_audit.")
@broker_options
@json_option
def list_topics(internal: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """List all topics: records, stored bytes, oldest and newest batch, PUTs of the last hour.

    Exits with 1 when the log of a partition does not answer: the counts of its topic leave it out.
    """
    with Admin(brokers_of(config, profile, flags)) as admin:
        topics = admin.topics(internal=internal)
        extents = admin.extents([one for one in topics if one.name != STATE_TOPIC])
    if as_json:
        print_json([_topic_json(one) | _extent_json(extents.get(one.name)) for one in topics])
    else:
        rows = [
            (one.name, len(one.taking), *_extent_cells(extents.get(one.name)), retention_text(one.settings))
            for one in topics
        ]
        print_table(("topic", "partitions", "records", "bytes", "oldest", "newest", "PUTs/h", "retention"), rows)
    return _tell_unknown(extents)


@topic.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=click.IntRange(1, PARTITIONS_MAX),
    help="Write partitions; default: as the namespace sets, else as the broker's setting partitions.",
)
@click.option("--exist-ok", is_flag=True, help="Return an existing topic instead of an error.")
@set_option
@broker_options
@json_option
def create(
    name: str,
    partitions: int | None,
    exist_ok: bool,
    texts: tuple[str, ...],
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Create a topic. `memq topic describe` shows its settings."""
    settings = parse_topic_settings(texts)
    with Admin(brokers_of(config, profile, flags)) as admin:
        made = admin.create_topic(name, partitions=partitions, settings=settings, exist_ok=exist_ok)
    if as_json:
        print_json(_topic_json(made))
    else:
        print_message(f"topic {made.name}: {count_text(len(made.partitions), 'partition')}, id {made.id}")


@topic.command()
@click.argument("name")
@broker_options
@json_option
def describe(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Show a topic's records, bytes and times, its partitions with their owners, and its settings.

    Exits with 1 when the log of a partition does not answer: the counts leave it out.
    """
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.topic(name)
        delayed = admin.delayed(name)
        extents = admin.extents([found.topic]) if name != STATE_TOPIC else {}
    extent = extents.get(name)
    next_ms = min((each.next_ms for each in delayed.values()), default=None)
    waiting = sum(each.records for each in delayed.values())
    if as_json:
        owners = [msgspec.to_builtins(owner) for owner in found.owners]
        held = {"records": waiting, "next_ms": next_ms}
        print_json({**_topic_json(found.topic), **_extent_json(extent), "owners": owners, "delayed": held})
        return _tell_unknown(extents)
    facts = [("topic", found.topic.name), ("id", found.topic.id), ("created", time_text(found.topic.created_ms))]
    if found.topic.sealed_ms:
        ended = "" if found.topic.ended else ", not at its end yet"
        facts.append(("sealed", f"{time_text(found.topic.sealed_ms)}{ended}"))
    if waiting:
        facts.append(("delayed", f"{count_text(waiting, 'record')}, the next is due {time_text(next_ms)}"))
    print_pairs([*facts, *_extent_facts(extent)])
    click.echo()
    heads = ("partition", "slots", "read partition", "owner", "address", "epoch")
    rows = [
        (
            part.partition,
            f"{part.slot_first}-{part.slot_last}" if part.takes_records else None,
            part.read_partition,
            *_owner_cells(found, part.partition),
        )
        for part in found.topic.partitions
    ]
    print_table(heads, rows)
    click.echo()
    values = msgspec.to_builtins(found.topic.settings)
    print_table(("setting", "value"), [(key, setting_text(key, value)) for key, value in values.items()])
    return _tell_unknown(extents)


@topic.command()
@click.argument("name")
@click.argument("first")
@click.argument("last")
@broker_options
@json_option
def count(
    name: str, first: str, last: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Count the records from position FIRST up to position LAST, which is not counted.

    Both are of one partition, written as `memq consume --json` prints them (0:17:3). Copies are counted, too.
    """
    positions = [parse_position(text) for text in (first, last)]
    if positions[0].read_partition != positions[1].read_partition or positions[0].offset > positions[1].offset:
        raise click.UsageError(f"{first} and {last} are not two positions of one partition, the lower one first")
    with Admin(brokers_of(config, profile, flags)) as admin:
        records = admin.count(name, *positions)
    if as_json:
        print_json({"topic": name, "first": first, "last": last, "records": records})
    else:
        click.echo(records)


@topic.command(short_help="Remove the records before a point.")
@click.argument("name")
@click.option(
    "--before", required=True, metavar="POSITION", help="end, @TIME (RFC 3339, epoch ms, -1h), or a position (0:17:3)."
)
@click.option("--dry-run", is_flag=True, help="Show the records that would go; change nothing.")
@yes_option
@broker_options
@json_option
def truncate(
    name: str,
    before: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Remove the records of topic NAME before a point; a single position truncates one partition.

    Whole batches go: the batch of a position stays. The next runs of retention remove them, when they are older than
    the topic's dedup_window_ms. On a terminal it asks first.
    """
    point = parse_reset_target(before, SystemClock().wall_ms())
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.truncate_topic(name, point, dry_run=True)
        records = sum(each.records for each in found)
        if not dry_run:
            if not yes and records:
                confirm(f"remove {count_text(records, 'record')} of topic {name}?")
            found = admin.truncate_topic(name, [each.before for each in found])
    rows = [(each.topic_partition.partition, each.begin, each.before, each.records, each.bytes) for each in found]
    heads = ("partition", "begin", "before", "records", "bytes")
    if as_json:
        print_json([dict(zip(heads, (row[0], *map(str, row[1:3]), *row[3:]), strict=True)) for row in rows])
    else:
        print_table(heads, rows)
        print_message(
            "nothing was changed (--dry-run)"
            if dry_run
            else f"topic {name}: the next runs of retention remove these records"
        )


@topic.command()
@click.argument("name")
@yes_option
@click.option("--timeout", "timeout_s", type=float, default=SEAL_S, show_default=True, help="Seconds to wait.")
@broker_options
@json_option
def seal(
    name: str,
    yes: bool,
    timeout_s: float,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Let topic NAME take no more records; wait until all acked ones are in its logs.

    From then on `memq consume` and other readers end after the last record. On a terminal it asks first.
    """
    if not yes:
        confirm(f"seal topic {name}? Producers get an error from then on")
    with Admin(brokers_of(config, profile, flags)) as admin:
        sealed = admin.seal_topic(name, timeout_s=timeout_s)
    _print_changed(sealed, f"topic {name} is sealed, and has ended", as_json=as_json)


@topic.command()
@click.argument("name")
@broker_options
@json_option
def unseal(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Let the sealed topic NAME take records again."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        unsealed = admin.unseal_topic(name)
    _print_changed(unsealed, f"topic {name} takes records", as_json=as_json)


@topic.command(short_help="Change settings of a topic.")
@click.argument("name")
@set_option
@broker_options
@json_option
def alter(
    name: str, texts: tuple[str, ...], as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Change settings of a topic, as --set retention_ms=7d --set batch_bytes_max=16MiB.

    No option sets the number of partitions. With --set write_partitions_max=N the governor makes up to N of them when
    the traffic needs them.
    """
    settings = parse_topic_settings(texts)
    if not settings:
        raise click.UsageError("nothing to change: give --set KEY=VALUE")
    with Admin(brokers_of(config, profile, flags)) as admin:
        altered = admin.alter_topic(name, settings=settings)
    if as_json:
        print_json(_topic_json(altered))
    else:
        for key in settings:
            holds = HOLDS.get(key, NEXT_BATCH)
            print_message(f"topic {altered.name}: {key} = {setting_text(key, getattr(altered.settings, key))}, {holds}")


@topic.command()
@click.argument("name")
@yes_option
@broker_options
@json_option
def delete(name: str, yes: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Delete a topic and all its records. On a terminal it asks first; elsewhere it needs --yes."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        gone = admin.topic(name).topic  # before the question, which a wrong name is not worth
        if not yes:
            confirm(f"delete topic {name} with all its records?")
        admin.delete_topic(name)
    _print_changed(gone, f"topic {name} is deleted; the sweep deletes its objects", as_json=as_json)


def _print_changed(changed: Topic, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(_topic_json(changed))
    else:
        print_message(text)


def parse_topic_settings(texts: tuple[str, ...]) -> dict[str, int | bool | str]:
    """Return the settings of `KEY=VALUE` texts; sizes as 64MiB, times as 5s.

    The broker checks their bounds.

    Raises: UnknownSettingError with a "did you mean", InvalidSettingError.
    """
    defaults = msgspec.to_builtins(TopicSettings())
    found: dict[str, int | bool | str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise InvalidSettingError(f"--set '{text[:60]}' has no value", hint="write --set KEY=VALUE")
        if key not in defaults:
            raise UnknownSettingError(
                f"unknown topic setting '{key[:60]}'", hint=kafka_hint(key) or did_you_mean(key, defaults)
            )
        is_word = isinstance(defaults[key], str)  # the broker checks the word
        found[key] = value.strip() if is_word else _parse(key, value.strip(), is_flag=isinstance(defaults[key], bool))
    return found


def _parse(key: str, value: str, *, is_flag: bool) -> int | bool:
    parsed: int | bool | None
    if is_flag:
        parsed = _FLAGS.get(value.lower())
    elif re.fullmatch(r"-?[0-9]{1,16}", value):
        parsed = int(value)
    elif "bytes" in key:
        parsed = parse_size(value)
    else:
        parsed = parse_time_ms(value) if key.endswith(("_ms", "_ms_max")) else None
    if parsed is None:
        example = "true" if is_flag else "64MiB" if "bytes" in key else "5s" if "_ms" in key else "a whole number"
        example = f"{example}, or 0 to keep all records" if key.startswith("retention_") else example
        raise InvalidSettingError(f"topic setting {key} = '{value[:60]}' can't be read", hint=f"write it as {example}")
    return parsed


def _topic_json(found: Topic) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(found)
    return shown


def _extent_cells(extent: TopicExtent | None) -> tuple[object, ...]:
    if extent is None:
        return (None,) * 5
    times = (None if each is None else time_text(each)[:19] + "Z" for each in (extent.oldest_ms, extent.newest_ms))
    return (extent.records, size_text(extent.bytes), *times, extent.hour_batches)


def _extent_facts(extent: TopicExtent | None) -> list[tuple[str, object]]:
    if extent is None:
        return []
    return [
        ("records", extent.records),
        ("bytes", f"{size_text(extent.bytes)}, stored"),
        ("oldest", time_text(extent.oldest_ms)),
        ("newest", time_text(extent.newest_ms)),
        ("PUTs/h", extent.hour_batches),
    ]


def _extent_json(extent: TopicExtent | None) -> dict[str, object]:
    if extent is None:
        return {}
    return {
        "records": extent.records,
        "bytes": extent.bytes,
        "oldest_ms": extent.oldest_ms,
        "newest_ms": extent.newest_ms,
        "puts_per_hour": extent.hour_batches,
        "unknown_partitions": [number for number, _ in extent.unknown],
    }


def _tell_unknown(extents: Mapping[str, TopicExtent]) -> int:
    """Print to stderr which partitions the counts leave out; return the exit code, 0 when there are none."""
    unknown = [(name, *each) for name, extent in extents.items() for each in extent.unknown]
    for name, number, error in unknown:
        print_message(f"memq: the counts of topic '{name}' leave out partition {number}: {error}")
    return 1 if unknown else 0


def _owner_cells(found: TopicMetadata, partition: int) -> tuple[object, object, object]:
    for owner in found.owners:
        if owner.partition == partition:
            return owner.broker or None, owner.address or None, owner.epoch
    return None, None, None
