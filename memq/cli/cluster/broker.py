"""`memq broker`: one broker of a cluster, until a signal.

`list`, `clients` and `drain` ask the running brokers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from memq.cli.option_groups import GroupedGroup
from memq.cli.options import broker_options, brokers_of, json_option, setting_options, settings_of, yes_option
from memq.cli.output import confirm, log_to_stderr, print_json, print_message, print_ready, print_table
from memq.client.admin import Admin
from memq.errors import InvalidRequestError
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.settings import BrokerSettings, PartSettings, Settings, Value, rules_of

_NAMES = [name for name in rules_of(BrokerSettings) if name != "data"] + list(rules_of(PartSettings))


@click.group(cls=GroupedGroup, invoke_without_command=True)
@setting_options(*_NAMES)
@click.pass_context
def broker(context: click.Context, /, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Run a broker of a cluster, on the store, queue and coordinator of the settings.

    A part that is not set is kept in ./memq-data, so without settings the broker runs alone there, and says so.
    Prints `memq ready: HOST:PORT` on stdout when clients can connect. SIGTERM and Ctrl-C drain: the broker
    stores and acks the blocks that it holds, other brokers take its partitions, and it exits. A second signal ends the
    drain, and the log names the batches that were not published.
    """
    if context.invoked_subcommand is not None:
        return 0
    if sys.platform == "win32":
        raise InvalidRequestError("the broker does not run on Windows", hint="run it on Linux, macOS or WSL")
    settings = settings_of(config, profile, **flags)
    log_to_stderr(settings.broker().log_level, settings.broker().log_format)
    _name_unset_parts(settings)
    import uvloop

    from memq.broker.assembly import serve_cluster
    from memq.broker.process import calm_collector

    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_cluster(settings.broker(), settings.parts(), print_ready))


def _name_unset_parts(settings: Settings) -> None:
    """Log the parts that are not set.

    A broker that misses its settings file would otherwise start a new, empty cluster without a word.
    """
    unset = [name for name in rules_of(PartSettings) if settings.origins[name] == "default"]
    if unset:
        events, folder = EventLog(SystemClock()), Path("memq-data").resolve()
        events.warning(
            "standalone",
            f"{', '.join(unset)} not set: this broker runs alone, on {folder}; "
            "give --config FILE for a broker of a cluster, or run memq dev for one machine",
        )


@broker.command("list")
@broker_options
@json_option
def list_brokers(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List the running brokers: the governor, partitions and traffic of each."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.brokers()
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [
        (
            each.broker,
            each.address,
            each.zone or "-",
            each.partitions,
            each.bytes_s,
            ", ".join(word for word, holds in (("governs", each.governs), ("draining", each.draining)) if holds) or "-",
        )
        for each in found
    ]
    print_table(("broker", "address", "zone", "partitions", "bytes/s", "state"), rows)


@broker.command(short_help="Show the clients of the broker NAME and their limits.")
@click.argument("name")
@broker_options
@json_option
def clients(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Show the limits, the connected clients, and the clients over a limit of the broker NAME."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.clients(name)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [
        (each.client, each.mode, each.bytes_s or None, each.requests_s or None, each.connections, each.over)
        for each in found
    ]
    print_table(("client", "mode", "bytes/s", "requests/s", "connections", "over"), rows)


@broker.command(short_help="Move all partitions of the broker NAME to others.")
@click.argument("name")
@yes_option
@broker_options
@json_option
def drain(name: str, yes: bool, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Move all partitions of the broker NAME to other brokers, and wait until it owns none.

    The broker continues to run and owns no partition until it is restarted. SIGTERM drains a broker, and then ends it.
    On a terminal it asks first; elsewhere it needs --yes.
    """
    if not yes:
        confirm(f"move all partitions of broker {name} to others, until it is restarted?")
    with Admin(brokers_of(config, profile, flags)) as admin:
        admin.drain_broker(name)
    if as_json:
        print_json({"broker": name, "partitions": 0})
        return
    print_message(f"broker {name} owns no partition any more")


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
        print_message("the governor plans no moves")
    for note in found.notes:
        print_message(note)
