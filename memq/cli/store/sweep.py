"""`memq sweep`: lists unnamed objects and deletes those that an earlier pass found too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memq.cli.options import json_option, setting_options, settings_of
from memq.cli.output import count_text, print_json, print_message, size_text, time_text
from memq.cli.run import FAILED, OK
from memq.errors import InvalidRequestError
from memq.runtime.clock import SystemClock
from memq.settings import PartSettings, Settings, Value, rules_of

if TYPE_CHECKING:
    from memq.broker.sweep.sweep import Sweep, Unnamed
    from memq.broker.sweep.sweep_lists import PendingObject, SweepLists
    from memq.format.packed_file import ListedObject


@click.command()
@click.option("--dry-run", is_flag=True, help="List the objects that no pointer names; change nothing.")
@click.option(
    "--pending", is_flag=True, help="List the objects that wait for a later pass, and the kept ones; change nothing."
)
@click.option("--keep", metavar="KEY|all", help="Keep a waiting object, or all of them: no sweep deletes it.")
@click.option("--release", metavar="KEY|all", help="Release a kept object, or all of them.")
@click.option("--unproven", is_flag=True, help="Also sweep objects whose records no batch of the log has.")
@setting_options("data", "cluster", "sweep_age_ms", "sweep_confirm_ms", "staged_age_ms", *rules_of(PartSettings))
@json_option
def sweep(
    *,
    dry_run: bool,
    pending: bool,
    keep: str | None,
    release: str | None,
    unproven: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Find the objects that no pointer names and that are older than sweep_age_ms, one line for each.

    A pass deletes the objects that an earlier pass, at least sweep_confirm_ms ago, found too. The others wait for a
    later pass. Brokers may run; the ages must be the same as theirs.

    Objects whose records no batch of the log has are kept. Their producers got no ack, or the log was cut. Use
    --unproven only if no log was cut.

    If the settings name no store, queue and coordinator, memq sweep uses the folder of --data. No other process may use
    it meanwhile, except with --pending, --keep and --release. Exits with 1 if it skipped a topic, because some of its
    pointers could not be read, or the queue may have lost pointers.
    """
    if sum((dry_run, pending, keep is not None, release is not None)) > 1:
        raise click.UsageError("use one of --dry-run, --pending, --keep and --release")
    if unproven and (pending or keep is not None or release is not None):
        raise click.UsageError("--unproven is for a pass, also with --dry-run")
    settings = settings_of(config, profile, **flags)
    confirm_ms = settings.broker().sweep_confirm_ms
    report = _PassReport(confirm_ms, as_json=as_json)
    if pending:
        asyncio.run(_name_pending(settings, report))
    elif keep is not None:
        asyncio.run(_change(settings, report, "kept", lambda lists, now_ms: lists.keep(keep, now_ms)))
    elif release is not None:
        asyncio.run(_change(settings, report, "released", lambda lists, now_ms: lists.release(release, now_ms)))
    else:
        ended = False
        try:
            asyncio.run(_sweep(settings, report, dry_run=dry_run, unproven=unproven))
            ended = True
        finally:
            if ended or report.found:
                report.sum_up("would be deleted" if dry_run else "deleted")
    return FAILED if report.notes else OK


