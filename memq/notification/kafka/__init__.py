"""The queue on Kafka: a read partition is a Kafka partition, a pointer is one record of it.

`docs/adr/` has the reasons of this layout. confluent-kafka is the extra `[kafka]`, so only `open_from_settings` imports
the modules that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memq.errors import InvalidSettingError
from memq.notification.kafka.settings import kafka_settings
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings

if TYPE_CHECKING:
    from memq.notification.kafka.queue import KafkaQueue


def open_from_settings(settings: PartSettings, runtime: Runtime) -> KafkaQueue:
    """Return the queue that `queue = "kafka://HOST:PORT,…"` and the section `[kafka]` name.

    It belongs to one event loop. This function sends no request: `check` proves that Kafka answers.
    Raises: InvalidSettingError, also when confluent-kafka is not installed.
    """
    chosen = kafka_settings(settings.queue, settings.section("kafka"))
    try:
        from memq.notification.kafka.queue import KafkaQueue
    except ModuleNotFoundError as error:
        raise InvalidSettingError(
            f"queue = '{settings.queue[:120]}' needs {error.name}, which is not installed",
            hint="pip install 'memq[kafka]'",
        ) from error
    return KafkaQueue(chosen, runtime)
