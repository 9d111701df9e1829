"""The part that both producers share: settings, the core, and the spans of their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memq.client.arguments import check_tracer_provider, public_name, runtime_of
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.observers.report_carrier import reporting
from memq.client.producer.core import Observe, ProducerCore
from memq.client.producer.delivery import Promise
from memq.client.producer.open_block import OpenBlock
from memq.client.producer.settings import AcksLike, OnAck, WhenFull, producer_settings
from memq.limits import KIB, MIB
from memq.runtime.network import Address, Runtime

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.client.observers.producer_traces import ProducerTraces


class BaseProducer(ABC):
    """A producer without its calls: those block, or are awaited."""

    @public_name("Producer")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        acks: AcksLike = "all",
        codec: str = "zstd",
        linger_ms: float = 5,
        block_bytes: int = 512 * KIB,
        pending_bytes_max: int = 64 * MIB,
        when_full: WhenFull = "block",
        delivery_timeout_ms: float = 120_000,
        metadata_timeout_ms: float = 30_000,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        on_ack: OnAck | None = None,
        name: str = "",
        audit: bool = True,
        tracer_provider: TracerProvider | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._settings = producer_settings(
            acks=acks,
            codec=codec,
            linger_ms=linger_ms,
            block_bytes=block_bytes,
            pending_bytes_max=pending_bytes_max,
            when_full=when_full,
            delivery_timeout_ms=delivery_timeout_ms,
            metadata_timeout_ms=metadata_timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            client_id=client_id,
            zone=zone,
            on_ack=on_ack,
            name=name,
            audit=audit,
        )
        check_tracer_provider(tracer_provider)
        self._runtime = runtime_of(runtime)
        observe = reporting("producer", name) if self._settings.audit else None
        self._core = self._open(bootstrap_addresses(brokers), observe)
        self._buffer = self._core.buffer
        # The fast ways into an open block. A record with a span takes neither: its headers carry the context.
        self._sticky: Mapping[str, OpenBlock] = self._buffer.sticky
        self._put_keyed: Callable[[str, bytes, bytes, int | None], Promise | None] = self._buffer.put_keyed
        self._traces: ProducerTraces | None = None
        if tracer_provider is not None:
            from memq.client.observers.producer_traces import ProducerTraces

            self._traces = ProducerTraces(tracer_provider, self._runtime.clock)
            self._sticky, self._put_keyed = {}, _no_fast_way
        self._closed = False

    @abstractmethod
    def _open(self, addresses: Sequence[Address], observe: Observe | None) -> ProducerCore:
        """Return the core, on the loop on which it is to run."""


def _no_fast_way(topic: str, value: bytes, key: bytes, timestamp_ms: int | None) -> None:
    return None
