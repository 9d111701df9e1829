"""The part of `AsyncAdmin` and `Admin` about rules: permissions, quotas, users and namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memq.client.transactions.admin import AsyncTransactionAdmin, TransactionAdmin
from memq.errors import UnsupportedVersionError
from memq.namespaces import Namespace, absent_namespace, check_namespace
from memq.permissions import AccessRule, check_rule
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.namespace_messages import ChangeNamespaces, ListNamespaces, NamespaceAnswer, NamespaceUse
from memq.protocol.permission_messages import (
    ChangePermissions,
    ChangeUsers,
    CheckPermission,
    ListPermissions,
    ListUsers,
    PermissionAnswer,
)
from memq.protocol.quota_messages import ChangeQuotas, ListQuotas, QuotaAnswer
from memq.quotas import QuotaRule, check_quota
from memq.scram import SALT_BYTES, credential_of
from memq.topic import check_name

PermissionAsk = ListPermissions | ChangePermissions | CheckPermission | ListUsers | ChangeUsers


@dataclass(frozen=True, slots=True)
class ChangedPermissions:
    """The rules that a change added and removed. `enforced`: the broker that answered checks permissions."""

    added: tuple[AccessRule, ...]
    removed: tuple[AccessRule, ...]
    enforced: bool


@dataclass(frozen=True, slots=True)
class PermissionDecision:
    """Whether a request would be allowed, and the rule that decided, None without one.

    Superusers and brokers are allowed without a rule.
    """

    allowed: bool
    rule: AccessRule | None
    enforced: bool


@dataclass(frozen=True, slots=True)
class ChangedQuotas:
    """The quotas that a change set and removed. `enforced`: the broker that answered applies quotas."""

    put: tuple[QuotaRule, ...]
    removed: tuple[QuotaRule, ...]
    enforced: bool


@dataclass(frozen=True, slots=True)
class ChangedNamespaces:
    """The namespaces that a change has set, and the names of those that it removed."""

    put: tuple[Namespace, ...]
    removed: tuple[str, ...]


class AsyncPermissionAdmin(AsyncTransactionAdmin):
    """Shows and changes the rules of permissions, quotas, users and namespaces."""

    async def permissions(self) -> list[AccessRule]:
        """Return all rules, in order. Raises: DeniedError."""
        return (await self._about_permissions(ListPermissions())).rules

    async def change_permissions(
        self, *, add: Sequence[AccessRule] = (), remove: Sequence[AccessRule] = ()
    ) -> ChangedPermissions:
        """Add and remove rules, all or none. All brokers know them within 5 s.

        Raises: InvalidRequestError for a rule that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        ask = ChangePermissions(add=[check_rule(rule) for rule in add], remove=list(remove))
        answer = await self._about_permissions(ask)
        return ChangedPermissions(tuple(answer.added), tuple(answer.removed), answer.enforced)

    async def test_permission(self, principal: str, permission: str, kind: str, name: str = "") -> PermissionDecision:
        """Return whether a principal has a permission on a resource, by the rules of now.

        Raises: InvalidRequestError for an unknown permission or kind; DeniedError.
        """
        ask = CheckPermission(principal=principal, permission=permission, kind=kind, name=name)
        answer = await self._about_permissions(ask)
        return PermissionDecision(answer.allowed, answer.rule, answer.enforced)

    async def quotas(self) -> list[QuotaRule]:
        """Return all quotas, in order. Raises: DeniedError."""
        return (await self._about_quotas(ListQuotas())).quotas

    async def change_quotas(self, *, put: Sequence[QuotaRule] = (), remove: Sequence[QuotaRule] = ()) -> ChangedQuotas:
        """Set and remove quotas, all or none. All brokers know them within 5 s.

        Kind and name name the quotas in `remove`.
        Raises: InvalidRequestError for a quota that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        answer = await self._about_quotas(ChangeQuotas(put=[check_quota(each) for each in put], remove=list(remove)))
        return ChangedQuotas(tuple(answer.put), tuple(answer.removed), answer.enforced)

    async def _about_quotas(self, ask: ListQuotas | ChangeQuotas) -> QuotaAnswer:
        return quotas_in(await self._ask(AdminRequest(ask=ask)))

    async def namespaces(self) -> list[NamespaceUse]:
        """Return the namespaces, set or with topics, in which the principal has a permission."""
        return (await self._about_namespaces(ListNamespaces())).uses

    async def namespace(self, name: str) -> NamespaceUse:
        """Return one namespace. Raises: NotFoundError, also when the principal may not see it."""
        found = (await self._about_namespaces(ListNamespaces(name=check_name(name, "namespace")))).uses
        if not found:
            raise absent_namespace(name)
        return found[0]

    async def change_namespaces(
        self, *, put: Sequence[Namespace] = (), remove: Sequence[str] = ()
    ) -> ChangedNamespaces:
        """Set and remove defaults and limits of namespaces, all or none.

        Topics that exist keep their settings.
        Raises: InvalidRequestError for a namespace that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        ask = ChangeNamespaces(put=[check_namespace(each) for each in put], remove=list(remove))
        answer = await self._about_namespaces(ask)
        return ChangedNamespaces(tuple(answer.put), tuple(answer.removed))

    async def _about_namespaces(self, ask: ListNamespaces | ChangeNamespaces) -> NamespaceAnswer:
        answer = (await self._ask(AdminRequest(ask=ask))).namespaces
        if not isinstance(answer, NamespaceAnswer):
            raise UnsupportedVersionError("the broker answered without namespaces", hint="upgrade the broker")
        return answer

    async def users(self) -> list[str]:
        """Return the names of all users with a password. Raises: DeniedError."""
        return (await self._about_permissions(ListUsers())).users

    async def put_user(self, user: str, password: str) -> None:
        """Add a user, or give it another password. The broker gets no password, but what checks one.

        All brokers know it within 5 s, and close connections that logged in with another password.
        Raises: InvalidRequestError for a bad name or password; DeniedError.
        """
        credential = credential_of(user, password, self._runtime.random.randbytes(SALT_BYTES))
        await self._about_permissions(ChangeUsers(put=[credential]))

    async def remove_user(self, user: str) -> None:
        """Remove a user, if it exists. Raises: DeniedError."""
        await self._about_permissions(ChangeUsers(remove=[user]))

    async def _about_permissions(self, ask: PermissionAsk) -> PermissionAnswer:
        answer = (await self._ask(AdminRequest(ask=ask))).permissions
        if not isinstance(answer, PermissionAnswer):
            raise UnsupportedVersionError("the broker answered without permissions", hint="upgrade the broker")
        return answer


