"""`memq namespace`: the namespaces of a cluster, their defaults and limits."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from memq.cli.cluster.topic import parse_topic_settings
from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_message, print_table
from memq.client.admin import Admin
from memq.client.permission_admin import ChangedNamespaces
from memq.limits import PARTITIONS_MAX
from memq.namespaces import PARTITIONS_TOTAL_MAX, TOPICS_MAX, Namespace
from memq.settings import Value


@click.group()
def namespace() -> None:
    """List, describe, set and remove namespaces: defaults and limits of the topics NAMESPACE/TOPIC."""


@namespace.command("list")
@broker_options
@json_option
def list_namespaces(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List the namespaces in which you have a permission: those that are set, or have topics."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.namespaces()
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows = [
        (
            each.namespace.name,
            each.topics,
            each.namespace.topics_max or None,
            each.partitions,
            each.namespace.partitions_max or None,
        )
        for each in found
    ]
    print_table(("namespace", "topics", "topics max", "partitions", "partitions max"), rows)


@namespace.command()
@click.argument("name")
@broker_options
@json_option
def describe(name: str, as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """Show defaults, limits and use of a namespace."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.namespace(name)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    known = found.namespace
    rows: list[tuple[str, str | int]] = [
        ("namespace", known.name),
        ("topics", _of(found.topics, known.topics_max)),
        ("partitions", _of(found.partitions, known.partitions_max)),
        ("default partitions", known.partitions or "of the broker"),
        *(("default setting", f"{key}={value}") for key, value in known.settings.items()),
    ]
    width = max(len(head) for head, _ in rows)
    for head, value in rows:
        click.echo(f"{head:<{width}}  {value}")


@namespace.command("set", short_help="Set defaults and limits of a namespace.")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(0, PARTITIONS_MAX), default=0, help="Partitions of new topics.")
@click.option("--topics-max", type=click.IntRange(0, TOPICS_MAX), default=0, help="Most topics.")
@click.option(
    "--partitions-max", type=click.IntRange(0, PARTITIONS_TOTAL_MAX), default=0, help="Most partitions of all topics."
)
@click.option("--set", "texts", multiple=True, metavar="KEY=VALUE", help="A setting of new topics; repeatable.")
@broker_options
@json_option
def set_namespace(
    name: str,
    partitions: int,
    topics_max: int,
    partitions_max: int,
    texts: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Set defaults and limits of NAME, and replace those that it has.

    A limit that is not given does not hold. Topics that exist keep their settings.
    """
    wanted = Namespace(
        name=name,
        partitions=partitions,
        settings=parse_topic_settings(texts),
        topics_max=topics_max,
        partitions_max=partitions_max,
    )
    with Admin(_brokers(options)) as admin:
        done = admin.change_namespaces(put=[wanted])
    _print_change(done, as_json=as_json)


@namespace.command()
@click.argument("name")
@broker_options
@json_option
def remove(name: str, as_json: bool, **options: Any) -> None:
    """Remove defaults and limits of NAME. Its topics stay."""
    with Admin(_brokers(options)) as admin:
        done = admin.change_namespaces(remove=[name])
    _print_change(done, as_json=as_json)


def _of(used: int, most: int) -> str:
    return f"{used} of {most}" if most else str(used)


def _brokers(options: dict[str, Any]) -> str:
    return brokers_of(options["config"], options["profile"], {"brokers": options["brokers"]})


def _print_change(done: ChangedNamespaces, *, as_json: bool) -> None:
    if as_json:
        print_json({"put": msgspec.to_builtins(done.put), "removed": list(done.removed)})
        return
    for each in done.put:
        print_message(f"+ {each}")
    for name in done.removed:
        print_message(f"- namespace '{name}'")
    if not (done.put or done.removed):
        print_message("nothing to change")
