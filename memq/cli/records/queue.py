"""`memq queue`: queues of items: list, describe, enqueue, dequeue, cancel, audit."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from memq.cli.options import broker_options, brokers_of, json_option, raw_option
from memq.cli.output import print_json, print_message, print_pairs, print_table, time_text, write_records
from memq.cli.records.pop import pop
from memq.cli.records.produce import parse_headers
from memq.cli.records.programs import DAY_S, seconds_of
from memq.cli.records.record_text import encode_record
from memq.cli.run import FAILED, OK
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import LEASE_S, PRIORITY
from memq.client.queue.sync_queue import Queue
from memq.errors import NotFoundError
from memq.limits import QUEUE_ATTEMPTS_MAX, QUEUE_DELAY_MS_MAX, QUEUE_ITEMS_PER_REQUEST_MAX, QUEUE_PRIORITY_MAX
from memq.protocol.queue_messages import WireQueue
from memq.queues.decisions import ItemOutcome
from memq.settings import Value
from memq.topic import check_resource_name

HEADS = ("queue", "ready", "leased", "delayed", "dead", "oldest ready")
DELAY_S_MAX = QUEUE_DELAY_MS_MAX / 1_000
BATCH_ITEMS = 500
NOTHING = 3  # exit code: no item is there


@click.group()
def queue() -> None:
    """Queues of items: list, describe and audit them; enqueue, dequeue and cancel items."""


queue.add_command(pop)


@queue.command("list")
@broker_options
@json_option
def list_queues(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List the queues that have items, with the number of items in each state."""
    with Queue(brokers_of(config, profile, flags)) as client:
        found = sorted(client.queues().values(), key=lambda each: each.queue)
    if as_json:
        print_json([_json(each) for each in found])
    else:
        print_table(HEADS, [_row(each) for each in found])


