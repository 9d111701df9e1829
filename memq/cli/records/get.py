"""`memq get`: prints one record, by its position."""

from __future__ import annotations

import click

from memq.cli.options import (
    encryption_of_settings,
    json_option,
    parse_position,
    raw_option,
    s3_values,
    setting_options,
    settings_of,
)
from memq.cli.output import write_records
from memq.cli.records.consume import line_of_record
from memq.client.consumer.consumer import read_record
from memq.errors import NotFoundError, PositionExpiredError
from memq.settings import Value


@click.command()
@click.argument("topic")
@click.argument("position")
@setting_options("brokers", "encryption", "subjects", "plain_blocks")
@click.option("-f", "--format", "form", metavar="FORMAT", help=r"Format of the record, such as '%t %p %k %s\n'.")
@raw_option
@json_option
def get(
    topic: str,
    position: str,
    form: str | None,
    raw: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Print the record of TOPIC at POSITION, as an ack or `memq consume --json` names it (0:17:3).

    The output is the value and a line end; with -f or --json also other fields. Only the block of the record is
    fetched. The exit code is 3 if no record is there, if it was removed, or if it is a copy of another one.
    """
    if as_json and form is not None:
        raise click.UsageError("--json and -f exclude each other")
    show = line_of_record(form, as_json=as_json)
    at = parse_position(position)
    found = settings_of(config, profile, **flags)
    try:
        client = found.client()
        keys = encryption_of_settings(client)
        record = read_record(client.brokers, topic, at, s3=s3_values(found), encryption=keys)
    except PositionExpiredError as error:
        raise NotFoundError(str(error), hint="retention or memq topic truncate has removed it") from error
    write_records(show(record, topic), raw=raw)
