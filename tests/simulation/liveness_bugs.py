"""Planted bugs that let others wait for one sick log; see `tests.simulation.planted`."""

from __future__ import annotations

from tests.simulation.bug import Planted

LIVENESS_BUGS = (
    Planted(
        "one sick log fails a whole poll",
        "memq.broker.api.group_requests",
        "GroupRequests.poll_entries",
        "if errors and len(errors) == len(found):",
        "if errors:",
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "one sick log makes a consumer poll all again",
        "memq.client.consumer.fetch.polling",
        "Polling._take_common",
        "self._failing[polled.partition] = None",
        "raise polled.error or QueueError(polled.partition.topic)",
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
)
