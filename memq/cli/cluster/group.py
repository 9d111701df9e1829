"""`memq group` and `memq lag`: consumer groups, their positions and their lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress

import click

from memq.cli.options import broker_options, brokers_of, json_option, listen_address, parse_reset_target, yes_option
from memq.cli.output import (
    confirm,
    log_to_stderr,
    print_json,
    print_message,
    print_pairs,
    print_ready,
    print_table,
)
from memq.client.admin import Admin, AsyncAdmin
from memq.client.group_admin import GroupDescription, Shift
from memq.client.group_migration import GroupMigration, migrate_groups
from memq.client.listener.retry_topics import delete_retry_topics
from memq.errors import AlreadyExistsError, InvalidNameError, NotFoundError
from memq.runtime.clock import SystemClock
from memq.settings import Value

LAG_PORT = 9878
HEADS = ("group", "topic", "partition", "position", "member", "lag records", "lag bytes", "lag seconds")


@click.group()
def group() -> None:
    """List, describe, reset and delete consumer groups."""


@group.command("list")
@click.option("--all", "internal", is_flag=True, help="Also memq's own groups, such as those of auditors.")
@broker_options
@json_option
def list_groups(internal: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List all groups."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        names = admin.groups(internal=internal)
    if as_json:
        print_json(names)
    else:
        print_table(("group",), [(name,) for name in names])


@group.command()
@click.argument("name")
@broker_options
@json_option
def describe(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Show a group's members, positions and lag; exits with 1 when the lag of a partition is unknown."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.group(name)
    if as_json:
        print_json(group_json(found))
        return tell_unknown([found])
    members = ", ".join(found.members) or "none"
    print_pairs((("group", found.group), ("generation", found.generation), ("members", members)))
    click.echo()
    print_table(HEADS, group_rows(found))
    return tell_unknown([found])


@group.command(short_help="Set the positions of a group.")
@click.argument("name")
@click.argument("topic")
@click.option("--to", metavar="POSITION", help="beginning, end, @TIME (RFC 3339, epoch ms, -1h), or a position.")
@click.option("--to-earliest", is_flag=True, help="The first record: --to beginning.")
@click.option("--to-latest", is_flag=True, help="After the last record: --to end.")
@click.option("--to-datetime", metavar="TIME", help="The first record of a time, as YYYY-MM-DDTHH:MM:SSZ.")
@click.option("--shift", type=int, metavar="±N", help="N records after each position of the group; -N before it.")
@click.option("--force", is_flag=True, help="Also while the group has members: they read on at the new positions.")
@click.option("--dry-run", is_flag=True, help="Show the new positions; change nothing.")
@broker_options
@json_option
def reset(
    name: str,
    topic: str,
    to: str | None,
    to_earliest: bool,
    to_latest: bool,
    to_datetime: str | None,
    shift: int | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Set the positions of a group without members in TOPIC; a single position moves one partition.

    With --force the members leave the group first. They lose their partitions, join again, and read from the new
    positions. Copies count in --shift.
    """
    at = None if to_datetime is None else f"@{to_datetime.removeprefix('@')}"
    given = [each for each in (to, to_earliest and "beginning", to_latest and "end", at) if each]
    if len(given) + (shift is not None) != 1:
        raise click.UsageError("give one of --to, --to-earliest, --to-latest, --to-datetime and --shift")
    target = Shift(shift) if shift is not None else parse_reset_target(given[0], SystemClock().wall_ms())
    with Admin(brokers_of(config, profile, flags)) as admin:
        resets = admin.reset_group(name, topic, target, dry_run=dry_run, force=force)
    rows = [(one.topic_partition.topic, one.topic_partition.partition, one.before, one.after) for one in resets]
    if as_json:
        names = ("topic", "partition", "before", "after")
        print_json([dict(zip(names, (*row[:2], *map(_text, row[2:])), strict=True)) for row in rows])
    else:
        print_table(("topic", "partition", "before", "after"), rows)
        print_message("nothing was changed (--dry-run)" if dry_run else f"group {name} is reset")


