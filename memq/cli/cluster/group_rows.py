"""How a consumer group's progress is shown, for `memq group describe` and `memq lag`."""

from __future__ import annotations

from collections.abc import Iterable

import click

from memq.client.admin.group_positions import GroupDescription

HEADS = ("group", "topic", "partition", "position", "member", "lag records", "lag bytes", "lag seconds")


def group_rows(found: GroupDescription) -> list[tuple[object, ...]]:
    """Return a row for each partition, under `HEADS`."""
    return [
        (
            *(found.group, one.place.topic, one.place.partition, one.position, one.member or None),
            *(("unknown",) * 3 if one.error else (one.lag.records, one.lag.bytes, round(one.lag.seconds))),
        )
        for one in found.partitions
    ]


def tell_unknown(groups: Iterable[GroupDescription]) -> int:
    """Print to stderr why the lag of partitions is unknown; return the exit code, 0 when all are known."""
    unknown = [(found.group, one) for found in groups for one in found.partitions if one.error]
    for group, one in unknown:
        place = f"partition {one.place.partition} of topic '{one.place.topic}'"
        click.echo(f"memq: lag of group '{group}' in {place} is unknown: {one.error}", err=True)
    return 1 if unknown else 0


def group_json(found: GroupDescription) -> dict[str, object]:
    """Return a group as JSON; times in seconds. A lag that is not known is null, with the error."""
    return {
        "group": found.group,
        "generation": found.generation,
        "members": list(found.members),
        "partitions": [
            {
                "topic": one.place.topic,
                "partition": one.place.partition,
                "position": None if one.position is None else str(one.position),
                "member": one.member or None,
                "lag_records": None if one.error else one.lag.records,
                "lag_bytes": None if one.error else one.lag.bytes,
                "lag_seconds": None if one.error else round(one.lag.seconds, 3),
                **({"error": str(one.error)} if one.error else {}),
            }
            for one in found.partitions
        ],
    }
