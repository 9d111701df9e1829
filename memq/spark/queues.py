"""Opens the notification queue itself, for who reads without a broker, and finds topics in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memq.errors import InvalidSettingError, NotFoundError
from memq.notification import TopicFinder
from memq.notification.kafka import open_from_settings
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.network import Runtime
from memq.settings import environment_settings
from memq.spark.options import ReadOptions
from memq.topic import ReadPartition

if TYPE_CHECKING:
    from memq.notification.kafka.queue import KafkaQueue


def open_queue(options: ReadOptions, runtime: Runtime) -> SqliteQueue | KafkaQueue:
    """Open `options.queue`. Raises: NotFoundError for a file that is not there, InvalidSettingError."""
    scheme, _, rest = options.queue.partition(":")
    if scheme == "kafka":
        settings = environment_settings({"queue": options.queue}, options.config, options.profile).parts()
        return open_from_settings(settings, runtime)
    if scheme != "sqlite":
        raise InvalidSettingError(
            f"option 'queue' = '{options.queue[:120]}' names no queue", hint="use sqlite:FILE or kafka://HOST:PORT"
        )
    path = Path(rest)
    if not path.is_file():
        raise NotFoundError(f"no queue file '{path}'", hint="it is queue.sqlite in the data folder of `memq dev`")
    return SqliteQueue(path, runtime.clock)


async def find_topic(queue: TopicFinder, name: str) -> list[ReadPartition]:
    """Return the read partitions of a topic.

    Raises: NotFoundError, InvalidSettingError when two have its name.
    """
    found = await queue.partitions(name)
    if not found:
        raise NotFoundError(f"topic '{name}' is not in the queue", hint="check the name, and the prefix in [kafka]")
    ids = sorted({partition.topic_id for partition in found})
    if len(ids) > 1:
        raise InvalidSettingError(
            f"the queue has {len(ids)} topics '{name}' with ids {', '.join(ids)}", hint="read it through a broker"
        )
    return sorted(found)
