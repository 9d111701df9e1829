"""`memq apply FILE`: makes the topics, groups, permissions and quotas of a cluster agree with a file."""

from __future__ import annotations

import asyncio

import click

from memq.cli.declared.declaration import Declaration, read_declaration
from memq.cli.declared.plan import Change, plan_changes
from memq.cli.options import broker_options, brokers_of, json_option, yes_option
from memq.cli.output import confirm, count_text, print_json, print_message
from memq.client.admin import AsyncAdmin
from memq.errors import MemqError
from memq.runtime.clock import SystemClock
from memq.settings import Value

WOULD_CHANGE = 2  # exit code of --dry-run, as of terraform plan -detailed-exitcode


@click.command(short_help="Make a cluster agree with a file of topics, groups, permissions and quotas.")
@click.argument("file")
@click.option("--dry-run", is_flag=True, help="Show the changes, make none; exits with 2 if there are some.")
@click.option("--prune", is_flag=True, help="Remove permissions and quotas that the file leaves out.")
@yes_option
@broker_options
@json_option
def apply(
    file: str,
    dry_run: bool,
    prune: bool,
    yes: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Make the topics, groups, permissions and quotas of a cluster agree with FILE, which is TOML.

    It shows all changes first; a second run finds none. Parts that the file leaves out stay. With --prune the rules
    and quotas that it leaves out are removed; on a terminal it asks first, elsewhere it needs --yes.
    """
    declared = read_declaration(file, SystemClock().wall_ms())
    changes = asyncio.run(
        _apply(brokers_of(config, profile, flags), declared, dry_run=dry_run, prune=prune, yes=yes, quiet=as_json)
    )
    if as_json:
        print_json(
            {"changes": [{"action": each.sign, "change": each.text} for each in changes], "applied": not dry_run}
        )
    elif dry_run and changes:
        print_message(f"nothing was changed (--dry-run): {count_text(len(changes), 'change')} left")
    elif changes:
        print_message(f"{count_text(len(changes), 'change')} made")
    else:
        print_message("no changes: the cluster agrees with the file")
    return WOULD_CHANGE if dry_run and changes else 0


async def _apply(
    brokers: str, declared: Declaration, *, dry_run: bool, prune: bool, yes: bool, quiet: bool
) -> list[Change]:
    async with AsyncAdmin(brokers) as admin:
        changes = await plan_changes(admin, declared, prune=prune)
        if not quiet:
            for change in changes:
                click.echo(str(change))
        removals = [each for each in changes if each.sign == "-"]
        if removals and not dry_run and not yes:
            confirm(f"remove {count_text(len(removals), 'rule or quota')}?")
        for done, change in enumerate([] if dry_run else changes):
            try:
                await change.make(admin)
            except MemqError as error:
                error.hint = f"{error.hint}; {done} of {len(changes)} changes are made, and a new run makes the rest"
                raise
    return changes