@queue.command()
@click.argument("name", metavar="QUEUE")
@broker_options
@json_option
def describe(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Show how many items of QUEUE are in each state. Exits with 3 if it has none."""
    with Queue(brokers_of(config, profile, flags)) as client:
        found = client.queues().get(name)
    if found is None:
        raise NotFoundError(f"queue '{name}' has no items", hint="a queue exists while it has items: memq queue list")
    if as_json:
        print_json(_json(found))
    else:
        print_pairs(list(zip(HEADS, _row(found), strict=True)))


def _json(found: WireQueue) -> dict[str, object]:
    return {
        "queue": found.queue,
        "ready": found.ready,
        "leased": found.leased,
        "delayed": found.delayed,
        "dead": found.dead,
        "oldest_ms": found.oldest_ms or None,
    }


def _row(found: WireQueue) -> tuple[object, ...]:
    oldest = time_text(found.oldest_ms or None)
    return found.queue, found.ready, found.leased, found.delayed, found.dead, oldest


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.argument("payloads", metavar="[PAYLOAD]...", nargs=-1)
@broker_options
@click.option(
    "--priority",
    type=click.IntRange(0, QUEUE_PRIORITY_MAX),
    default=PRIORITY,
    metavar="N",
    help=f"0 comes first, {QUEUE_PRIORITY_MAX} last (default {PRIORITY}).",
)
@click.option("--deliver-after", metavar="DELAY", help="No worker gets the items before this time is over, as 5m.")
@click.option("--ttl", metavar="TIME", help="Items that no worker has end after this time.")
@click.option("--lease", metavar="TIME", help=f"A worker has an item for this time (default {LEASE_S:g}s).")
@click.option(
    "--attempts",
    type=click.IntRange(0, QUEUE_ATTEMPTS_MAX),
    default=0,
    metavar="N",
    help="An item is dead after N leases (default 0: no limit).",
)
@click.option("--at-most-once", is_flag=True, help="An item comes once, and needs no ack.")
@click.option("-H", "--header", multiple=True, metavar="NAME=VALUE", help="Metadata of each item; repeatable.")
@click.option("--whole", is_flag=True, help="All of stdin is one item.")
@json_option
def enqueue(
    name: str,
    payloads: tuple[str, ...],
    priority: int,
    deliver_after: str | None,
    ttl: str | None,
    lease: str | None,
    attempts: int,
    at_most_once: bool,
    header: tuple[str, ...],
    whole: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Put each PAYLOAD into QUEUE as an item, or each line of stdin; print the ids."""
    if whole and payloads:
        raise click.UsageError("--whole reads stdin, and excludes a PAYLOAD")
    headers = parse_headers(header) or None
    with Queue(brokers_of(config, profile, flags)) as client:
        for some in _batches(_payloads(payloads, whole=whole)):
            ids = client.enqueue_many(
                name,
                some,
                priority=priority,
                deliver_after=0 if deliver_after is None else seconds_of("--deliver-after", deliver_after, DELAY_S_MAX),
                ttl=None if ttl is None else seconds_of("--ttl", ttl, DELAY_S_MAX),
                lease=LEASE_S if lease is None else seconds_of("--lease", lease),
                attempts_max=attempts,
                at_most_once=at_most_once,
                metadata=[headers] * len(some),
            )
            for id_ in ids:
                if as_json:
                    print_json({"id": id_})
                else:
                    click.echo(id_)


def _payloads(given: tuple[str, ...], *, whole: bool) -> Iterator[bytes]:
    if given:
        yield from (each.encode(errors="surrogateescape") for each in given)
        return
    if sys.stdin.isatty():
        print_message("memq: reading items from the terminal; Ctrl-D ends the input")
    if whole:
        yield sys.stdin.buffer.read()
        return
    for line in sys.stdin.buffer:
        yield line.removesuffix(b"\n")


def _batches(payloads: Iterator[bytes]) -> Iterator[list[bytes]]:
    some: list[bytes] = []
    for payload in payloads:
        some.append(payload)
        if len(some) == BATCH_ITEMS:
            yield some
            some = []
    if some:
        yield some


@queue.command()
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@click.option(
    "-c",
    "--count",
    type=click.IntRange(1, QUEUE_ITEMS_PER_REQUEST_MAX),
    default=1,
    metavar="COUNT",
    help="At most COUNT items of each queue (default 1).",
)
@click.option("--wait", default="0s", metavar="TIME", help="Wait up to this time for the first item (default 0s).")
@click.option("--no-ack", is_flag=True, help="Do not end the items: they come again when their leases end.")
@broker_options
@raw_option
@json_option
def dequeue(
    names: tuple[str, ...],
    count: int,
    wait: str,
    no_ack: bool,
    raw: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Lease items of QUEUEs, print their payloads, then ack them. Exits with 3 if no item is ready."""
    each = min(count, QUEUE_ITEMS_PER_REQUEST_MAX // len(set(names)) or 1)
    with Queue(brokers_of(config, profile, flags)) as client:
        items = client.dequeue(dict.fromkeys(names, each), wait=seconds_of("--wait", wait, DAY_S))
        for item in items:
            if as_json:
                click.echo(_item_json(item))
            else:
                write_records(item.payload + b"\n", raw=raw)
        sys.stdout.flush()
        outcomes = [] if no_ack else client.ack_many([item for item in items if item.lease_s])
    lost = [outcome for outcome in outcomes if outcome not in (ItemOutcome.ACKED, ItemOutcome.ALREADY_ACKED)]
    if lost:
        print_message(f"memq: {len(lost)} of {len(items)} items were not acked: {', '.join(sorted(set(lost)))}")
        return 1
    return 0 if items else NOTHING


def _item_json(item: QueueItem) -> str:
    identity: dict[str, object] = {
        "id": item.id,
        "queue": item.queue,
        "attempt": item.attempt,
        "lease_s": item.lease_s,
        "note": item.note.decode("utf-8", "replace"),
    }
    if item.position is not None:
        identity |= {"topic": item.topic, "position": str(item.position)}
    return encode_record(identity, item.payload, item.key, item.metadata, item.timestamp_ms or None, item.tag)


@queue.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@broker_options
@json_option
def cancel(ids: tuple[str, ...], as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """End items that no worker has, also dead ones; print the outcomes. Exits with 1 if one is not ended."""
    with Queue(brokers_of(config, profile, flags)) as client:
        found = dict(zip(ids, client.cancel_many(ids), strict=True))
    if as_json:
        print_json(found)
    else:
        print_table(("id", "outcome"), [(id_, str(outcome)) for id_, outcome in found.items()])
    return 0 if set(found.values()) <= {ItemOutcome.CANCELLED} else 1


@queue.command()
@click.argument("name", metavar="[QUEUE]", default="")
@broker_options
@json_option
def audit(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Check each item of QUEUE, or of all queues, by the logs, snapshots and objects.

    It names items that were acked and came again, that are lost, or whose payload is missing or damaged. It reads the
    store directly. Exits with 0 if the verdict is clean or incomplete, else with 1.
    """
    import asyncio

    from memq.audit.items.auditor import audit_items

    verdict = asyncio.run(
        audit_items(brokers_of(config, profile, flags), check_resource_name(name, "queue") if name else "")
    )
    if as_json:
        print_json(verdict.to_json())
        return OK if verdict.passed else FAILED
    if verdict.findings:
        counts = [(fault.value, verdict.counts[fault]) for fault in verdict.counts]
        print_table(("finding", "items"), counts)
        for each in verdict.findings:
            click.echo(f"{each.fault.value}: {each}")
    click.echo(f"verdict: {verdict}")
    click.echo(f"coverage: {verdict.basis}")
    return OK if verdict.passed else FAILED
