"""Requests about namespaces in an ADMIN frame: their list and their change; the answer."""

from __future__ import annotations

import msgspec

from memq.namespaces import Namespace
from memq.protocol.wire_types import Int64


class ListNamespaces(msgspec.Struct, tag_field="op", tag="list-namespaces", kw_only=True):
    """Show the namespaces that are set or have topics; with `name`, this one alone."""

    name: str = ""


class ChangeNamespaces(msgspec.Struct, tag_field="op", tag="change-namespaces", kw_only=True):
    """Remove and set defaults and limits of namespaces, in one atomic change."""

    put: list[Namespace] = []
    remove: list[str] = []


class NamespaceUse(msgspec.Struct, kw_only=True):
    """A namespace, and the topics and write partitions in it that the principal may describe."""

    namespace: Namespace
    topics: Int64 = 0
    partitions: Int64 = 0


class NamespaceAnswer(msgspec.Struct, kw_only=True):
    """Answer to a request about namespaces: those that exist, or those that a change has set and removed."""

    uses: list[NamespaceUse] = []
    put: list[Namespace] = []
    removed: list[str] = []
