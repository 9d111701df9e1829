"""Answers operators' requests about permissions; any broker answers them from the coordinator."""

from __future__ import annotations

from memq.broker.api import Answer, Call
from memq.broker.services import Services
from memq.errors import VersionConflictError
from memq.permissions import Resource, RuleSet, changed_rules, named_kind, named_permission
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.permission_messages import (
    ChangePermissions,
    CheckPermission,
    ListPermissions,
    PermissionAnswer,
)

CHANGE_TRIES = 5  # against other brokers that change the rules at the same time


class PermissionRequests:
    """Lists, changes and tests the rules of the cluster."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def list_rules(self, call: Call[ListPermissions]) -> Answer:
        """Return all rules."""
        found = await self._services.coordinator.rules.read()
        return self._answer(found, rules=list(found.rules))

    async def change(self, call: Call[ChangePermissions]) -> Answer:
        """Add and remove rules, all or none.

        Raises: InvalidRequestError, TooLargeError; VersionConflictError after CHANGE_TRIES.
        """
        keeper, checks = self._services.coordinator.rules, self._services.permissions
        for _ in range(CHANGE_TRIES):
            before = await keeper.read()
            wanted = changed_rules(before, call.ask.add, call.ask.remove)
            stored = before if wanted is before else await keeper.replace(wanted)
            if stored == wanted:
                checks.apply(stored)
                added, removed = set(stored.rules) - set(before.rules), set(before.rules) - set(stored.rules)
                return self._answer(stored, added=sorted(added), removed=sorted(removed))
        raise VersionConflictError("other operators changed the rules at the same time", hint="try again")

    async def test(self, call: Call[CheckPermission]) -> Answer:
        """Return the decision of this broker, by a fresh read of the rules.

        Raises: InvalidRequestError for an unknown permission or kind.
        """
        ask, checks = call.ask, self._services.permissions
        permission, resource = named_permission(ask.permission), Resource(named_kind(ask.kind), ask.name)
        stored = await self._services.coordinator.rules.read()
        checks.apply(stored)
        decided = checks.decision(ask.principal, permission, resource)
        return self._answer(stored, allowed=decided.allowed, rule=decided.rule)

    def _answer(self, stored: RuleSet, **fields: object) -> AdminAnswer:
        enforced = self._services.permissions.enforced
        answer = PermissionAnswer(enforced=enforced, version=stored.version, **fields)  # type: ignore[arg-type]
        return AdminAnswer(permissions=answer)
