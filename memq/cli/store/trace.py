"""`memq trace`: shows the path of one record: block, object, pointers, times, groups."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import click

from memq.audit.checks.checker import Checker
from memq.audit.minutes import MINUTE_MS
from memq.audit.opened_topic import OpenedTopic, opened_topic
from memq.audit.trace import NO_BLOCK, Sighting, TraceTarget, sightings, unread_sighting
from memq.cli.options import broker_options, brokers_of, json_option, parse_position
from memq.cli.output import print_json, print_message, time_text
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import cut_error
from memq.errors import InvalidSettingError, MemqError, NotFoundError
from memq.format.batch import cut_batch, is_whole
from memq.format.blocks.header import Buffer
from memq.format.held_sequences import due_time_of, held_minute, is_held, is_transactional
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import Entry
from memq.notification.log_reader import entries_between
from memq.settings import Value
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import Position, ReadPartition, read_partitions

FOUND_MAX = 100
# How a held record is described that is not in the log; "": no service partition knows it.
_STATES = {
    "held": "a service partition holds it until then",
    "released": "it was due: it is on its way to the log, or retention has taken it",
    "dropped": "it was cancelled",
    "": "the log does not have it before that, and never after a cancel or a roll-back",
}
Groups = dict[int, dict[str, Position]]  # by read partition


@click.command()
@click.argument("topic")
@click.argument("position", required=False, metavar="[POSITION]")
@click.option("--key", "-k", metavar="KEY", help="All records of a key, UTF-8.")
@click.option("--producer", metavar="HEX", help="The producer id, as findings name it; with --seq.")
@click.option(
    "--seq", "sequence", type=click.IntRange(0), metavar="N", help="The record's number among those of its producer."
)
@broker_options
@json_option
def trace(
    topic: str,
    position: str | None,
    key: str | None,
    producer: str | None,
    sequence: int | None,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Show the location of a record of TOPIC, its times, and the groups that have committed beyond it.

    Name a record by its position, as `memq consume` prints it (0:17:3), by producer and sequence, as findings do, or by
    its key. A position with a mark is refused if the log was cut before it. For a key, the first hundred records are
    shown. A copy that readers skip is marked as a copy. The line `held` says until when a record was delayed, or when
    its transaction began.

    The queue time is the time of the owner's last proof that it owns the partition. The pointer was queued at this time
    or later; the line `queued` has the bound. So it may be earlier than `sealed`.
    """
    wanted = _wanted(position, key, producer, sequence)
    found, groups, queue_late_ms, state = asyncio.run(_find(brokers_of(config, profile, flags), topic, wanted))
    if not found:
        hint = "memq consume --json shows positions; memq audit names records that are removed or unreadable"
        if sequence is not None and is_held(sequence):
            hint = f"it is {_held_text(sequence)}, and {_STATES.get(state, _STATES[''])}"
        raise NotFoundError(f"topic '{topic}' has no such record", hint=hint)
    if as_json:
        more = {"queue_late_ms": queue_late_ms}
        print_json([sighting.to_json() | more | {"groups": _passed(sighting, groups)} for sighting in found])
    else:
        for sighting in found:
            _print(sighting, groups, queue_late_ms)
    if len(found) == FOUND_MAX:
        print_message(f"only the first {FOUND_MAX} are shown")


def _wanted(position: str | None, key: str | None, producer: str | None, sequence: int | None) -> TraceTarget:
    given = [position is not None, key is not None, producer is not None or sequence is not None]
    if sum(given) != 1 or (producer is None) != (sequence is None):
        what = "no record is named" if not any(given) else "the record is named twice"
        what = "--producer and --seq name a record together" if sum(given) == 1 else what
        raise InvalidSettingError(what, hint="give its position, --key, or --producer and --seq")
    if producer is not None and not re.fullmatch("(0x)?[0-9a-fA-F]{1,16}", producer):
        raise InvalidSettingError(
            f"producer '{producer[:40]}' is no id",
            hint="give 16 hex digits, as findings and the text of an Ack do; in Python: f'{ack.producer_id:016x}'",
        )
    number = int(producer, 16) if producer is not None else None
    at = parse_position(position) if position is not None else None
    return TraceTarget(number, sequence, key.encode() if key is not None else None, at)


async def _find(brokers: str, topic: str, wanted: TraceTarget) -> tuple[list[Sighting], Groups, int, str]:
    """Return sightings, positions of groups in their partitions, and how late queue times may be (ms).

    The last result is the state of a delayed record that is not in the log.
    """
    async with opened_topic(brokers, topic) as opened:
        known = len(read_partitions(opened.topic))
        if wanted.position is not None and wanted.position.read_partition >= known:
            raise NotFoundError(
                f"topic '{topic}' has no partition {wanted.position.read_partition}", hint=f"it has {known}, from 0 on"
            )
        found: list[Sighting] = []
        seen: dict[tuple[int, int], None] = {}
        async for sighting in _sightings(opened, wanted):
            record = (sighting.producer, sighting.sequence)
            found.append(replace(sighting, copy=sighting.copy or record in seen))
            seen[record] = None
            if len(found) == FOUND_MAX:
                break
        groups: Groups = {}
        numbers = {sighting.position.read_partition: None for sighting in found}
        partitions = [each for each in read_partitions(opened.topic) if each.partition in numbers]
        for group in await opened.groups.groups():
            for partition, committed in (await opened.groups.committed(group, partitions)).items():
                groups.setdefault(partition.partition, {})[group] = committed.position
        state, producer, sequence = "", wanted.producer, wanted.sequence
        if not found and producer is not None and sequence is not None and due_time_of(sequence):
            state = await opened.state_of(opened.topic, producer, sequence)
        return found, groups, opened.topic.settings.late_ms, state


