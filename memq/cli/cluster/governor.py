"""`memq governor`: what the governor would change now, without changing it."""

from __future__ import annotations

import click
import msgspec

from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_table, talk
from memq.client.admin.admin import Admin
from memq.settings import Value


@click.group()
def governor() -> None:
    """Show the plan of the governor."""


@governor.command()
@broker_options
@json_option
def plan(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Show the moves that the governor would make now, with their reasons. Changes nothing.

    The governor acts by itself. It can't do a move that is listed here for longer than a few seconds.
    """
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.plan()
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [(each.topic, each.partition, each.before or "-", each.after or "-", each.reason) for each in found.changes]
    if rows:
        print_table(("topic", "partition", "from", "to", "because"), rows)
    else:
        talk("the governor plans no moves")
    for note in found.notes:
        talk(note)