@group.command()
@click.argument("name")
@click.option("--with-topics", is_flag=True, help="Also its retry topic and its dead-letter topic, with all records.")
@yes_option
@broker_options
@json_option
def delete(
    name: str,
    with_topics: bool,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Delete a group without members, with its positions. On a terminal it asks first.

    The topics that listeners have made for it, NAME.retry and NAME.dead-letters, stay without --with-topics.
    """
    if not yes:
        more = ", its retries and its dead letters" if with_topics else ""
        confirm(f"delete group {name} with its positions{more}?")
    there, topics, stay = asyncio.run(_delete(brokers_of(config, profile, flags), name, with_topics=with_topics))
    if as_json:
        print_json({"group": name, "deleted_topics": topics, "kept_topics": stay})
        return
    if there:
        print_message(f"group {name} is deleted")
    for topic in topics:
        print_message(f"topic {topic} is deleted")
    if stay:
        print_message(f"topics of the group stay: {', '.join(stay)} (memq group delete {name} --with-topics)")


async def _delete(brokers: str, name: str, *, with_topics: bool) -> tuple[bool, list[str], list[str]]:
    """Delete the group; return whether it existed, the deleted topics of its own, and those that stay."""
    async with AsyncAdmin(brokers) as admin:
        own = await _own_topics(admin, name, refuse=with_topics)
        there = True
        try:
            await admin.delete_group(name)
        except NotFoundError:
            if not (with_topics and own):  # a call that was interrupted has deleted the group
                raise
            there = False
        return (there, await delete_retry_topics(admin, name), []) if with_topics else (there, [], own)


async def _own_topics(admin: AsyncAdmin, name: str, *, refuse: bool) -> list[str]:
    """Return the topics that listeners have made for a group. Raises: AlreadyExistsError with `refuse`."""
    try:
        return await delete_retry_topics(admin, name, dry_run=True)
    except InvalidNameError:  # too long for such topics, or a group of memq's own
        return []
    except AlreadyExistsError:
        if refuse:
            raise
        return []


@group.command(short_help="Move groups of an earlier release from the queue to state logs.")
@click.option("--dry-run", is_flag=True, help="Show the groups; change nothing.")
@broker_options
@json_option
def migrate(dry_run: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Move the groups that an earlier release kept in the queue to state logs, with their positions.

    All brokers must run the new release, and the consumers of the groups must be stopped. An interrupted command can be
    repeated. Exits with 1 if a group was not moved.
    """
    return asyncio.run(_migrate(brokers_of(config, profile, flags), dry_run=dry_run, as_json=as_json))


async def _migrate(brokers: str, *, dry_run: bool, as_json: bool) -> int:
    found = [one async for one in migrate_groups(brokers, dry_run=dry_run)]
    if as_json:
        print_json([_migration_json(one, dry_run=dry_run) for one in found])
    else:
        rows = [(one.group, one.positions, len(one.members), _state(one, dry_run=dry_run)) for one in found]
        print_table(("group", "positions", "members", "state"), rows)
        if dry_run:
            print_message("nothing was changed (--dry-run)")
    refused = [one for one in found if one.error is not None]
    for one in refused:
        assert one.error is not None
        click.echo(f"memq: {one.error} ({one.error.hint})", err=True)
    return 1 if refused else 0


def _state(one: GroupMigration, *, dry_run: bool) -> str:
    if one.error is not None:
        return "refused"
    if dry_run:
        return "has members" if one.members else "would be moved"
    return "moved"


def _migration_json(one: GroupMigration, *, dry_run: bool) -> dict[str, object]:
    return {
        "group": one.group,
        "positions": one.positions,
        "members": list(one.members),
        "moved": one.error is None and not dry_run,
        **({"error": str(one.error), "hint": one.error.hint} if one.error is not None else {}),
    }


def _text(position: object) -> str | None:
    return None if position is None else str(position)


@click.command()
@click.argument("groups", metavar="[GROUP]...", nargs=-1)
@broker_options
@json_option
@click.option(
    "--serve",
    metavar="HOST:PORT",
    help="Serve the lag as metrics for Prometheus, until a signal; port 0 takes any free port.",
)
def lag(
    groups: tuple[str, ...],
    as_json: bool,
    serve: str | None,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Show the lag of one or all groups: records and stored bytes before dedup, age of the oldest.

    Exits with 1 when the log of a partition does not answer: its lag is unknown, that of all others exact.
    """
    if serve is not None:
        return _serve(brokers_of(config, profile, flags), groups, serve)
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = [admin.group(name) for name in groups] if groups else list(_all_groups(admin))
    if as_json:
        print_json([group_json(one) for one in found])
    else:
        print_table(HEADS, [row for one in found for row in group_rows(one)])
    return tell_unknown(found)


def _all_groups(admin: Admin) -> Iterator[GroupDescription]:
    """Yield all groups, without those that are deleted meanwhile."""
    for name in admin.groups():
        with suppress(NotFoundError):
            yield admin.group(name)


def _serve(brokers: str, groups: tuple[str, ...], listen: str) -> int:
    """Serve the lag until a signal; print `memq ready: HOST:PORT` on stdout after the first round."""
    from memq.cli.exporter import export_lag

    log_to_stderr("info", "text")
    return asyncio.run(export_lag(brokers, groups, listen_address(listen, LAG_PORT), print_ready))


def group_rows(found: GroupDescription) -> list[tuple[object, ...]]:
    """Return a row for each partition, under `HEADS`."""
    return [
        (
            *(found.group, one.topic_partition.topic, one.topic_partition.partition, one.position, one.member or None),
            *(("unknown",) * 3 if one.error else (one.lag.records, one.lag.bytes, round(one.lag.seconds))),
        )
        for one in found.partitions
    ]


def tell_unknown(groups: Iterable[GroupDescription]) -> int:
    """Print to stderr why the lag of partitions is unknown; return the exit code, 0 when all are known."""
    unknown = [(found.group, one) for found in groups for one in found.partitions if one.error]
    for group, one in unknown:
        partition = f"partition {one.topic_partition.partition} of topic '{one.topic_partition.topic}'"
        click.echo(f"memq: lag of group '{group}' in {partition} is unknown: {one.error}", err=True)
    return 1 if unknown else 0


def group_json(found: GroupDescription) -> dict[str, object]:
    """Return a group as JSON; times in seconds. An unknown lag is null, with the error."""
    return {
        "group": found.group,
        "generation": found.generation,
        "members": list(found.members),
        "partitions": [
            {
                "topic": one.topic_partition.topic,
                "partition": one.topic_partition.partition,
                "position": None if one.position is None else str(one.position),
                "member": one.member or None,
                "lag_records": None if one.error else one.lag.records,
                "lag_bytes": None if one.error else one.lag.bytes,
                "lag_seconds": None if one.error else round(one.lag.seconds, 3),
                **({"error": str(one.error)} if one.error else {}),
            }
            for one in found.partitions
        ],
    }
