"""`memq listen`: runs a program for each record of a group."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

import click

from memq.cli.commands import INTERRUPTED
from memq.cli.options import encryption_of_settings, s3_values, setting_options, settings_of
from memq.cli.output import print_message
from memq.cli.records.programs import (
    Programs,
    delays_of,
    handle_until_signal,
    program_environment,
    programs_of,
    seconds_of,
)
from memq.client.listener.answers import Message
from memq.client.listener.core import ListenerStats
from memq.client.listener.listener import AsyncListener
from memq.client.listener.settings import CONCURRENCY_MAX, RETRY_DELAYS_S, WhenFailing
from memq.settings import Value


@click.command()
@click.argument("topic")
@click.argument("command", nargs=-1, required=True)
@setting_options("brokers", "prefetch_bytes_max", "encryption", "subjects", "plain_blocks")
@click.option("-G", "--group", required=True, metavar="GROUP", help="Share the topic with the group's members.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, CONCURRENCY_MAX),
    default=1,
    metavar="N",
    help="Most programs at the same time (default 1).",
)
@click.option("--ordered", is_flag=True, help="One program at a time for each key, in the order of its records.")
@click.option(
    "--when-failing",
    type=click.Choice(["dead-letter", "block", "park"]),
    default="dead-letter",
    help="With --ordered, for a record that fails in all tries: give it up, block its key, or park its key.",
)
@click.option(
    "--delays",
    metavar="TIMES",
    help="Delays before further tries, as 1s,30s,10min; default: 15 delays from 1 s to 2 h. '' makes one try.",
)
@click.option("--timeout", metavar="TIME", help="Kill a program after this time; its record failed.")
@click.option(
    "--drain", default="30s", metavar="TIME", help="How long Ctrl-C waits for running programs (default 30s)."
)
@click.option("--tags", metavar="TAGS", help="Only records with one of these tags: 'A || B'.")
@click.option("--where", metavar="CONDITION", help="Only records with such headers.")
def listen(
    topic: str,
    command: tuple[str, ...],
    group: str,
    concurrency: int,
    ordered: bool,
    when_failing: WhenFailing,
    delays: str | None,
    timeout: str | None,
    drain: str,
    tags: str | None,
    where: str | None,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Run COMMAND for each record of TOPIC: memq listen TOPIC -G GROUP -- COMMAND [ARGUMENT]...

    The program gets the value on stdin, and the other fields as variables RECORD_TOPIC, RECORD_POSITION, RECORD_KEY,
    RECORD_TAG, RECORD_TIMESTAMP_MS, RECORD_ATTEMPT, RECORD_ERROR, RECORD_GROUP and RECORD_HEADER_NAME. Its exit code is
    the answer. 0: done; 75: retry; 65: dead letter; 79: park; any other code, or a signal: failed, so it is retried.
    The last line of its stderr is the reason. Ctrl-C lets running programs finish.
    """
    if when_failing != "dead-letter" and not ordered:
        raise click.UsageError(f"--when-failing {when_failing} needs --ordered")
    programs = programs_of(command, timeout)
    found = settings_of(config, profile, **flags)
    settings = found.client()

    async def run(message: Message) -> object:
        return await programs.run(message.value or b"", record_environment(message, group))

    listener = AsyncListener(
        settings.brokers,
        topic,
        group,
        run,
        concurrency=concurrency,
        ordered=ordered,
        when_failing=when_failing,
        retry_delays_s=RETRY_DELAYS_S if delays is None else delays_of(delays),
        drain_s=seconds_of("--drain", drain),
        tags=tags,
        where=where,
        prefetch_bytes_max=settings.prefetch_bytes_max,
        s3=s3_values(found),
        encryption=encryption_of_settings(settings),
    )
    stopped = asyncio.run(_listen(listener, programs))
    print_message(f"memq: {_summary(listener.stats())}")
    return INTERRUPTED if stopped == signal.SIGINT else 0


async def _listen(listener: AsyncListener, programs: Programs) -> signal.Signals | None:
    async with listener:
        return await handle_until_signal(listener, programs)


def record_environment(message: Message, group: str) -> Mapping[str, str | bytes]:
    """Return the environment of a program: that of this process, and the fields of a message."""
    fields = {
        "TOPIC": message.topic,
        "POSITION": str(message.position),
        "KEY": message.key,
        "TAG": message.tag,
        "TIMESTAMP_MS": str(message.timestamp_ms),
        "ATTEMPT": str(message.attempt),
        "ERROR": message.error,
        "GROUP": group,
    }
    return program_environment("RECORD_", "RECORD_HEADER_", message.headers, fields)


def _summary(stats: ListenerStats) -> str:
    return f"{stats.done:,} done, {stats.retried:,} retried, {stats.dead_letters:,} dead, {stats.parked:,} parked"
