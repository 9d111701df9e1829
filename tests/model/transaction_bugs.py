"""The rules T1 to T5 of transactions, each left out in the product's code: some schedule of the model fails.

`python -m tests.model.transaction_bugs [NAME-PART] [SCHEDULES]` searches; without a bug of that name, all rules hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.model.transactions import run
from tests.simulation.bug import Change, Planted, first, swap
from tests.simulation.planted_bugs import plant

MACHINE = "memq.transactions.machine"


def bug(target: str, change: Change, module: str = MACHINE) -> Planted:
    """Return a bug of one change."""
    return Planted(target, module, target, change)


BUGS: dict[str, Planted] = {
    "T1: positions move before the records are judged": bug(
        "TransactionMachine._settle",
        swap(
            "self._refusal(decision, lane) or self._move(decision)",
            "self._move(decision) or self._refusal(decision, lane)",
        ),
    ),
    "T1: records are released, and positions do not move": bug(
        "TransactionMachine._settle",
        swap("self._refusal(decision, lane) or self._move(decision)", "self._refusal(decision, lane)"),
    ),
    "T2: what an older instance has open stays": bug(
        "TransactionMachine._begin",
        swap("self._holds.drop_lane(lane_of(known.instance, known.open), decision.now_ms)", "pass"),
    ),
    "T2: an older instance commits": bug(
        "TransactionMachine._present", swap("known.instance != decision.instance", "known.instance < 0")
    ),
    "T2: a late request of an older instance begins again": bug(
        "TransactionMachine._begin", swap("each.token == decision.token", "each.token < 0")
    ),
    "T2: the same instance begins twice": bug(
        "TransactionMachine._begin", swap("decision.token == known.token", "decision.token < 0")
    ),
    "T3: the held blocks are not counted": bug(
        "TransactionMachine._refusal", swap("decision.blocks not in (ANY_BLOCKS, count)", "count < 0")
    ),
    "T3: former positions are not compared": bug(
        "TransactionMachine._move", swap("found != expected", "expected == 0")
    ),
    "T3: any member moves positions": bug(
        "TransactionMachine._move",
        swap("stored.membership.check_commit(moves.member, moves.generation, after)", "pass"),
    ),
    "T3: a settled number is settled again": bug(
        "TransactionMachine.apply", swap("decision.number > known.settled.number", "decision.number >= 1")
    ),
    "T3: a lower number gets the last answer": bug(
        "TransactionMachine.apply", swap("decision.number < known.settled.number", "decision.number < 0")
    ),
    "T3: a refused number is not burned": bug(
        "TransactionMachine._settle",
        swap("_aborted(decision.number, error)", "_aborted(decision.number - 1, error)"),
    ),
    "T4: a transaction that was rolled back takes blocks": bug(
        "TransactionMachine._enter", swap("int(number) <= known.settled.number", "int(number) < 0")
    ),
    "T3: the blocks of a prepared transaction are not counted": bug(
        "TransactionMachine._prepare", swap("self._refusal(decision, lane)", "None")
    ),
    "T4: a prepared transaction is still open": bug(
        "TransactionMachine._prepare", swap("known.open = 0", "known.open = decision.number")
    ),
    "T4: a late time-out rolls back what is prepared": bug(
        "TransactionMachine._decide", swap("isinstance(decision, AbortDecision) and decision.expired", "False")
    ),
    "T4: a new instance rolls back what the former one has prepared": bug(
        "TransactionMachine._begin",
        first(
            "for each in list(self.prepared.values()):\n"
            "    if each.id == decision.id and each.tries == 0:\n"
            "        self._end(each, decision.now_ms, _fenced(decision.id))\n"
        ),
    ),
    "T4: an answer about a finished transaction gets what it says": bug(
        "TransactionMachine.apply",
        swap(
            "self._ended[lane]",
            "SettledTransaction(decision.number, not isinstance(decision, (AbortDecision, AnswerDecision)))",
        ),
    ),
    "T4: a stranger's group decides": bug(
        "TransactionMachine._decide", swap("decision.producer_group != found.producer_group", "False")
    ),
    "T4: the number of questions is lost with a snapshot": bug(
        "TransactionMachine.restore",
        swap(
            "{each.lane: each for each in saved.prepared}",
            "{each.lane: msgspec.structs.replace(each, tries=0) for each in saved.prepared}",
        ),
    ),
    "T4: a snapshot has no prepared transactions": bug(
        "TransactionMachine.restore", swap("{each.lane: each for each in saved.prepared}", "{}")
    ),
    "T5: more than one pointer's blocks for a partition": bug(
        "TransactionMachine._refusal", swap("len(holds) > TARGET_BLOCKS_MAX", "len(holds) < 0")
    ),
    "H2: a decision releases a part of a lane": bug(
        "HoldMachine.by_target",
        swap("self.lanes.get(lane, ())", "list(self.lanes.get(lane, ()))[:3]"),
        "memq.holds.machine",
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for the time of the context."""
    with plant(BUGS[name]):
        yield


def first_found(seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed whose schedule breaks a promise, and the promise."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:  # noqa: BLE001 - under a bug the machine may fail in any way
            return seed, str(error) or type(error).__name__
    return None


def main(part: str, schedules: int) -> None:
    """Search."""
    for name in [each for each in BUGS if part in each] or [""]:
        if not name:
            print("all rules:", first_found(range(schedules)))
            continue
        with planted(name):
            print(f"{name}: {first_found(range(schedules))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else 2_000)
