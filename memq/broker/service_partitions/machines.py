"""The machines that share a state log: groups, held records, transactions, queues."""

from __future__ import annotations

from memq.groups.machine import GROUPS_MACHINE, GroupMachine
from memq.holds.decisions import HOLDS_MACHINE
from memq.holds.machine import HoldMachine
from memq.queues.decisions import QUEUES_MACHINE
from memq.queues.machine import QueueMachine
from memq.state_log import StateMachine
from memq.transactions.machine import TRANSACTIONS_MACHINE, TransactionMachine


class ServiceMachines:
    """The machines of one state log, with empty states.

    They share state: transactions change groups and holds.
    """

    def __init__(self) -> None:
        self.groups = GroupMachine()
        self.holds = HoldMachine()
        self.transactions = TransactionMachine(self.groups, self.holds)
        self.queues = QueueMachine()

    def by_name(self) -> dict[str, StateMachine]:
        """Return them by their names in the log."""
        return {
            GROUPS_MACHINE: self.groups,
            HOLDS_MACHINE: self.holds,
            TRANSACTIONS_MACHINE: self.transactions,
            QUEUES_MACHINE: self.queues,
        }
