"""The background of a blocking producer: its core on the I/O thread, and the threads that seal blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from memq.client.io_thread import forked_error
from memq.client.lifecycle import Background
from memq.client.producer.core import Observe, ProducerCore
from memq.client.producer.delivery import Delivery
from memq.client.producer.settings import ProducerSettings
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.runtime.threads import SpareThreads

SEALING_THREADS_MAX = 4


class ProducerBackground(Background[ProducerCore]):
    """A producer's background: wakes threads that wait for room, delivers a forgotten producer's records."""

    def __init__(
        self, settings: ProducerSettings, runtime: Runtime, addresses: Sequence[Address], observe: Observe | None
    ) -> None:
        core = ProducerCore(settings, runtime, addresses, Delivery, self._wake, self._room_made, observe=observe)
        self.room = threading.Condition(core.buffer.lock)
        # The caller's thread seals, too. Without a codec, sealing hardly releases the interpreter's lock.
        threads = 0 if settings.codec == "none" else min(os.cpu_count() or 1, SEALING_THREADS_MAX) - 1
        self._spare = SpareThreads("seal", threads)
        core.buffer.aside = self._spare.offer
        super().__init__("producer", core)

    def forked(self) -> None:
        """See `SyncClient.forked`. The child gets a new lock: a thread of the parent may hold the old one.

        `locked` is no sufficient check: a thread may have just acquired the lock and wait for the GIL.
        """
        super().forked()
        buffer = self.core.buffer
        buffer.lock = threading.Lock()
        self.room = threading.Condition(buffer.lock)
        buffer.waiting = 0
        buffer.refuse(forked_error("producer"))

    def detach(self) -> None:
        """See `Background.detach`. It waits for the sealing threads, except on the I/O thread."""
        super().detach()
        self._spare.close(wait=not self.io.current)

    def _close_failed(self, error: BaseException) -> None:
        self.core.events.error("producer.forgotten", f"a forgotten producer was not flushed: {error}")

    def _wake(self) -> None:
        self.io.call(self.core.drain)

    def _room_made(self) -> None:
        self.room.notify_all()
