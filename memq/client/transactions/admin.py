"""The part of `AsyncAdmin` and `Admin` about transactions: what is open, and its end by an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memq.client.queue.pop_admin import AsyncPopAdmin, PopAdmin
from memq.protocol.admin_messages import AdminRequest
from memq.protocol.transaction_messages import ListTransactions, SettleTransaction


@dataclass(frozen=True, slots=True)
class ShownTransaction:
    """An undecided transaction: its producer, its age at its coordinator, and its held blocks by topic.

    `id` is unique. A prepared one has a producer group, which was asked `tries` times. A parked one waits for an
    operator.
    """

    transactional_id: str
    group: str
    open_ms: int
    timeout_ms: int
    blocks: Mapping[str, int]
    id: str = ""
    producer_group: str = ""
    tries: int = 0
    parked: bool = False

    @property
    def state(self) -> str:
        """One of "open", "prepared", "asked" and "parked"."""
        if self.parked:
            return "parked"
        return "asked" if self.tries else "prepared" if self.producer_group else "open"


class AsyncTransactionAdmin(AsyncPopAdmin):
    """Shows and settles undecided transactions."""

    async def transactions(self, *, proven: bool = True) -> list[ShownTransaction]:
        """Return the undecided transactions with held records, by producer.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        found = (await self._ask(AdminRequest(ask=ListTransactions(proven=proven)))).transactions
        return [
            ShownTransaction(
                id=f"{each.instance}.{each.number}",
                transactional_id=each.name,
                group=each.group,
                open_ms=each.open_ms,
                timeout_ms=each.timeout_ms,
                blocks=each.blocks,
                producer_group=each.producer_group,
                tries=each.tries,
                parked=each.parked,
            )
            for each in found
        ]

    async def commit_transaction(self, transactional_id: str, group: str = "", transaction: str = "") -> None:
        """Commit the undecided transaction of a producer, with the records that are held; no position moves.

        `transaction`, the `id` of a shown one, names one of several. Raises: NotFoundError if none is undecided;
        InvalidRequestError for more than one without it.
        """
        await self._settle(transactional_id, group, transaction, commit=True)

    async def abort_transaction(self, transactional_id: str, group: str = "", transaction: str = "") -> None:
        """Roll the undecided transaction of a producer back. See `commit_transaction`."""
        await self._settle(transactional_id, group, transaction, commit=False)

    async def _settle(self, transactional_id: str, group: str, transaction: str, *, commit: bool) -> None:
        ask = SettleTransaction(name=transactional_id, group=group, commit=commit, transaction=transaction)
        await self._ask(AdminRequest(ask=ask))


class TransactionAdmin(PopAdmin):
    """The same, blocking."""

    _core: AsyncTransactionAdmin

    def transactions(self, *, proven: bool = True) -> list[ShownTransaction]:
        """Return the undecided transactions with held records, by producer.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        return self._background.run(self._core.transactions(proven=proven))

    def commit_transaction(self, transactional_id: str, group: str = "", transaction: str = "") -> None:
        """Commit the undecided transaction of a producer, with the records that are held; no position moves.

        `transaction`, the `id` of a shown one, names one of several. Raises: NotFoundError if none is undecided;
        InvalidRequestError for more than one without it.
        """
        self._background.run(self._core.commit_transaction(transactional_id, group, transaction))

    def abort_transaction(self, transactional_id: str, group: str = "", transaction: str = "") -> None:
        """Roll the undecided transaction of a producer back. See `commit_transaction`."""
        self._background.run(self._core.abort_transaction(transactional_id, group, transaction))
