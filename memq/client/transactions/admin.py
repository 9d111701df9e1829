"""The part of `AsyncAdmin` and `Admin` about transactions: what is open, and its end by an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memq.client.group_admin import AsyncGroupAdmin, GroupAdmin
from memq.protocol.admin_messages import AdminRequest
from memq.protocol.transaction_messages import ListTransactions, SettleTransaction


@dataclass(frozen=True, slots=True)
class ShownTransaction:
    """An open transaction: its producer, its age at its coordinator, and its held blocks by topic."""

    transactional_id: str
    group: str
    open_ms: int
    timeout_ms: int
    blocks: Mapping[str, int]


class AsyncTransactionAdmin(AsyncGroupAdmin):
    """Shows and settles open transactions."""

    async def transactions(self, *, proven: bool = True) -> list[ShownTransaction]:
        """Return the open transactions with held records, by producer.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        found = (await self._ask(AdminRequest(ask=ListTransactions(proven=proven)))).transactions
        return [ShownTransaction(each.name, each.group, each.open_ms, each.timeout_ms, each.blocks) for each in found]

    async def commit_transaction(self, transactional_id: str, group: str = "") -> None:
        """Commit the open transaction of a producer, with the records that are held; no position moves.

        Raises: NotFoundError if none is open.
        """
        await self._settle(transactional_id, group, commit=True)

    async def abort_transaction(self, transactional_id: str, group: str = "") -> None:
        """Roll the open transaction of a producer back. Raises: as `commit_transaction`."""
        await self._settle(transactional_id, group, commit=False)

    async def _settle(self, transactional_id: str, group: str, *, commit: bool) -> None:
        await self._ask(AdminRequest(ask=SettleTransaction(name=transactional_id, group=group, commit=commit)))


class TransactionAdmin(GroupAdmin):
    """The same, blocking."""

    _core: AsyncTransactionAdmin

    def transactions(self, *, proven: bool = True) -> list[ShownTransaction]:
        """Return the open transactions with held records, by producer.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        return self._background.run(self._core.transactions(proven=proven))

    def commit_transaction(self, transactional_id: str, group: str = "") -> None:
        """Commit the open transaction of a producer, with the records that are held; no position moves.

        Raises: NotFoundError if none is open.
        """
        self._background.run(self._core.commit_transaction(transactional_id, group))

    def abort_transaction(self, transactional_id: str, group: str = "") -> None:
        """Roll the open transaction of a producer back. Raises: as `commit_transaction`."""
        self._background.run(self._core.abort_transaction(transactional_id, group))
