"""Permissions for tests of request handlers, which decide nothing themselves."""

from __future__ import annotations

from collections.abc import Iterable

from memq.permissions import Permission, Resource, ResourceKind, permission_subject, topic_resource


class FullAccess:
    """See `memq.broker.permissions.checks.PrincipalAccess`; everything is allowed."""

    def may(self, permission: Permission, resource: Resource) -> bool:
        return True

    def may_on_all(self, permission: Permission, kind: ResourceKind) -> bool:
        return True

    def sees(self, namespace: str) -> bool:
        return True

    def hidden(self, resources: Iterable[Resource], peer: str) -> None:
        raise AssertionError("nothing is hidden")


class OneTopic(FullAccess):
    """Everything is allowed on one topic, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def may(self, permission: Permission, resource: Resource) -> bool:
        return permission_subject(resource) == topic_resource(self._name)

    def may_on_all(self, permission: Permission, kind: ResourceKind) -> bool:
        return False


EVERYTHING = FullAccess()
