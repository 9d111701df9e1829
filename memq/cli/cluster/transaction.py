"""`memq transaction`: the undecided transactions, and their end by an operator."""

from __future__ import annotations

import click

from memq.cli.options import broker_options, brokers_of, json_option, yes_option
from memq.cli.output import confirm, print_done, print_json, print_table
from memq.client.admin import Admin
from memq.settings import Value

HEADS = ("transactional id", "group", "transaction", "state", "tries", "open seconds", "time-out seconds", "blocks")


_group_option = click.option(
    "-G", "--group", default="", metavar="GROUP", help="Group whose positions the producer moves, if it has one."
)
_transaction_option = click.option(
    "-t", "--transaction", "chosen", default="", metavar="NUMBERS", help="One of several, as the list names it."
)


@click.group()
def transaction() -> None:
    """List undecided transactions; commit one, or roll it back."""


@transaction.command("list")
@broker_options
@json_option
def list_open(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List the undecided transactions with held records.

    Those of producers with a checker are prepared: their group is asked for the decision, and they are parked after the
    last try. Parked ones wait for you. The age counts from when the present coordinator met the transaction.
    """
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.transactions()
    if as_json:
        print_json(
            [
                {
                    "transactional_id": each.transactional_id,
                    "group": each.group,
                    "transaction": each.id,
                    "state": each.state,
                    "producer_group": each.producer_group,
                    "tries": each.tries,
                    "open_ms": each.open_ms,
                    "timeout_ms": each.timeout_ms,
                    "blocks": dict(each.blocks),
                }
                for each in found
            ]
        )
        return
    rows = []
    for each in found:
        blocks = ", ".join(f"{topic}: {count}" for topic, count in each.blocks.items())
        named = each.transactional_id, each.group, each.id, each.state, each.tries
        rows.append((*named, each.open_ms // 1_000, each.timeout_ms // 1_000, blocks))
    print_table(HEADS, rows)


@transaction.command(short_help="Commit an undecided transaction with the records that are held.")
@click.argument("transactional_id")
@_group_option
@_transaction_option
@yes_option
@broker_options
@json_option
def commit(
    transactional_id: str,
    group: str,
    chosen: str,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Commit the undecided transaction of a producer with the records that are held.

    Records that its producer has not sent yet are missing, and no position moves. On a terminal it asks first.
    """
    if not yes:
        confirm(f"commit the undecided transaction of {transactional_id} with the records that are held?")
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.commit_transaction(transactional_id, group, chosen)
    print_done(
        f"the transaction of {transactional_id} is committed",
        {"transactional_id": transactional_id, "state": "committed"},
        as_json=as_json,
    )


@transaction.command(short_help="Roll an undecided transaction back.")
@click.argument("transactional_id")
@_group_option
@_transaction_option
@yes_option
@broker_options
@json_option
def abort(
    transactional_id: str,
    group: str,
    chosen: str,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Roll the undecided transaction of a producer back. On a terminal it asks first."""
    if not yes:
        confirm(f"roll the undecided transaction of {transactional_id} back?")
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.abort_transaction(transactional_id, group, chosen)
    print_done(
        f"the transaction of {transactional_id} is rolled back",
        {"transactional_id": transactional_id, "state": "rolled back"},
        as_json=as_json,
    )
