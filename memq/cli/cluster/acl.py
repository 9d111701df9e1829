"""`memq acl`: the rules of permissions, their change, and the decision on a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import click

from memq.cli.options import broker_options, brokers_of, json_option
from memq.cli.output import print_json, print_message, print_table
from memq.client.admin import Admin
from memq.client.permission_admin import ChangedPermissions
from memq.errors import InvalidRequestError
from memq.patterns import EVERY
from memq.permissions import (
    KINDS,
    ROLES,
    AccessRule,
    Permission,
    ResourceKind,
    is_of_cluster,
    kinds_of_role,
    named_permission,
    rules_of_role,
)
from memq.settings import Value
from memq.topic import NAMESPACE_END, check_name

HEADS = ("effect", "principal", "permission", "kind", "name")
DENIED = 1  # exit code of `memq acl test`
_PERMISSIONS = ", ".join(each.value for each in Permission)


def _resource_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for kind in reversed(KINDS):
        if kind is ResourceKind.CLUSTER:
            command = click.option("--cluster", "on_cluster", is_flag=True, help="The cluster itself.")(command)
        else:
            text = f"Name of a {kind.value.replace('-', ' ')}; a final * names a prefix."
            name = kind.name.lower()
            command = click.option(f"--{kind.value}", name, multiple=True, metavar="NAME", help=text)(command)
    text = "All topics, groups, queues and ids of a namespace: those that the role or the permission has."
    return click.option("--namespace", "namespaces", multiple=True, metavar="NAME", help=text)(command)


_role_option = click.option("--role", type=click.Choice(list(ROLES)), help="Permissions for a task, instead of one.")


@click.group()
def acl() -> None:
    """List, change and test the permissions of principals."""


@acl.command("list")
@click.argument("principal", required=False)
@broker_options
@json_option
def list_rules(
    principal: str | None, as_json: bool, config: str | None, profile: str | None, **flags: Value | None
) -> None:
    """List the rules, all or those that name PRINCIPAL."""
    with Admin(brokers_of(config, profile, flags)) as admin:
        rules = [rule for rule in admin.permissions() if principal in (None, rule.principal)]
    if as_json:
        print_json([_json_of(rule) for rule in rules])
        return
    print_table(HEADS, [(rule.effect, rule.principal, rule.permission, rule.kind, rule.name) for rule in rules])


@acl.command()
@click.argument("principal")
@click.argument("permission", required=False)
@_role_option
@_resource_options
@broker_options
@json_option
def allow(principal: str, permission: str | None, role: str | None, as_json: bool, **options: Any) -> None:
    """Allow PRINCIPAL a permission, or the permissions of a role.

    Brokers know the change within 5 s.
    """
    _change("allow", principal, permission, role, options, as_json=as_json)


@acl.command()
@click.argument("principal")
@click.argument("permission")
@_resource_options
@broker_options
@json_option
def deny(principal: str, permission: str, as_json: bool, **options: Any) -> None:
    """Deny PRINCIPAL a permission; a deny wins over each allow."""
    _change("deny", principal, permission, None, options, as_json=as_json)


@acl.command()
@click.argument("principal")
@click.argument("permission", required=False)
@_role_option
@click.option("--deny", "denies", is_flag=True, help="Remove rules that deny, not those that allow.")
@_resource_options
@broker_options
@json_option
def remove(
    principal: str, permission: str | None, role: str | None, denies: bool, as_json: bool, **options: Any
) -> None:
    """Remove the rules that `memq acl allow` or `memq acl deny` made with the same arguments."""
    effect: Literal["allow", "deny"] = "deny" if denies else "allow"
    _change(effect, principal, permission, role, options, as_json=as_json, remove=True)


@acl.command(short_help="Show whether a request would be allowed, and the rule that decides.")
@click.argument("principal")
@click.argument("permission")
@_resource_options
@broker_options
@json_option
def test(principal: str, permission: str, as_json: bool, **options: Any) -> None:
    """Show whether PRINCIPAL has a permission on a resource, and the rule that decides.

    The exit code is 1 if it has not.
    """
    named = [(kind, name) for kind, names in _names(options, KINDS).items() for name in names]
    if len(named) != 1:
        raise InvalidRequestError(f"{len(named)} resources are named", hint="name one, for example --topic clicks")
    (kind, name) = named[0]
    if kind is ResourceKind.CLUSTER:
        name = ""
    with Admin(_brokers(options)) as admin:
        found = admin.test_permission(principal, permission, kind.value, name)
    if as_json:
        rule = None if found.rule is None else _json_of(found.rule)
        print_json({"allowed": found.allowed, "rule": rule, "enforced": found.enforced})
    else:
        cause = f"rule: {found.rule}" if found.rule else "by the settings" if found.allowed else "no rule allows it"
        print_message(f"{'allowed' if found.allowed else 'denied'}; {cause}")
        _warn_unless(found.enforced)
    if not found.allowed:
        click.get_current_context().exit(DENIED)


def _change(
    effect: Literal["allow", "deny"],
    principal: str,
    permission: str | None,
    role: str | None,
    options: Mapping[str, Any],
    *,
    as_json: bool,
    remove: bool = False,
) -> None:
    """Add or remove rules, and print the change."""
    names = _names(options, KINDS if role is None else kinds_of_role(role))
    if options["namespaces"] and role is not None and is_of_cluster(role):
        raise InvalidRequestError(
            f"role '{role}' has permissions on the whole cluster, not in a namespace alone",
            hint="--role owner has all permissions in a namespace; name topics, groups and queues to give this role",
        )
    rules = rules_named(effect, principal, permission, role, names)
    with Admin(_brokers(options)) as admin:
        done = admin.change_permissions(**{"remove" if remove else "add": rules})
    _print_change(done, as_json=as_json)


def rules_named(
    effect: Literal["allow", "deny"],
    principal: str,
    permission: str | None,
    role: str | None,
    names: Mapping[ResourceKind, Sequence[str]],
) -> list[AccessRule]:
    """Return the rules that give or deny a principal one permission, or a role, on named resources.

    Raises: InvalidRequestError.
    """
    if (permission is None) == (role is None):
        raise InvalidRequestError("a change names one permission or one role", hint=f"permissions: {_PERMISSIONS}")
    if role is not None:
        return rules_of_role(role, principal, dict(names) | {ResourceKind.CLUSTER: ()})
    assert permission is not None, "checked above"
    named_permission(permission)
    found = [
        AccessRule(effect=effect, principal=principal, permission=permission, kind=kind.value, name=name)
        for kind, given in names.items()
        for name in given
    ]
    if not found:
        raise InvalidRequestError("no resource is named", hint="for example --topic clicks, --group '*' or --cluster")
    return found


def _names(options: Mapping[str, Any], kinds: Collection[ResourceKind]) -> dict[ResourceKind, Sequence[str]]:
    """Return the named resources by kind; a namespace names all resources of `kinds` in it."""
    inside = [f"{check_name(each, 'namespace')}{NAMESPACE_END}{EVERY}" for each in options["namespaces"]]
    given: dict[ResourceKind, Sequence[str]] = {
        kind: [*options[kind.name.lower()], *(inside if kind in kinds else ())]
        for kind in KINDS
        if kind is not ResourceKind.CLUSTER
    }
    return {ResourceKind.CLUSTER: (EVERY,) if options["on_cluster"] else (), **given}


def _brokers(options: Mapping[str, Any]) -> str:
    flags = {"brokers": options["brokers"]}
    return brokers_of(options["config"], options["profile"], flags)


def _print_change(done: ChangedPermissions, *, as_json: bool) -> None:
    if as_json:
        added, removed = ([_json_of(rule) for rule in rules] for rules in (done.added, done.removed))
        print_json({"added": added, "removed": removed, "enforced": done.enforced})
        return
    for sign, rules in (("+", done.added), ("-", done.removed)):
        for rule in rules:
            print_message(f"{sign} {rule}")
    if not (done.added or done.removed):
        print_message("nothing to change")
    _warn_unless(done.enforced)


def _warn_unless(enforced: bool) -> None:
    if not enforced:
        print_message("note: the broker checks no permissions; set permissions = true in its settings")


def _json_of(rule: AccessRule) -> dict[str, str]:
    return {
        "effect": rule.effect,
        "principal": rule.principal,
        "permission": rule.permission,
        "kind": rule.kind,
        "name": rule.name,
    }
