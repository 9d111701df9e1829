"""How a consumer group's progress is shown, for `memq group describe` and `memq lag`."""

from __future__ import annotations

from memq.client.group_positions import GroupDescription

HEADS = ("group", "topic", "partition", "position", "member", "lag records", "lag bytes", "lag seconds")


def group_rows(found: GroupDescription) -> list[tuple[object, ...]]:
    """Return a row for each partition, under `HEADS`."""
    return [
        (
            *(found.group, one.place.topic, one.place.partition, one.position, one.member or None),
            *(one.lag.records, one.lag.bytes, round(one.lag.seconds)),
        )
        for one in found.partitions
    ]


def group_json(found: GroupDescription) -> dict[str, object]:
    """Return a group as JSON; times in seconds."""
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
                "lag_records": one.lag.records,
                "lag_bytes": one.lag.bytes,
                "lag_seconds": round(one.lag.seconds, 3),
            }
            for one in found.partitions
        ],
    }
