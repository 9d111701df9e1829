"""`memq sweep`: names the objects that no pointer names, and deletes them."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memq.cli.options import json_option, setting_options, settings_of
from memq.cli.output import count_text, size_text, talk, time_text
from memq.cli.run import FAILED, OK
from memq.errors import InvalidRequestError
from memq.settings import PartSettings, Settings, Value, rules_of

if TYPE_CHECKING:
    from memq.broker.sweep import Sweep, Unnamed


@click.command()
@click.option("--dry-run", is_flag=True, help="Name what would be deleted, and change nothing.")
@setting_options("data", "cluster", "sweep_age_ms", "staged_age_ms", *rules_of(PartSettings))
@json_option
def sweep(*, dry_run: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Delete the objects that no pointer names and that are older than sweep_age_ms, one line for each.

    Brokers may run; the age must be theirs. Objects that topics share go when no topic names them. Where the settings
    name no store, queue and coordinator, it is the folder of --data, which nobody else may use meanwhile. Exits with 1
    when a topic was left alone, since its pointers could not all be read, or objects that lost pointers may have named.
    """
    settings = settings_of(config, profile, **flags)
    tally, ended = _Tally(as_json=as_json), False
    try:
        asyncio.run(_sweep(settings, tally, dry_run=dry_run))
        ended = True
    finally:
        if ended or tally.objects:
            verb = "would be deleted" if dry_run else "deleted"
            talk(f"{count_text(tally.objects, 'object')} of {size_text(tally.bytes)} {verb}")
    return FAILED if tally.notes else OK


class _Tally:
    """What was found so far, told at once."""

    def __init__(self, *, as_json: bool) -> None:
        self.objects = self.bytes = self.notes = 0
        self._as_json = as_json

    def note(self, text: str) -> None:
        """Tell what is left alone."""
        self.notes += 1
        talk(text)

    def take(self, found: Unnamed) -> None:
        """Tell of one object."""
        self.objects += 1
        self.bytes += found.size
        if self._as_json:
            click.echo(json.dumps(asdict(found)))
        else:
            click.echo(f"{found.key}: {found.why} ({size_text(found.size)}, written {time_text(found.modified_ms)})")


async def _sweep(settings: Settings, tally: _Tally, *, dry_run: bool) -> None:
    ages_ms = (settings.broker().sweep_age_ms, settings.broker().staged_age_ms)
    async with _opened(settings, tally) as found:
        if not dry_run and not await found.topics():
            raise InvalidRequestError(
                "the coordinator knows no topic, so every object would be deleted",
                hint="check the settings coordinator and cluster; --dry-run names the objects",
            )
        async for each in found.find(*ages_ms) if dry_run else found.run(*ages_ms):
            tally.take(each)


def _opened(settings: Settings, tally: _Tally) -> AbstractAsyncContextManager[Sweep]:
    from memq.broker.sweep_cluster import cluster_sweep, folder_sweep

    if any(settings.origins[name] != "default" for name in rules_of(PartSettings)):
        return cluster_sweep(settings.broker().cluster, settings.parts(), tally.note)
    data = Path(settings.broker().data)
    if not (data / "cluster.json").is_file():
        raise InvalidRequestError(
            f"'{data}' is no data folder of memq dev",
            hint="name one with --data, or the parts of a cluster by --config",
        )
    return folder_sweep(data, tally.note)
