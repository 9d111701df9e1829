"""`memq lag`: how far groups are behind, once or for Prometheus."""

from __future__ import annotations

import asyncio

import click

from memq.cli.cluster.group_rows import HEADS, group_json, group_rows, tell_unknown
from memq.cli.log_lines import log_to_stderr
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_table
from memq.cli.ready import listen_address, say_ready
from memq.client.admin.admin import Admin
from memq.settings import Value

LAG_PORT = 9878


@click.command()
@click.argument("groups", metavar="[GROUP]...", nargs=-1)
@broker_options
@json_option
@click.option(
    "--serve",
    metavar="HOST:PORT",
    help="Serve the lag as metrics for Prometheus, until a signal; port 0 takes any free port.",
)
def lag(
    groups: tuple[str, ...],
    as_json: bool,
    serve: str | None,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> int:
    """Show the lag of one or all groups: records and stored bytes before dedup, age of the oldest.

    Exits with 1 when the log of a partition does not answer: its lag is unknown, that of all others exact.
    """
    if serve is not None:
        return _serve(brokers_of(config, profile, flags), groups, serve)
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = [admin.group(name) for name in groups or admin.groups()]
    if as_json:
        print_json([group_json(one) for one in found])
    else:
        print_table(HEADS, [row for one in found for row in group_rows(one)])
    return tell_unknown(found)


def _serve(brokers: str, groups: tuple[str, ...], listen: str) -> int:
    """Serve it until a signal; `memq ready: HOST:PORT` on stdout says that the first round is over."""
    from memq.cli.cluster.lag_export import export_lag

    log_to_stderr("info", "text")
    return asyncio.run(export_lag(brokers, groups, listen_address(listen, LAG_PORT), say_ready))
