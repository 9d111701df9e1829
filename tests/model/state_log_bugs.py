"""The rules S1 to S7 of the state log, each left out in the product's code: some schedule of the model fails.

`python -m tests.model.state_log_bugs [NAME-PART] [SCHEDULES]` searches; without a bug of that name, all rules hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.model import state_log as model
from tests.simulation import state_log_cluster
from tests.simulation.bug import Change, Planted, body, first, instead, swap
from tests.simulation.planted_bugs import plant

FOLD, OPENING, OWNER = "memq.state_log.fold", "memq.state_log.opening", "memq.state_log.owner"


def bug(module: str, target: str, change: Change) -> tuple[Planted, ...]:
    """Return a bug of one change."""
    return (Planted(target, module, target, change),)


# An owner also ends when an entry counts that it did not publish: this second guard hides some bugs.
_ANY_ENTRY = bug(OWNER, "StateOwner._is_expected", body("return True"))
BUGS: dict[str, tuple[Planted, ...]] = {
    "S1: late entries of a former owner are applied": bug(
        FOLD,
        "StateFold.meet",
        first(
            "if entry.epoch < self.epoch and isinstance(entry.content, StateDecisions):\n"
            "    for name, part in entry.content.decisions:\n"
            "        self.machines[name].apply(part)\n"
        ),
    ),
    "S1: a copy is applied again": bug(
        FOLD, "StateFold._judge", swap("(entry.epoch, entry.number) == expected", "entry.epoch == self.epoch")
    ),
    "S1: an `opened` of the same epoch counts": bug(
        FOLD, "StateFold._judge", swap("entry.epoch > self.epoch", "entry.epoch >= self.epoch")
    ),
    "S2: the own `opened` is not checked": (*bug(OPENING, "check_opened", body("pass")), *_ANY_ENTRY),
    "S2: two openers of one epoch own it": (
        *bug(OPENING, "check_opened", swap("(fold.epoch, fold.nonce) != (epoch, nonce)", "fold.epoch != epoch")),
        *_ANY_ENTRY,
    ),
    "S2: the entries just before the own `opened` are not read": bug(
        OPENING,
        "LogScan.begin_fold",
        instead(
            "fold.meet",
            "for offset, entry, _ in self._entries:\n"
            "    if offset >= fold.offset:\n"
            "        if self.end - 4 < offset and not isinstance(entry.content, OpenedState):\n"
            "            fold.offset += 1\n"
            "        else:\n"
            "            fold.meet(offset, entry)\n",
        ),
    ),
    "S4: an answer goes out at any offset": bug(
        OWNER, "StateOwner.published", first("self.fold.offset = max(self.fold.offset, offset)")
    ),
    "S4: an answer goes out before its entry counts": bug(
        OWNER,
        "StateOwner.failed",
        first(
            "for ticket, _ in self._sealed.tickets if self._sealed else ():\n"
            "    self._settled.append(Settled(ticket, ProposalFate.COUNTS, True))\n"
        ),
    ),
    "S5: a timeout is answered as failed": bug(
        OWNER,
        "StateOwner.failed",
        first(
            "for ticket, _ in self._sealed.tickets if self._sealed else ():\n"
            "    self._settled.append(Settled(ticket, ProposalFate.VOID))\n"
        ),
    ),
    "S5: an owner that is refused is fenced without a read": bug(
        OWNER, "StateOwner.failed", body("self._fence(EpochFencedError('refused'))")
    ),
    "S5: an owner that has lost track says that nothing was done": bug(
        OWNER, "StateOwner.end", swap("ProposalFate.UNKNOWN", "ProposalFate.VOID")
    ),
    "S5: other bytes under the same number": (
        *bug(
            OWNER,
            "StateOwner.next_step",
            first(
                "old = self._sealed\n"
                "if old and self._waiting and not self._unread and isinstance(old.entry.content, StateDecisions):\n"
                "    parts = iter(old.entry.content.decisions)\n"
                "    again = [(ticket, next(parts) if decides else None) for ticket, decides in old.tickets]\n"
                "    self._waiting.extendleft(reversed(again))\n"
                "    self._sealed = None\n"
            ),
        ),
        *_ANY_ENTRY,
    ),
    "S6: a read is answered at once": bug(
        OWNER,
        "StateOwner.propose",
        first(
            "if decision is None:\n"
            "    self._tickets += 1\n"
            "    self._settled.append(Settled(self._tickets, ProposalFate.COUNTS))\n"
            "    return self._tickets\n"
        ),
    ),
    "S6: the proof was handed over before the read came in": bug(
        OWNER,
        "StateOwner.propose",
        first(
            "if decision is None and self._sealed is not None:\n"
            "    self._tickets += 1\n"
            "    self._sealed.tickets += ((self._tickets, False),)\n"
            "    return self._tickets\n"
        ),
    ),
    "S7: the log is trimmed before the snapshot's entry counts": bug(
        OWNER, "StateOwner.name", first("self._trims.append(TrimStep(snapshot.offset, None))")
    ),
    "S7: the log is trimmed up to its end": bug(
        OWNER, "StateOwner._counts", swap("sealed.entry.content.offset", "self.fold.offset")
    ),
    "S7: the last snapshot is deleted before the next one counts": bug(
        OWNER, "StateOwner.name", first("self._trims.append(TrimStep(0, self.fold.snapshot))")
    ),
    "S7: a snapshot has what is on its way": bug(
        OWNER,
        "StateOwner.save",
        first(
            "content = self._sealed.entry.content if self._sealed else None\n"
            "if isinstance(content, StateDecisions):\n"
            "    saved, machine = self.fold.save(), type(self.fold.machines['slots'])()\n"
            "    machine.restore(saved.machines['slots'])\n"
            "    for _, part in content.decisions:\n"
            "        machine.apply(part)\n"
            "    found = SavedState(saved.offset, saved.epoch, saved.number, {'slots': machine.snapshot()})\n"
            "    return iter((found,))\n"
        ),
    ),
    "S7: a snapshot without epoch and number": bug(
        FOLD,
        "StateFold.begin_save",
        swap("(self.offset, self.epoch, self.number)", "(self.offset, 1, 0)"),
    ),
    "S7: a snapshot is believed by a void entry": bug(
        OPENING,
        "LogScan.add",
        swap("(decoded.epoch, number) <= (self.highest_epoch, self._number)", "decoded.epoch < 0"),
    ),
}

SHELL = "memq.state_log.state_log"
SHELL_BUGS: dict[str, tuple[Planted, ...]] = {  # of the shell, which the model does not run
    "S2: the log is read before `opened` is published": bug(
        SHELL,
        "StateLog._load",
        body(
            "scan = await self._scan(0)\n"
            "fold = scan.fold(self._machines, await self._snapshots.get(scan.snapshot) if scan.snapshot else None)\n"
            "fold.offset = await self._publish_opened(opened) + 1\n"
            "fold.epoch, fold.nonce, fold.number = opened.epoch, nonce, 0\n"
            "return StateOwner(fold, SnapshotPace(1.0, 0, self._now()))\n"
        ),
    ),
    "S5: a log that is closed says that nothing was done": bug(
        SHELL, "StateLog.close", swap("owner.end", "owner._fence")
    ),
    "S6: a read of the queue is a proof": bug(
        SHELL,
        "StateLog.fresh",
        body(
            "owner = self._live_owner()\n"
            "scan = await self._scan(0)\n"
            "if scan.highest_epoch > owner.epoch:\n"
            "    raise MovedError('another owner')\n"
            "return owner.epoch\n"
        ),
    ),
    "S7: a snapshot is named that is not stored": bug(
        "memq.state_log.snapshot_store",
        "SnapshotStore.put",
        body(
            "snapshot, parts = encode_snapshot(saved, key)\n"
            "try:\n"
            "    await self._store.put(state_part_key(key, 0), parts, crc32c(parts[0]))\n"
            "finally:\n"
            "    return snapshot\n"
        ),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Leave out one rule while the block runs."""
    with ExitStack() as stack:
        for part in (BUGS | SHELL_BUGS)[name]:
            stack.enter_context(plant(part))
        yield


def first_found(seeds: range, run: Callable[[int], object] = model.run) -> tuple[int, str] | None:
    """Return the first seed of a range that fails, and how; None if none does."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:  # noqa: BLE001 - under a bug the owner may fail in any way
            return seed, str(error) or type(error).__name__
    return None


if __name__ == "__main__":
    part, schedules = [*sys.argv[1:], "", ""][:2]
    count = int(schedules or 1_000)
    for name in [name for name in BUGS | SHELL_BUGS if part in name]:
        runner = model.run if name in BUGS else state_log_cluster.run
        with planted(name):
            print(f"{name}: {first_found(range(count), runner)}", flush=True)
    if not any(part in name for name in BUGS | SHELL_BUGS):
        print(f"all rules: {first_found(range(count))}, {first_found(range(count), state_log_cluster.run)}")
