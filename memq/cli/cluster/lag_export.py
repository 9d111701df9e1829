"""`memq lag --serve`: the lag of all groups for Prometheus, in records, bytes and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from memq.cli.exporter import export
from memq.client.admin.aio_admin import AsyncAdmin
from memq.client.admin.group_positions import GroupDescription
from memq.errors import NotFoundError
from memq.observe.metrics import LAG_SERIES_MAX, lines_of
from memq.runtime.network import Address, Runtime


async def export_lag(brokers: str, names: tuple[str, ...], listen: Address, ready: Callable[[str], None]) -> int:
    """Serve the lag of these groups, of all without a name: see `export`."""
    runtime = Runtime()
    async with AsyncAdmin(brokers, runtime=runtime) as admin:

        async def ask() -> Sequence[Metric]:
            return lag_metrics(await _described(admin, names))

        return await export("lag", ask, listen, ready, runtime)


async def _described(admin: AsyncAdmin, names: tuple[str, ...]) -> list[GroupDescription]:
    """Return the groups; one that goes while it is asked for is left out."""
    found = []
    for name in names or await admin.groups():
        try:
            found.append(await admin.group(name))
        except NotFoundError:
            continue
    return found


def lag_metrics(groups: Sequence[GroupDescription]) -> list[Metric]:
    """Return the lag of each group in each topic: sums of its partitions, and the longest wait among them.

    Where the lag of a partition is unknown there is no sum, only the number of such partitions.
    """
    lags, unknown = _lags(groups), _unknown(groups)
    return [
        lines_of("memq_lag_left_out_series", [((), max(0, len(lags) - LAG_SERIES_MAX))]),
        lines_of("memq_group_members", [((each.group,), len(each.members)) for each in groups]),
        lines_of("memq_group_lag_records", [(labels, records) for labels, (records, _, _) in lags.items()]),
        lines_of("memq_group_lag_bytes", [(labels, size) for labels, (_, size, _) in lags.items()]),
        lines_of("memq_group_lag_seconds", [(labels, seconds) for labels, (_, _, seconds) in lags.items()]),
        lines_of("memq_group_lag_unknown_partitions", list(unknown.items())),
    ]


def _unknown(groups: Iterable[GroupDescription]) -> dict[tuple[str, str], int]:
    """Return how many partitions have an unknown lag, by group and topic."""
    found: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for one in group.partitions:
            found[group.group, one.place.topic] += one.error is not None
    return found


def _lags(groups: Sequence[GroupDescription]) -> dict[tuple[str, str], tuple[int, int, float]]:
    """Return records, bytes and seconds by group and topic, where all partitions are known."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    unknown = _unknown(groups)
    for group in groups:
        for one in group.partitions:
            labels = (group.group, one.place.topic)
            if unknown[labels]:
                continue
            records, size, seconds = found.get(labels, (0, 0, 0.0))
            lag = one.lag
            found[labels] = (records + lag.records, size + lag.bytes, max(seconds, lag.seconds))
    return found
