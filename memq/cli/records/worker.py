"""`memq worker`: runs a program for each item of queues."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

import click

from memq.cli.commands import INTERRUPTED
from memq.cli.options import broker_options, brokers_of
from memq.cli.output import print_message
from memq.cli.records.programs import (
    Programs,
    delays_of,
    handle_until_signal,
    program_environment,
    programs_of,
    seconds_of,
)
from memq.client.listener.settings import CONCURRENCY_MAX, RETRY_DELAYS_S
from memq.client.queue.items import QueueItem
from memq.client.queue.worker import AsyncWorker
from memq.client.queue.worker_settings import WorkerStats
from memq.settings import Value

PROGRAM = "memq.program"  # in the context: the arguments after `--`


class _QueuesAndCommand(click.Command):
    """A command with queues before the first `--`, and a program with its own options after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PROGRAM] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@click.command(cls=_QueuesAndCommand, options_metavar="[OPTIONS]")
@click.argument("queues", metavar="QUEUE... -- COMMAND...", nargs=-1, required=True)
@broker_options
@click.option(
    "--concurrency",
    type=click.IntRange(1, CONCURRENCY_MAX),
    default=1,
    metavar="N",
    help="Most programs at the same time (default 1).",
)
@click.option(
    "--prefetch",
    type=click.IntRange(0, CONCURRENCY_MAX),
    metavar="N",
    help="Items that are leased before a program is free; default: as many as programs, while they take less than 1 s.",
)
@click.option("--delays", metavar="TIMES", help="Delays after failures, as 1s,30s,10min; default: 15, from 1 s to 2 h.")
@click.option("--timeout", metavar="TIME", help="Kill a program after this time; its item failed.")
@click.option(
    "--drain", default="30s", metavar="TIME", help="How long Ctrl-C waits for running programs (default 30s)."
)
@click.pass_context
def worker(
    context: click.Context,
    /,
    queues: tuple[str, ...],
    concurrency: int,
    prefetch: int | None,
    delays: str | None,
    timeout: str | None,
    drain: str,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Run COMMAND for each item of QUEUEs: memq worker QUEUE... -- COMMAND [ARGUMENT]...

    The program gets the payload on stdin, and the other fields as variables ITEM_ID, ITEM_QUEUE, ITEM_ATTEMPT,
    ITEM_NOTE and ITEM_METADATA_NAME. Its exit code is the answer. 0: acked; 75: again; 65 or 79: dead; any other code,
    or a signal: failed, so it comes again. The last line of its stderr is the note. The lease is extended while it
    runs. Ctrl-C and SIGTERM let running programs finish, and give back what has not begun.
    """
    command = context.meta[PROGRAM]
    if not command:
        raise click.UsageError("Missing argument 'COMMAND': write it after '--'")
    programs = programs_of(command, timeout)

    async def run(item: QueueItem) -> object:
        return await programs.run(item.payload, item_environment(item))

    made = AsyncWorker(
        run,
        queues,
        brokers=brokers_of(config, profile, flags),
        concurrency=concurrency,
        prefetch=prefetch,
        retry_delays_s=RETRY_DELAYS_S if delays is None else delays_of(delays),
        drain_s=seconds_of("--drain", drain),
    )
    stopped = asyncio.run(_work(made, programs))
    print_message(f"memq: {_summary(made.stats())}")
    return INTERRUPTED if stopped == signal.SIGINT else 0


async def _work(made: AsyncWorker, programs: Programs) -> signal.Signals | None:
    async with made:
        return await handle_until_signal(made, programs)


def item_environment(item: QueueItem) -> Mapping[str, str | bytes]:
    """Return the environment of a program: that of this process, and the fields of an item."""
    fields: dict[str, str | bytes | None] = {
        "ID": item.id,
        "QUEUE": item.queue,
        "ATTEMPT": str(item.attempt),
        "NOTE": item.note,
    }
    if item.position is not None:
        fields |= {"TOPIC": item.topic, "POSITION": str(item.position), "KEY": item.key, "TAG": item.tag}
    return program_environment("ITEM_", "ITEM_METADATA_", item.metadata, fields)


def _summary(stats: WorkerStats) -> str:
    counts = f"{stats.done:,} done, {stats.retried:,} retried, {stats.dead:,} dead"
    return f"{counts}, {stats.lost:,} lost, {stats.returned:,} returned"
