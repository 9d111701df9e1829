"""`memq group`: list, describe, reset and delete consumer groups."""

from __future__ import annotations

import click

from memq.cli.cluster.group_rows import HEADS, group_json, group_rows, tell_unknown
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import confirm, print_json, print_pairs, print_table, talk
from memq.cli.records.start_position import parse_place
from memq.client.admin.admin import Admin
from memq.runtime.clock import SystemClock
from memq.settings import Value


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


@group.command(short_help="Set the position of a group without members.")
@click.argument("name")
@click.argument("topic")
@click.option(
    "--to", required=True, metavar="PLACE", help="beginning, end, @TIME (RFC 3339, epoch ms, -1h), or a position."
)
@click.option("--dry-run", is_flag=True, help="Show the new positions; change nothing.")
@broker_options
@json_option
def reset(
    name: str,
    topic: str,
    to: str,
    dry_run: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Put a group without members to another place in TOPIC; a position moves its partition alone."""
    place = parse_place(to, SystemClock().wall_ms())
    with Admin(brokers_of(config, profile, flags)) as admin:
        resets = admin.reset_group(name, topic, place, dry_run=dry_run)
    rows = [(one.place.topic, one.place.partition, one.before, one.after) for one in resets]
    if as_json:
        names = ("topic", "partition", "before", "after")
        print_json([dict(zip(names, (*row[:2], *map(_text, row[2:])), strict=True)) for row in rows])
    else:
        print_table(("topic", "partition", "before", "after"), rows)
        talk("nothing was changed (--dry-run)" if dry_run else f"group {name} is reset")


@group.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@broker_options
def delete(name: str, yes: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Delete a group without members, with its positions. On a terminal it asks first."""
    if not yes:
        confirm(f"delete group {name} with its positions?")
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.delete_group(name)
    talk(f"group {name} is deleted")


def _text(position: object) -> str | None:
    return None if position is None else str(position)
