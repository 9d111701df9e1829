"""Planted bugs of transactions: a rule is left out (T2 to T5, H2, H3)."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, first, swap

TRANSACTIONS = ("transaction",)  # with a database and a checker in seeds 1,004 and 1,012, not in 1,000
MACHINE, COORDINATOR = "memq.transactions.machine", "memq.transactions.coordinator"

TRANSACTION_BUGS = (
    Planted(
        "H2: a commit releases a part of a transaction",
        "memq.holds.machine",
        "HoldMachine.release_lane",
        swap("tuple(hold.block.id for hold in holds)", "tuple(hold.block.id for hold in holds[:1])"),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a transaction is committed after its roll-back was answered",
        MACHINE,
        "TransactionMachine._settle",
        swap("self._holds.drop_lane(lane, decision.now_ms)", "self._holds.release_lane(lane)"),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a producer takes a transaction for rolled back that an operator has committed",
        "memq.client.transactions.core",
        "TransactionalCore._roll_back",
        body(
            "ask = EndTransaction(transaction=self._wire(transaction.number), commit=False)\n"
            "await self._surely(ask, timeout_s)\n"
            "self._settled(transaction, committed=False)\n"
            "return False\n"
        ),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T2: a new instance commits what the former one had open",
        MACHINE,
        "TransactionMachine._begin",
        swap(
            "self._holds.drop_lane(lane_of(known.instance, known.open), decision.now_ms)",
            "self._holds.release_lane(lane_of(known.instance, known.open))",
        ),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "S4: a commit is answered before its decision counts",
        COORDINATOR,
        "TransactionCoordinator.commit",
        body(
            "asyncio.ensure_future(asyncio.gather(self._settle(CommitTransactionDecision(\n"
            "    id_, instance, number, self._clock.wall_ms(), blocks, moves)), return_exceptions=True))\n"
        ),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T5: a commit does not wait until its records are visible",
        COORDINATOR,
        "TransactionCoordinator.until_visible",
        body("return True"),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a new instance rolls back what the former one has prepared",
        MACHINE,
        "TransactionMachine._begin",
        first(
            "for each in list(self.prepared.values()):\n"
            "    if each.id == decision.id:\n"
            "        self._end(each, decision.now_ms, _fenced(decision.id))\n"
        ),
        level="breezy",
        seed=1_004,
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a parked transaction is rolled back",
        COORDINATOR,
        "TransactionCoordinator._ask_about",
        swap(
            "CheckDecision(each.instance, each.number, each.tries + (not park), park)",
            "AbortDecision(each.id, each.instance, each.number, self._clock.wall_ms(), 'was parked') if park"
            " else CheckDecision(each.instance, each.number, each.tries + (not park), park)",
        ),
        level="breezy",
        seed=1_004,
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a stranger's producer group is asked",
        COORDINATOR,
        "TransactionCoordinator.questions",
        swap("each.producer_group == producer_group", "True"),
        level="breezy",
        seed=1_004,
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: the number of questions is lost with a new owner",
        MACHINE,
        "TransactionMachine.restore",
        swap(
            "{each.lane: each for each in saved.prepared}",
            "{each.lane: msgspec.structs.replace(each, tries=0) for each in saved.prepared}",
        ),
        level="breezy",
        seed=1_012,
        aspects=("transaction", "state-log"),
    ),
    Planted(
        "T4: a checker that does not know rolls back",
        "memq.client.transactions.check_back",
        "TransactionChecks._check",
        swap("said is CheckAnswer.UNKNOWN", "False"),
        level="breezy",
        seed=1_004,
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: an exception after the database's commit rolls back",
        "memq.client.transactions.transaction",
        "AsyncTransaction.__aexit__",
        swap("transaction.prepared", "False"),
        level="breezy",
        seed=1_004,
        aspects=TRANSACTIONS,
    ),
    Planted(
        "S9: a restore holds transactions again that targets have",
        "memq.broker.restore.restored_holds",
        "RestoredHolds._in_logs",
        body("return set()"),
        level="calm",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "H3: blocks of one transaction for one partition are released one by one",
        "memq.holds.machine",
        "HoldMachine.release_lane",
        body(
            "for target, holds in self.by_target(lane).items():\n"
            "    for hold in holds:\n"
            "        self._release(Unit(target, self.next_number(target), (hold.block.id,)))\n"
        ),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
    Planted(
        "T4: a late time-out rolls back what is prepared",
        "memq.transactions.machine",
        "TransactionMachine._decide",
        swap("isinstance(decision, AbortDecision) and decision.expired", "False"),
        seed=1_056,
        aspects=("transaction",),
    ),
    Planted(
        "T3: a commit moves no positions",
        MACHINE,
        "TransactionMachine._move",
        body("return None"),
        level="breezy",
        aspects=TRANSACTIONS,
    ),
)
