"""`memq dlq`: dead letters of groups: list, show, redrive, purge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import click

from memq.cli.options import (
    encryption_of_settings,
    json_option,
    parse_position,
    raw_option,
    setting_options,
    settings_of,
    yes_option,
)
from memq.cli.output import (
    confirm,
    count_text,
    print_done,
    print_json,
    print_message,
    print_pairs,
    print_table,
    time_text,
    write_records,
)
from memq.cli.records.record_text import encode_record
from memq.client.admin import AsyncAdmin
from memq.client.listener.dead_letter_queue import LETTERS_MAX, DeadLetterQueue, Letter, waiting_letters
from memq.errors import InvalidRequestError
from memq.settings import Value

HEADS = ("position", "topic", "origin", "state", "attempts", "at", "key", "cause")
CAUSE_CHARS = 80  # in a table
STRANGERS_SHOWN = 5


_letter_options = setting_options("brokers", "encryption", "subjects", "plain_blocks")


def _open(group: str, config: str | None, profile: str | None, flags: Mapping[str, Value | None]) -> DeadLetterQueue:
    settings = settings_of(config, profile, **flags).client()
    return DeadLetterQueue(settings.brokers, group, encryption=encryption_of_settings(settings))


@click.group()
def dlq() -> None:
    """Dead letters of consumer groups: list, show, redrive and purge them."""


@dlq.command("list")
@click.argument("group", required=False)
@click.option("-c", "--count", type=click.IntRange(min=1), default=LETTERS_MAX, metavar="COUNT", help="At most COUNT.")
@_letter_options
@json_option
def list_letters(
    group: str | None, count: int, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """List the waiting letters of GROUP, oldest first; without GROUP, how many wait in each group."""
    if group is None:
        waiting = asyncio.run(_waiting(settings_of(config, profile, **flags).client().brokers))
        if as_json:
            print_json(waiting)
        else:
            print_table(("group", "waiting letters"), sorted(waiting.items()))
        return
    with _open(group, config, profile, flags) as queue:
        letters = queue.letters(count)
        _tell_strangers(queue)
    if as_json:
        for letter in letters:
            click.echo(_json_line(letter))
        return
    print_table(HEADS, [_row(letter) for letter in letters])


def _tell_strangers(queue: DeadLetterQueue) -> None:
    """Say where records lie that are no letters. Only memq is to write to the topic."""
    if found := queue.strangers:
        more = ", …" if len(found) > STRANGERS_SHOWN else ""
        places = ", ".join(map(str, found[:STRANGERS_SHOWN]))
        print_message(f"memq: {count_text(len(found), 'record')} passed over, since not a dead letter: {places}{more}")


async def _waiting(brokers: str) -> dict[str, int]:
    async with AsyncAdmin(brokers) as admin:
        return await waiting_letters(admin)


def _row(letter: Letter) -> tuple[object, ...]:
    cause = letter.cause if len(letter.cause) <= CAUSE_CHARS else letter.cause[: CAUSE_CHARS - 1] + "…"
    key = None if letter.key is None else letter.key.decode("utf-8", "replace")
    place = (str(letter.position), letter.topic, str(letter.origin))
    return (*place, letter.state, letter.attempts, time_text(letter.dead_ms), key, cause)


@dlq.command()
@click.argument("group")
@click.argument("position")
@click.option("--value", "only_value", is_flag=True, help="Print only the value.")
@_letter_options
@raw_option
@json_option
def show(
    group: str,
    position: str,
    only_value: bool,
    raw: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Show the letter of GROUP at POSITION: its origin, attempts, cause, and the record."""
    if only_value and as_json:
        raise click.UsageError("--value and --json exclude each other")
    at = parse_position(position)
    with _open(group, config, profile, flags) as queue:
        letter = queue.letter(at)
    if only_value:
        if letter.cut:
            raise InvalidRequestError(
                f"the letter at {letter.position} has no value, since it is too large",
                hint=f"memq get {letter.topic} {letter.origin}",
            )
        write_records(letter.value or b"", raw=raw)
    elif as_json:
        click.echo(_json_line(letter))
    else:
        print_pairs(_pairs(letter))


def _pairs(letter: Letter) -> list[tuple[str, object]]:
    headers = [(f"header {name}", _text(value)) for name, value in letter.headers]
    return [
        ("position", letter.position),
        ("topic", letter.topic),
        ("origin", letter.origin),
        ("state", letter.state),
        ("attempts", letter.attempts),
        ("at", time_text(letter.dead_ms)),
        ("cause", letter.cause),
        ("timestamp", time_text(letter.timestamp_ms)),
        ("tag", letter.tag),
        ("key", _text(letter.key)),
        *headers,
        ("value", f"left out, see memq get {letter.topic} {letter.origin}" if letter.cut else _text(letter.value)),
    ]


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "backslashreplace")


def _json_line(letter: Letter) -> str:
    identity: dict[str, object] = {
        "position": str(letter.position),
        "topic": letter.topic,
        "origin": str(letter.origin),
        "state": letter.state,
        "attempts": letter.attempts,
        "dead_ms": letter.dead_ms,
        "cause": letter.cause,
        "cut": letter.cut,
    }
    return encode_record(identity, letter.value, letter.key, letter.headers, letter.timestamp_ms, letter.tag)


@dlq.command(short_help="Send waiting letters back to the group's handlers.")
@click.argument("group")
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="COUNT", help="At most COUNT, the oldest ones.")
@_letter_options
@json_option
def redrive(
    group: str, count: int | None, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """Send the waiting letters of GROUP back to its handlers, each once; their attempts begin at 1 again.

    Other groups see nothing of it. If the command is killed, run it again: letters that were sent and not committed
    are sent twice.
    """
    with _open(group, config, profile, flags) as queue:
        sent = queue.redrive(count)
        _tell_strangers(queue)
    print_done(f"{count_text(sent, 'letter')} sent back", {"group": group, "sent": sent}, as_json=as_json)


@dlq.command(short_help="Drop waiting letters.")
@click.argument("group")
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="COUNT", help="At most COUNT, the oldest ones.")
@yes_option
@_letter_options
@json_option
def purge(
    group: str,
    count: int | None,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Drop the waiting letters of GROUP, oldest first. On a terminal it asks first."""
    if not yes:
        confirm(f"drop {'all' if count is None else count} waiting letters of group {group}?")
    with _open(group, config, profile, flags) as queue:
        purged = queue.purge(count)
    print_done(f"{count_text(purged, 'letter')} dropped", {"group": group, "dropped": purged}, as_json=as_json)