class _PassReport:
    """The results so far, printed immediately."""

    def __init__(self, confirm_ms: int, *, as_json: bool) -> None:
        self.notes = self.found = 0
        self._gone = self._waiting = self._kept = (0, 0)  # objects and bytes
        self._confirm_ms = confirm_ms
        self._as_json = as_json

    def note(self, text: str) -> None:
        """Print a note about objects that are kept."""
        self.notes += 1
        print_message(text)

    def take(self, found: Unnamed) -> None:
        """Print one object of a pass."""
        self.found += 1
        if found.goes:
            state, self._gone = "goes", (self._gone[0] + 1, self._gone[1] + found.size)
        elif found.kept:
            state, self._kept = "is kept", (self._kept[0] + 1, self._kept[1] + found.size)
        else:
            state = f"waits until {time_text(found.since_ms + self._confirm_ms)}"
            self._waiting = (self._waiting[0] + 1, self._waiting[1] + found.size)
        self._print(asdict(found), found.key, f"{found.why}; {state}", found.size, found.modified_ms)

    def take_listed(self, each: PendingObject) -> None:
        """Print one object of a list."""
        self.found += 1
        found, until_ms = each.found, each.since_ms + self._confirm_ms
        state = "kept" if each.kept else f"waits since {time_text(each.since_ms)}, until {time_text(until_ms)}"
        row = {**found._asdict(), "since_ms": each.since_ms, "until_ms": until_ms, "kept": each.kept}
        self._print(row, found.key, f"{found.why}; {state}", found.size, found.modified_ms)

    def take_changed(self, found: ListedObject, verb: str) -> None:
        """Print one object that is kept, or released."""
        self._print({**found._asdict(), "state": verb}, found.key, verb, found.size, found.modified_ms)

    def sum_up(self, verb: str) -> None:
        """Print the numbers of changed and of waiting objects."""
        counts = [(self._gone, verb), (self._waiting, "wait for a later pass")]
        if self._kept[0]:
            counts.append((self._kept, "are kept, because no batch has their records"))
        for (count, size), what in counts:
            print_message(f"{count_text(count, 'object')} of {size_text(size)} {what}")

    def _print(self, row: dict[str, object], key: str, what: str, size: int, modified_ms: int) -> None:
        if self._as_json:
            print_json(row)
        else:
            click.echo(f"{key}: {what} ({size_text(size)}, written {time_text(modified_ms)})")


async def _sweep(settings: Settings, report: _PassReport, *, dry_run: bool, unproven: bool) -> None:
    ages_ms = (settings.broker().sweep_age_ms, settings.broker().staged_age_ms)
    async with _opened(settings, report) as found:
        if not dry_run and not await found.topics():
            raise InvalidRequestError(
                "the coordinator knows no topic, so every object would be deleted",
                hint="check the settings coordinator and cluster; --dry-run names the objects",
            )
        found.takes_unproven = unproven
        async for each in found.find(*ages_ms) if dry_run else found.run(*ages_ms):
            report.take(each)


async def _name_pending(settings: Settings, report: _PassReport) -> None:
    async with _opened_lists(settings, report) as lists:
        async for each in lists.all():
            report.take_listed(each)
    if not report.found:
        print_message("no object waits for a later pass")


async def _change(
    settings: Settings,
    report: _PassReport,
    verb: str,
    change: Callable[[SweepLists, int], Awaitable[list[ListedObject]]],
) -> None:
    async with _opened_lists(settings, report) as lists:
        for each in await change(lists, SystemClock().wall_ms()):
            report.take_changed(each, verb)


def _opened(settings: Settings, report: _PassReport) -> AbstractAsyncContextManager[Sweep]:
    from memq.broker.sweep.sweep_cluster import cluster_sweep, folder_sweep

    confirm_ms = settings.broker().sweep_confirm_ms
    if _names_parts(settings):
        return cluster_sweep(settings.broker().cluster, settings.parts(), report.note, confirm_ms)
    return folder_sweep(_folder(settings), report.note, confirm_ms)


def _opened_lists(settings: Settings, report: _PassReport) -> AbstractAsyncContextManager[SweepLists]:
    from memq.broker.sweep.sweep_cluster import cluster_lists, folder_lists

    if _names_parts(settings):
        return cluster_lists(settings.broker().cluster, settings.parts(), report.note)
    return folder_lists(_folder(settings), report.note)


def _names_parts(settings: Settings) -> bool:
    return any(settings.origins[name] != "default" for name in rules_of(PartSettings))


def _folder(settings: Settings) -> Path:
    from memq.broker.data_folder import cluster_of

    data = Path(settings.broker().data)
    cluster_of(data)  # raises for another folder, in which an open would make a cluster
    return data
