"""Planted bugs of staged parts of transactions (H2, H4, T3)."""

from __future__ import annotations

from tests.simulation.bug import Planted, body

PARTS = ("transaction", "parts")
MACHINE, STAGING = "memq.holds.machine", "memq.client.transactions.staging"

PART_BUGS = (
    Planted(
        "H2: a roll-back releases the staged parts of a transaction",
        MACHINE,
        "HoldMachine.drop_lane",
        body(
            "for hold in list(self.lanes.get(lane, ())):\n"
            "    known = self.open[hold]\n"
            "    if known.is_staged:\n"
            "        self._release(Unit(known.target, self.next_number(known.target), (hold,)))\n"
            "    else:\n"
            "        self._drop(hold, None, now_ms)\n"
        ),
        level="breezy",
        aspects=PARTS,
    ),
    Planted(
        "T3: a part of a transaction is held whose object the store has refused",
        STAGING,
        "PartStager._put",
        body(
            "try:\n"
            "    await self._store().put(key, buffers, checksum)\n"
            "except (ObjectExistsError, RetryableError):\n"
            "    return\n"
        ),
        level="breezy",
        seed=1_002,
        aspects=PARTS,
    ),
    Planted(
        "H4: a target passes over a staged part",
        "memq.broker.holds.staged_parts",
        "_publish",
        body("return"),
        level="breezy",
        aspects=PARTS,
    ),
)