async def _sightings(opened: OpenedTopic, wanted: TraceTarget) -> AsyncIterator[Sighting]:
    """Read all pointers, and the batches that may have the record."""
    checker = Checker(opened.queue, opened.read)
    for partition in read_partitions(opened.topic):
        if wanted.position is not None and wanted.position.read_partition != partition.partition:
            continue
        span = await checker.span(partition)
        if wanted.position is not None and wanted.position.mark:
            await _check_mark(opened, partition, wanted.position, span.end)
        at = max(span.begin, wanted.position.pointer_offset) if wanted.position is not None else span.begin
        async for entries in entries_between(opened.queue, partition, at, span.end):
            for entry in entries:
                async for sighting in _in_batch(opened, wanted, partition.partition, entry):
                    yield sighting
            if wanted.position is not None:
                break


async def _check_mark(opened: OpenedTopic, partition: ReadPartition, position: Position, end: int) -> None:
    """Check that the log still has the pointer that was read before a position. Raises: PositionLostError."""
    if position.pointer_offset + (position.record_index > 0) > end:
        raise cut_error(partition, position, end)
    await OffsetResolver(opened.queue).checked_mark(partition, position)


async def _in_batch(opened: OpenedTopic, wanted: TraceTarget, partition: int, entry: Entry) -> AsyncIterator[Sighting]:
    """Follow one pointer, if its batch may have the record.

    An unreadable block is shown with the facts from its pointer.
    """
    pointer: Pointer | None = None
    batch: Buffer = b""
    cause = "no block of the batch that can be read has it"
    try:
        pointer = decode_pointer(entry.body)
        if not wanted.may_be_in(entry.offset, pointer):
            return
        batch = await _batch_of(opened, pointer)
    except MemqError as error:
        print_message(f"pointer {entry.offset} of partition {partition} can't be followed: {error}")
        cause = str(error)
    if pointer is None:
        return
    found = False
    for sighting in sightings(wanted, partition, entry, pointer, batch):
        found = True
        yield sighting
    unread = None if found else unread_sighting(wanted, partition, entry, pointer, cause)
    if unread is not None:
        yield unread


async def _batch_of(opened: OpenedTopic, pointer: Pointer) -> Buffer:
    """Return the bytes of a batch; two fetches agree on damage. Raises: as `ReadObject`."""
    location = pointer.locations[0]
    way = Way(f"object '{location.key}'", partial(opened.read, location, whole=False))
    return await ConfirmedReads().read([way], lambda data: is_whole(cut_batch(pointer, data)))


def _passed(sighting: Sighting, groups: Groups) -> dict[str, bool]:
    return sighting.passed_by(groups.get(sighting.position.read_partition, {}))


def _print(sighting: Sighting, groups: Groups, queue_late_ms: int) -> None:
    """Print the path of one block, a line for each step."""
    passed, late = _passed(sighting, groups), f"{queue_late_ms / 1000:g} s later"
    lines = {
        "record": f"producer {sighting.producer:016x} sequence {sighting.sequence}"
        + (" (a copy, which readers pass over)" if sighting.copy else ""),
        **({"held": _held_text(sighting.sequence)} if is_held(sighting.sequence) else {}),
        "time": time_text(sighting.time_ms) if sighting.time_ms else f"not known: {sighting.damage}",
        "object": f"{sighting.object} {_block_text(sighting)} at {sighting.offset}+{sighting.length}",
        "sealed": f"{time_text(sighting.sealed_ms)} by broker '{sighting.broker}'",
        "queued": f"{time_text(sighting.queue_ms)} or up to {late}, in epoch {sighting.epoch}",
        "position": str(sighting.position),
        "groups": ", ".join(f"{name}: {'past it' if done else 'before it'}" for name, done in passed.items()) or "none",
    }
    if sighting.damage and sighting.time_ms:
        lines["damage"] = sighting.damage
    for name, text in lines.items():
        click.echo(f"{name + ':':<10}{text}")
    click.echo()


def _held_text(sequence: int) -> str:
    """Return what the sequence of a held record says."""
    if is_transactional(sequence):
        return (
            f"of a transaction that began at {time_text(held_minute(sequence) * MINUTE_MS)} or less than a minute later"
        )
    return f"delayed until {time_text(due_time_of(sequence))}"


def _block_text(sighting: Sighting) -> str:
    return "batch" if sighting.block == NO_BLOCK else f"block {sighting.block}"
