"""`memq queue pop`: pop groups, which have the records of a topic as items: begin, list, delete."""

from __future__ import annotations

import click

from memq.cli.options import broker_options, brokers_of, json_option, parse_reset_target, yes_option
from memq.cli.output import confirm, print_done, print_json, print_table
from memq.cli.records.programs import seconds_of
from memq.client.admin import Admin
from memq.client.queue.pop_admin import POP_LEASE_S, PopGroupDescription
from memq.client.queue.sync_queue import Queue
from memq.limits import QUEUE_ATTEMPTS_MAX
from memq.runtime.clock import SystemClock
from memq.settings import Value

HEADS = ("queue", "lease", "attempts", "items", "lag records", "positions")


@click.group()
def pop() -> None:
    """Pop groups: lease the records of a topic one by one, as items of the queue TOPIC@GROUP."""


@pop.command()
@click.argument("topic")
@click.argument("group")
@click.option(
    "--start",
    default="beginning",
    metavar="POSITION",
    help="Of a new group: beginning, end, or @TIME (RFC 3339, epoch ms, -1h). Default: beginning.",
)
@click.option("--lease", metavar="TIME", help=f"A worker has a record for this time (default {POP_LEASE_S:g}s).")
@click.option(
    "--attempts",
    type=click.IntRange(0, QUEUE_ATTEMPTS_MAX),
    default=0,
    metavar="N",
    help="A record is dead after N leases (default 0: no limit).",
)
@broker_options
@json_option
def begin(
    topic: str,
    group: str,
    start: str,
    lease: str | None,
    attempts: int,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Begin a pop group of TOPIC, if it does not exist; print the name of its queue."""
    point = parse_reset_target(start, SystemClock().wall_ms())
    lease_s = POP_LEASE_S if lease is None else seconds_of("--lease", lease)
    with Queue(brokers_of(config, profile, flags)) as client:
        queue = client.begin_pop(topic, group, start=point, lease=lease_s, attempts_max=attempts)
    if as_json:
        print_json({"queue": queue})
    else:
        click.echo(queue)


@pop.command("list")
@broker_options
@json_option
def list_groups(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """List the pop groups with their items and their lag. Exits with 1 if a lag is unknown."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.pop_groups()
    if as_json:
        print_json([_json(each) for each in found])
    else:
        print_table(HEADS, [_row(each) for each in found])
    return 1 if any(each.records is None for each in found) else 0


@pop.command()
@click.argument("queue", metavar="TOPIC@GROUP")
@yes_option
@broker_options
@json_option
def delete(
    queue: str, yes: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Delete a pop group with its positions and items; the records stay. On a terminal it asks first."""
    if not yes:
        confirm(f"delete pop group {queue} with its positions, and forget which records are acked?")
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.delete_pop(queue)
    print_done(f"pop group {queue} is deleted", {"queue": queue}, as_json=as_json)


def _positions(found: PopGroupDescription) -> list[str]:
    return [str(each.position) for each in found.partitions]


def _json(found: PopGroupDescription) -> dict[str, object]:
    return {
        "queue": found.queue,
        "lease_s": found.lease_s,
        "attempts_max": found.attempts_max,
        "items": found.items,
        "lag_records": found.records,
        "positions": _positions(found),
    }


def _row(found: PopGroupDescription) -> tuple[object, ...]:
    records = "unknown" if found.records is None else found.records
    return found.queue, f"{found.lease_s:g} s", found.attempts_max, found.items, records, " ".join(_positions(found))
