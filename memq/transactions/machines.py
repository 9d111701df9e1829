"""The machines of a service partition, which share state: transactions change groups and holds."""

from __future__ import annotations

from memq.groups.coordinator import MACHINE as GROUPS
from memq.groups.machine import GroupMachine
from memq.holds.machine import MACHINE as HOLDS
from memq.holds.machine import HoldMachine
from memq.state_log import StateMachine
from memq.transactions.machine import MACHINE, TransactionMachine


class ServiceMachines:
    """The machines of one state log, with empty states."""

    def __init__(self) -> None:
        self.groups = GroupMachine()
        self.holds = HoldMachine()
        self.transactions = TransactionMachine(self.groups, self.holds)

    def by_name(self) -> dict[str, StateMachine]:
        """Return them by their names in the log."""
        return {GROUPS: self.groups, HOLDS: self.holds, MACHINE: self.transactions}


def service_machines() -> dict[str, StateMachine]:
    """Return new machines of a state log, by name."""
    return ServiceMachines().by_name()
