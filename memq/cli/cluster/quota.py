"""`memq quota`: how much principals and namespaces may use, and what they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec

from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_message, print_table
from memq.client.admin import Admin
from memq.client.permission_admin import ChangedQuotas
from memq.errors import InvalidSettingError
from memq.quotas import QuotaKind, QuotaRule, amounts_of
from memq.settings import Value, parse_size

HEADS = ("kind", "name", "bytes in/s", "bytes out/s", "records/s", "requests/s", "connections")
_AMOUNTS = {
    "bytes_in_s": ("--bytes-in", "SIZE", "Bytes per second that producers and requests send, such as 10MiB."),
    "bytes_out_s": ("--bytes-out", "SIZE", "Bytes per second of answers."),
    "records_s": ("--records", "NUMBER", "Records per second that producers send."),
    "requests_s": ("--requests", "NUMBER", "Requests and blocks per second."),
    "connections": ("--connections", "NUMBER", "Connections of a principal to each broker."),
}


def _amount_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (option, metavar, text) in reversed(_AMOUNTS.items()):
        command = click.option(option, name, metavar=metavar, help=text)(command)
    return command


_kind_option = click.option("--namespace", "of_namespace", is_flag=True, help="NAME is a namespace, not a principal.")


def _kind(of_namespace: bool) -> QuotaKind:
    return "namespace" if of_namespace else "principal"


@click.group()
def quota() -> None:
    """List and change the quotas of principals and namespaces."""


@quota.command("list")
@broker_options
@json_option
def list_quotas(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> None:
    """List all quotas. The exact name applies, else the longest prefix; * is the default."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        found = admin.quotas()
    if as_json:
        print_json([_json_of(each) for each in found])
        return
    print_table(
        HEADS, [(each.kind, each.name, *(limit or None for limit in amounts_of(each).values())) for each in found]
    )


@quota.command("set", short_help="Set the quota of a principal or a namespace.")
@click.argument("name")
@_kind_option
@_amount_options
@broker_options
@json_option
def set_quota(name: str, of_namespace: bool, as_json: bool, **options: Any) -> None:
    """Set the quota of NAME: a principal, a prefix with a final *, or * as the default of all others.

    An amount that is not given has no limit. Brokers know the change within 5 s.
    """
    amounts: dict[str, Any] = {
        each: _amount(_AMOUNTS[each][0], text) for each in _AMOUNTS if (text := options[each]) is not None
    }
    with Admin(_brokers(options)) as admin:
        done = admin.change_quotas(put=[QuotaRule(kind=_kind(of_namespace), name=name, **amounts)])
    _print_change(done, as_json=as_json)


@quota.command()
@click.argument("name")
@_kind_option
@broker_options
@json_option
def remove(name: str, of_namespace: bool, as_json: bool, **options: Any) -> None:
    """Remove the quota of NAME, as it was set."""
    with Admin(_brokers(options)) as admin:
        done = admin.change_quotas(remove=[QuotaRule(kind=_kind(of_namespace), name=name)])
    _print_change(done, as_json=as_json)


@quota.command(short_help="Show what a principal or a namespace uses at each broker.")
@click.argument("name")
@_kind_option
@broker_options
@json_option
def show(name: str, of_namespace: bool, as_json: bool, **options: Any) -> None:
    """Show what NAME uses at each broker.

    `used` counts since the limit exists, and `held` how often NAME had to wait.
    """
    with Admin(_brokers(options)) as admin:
        found = admin.quota_use(name, kind=_kind(of_namespace))
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    rows: list[tuple[str | float | None, ...]] = []
    for use in found:
        name_of_quota = use.quota.name if use.quota else None
        rows += [(use.broker, name_of_quota, rate.rate, rate.limit, rate.used, rate.held) for rate in use.rates]
        if use.quota is not None and use.quota.connections:
            rows.append((use.broker, name_of_quota, "connections", use.quota.connections, use.connections, None))
    if rows:
        print_table(("broker", "quota", "rate", "limit", "used", "held"), rows)
    else:
        print_message(f"no quota limits '{name}', or nothing has used it yet")


def _amount(option: str, text: str) -> int:
    """Return a number or a size. Raises: InvalidSettingError."""
    amount = parse_size(text)
    if amount is None:
        raise InvalidSettingError(
            f"{option} '{text[:60]}' can't be read", hint="write a number, or a size such as 10MiB"
        )
    return amount


def _brokers(options: dict[str, Any]) -> str:
    return brokers_of(options["config"], options["profile"], {"brokers": options["brokers"]})


def _print_change(done: ChangedQuotas, *, as_json: bool) -> None:
    if as_json:
        put, removed = ([_json_of(each) for each in quotas] for quotas in (done.put, done.removed))
        print_json({"put": put, "removed": removed, "enforced": done.enforced})
        return
    for sign, quotas in (("+", done.put), ("-", done.removed)):
        for each in quotas:
            print_message(f"{sign} {each}")
    if not (done.put or done.removed):
        print_message("nothing to change")
    if not done.enforced:
        print_message("note: the broker applies no quotas; set quotas = true in its settings")


def _json_of(quota: QuotaRule) -> dict[str, str | int]:
    return {"kind": quota.kind, "name": quota.name, **amounts_of(quota)}
