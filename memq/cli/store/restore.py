"""`memq restore` rebuilds the queue from the objects; `memq accept-store` accepts a moved store."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memq.cli.options import json_option, setting_options, settings_of
from memq.cli.output import GrowingCount, ProgressBar, count_text, print_json, print_message, print_table, size_text
from memq.cli.run import OK
from memq.errors import CorruptDataError, InvalidRequestError
from memq.settings import PartSettings, Settings, Value, rules_of
from memq.topic import is_state_topic

if TYPE_CHECKING:
    from memq.broker.restore.restore import Restored


@click.command()
@click.option("--dry-run", is_flag=True, help="List the pointers that would be written; change nothing.")
@setting_options("data", "cluster", *rules_of(PartSettings))
@json_option
def restore(*, dry_run: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Rebuild a lost notification queue: queue.sqlite, or a cluster's topics in Kafka.

    It reads and checks every object, and writes the pointers in the order of their commits; a batch that is stored
    twice gets one pointer. It leaves partitions that the queue has unchanged, and counts them as intact. Groups on
    state logs come back with the positions of the last snapshot. Positions of other groups were in the queue: these
    groups begin at their consumers' `start`. If the queue still has such a position in a lost log, the group begins at
    the beginning. No broker may run.

    If the settings name no store, queue and coordinator, it restores the queue of --data. It moves a damaged
    queue.sqlite away first, and an interrupted run changes nothing. It fills the queue of a cluster in place. Start an
    interrupted run again to continue it.
    """
    settings = settings_of(config, profile, **flags)
    reports = _restore(settings, dry_run=dry_run)
    if as_json:
        print_json([asdict(one) for one in reports])
    else:
        if dry_run:
            print_message("dry run: nothing is changed")
        heads = ("topic", "intact", "objects", "pointers", "records", "bytes", "copies", "damaged blocks")
        print_table(
            heads,
            [
                (
                    one.topic,
                    one.intact,
                    one.objects,
                    one.pointers,
                    one.records,
                    size_text(one.bytes),
                    one.copies,
                    one.damaged_blocks,
                )
                for one in reports
            ],
        )
    for one in reports:
        for group in one.groups:
            if is_state_topic(one.topic):
                print_message(f"group '{group}' has its restored positions, and its members join again")
            else:
                print_message(f"group '{group}' begins at the beginning of topic '{one.topic}', whose log was lost")
    findings = [(key, text) for one in reports for key, text in one.findings]
    for key, text in findings:
        print_message(f"{key}: {text}")
    if findings:
        raise CorruptDataError(f"{count_text(len(findings), 'finding')}", hint="see the messages above")


def _restore(settings: Settings, *, dry_run: bool) -> list[Restored]:
    if any(settings.origins[name] != "default" for name in rules_of(PartSettings)):
        from memq.broker.restore.restore import restore_cluster

        with GrowingCount("restore", "objects") as counted:
            return asyncio.run(
                restore_cluster(settings.broker().cluster, settings.parts(), dry_run=dry_run, moved=counted.move)
            )
    from memq.broker.data_folder import not_a_data_folder
    from memq.broker.restore.restore import restore_folder

    data = Path(str(settings.broker().data))
    if not (data / "topics.sqlite").is_file():
        raise not_a_data_folder(data)
    objects = sum(1 for file in (data / "objects").rglob("*") if file.is_file())
    with ProgressBar("restore", objects) as progress:
        return asyncio.run(restore_folder(data, dry_run=dry_run, moved=progress.move))


@click.command()
@click.option("--dry-run", is_flag=True, help="Compare the marks, and change nothing.")
@setting_options("cluster", *rules_of(PartSettings))
@json_option
def accept_store(
    *, dry_run: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> int:
    """Accept the store of the settings for the cluster: brokers then start only with this store.

    Copy all objects to it first, and stop all brokers before the last copy. An object that a pointer names and the new
    store lacks counts as lost. A complete copy of a bucket contains the mark, and needs no accept-store.
    """
    settings = settings_of(config, profile, **flags)
    missing = [name for name in ("store", "coordinator") if settings.origins[name] == "default"]
    if missing:
        raise InvalidRequestError(f"the settings name no {' and no '.join(missing)}", hint="give --config FILE")
    text = asyncio.run(_accept(settings, dry_run=dry_run))
    if as_json:
        print_json({"store": settings.parts().store, "dry_run": dry_run, "says": text})
    else:
        click.echo(text)
    return OK


async def _accept(settings: Settings, *, dry_run: bool) -> str:
    from memq.broker.assembly import opened_mark
    from memq.runtime.runtime import Runtime

    runtime = Runtime()
    async with opened_mark(settings.parts(), settings.broker(), runtime=runtime) as mark:
        marks = await mark.read() if dry_run else await mark.accept(runtime.random)
    store = f"store '{settings.parts().store}'"
    if not marks.differ:
        return f"{store} is that of the cluster already" if marks.known else f"{store}: the cluster has no mark yet"
    found = f"with the mark {marks.found}" if marks.found else "with a new mark"
    return f"{store} {'would replace' if dry_run else 'replaces'} the one with the mark {marks.known}, {found}"
