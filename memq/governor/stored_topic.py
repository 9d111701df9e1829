"""A topic as stored by coordinators: unknown fields of a newer broker survive changes.

In a rolling upgrade brokers of two versions change the same topics. An older one passes over the newer one's fields
when it reads; would it leave them out when it writes, a setting would fall back to its default, unnoticed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memq.topic import Topic


def encode_topic(topic: Topic, before: bytes | None = None) -> bytes:
    """Return the bytes of a topic.

    Fields of `before`, its bytes until now, that are not known here are kept.
    """
    body = msgspec.json.encode(topic)
    if before is None:
        return body
    return msgspec.json.encode(_merged(msgspec.json.decode(body), msgspec.json.decode(before)))


def _merged(new: Any, old: Any) -> Any:
    """Every known field is written: what only `old` has is unknown.

    Partitions keep their places, and none goes.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        return {name: _merged(value, old.get(name)) for name, value in new.items()} | {
            name: value for name, value in old.items() if name not in new
        }
    if isinstance(new, list) and isinstance(old, list):
        return [_merged(value, old[at] if at < len(old) else None) for at, value in enumerate(new)]
    return new
