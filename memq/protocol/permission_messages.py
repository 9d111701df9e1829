"""Requests about permissions in an ADMIN frame: the rules, their change, and a decision; their answer."""

from __future__ import annotations

import msgspec

from memq.permissions import AccessRule
from memq.protocol.wire_types import Int64
from memq.scram import Credential


class ListPermissions(msgspec.Struct, tag_field="op", tag="list-permissions", kw_only=True):
    """Show all rules of permissions."""


class ChangePermissions(msgspec.Struct, tag_field="op", tag="change-permissions", kw_only=True):
    """Remove rules and add rules, in one atomic change. Rules that exist, or do not, are passed over."""

    add: list[AccessRule] = []
    remove: list[AccessRule] = []


class CheckPermission(msgspec.Struct, tag_field="op", tag="test-permission", kw_only=True):
    """Ask for the decision of the receiving broker by the present rules."""

    principal: str
    permission: str
    kind: str
    name: str = ""


class ListUsers(msgspec.Struct, tag_field="op", tag="list-users", kw_only=True):
    """Show the names of all users with a password."""


class ChangeUsers(msgspec.Struct, tag_field="op", tag="change-users", kw_only=True):
    """Add or replace the credentials of users, and remove users by name, in one atomic change."""

    put: list[Credential] = []
    remove: list[str] = []


class PermissionAnswer(msgspec.Struct, kw_only=True):
    """Answer to a request about permissions.

    `rules` are all rules. `added` and `removed` are the rules that a change added and removed. `allowed` is the
    decision, and `rule` the rule that decided. `enforced` is whether the receiving broker checks permissions.
    """

    enforced: bool
    version: Int64 = 0
    rules: list[AccessRule] = []
    added: list[AccessRule] = []
    removed: list[AccessRule] = []
    allowed: bool = False
    rule: AccessRule | None = None
    users: list[str] = []  # names
