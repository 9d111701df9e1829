"""Planted bugs that show while one log fails; see `tests.simulation.planted_bugs`."""

from __future__ import annotations

from tests.simulation.bug import Planted, swap

LIVENESS_BUGS = (
    Planted(
        "one failing log fails a whole poll",
        "memq.broker.api.reader_requests",
        "ReaderRequests.poll_entries",
        swap("errors and len(errors) == len(found)", "errors"),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "one failing log makes a consumer poll all again",
        "memq.client.consumer.fetch.polling",
        "Polling._take_common",
        swap("self._failing[polled.partition] = None", "raise polled.error or QueueError(polled.partition.topic)"),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "one failing log hides the ends of all",
        "memq.broker.api.reader_requests",
        "ReaderRequests.poll_spans",
        swap("errors and len(errors) == len(spans)", "errors"),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "the page keeps the total of a log that does not answer",
        "memq.audit.dashboard.history",
        "TopicRates.total",
        swap("partition not in known.unknown", "True"),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "lag counts from the beginning of the log",
        "memq.client.consumer.offset_resolver",
        "OffsetResolver.lag",
        swap(
            "records = end.records - here.records - position.record_index",
            "records = end.records - position.record_index",
        ),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
    Planted(
        "a group's lag counts what it has committed",
        "memq.client.group_admin",
        "AsyncGroupAdmin._lag",
        swap("committed is None", "True"),
        level="calm",
        seed=1_014,
        aspects=("part",),
    ),
)
