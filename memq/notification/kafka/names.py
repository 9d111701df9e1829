"""Names in Kafka: topics, partitions and groups, from memq's names and back. Pure."""

from __future__ import annotations

import re

from memq.errors import InvalidNameError
from memq.limits import NAME_CHARS_MAX
from memq.topic import ReadPartition

_TOPIC = re.compile(r"(?P<topic>.+)\.(?P<id>[0-9a-f]{32})\Z", re.DOTALL)


class Names:
    """Names under one prefix, which lets several clusters of memq, and other programs, share a Kafka.

    A Kafka topic is named `<prefix><topic>.<topic id>`: a topic that is made again under the same name is another
    one, and no two names differ only in `.` and `_`, which Kafka's metrics can't tell apart.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def kafka_topic(self, partition: ReadPartition) -> str:
        """Return the Kafka topic that holds a read partition.

        Raises: InvalidNameError when the name is too long.
        """
        name = f"{self._prefix}{partition.topic}.{partition.topic_id}"
        if len(name) > NAME_CHARS_MAX:
            most = NAME_CHARS_MAX - len(name) + len(partition.topic)
            raise InvalidNameError(
                f"topic name '{partition.topic[:40]}...' has {len(partition.topic)} characters, "
                f"with Kafka as the queue {most} are allowed",
                hint="choose a shorter name for the topic, or a shorter prefix in [kafka]",
            )
        return name

    def read_partition(self, kafka_topic: str, number: int) -> ReadPartition | None:
        """Return the read partition that a partition of a Kafka topic holds; None when it is none of memq's."""
        found = _TOPIC.match(kafka_topic.removeprefix(self._prefix))
        if found is None or not kafka_topic.startswith(self._prefix):
            return None
        return ReadPartition(found["topic"], found["id"], number)

    def kafka_group(self, group: str) -> str:
        """Return the Kafka group of a consumer group."""
        return self._prefix + group

    def group(self, kafka_group: str) -> str | None:
        """Return the consumer group of a Kafka group; None when it is none of memq's."""
        return kafka_group.removeprefix(self._prefix) if kafka_group.startswith(self._prefix) else None
