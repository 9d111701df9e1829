"""Answers operators' requests about permissions; any broker answers them from the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from memq.broker.api import Answer, Call
from memq.broker.services import Services
from memq.errors import InvalidRequestError, VersionConflictError
from memq.patterns import matches
from memq.permissions import Resource, RuleSet, changed_rules, changed_users, named_kind, named_permission
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.permission_messages import (
    ChangePermissions,
    ChangeUsers,
    CheckPermission,
    ListPermissions,
    ListUsers,
    PermissionAnswer,
)

DECOY_SECRET_BYTES = 32
CHANGE_TRIES = 5  # against other brokers that change the rules at the same time


async def changed_at_coordinator(services: Services, changed: Callable[[RuleSet], RuleSet]) -> tuple[RuleSet, RuleSet]:
    """Change the rules of the cluster; return them before and after. This broker applies them.

    Raises: as `changed`; VersionConflictError after CHANGE_TRIES.
    """
    keeper = services.coordinator.rules
    for _ in range(CHANGE_TRIES):
        before = await keeper.read()
        wanted = changed(before)
        stored = before if wanted is before else await keeper.replace(wanted)
        if stored == wanted:
            services.permissions.apply(stored)
            return before, stored
    raise VersionConflictError("other operators changed the rules at the same time", hint="try again")


class PermissionRequests:
    """Shows, changes and tries the rules of the cluster."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def list_rules(self, call: Call[ListPermissions]) -> Answer:
        """Return all rules."""
        found = await self._services.coordinator.rules.read()
        return self._answer(found, rules=list(found.rules))

    async def change(self, call: Call[ChangePermissions]) -> Answer:
        """Add and remove rules, all or none.

        Raises: InvalidRequestError, TooLargeError; as `changed_at_coordinator`.
        """
        ask = call.ask

        def changed(stored: RuleSet) -> RuleSet:
            return changed_rules(stored, ask.add, ask.remove)

        before, stored = await changed_at_coordinator(self._services, changed)
        added, removed = set(stored.rules) - set(before.rules), set(before.rules) - set(stored.rules)
        return self._answer(stored, added=sorted(added), removed=sorted(removed))

    async def list_users(self, call: Call[ListUsers]) -> Answer:
        """Return the names of all users."""
        found = await self._services.coordinator.rules.read()
        return self._answer(found, users=[each.user for each in found.users])

    async def change_users(self, call: Call[ChangeUsers]) -> Answer:
        """Add, replace and remove users, all or none, and return the names of all.

        Raises: as `change`; InvalidRequestError for a name of brokers, which have no passwords.
        """
        for each in call.ask.put:
            if any(matches(pattern, each.user) for pattern in self._services.permissions.peers):
                raise InvalidRequestError(
                    f"user '{each.user[:60]}' has a name of broker_principals", hint="brokers have certificates"
                )
        decoys = self._services.runtime.random.randbytes(DECOY_SECRET_BYTES).hex()

        def changed(stored: RuleSet) -> RuleSet:
            return changed_users(stored, call.ask.put, call.ask.remove, decoys)

        _, stored = await changed_at_coordinator(self._services, changed)
        return self._answer(stored, users=[each.user for each in stored.users])

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
