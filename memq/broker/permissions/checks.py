"""Decides on requests by the rules of the coordinator, which each broker has in memory.

A broker reads the rules at its start and every READ_INTERVAL_S. While they can't be read, it uses the last ones. Before
the first read it refuses requests with NotReadyError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from memq.errors import DeniedError, MemqError, NotReadyError
from memq.governor import RuleKeeper
from memq.patterns import EVERY, matches
from memq.permissions import (
    AccessDecision,
    Permission,
    Resource,
    ResourceKind,
    RuleIndex,
    RuleSet,
    grant_command,
    permission_subject,
    sees_namespace,
    topic_resource,
)
from memq.quotas import QuotaRule
from memq.runtime.logs import EventLog
from memq.settings import BrokerSettings

READ_INTERVAL_S = 2.0  # a change is effective after this and the time of one read
READ_S_MAX = 2.0  # time-out for one read of the rules
CACHED_MAX = 100_000  # decisions in memory
CACHED_CHARS_MAX = 500  # of a name: that of a pop group has two names. Requests may name 1 MiB, which nothing has
SHOWN_CHARS_MAX = 500  # of a name in a refusal
NOT_READY_MS = 500
HIDDEN_LOGGED_MAX = 5  # names in one line of the log
_ALLOWED = AccessDecision(True)
Needs = Iterable[tuple[Permission, Resource]]


class PrincipalAccess(Protocol):
    """The permissions of one principal."""

    def may(self, permission: Permission, resource: Resource) -> bool:
        """Whether a permission on one resource is allowed."""
        ...

    def may_on_all(self, permission: Permission, kind: ResourceKind) -> bool:
        """Whether a permission is allowed on each resource of a kind."""
        ...

    def sees(self, namespace: str) -> bool:
        """Whether the principal has a permission in a namespace."""
        ...

    def hidden(self, resources: Iterable[Resource], peer: str) -> None:
        """Log that an answer hides resources that the request named."""
        ...


class PermissionChecks:
    """Decides on requests. It calls `changed` after each change of the rules."""

    def __init__(self, settings: BrokerSettings, keeper: RuleKeeper, events: EventLog) -> None:
        self.enforced = settings.permissions
        self.changed: Callable[[], None] = lambda: None
        self.denied_requests: dict[str, int] = {}  # by operation
        self.version = 0  # of the decisions: another one after each change of rules
        self._free = [*_names(settings.superusers), *_names(settings.broker_principals)]
        self.peers = _names(settings.broker_principals)
        self._keeper = keeper
        self._events = events
        self._rules: RuleSet | None = None
        self._index = RuleIndex(())
        self._cache: dict[tuple[str, Permission, Resource], AccessDecision] = {}
        self._unread = events.outage("permissions-unread", "permissions-read")

    # ---- decisions -------------------------------------------------------------------------------

    def decision(self, principal: str, permission: Permission, resource: Resource) -> AccessDecision:
        """Decide on one resource, also if permissions are not enforced.

        Raises: NotReadyError before the rules were read.
        """
        subject = permission_subject(resource)
        key = principal, permission, subject
        found = self._cache.get(key)
        if found is None:
            free = self._is_free(principal, permission)
            found = _ALLOWED if free else self._decide(principal, permission, subject)
            if len(self._cache) >= CACHED_MAX:
                self._cache.clear()
            if len(subject.name) <= CACHED_CHARS_MAX:
                self._cache[key] = found
        return found

    def _decide(self, principal: str, permission: Permission, subject: Resource) -> AccessDecision:
        """Decide by the rules; an object of unknown topics needs the permission on all of them."""
        self.known()
        if subject.kind is ResourceKind.OBJECT:
            return self._index.decide_on_all(principal, permission, ResourceKind.TOPIC)
        return self._index.decide(principal, permission, subject)

    def may(self, principal: str, permission: Permission, resource: Resource) -> bool:
        """Whether a principal has a permission on a resource. Raises: NotReadyError."""
        return not self.enforced or self.decision(principal, permission, resource).allowed

    def may_on_all(self, principal: str, permission: Permission, kind: ResourceKind) -> bool:
        """Whether a principal has a permission on each resource of a kind. Raises: NotReadyError."""
        if not self.enforced or self._is_free(principal, permission):
            return True
        self.known()
        return self._index.decide_on_all(principal, permission, kind).allowed

    def sees(self, principal: str, namespace: str) -> bool:
        """Whether a principal has a permission in a namespace. Raises: NotReadyError."""
        free = not self.enforced or self._is_free(principal, Permission.DESCRIBE)
        return free or sees_namespace(self.known().rules, principal, namespace)

    def check(self, principal: str, needs: Needs, operation: str, peer: str) -> None:
        """Raise DeniedError, with an event, when a permission is not allowed; NotReadyError."""
        if not self.enforced:
            return
        for permission, resource in needs:
            decided = self.decision(principal, permission, resource)
            if not decided.allowed:
                raise self.denied(principal, permission, resource, operation, peer, decided)

    def denied(
        self,
        principal: str,
        permission: Permission,
        resource: Resource,
        operation: str,
        peer: str,
        decided: AccessDecision,
    ) -> DeniedError:
        """Note a refusal in log and metrics, and return its error."""
        kind, name = permission_subject(resource)
        subject = Resource(kind, name if len(name) <= SHOWN_CHARS_MAX else f"{name[:SHOWN_CHARS_MAX]}…")
        self.denied_requests[operation] = self.denied_requests.get(operation, 0) + 1
        text = f"principal '{principal}' may not {permission.value} {subject}"
        cause = f"the rule '{decided.rule}' denies it" if decided.rule else "no rule allows it"
        self._events.warning(
            "permission-denied", f"{text}: {cause}; {operation} from {peer}", source=_source(principal, peer)
        )
        granted = topic_resource(EVERY) if subject.kind is ResourceKind.OBJECT else subject
        command = grant_command(principal, permission, granted)
        if decided.rule:
            return DeniedError(f"{text}: a rule denies it", hint="ask an operator; memq acl list shows the rules")
        return DeniedError(f"{text}: no rule allows it", hint=f"an operator allows it with: {command}")

    def is_broker(self, principal: str) -> bool | None:
        """Whether the settings name a principal as one of a broker; None when they name no brokers."""
        return any(matches(pattern, principal) for pattern in self.peers) if self.peers else None

    def hidden(self, principal: str, resources: Iterable[Resource], peer: str) -> None:
        """Log that an answer leaves out resources that a request named: its client can't see why."""
        named = ", ".join(map(str, list(resources)[:HIDDEN_LOGGED_MAX]))
        self._events.warning(
            "permission-hidden",
            f"principal '{principal}' may not describe {named}, and asked for it; from {peer}",
            source=_source(principal, peer),
        )

    def access_of(self, principal: str) -> PrincipalAccess:
        """Return the permissions of a principal."""
        return _AccessOf(self, principal)

    def may_be_broker(self, principal: str) -> bool:
        """Whether a principal that says it is a broker may be one."""
        return not self.enforced or self._is_free(principal, Permission.PEER)

    def _is_free(self, principal: str, permission: Permission) -> bool:
        """Whether a principal is allowed a permission by the settings; only brokers are allowed to be peers."""
        patterns = self.peers if permission is Permission.PEER else self._free
        return any(matches(pattern, principal) for pattern in patterns)

    def known(self) -> RuleSet:
        """Return the rules and users. Raises: NotReadyError before they were read."""
        if self._rules is None:
            raise NotReadyError("the broker has not read the permissions yet", retry_after_ms=NOT_READY_MS)
        return self._rules

    @property
    def quotas(self) -> tuple[QuotaRule, ...]:
        """The quotas that were read with the rules."""
        return () if self._rules is None else self._rules.quotas

    # ---- rules -----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read the rules. Raises: as `RuleKeeper.read`; TimeoutError."""
        async with asyncio.timeout(READ_S_MAX):
            found = await self._keeper.read()
            known = self._rules
            if known is not None and found != known and found.version <= known.version:
                # A stale or wrong answer would allow denied requests; a restored coordinator gives it twice.
                again = await self._keeper.read()
                if again != found:
                    return
        self.apply(found)

    def apply(self, rules: RuleSet) -> None:
        """Decide by these rules from now on."""
        if rules == self._rules:
            return
        self._rules, self._index = rules, RuleIndex(rules.rules)
        self._cache.clear()
        self.version += 1
        self._events.info(
            "permissions-changed", f"{len(rules.rules)} rules, {len(rules.quotas)} quotas, version {rules.version}"
        )
        self.changed()

    async def follow(self) -> None:
        """Read the rules every READ_INTERVAL_S, until cancelled."""
        while True:
            try:
                await self.refresh()
            except (MemqError, TimeoutError) as error:
                self._unread.failed(f"{error!r}; the rules that were read before apply")
            else:
                self._unread.passed()
            await asyncio.sleep(READ_INTERVAL_S)


class _AccessOf:
    """See `PrincipalAccess`."""

    def __init__(self, checks: PermissionChecks, principal: str) -> None:
        self._checks = checks
        self._principal = principal

    def may(self, permission: Permission, resource: Resource) -> bool:
        return self._checks.may(self._principal, permission, resource)

    def may_on_all(self, permission: Permission, kind: ResourceKind) -> bool:
        return self._checks.may_on_all(self._principal, permission, kind)

    def sees(self, namespace: str) -> bool:
        return self._checks.sees(self._principal, namespace)

    def hidden(self, resources: Iterable[Resource], peer: str) -> None:
        self._checks.hidden(self._principal, resources, peer)


def _names(setting: str) -> list[str]:
    """Return the principals in a setting, which separates them by commas."""
    return [name for each in setting.split(",") if (name := each.strip())]


def _source(principal: str, peer: str) -> str:
    """Return the source of refusals: a principal at an address."""
    return f"{principal} {peer.rpartition(':')[0]}"
