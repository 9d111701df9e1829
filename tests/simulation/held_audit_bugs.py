"""Planted bugs of the audit of held records: of its proof, and of what clients and shards say."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, first, swap

AUDITED = ("delay", "transaction", "audit-command")
REPORTED = ("delay", "transaction", "reports")

HELD_AUDIT_BUGS = (
    Planted(
        "a shard counts the records of its last unit only",
        "memq.holds.machine",
        "HoldMachine._release",
        swap("self.totals.get(unit.target, 0) + released.records", "released.records"),
        level="breezy",
        aspects=AUDITED,
    ),
    Planted(
        "pointers do not state how many held records there are, and the audit does not ask",
        "memq.audit.released",
        "ReleaseFacts.meet",
        swap("stated if known and named else None", "None"),
        level="breezy",
        aspects=AUDITED,
    ),
    Planted(
        "a released record is left out after its unit was settled",
        "memq.broker.holds.taking",
        "_append",
        first("found = found[:-1] or found"),
        level="breezy",
        aspects=AUDITED,
    ),
    Planted(
        "the live audit calls a cancelled record lost",
        "memq.audit.live.questions.held_minutes",
        "HeldAudit.take_reported",
        swap("self._of_minute(False, span.minute).ended += span.records", "pass"),
        level="breezy",
        aspects=REPORTED,
    ),
    Planted(
        "a producer reports a roll-back as a commit",
        "memq.client.transactions.open_transaction",
        "OpenTransaction._note_end",
        first("stage = stage and 'committed'"),
        level="breezy",
        aspects=REPORTED,
    ),
    Planted(
        "the live audit counts a unit that comes again",
        "memq.audit.live.questions.held_minutes",
        "HeldAudit.take_pointer",
        swap("entry.last_sequence <= known[entry.producer].number", "False"),
        level="breezy",
        aspects=REPORTED,
    ),
    Planted(
        "the live audit believes that a unit has all of its records",
        "memq.audit.live.questions.held_minutes",
        "HeldAudit.settle",
        body("self._open.clear()"),
        level="breezy",
        aspects=REPORTED,
    ),
)
