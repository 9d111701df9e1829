"""Planted bugs that show while one log is sick; see `tests.simulation.planted`."""

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
    Planted(
        "one sick log hides the ends of all",
        "memq.broker.api.group_requests",
        "GroupRequests.poll_spans",
        "if errors and len(errors) == len(spans):",
        "if errors:",
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "the page keeps the total of a log that does not answer",
        "memq.audit.dashboard.rates",
        "TopicRates.total",
        " and partition not in known.unknown else None",
        " else None",
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "lag counts from the beginning of the log",
        "memq.client.consumer.offset_resolver",
        "OffsetResolver.lag",
        "records = end.records - here.records - position.record_index",
        "records = end.records - position.record_index",
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
)