def quotas_in(answer: AdminAnswer) -> QuotaAnswer:
    """Return an answer about quotas. Raises: UnsupportedVersionError from a broker that has none."""
    if not isinstance(answer.quotas, QuotaAnswer):
        raise UnsupportedVersionError("the broker answered without quotas", hint="upgrade the broker")
    return answer.quotas


class PermissionAdmin(TransactionAdmin):
    """The same, blocking."""

    _core: AsyncPermissionAdmin

    def permissions(self) -> list[AccessRule]:
        """Return all rules, in order. Raises: DeniedError."""
        return self._background.run(self._core.permissions())

    def change_permissions(
        self, *, add: Sequence[AccessRule] = (), remove: Sequence[AccessRule] = ()
    ) -> ChangedPermissions:
        """Add and remove rules, all or none. All brokers know them within 5 s.

        Raises: InvalidRequestError for a rule that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        return self._background.run(self._core.change_permissions(add=add, remove=remove))

    def test_permission(self, principal: str, permission: str, kind: str, name: str = "") -> PermissionDecision:
        """Return whether a principal has a permission on a resource, by the rules of now.

        Raises: InvalidRequestError for an unknown permission or kind; DeniedError.
        """
        return self._background.run(self._core.test_permission(principal, permission, kind, name))

    def quotas(self) -> list[QuotaRule]:
        """Return all quotas, in order. Raises: DeniedError."""
        return self._background.run(self._core.quotas())

    def change_quotas(self, *, put: Sequence[QuotaRule] = (), remove: Sequence[QuotaRule] = ()) -> ChangedQuotas:
        """Set and remove quotas, all or none. All brokers know them within 5 s.

        Kind and name name the quotas in `remove`.
        Raises: InvalidRequestError for a quota that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        return self._background.run(self._core.change_quotas(put=put, remove=remove))

    def namespaces(self) -> list[NamespaceUse]:
        """Return the namespaces, set or with topics, in which the principal has a permission."""
        return self._background.run(self._core.namespaces())

    def namespace(self, name: str) -> NamespaceUse:
        """Return one namespace. Raises: NotFoundError, also when the principal may not see it."""
        return self._background.run(self._core.namespace(name))

    def change_namespaces(self, *, put: Sequence[Namespace] = (), remove: Sequence[str] = ()) -> ChangedNamespaces:
        """Set and remove defaults and limits of namespaces, all or none.

        Topics that exist keep their settings.
        Raises: InvalidRequestError for a namespace that is not sound; DeniedError; VersionConflictError; TooLargeError.
        """
        return self._background.run(self._core.change_namespaces(put=put, remove=remove))

    def users(self) -> list[str]:
        """Return the names of all users with a password. Raises: DeniedError."""
        return self._background.run(self._core.users())

    def put_user(self, user: str, password: str) -> None:
        """Add a user, or give it another password. The broker gets no password, but what checks one.

        All brokers know it within 5 s, and close connections that logged in with another password.
        Raises: InvalidRequestError for a bad name or password; DeniedError.
        """
        self._background.run(self._core.put_user(user, password))

    def remove_user(self, user: str) -> None:
        """Remove a user, if it exists. Raises: DeniedError."""
        self._background.run(self._core.remove_user(user))
