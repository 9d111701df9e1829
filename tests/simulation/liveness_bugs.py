"""Planted bugs that let others wait for one sick log; see `tests.simulation.planted`."""

from __future__ import annotations

from tests.simulation.bug import Planted

LIVENESS_BUGS = (
    Planted(
        "one sick log fails a whole poll",
        "memq.broker.group_requests",
        "GroupRequests._poll_entries",
        "if errors and len(errors) == len(found):",
        "if errors:",
        level="calm",
        aspects=("part",),
    ),
    Planted(
        "an opening that hangs holds the place of all others",
        "memq.client.opener",
        "Opener._open_missing",
        'self._tasks.start(self._open_soon(partition, grant, stored.get(partition)), "consumer opens a partition")',
        "await self._open_soon(partition, grant, stored.get(partition))",
        level="calm",
        aspects=("part",),
    ),
)
