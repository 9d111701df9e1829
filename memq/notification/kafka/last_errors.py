"""The last connection errors of librdkafka's clients: the cause behind a bare timeout."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from memq.errors import MemqError
from memq.notification.kafka.failures import denial, failure, is_not_let_in

_SILENT = (KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT)


class LastErrors:
    """The last complaint of all clients of one queue.

    A certificate or a login that is refused shows nowhere else.
    A complaint explains a request that was not answered, and never changes the kind of its error: Kafka breaks off
    handshakes when it stops and when it starts, and an outage is no denial. Clients call `note` on their own threads;
    it only sets an attribute.
    """

    def __init__(self) -> None:
        self._last: KafkaError | None = None
        self._answered = False

    def note(self, error: KafkaError) -> None:
        """Take what a client complains of, as its `error_cb`."""
        last, code = self._last, error.code()
        if last is not None:
            if code == KafkaError._ALL_BROKERS_DOWN:  # counts them, and has no reason
                return
            if code == KafkaError._TRANSPORT and is_not_let_in(last):  # what is lost is lost for that reason
                return
        self._last = error

    def settled(self) -> None:
        """Forget it: Kafka has answered."""
        self._last = None
        self._answered = True

    def denial(self, doing: str) -> MemqError | None:
        """Return memq's error for a login or a certificate that was refused, while Kafka has never answered."""
        return denial(self._last, doing) if self._last is not None and not self._answered else None

    def failure(self, error: KafkaError | KafkaException, doing: str) -> MemqError:
        """Return memq's error for a request that failed, with the complaint that explains it."""
        code = (error.args[0] if isinstance(error, KafkaException) else error).code()
        return failure(error, doing, self._last if code in _SILENT else None)
