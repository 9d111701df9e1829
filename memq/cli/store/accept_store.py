"""`memq accept-store`: takes the store that the settings name as that of the cluster, after a move."""

from __future__ import annotations

import asyncio

import click

from memq.cli.options import setting_options, settings_of
from memq.cli.run import OK
from memq.errors import InvalidRequestError
from memq.settings import PartSettings, Settings, Value, rules_of


@click.command()
@click.option("--dry-run", is_flag=True, help="Compare the marks, and change nothing.")
@setting_options("cluster", *rules_of(PartSettings))
def accept_store(*, dry_run: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Accept the store of the settings for the cluster: brokers then start only with this store.

    Copy all objects to it first, and stop all brokers before the last copy. An object that a pointer names and the new
    store lacks counts as lost. A complete copy of a bucket contains the mark, and needs no accept-store.
    """
    settings = settings_of(config, profile, **flags)
    missing = [name for name in ("store", "coordinator") if settings.origins[name] == "default"]
    if missing:
        raise InvalidRequestError(f"the settings name no {' and no '.join(missing)}", hint="give --config FILE")
    click.echo(asyncio.run(_accept(settings, dry_run=dry_run)))
    return OK


async def _accept(settings: Settings, *, dry_run: bool) -> str:
    from memq.broker.assembly import opened_mark
    from memq.runtime.network import Runtime

    runtime = Runtime()
    async with opened_mark(settings.parts(), settings.broker(), runtime=runtime) as mark:
        marks = await mark.look() if dry_run else await mark.accept(runtime.random)
    store = f"store '{settings.parts().store}'"
    if not marks.differ:
        return f"{store} is that of the cluster already" if marks.known else f"{store}: the cluster has no mark yet"
    found = f"with the mark {marks.found}" if marks.found else "with a new mark"
    return f"{store} {'would replace' if dry_run else 'replaces'} the one with the mark {marks.known}, {found}"
