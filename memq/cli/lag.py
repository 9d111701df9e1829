"""`memq lag`: how far groups are behind."""

from __future__ import annotations

import click

from memq.cli.group_rows import HEADS, group_json, group_rows
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_table
from memq.client.admin import Admin
from memq.settings import Value


@click.command()
@click.argument("groups", metavar="[GROUP]...", nargs=-1)
@broker_options
@json_option
def lag(groups: tuple[str, ...], as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Show the lag of groups, of all without a name: records and stored bytes before dedup, seconds of the oldest."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = [admin.group(name) for name in groups or admin.groups()]
    if as_json:
        print_json([group_json(one) for one in found])
    else:
        print_table(HEADS, [row for one in found for row in group_rows(one)])
