"""`memq restore`: makes the queue of a data folder anew from its objects."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import click

from memq.cli.options import json_option, setting_options, settings_of
from memq.cli.output import Progress, count_text, print_json, print_table, size_text, talk
from memq.errors import CorruptDataError, InvalidRequestError
from memq.settings import Value


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be named, and change nothing.")
@setting_options("data")
@json_option
def restore(*, dry_run: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Make the notification queue of a data folder anew, when queue.sqlite is gone or beyond repair.

    Every object is read and checked, and gets its pointer in the order in which it was committed; what lies there
    twice is named once. Groups' positions were in the queue: they begin as their consumers' `start` says. No broker may
    run on the folder; a damaged queue.sqlite is moved away first. An interrupted run changes nothing.
    """
    from memq.broker.restore_folder import restore_folder

    data = Path(str(settings_of(config, profile, **flags).broker().data))
    if not (data / "topics.sqlite").is_file():
        raise InvalidRequestError(f"'{data}' is no data folder of memq dev", hint="name one with --data")
    objects = sum(1 for file in (data / "objects").rglob("*") if file.is_file())
    with Progress("restore", objects) as progress:
        told = asyncio.run(restore_folder(data, dry_run=dry_run, moved=progress.move))
    if as_json:
        print_json([asdict(one) for one in told])
    else:
        if dry_run:
            talk("dry run: nothing is changed")
        heads = ("topic", "objects", "pointers", "records", "bytes", "copies", "damaged blocks")
        print_table(
            heads,
            [
                (
                    one.topic,
                    one.objects,
                    one.pointers,
                    one.records,
                    size_text(one.bytes),
                    one.copies,
                    one.damaged_blocks,
                )
                for one in told
            ],
        )
    findings = [(key, text) for one in told for key, text in one.findings]
    for key, text in findings:
        talk(f"{key}: {text}")
    if findings:
        raise CorruptDataError(
            f"{count_text(len(findings), 'object')} damaged or misplaced", hint="see what is said above"
        )
