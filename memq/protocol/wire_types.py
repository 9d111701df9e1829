"""Types of the fields of messages: bounded integers, and brokers, loads and plans for operators."""

from __future__ import annotations

from typing import Annotated

import msgspec

# JSON has no bound for numbers, but the code that stores and compares them has.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Bits64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", max_length=16)]  # as in pointers
NO_BITS = "0" * 16


class ServiceQuestion(msgspec.Struct, kw_only=True):
    """A question to the services of all service partitions of `_memq_state`.

    A broker that forwards it names the `service_partitions` that it expects of the other broker. The answer names in
    `AdminAnswer.covered` those that it covers: an answer without a partition is no answer of an empty one.
    """

    service_partitions: list[Int64] | None = None


class WireBroker(msgspec.Struct, kw_only=True):
    """A live broker, for operators: rates and capacity in bytes per s, capacity 0 if not configured."""

    broker: str
    address: str
    zone: str = ""
    draining: bool = False
    governs: bool = False
    partitions: Int64 = 0
    bytes_s: Int64 = 0
    capacity_bytes_s: Int64 = 0


class WireLoad(msgspec.Struct, kw_only=True):
    """A broker's load: its memory budget and use, unpublished batches, uploads in flight.

    `open_breakers` names the stores whose circuit breaker is open.
    """

    memory_bytes: Int64 = 0
    memory_bytes_max: Int64 = 0
    ring_batches: Int64 = 0
    uploads: Int64 = 0
    open_breakers: list[str] = []


class WireClient(msgspec.Struct, kw_only=True):
    """A client's limits at one broker per s, 0 for none; "default": each unnamed client.

    `over` counts its blocks and requests over the limit, since the broker knows the client.
    """

    client: str
    mode: str
    bytes_s: Int64 = 0
    requests_s: Int64 = 0
    connections: Int64 = 0
    over: Int64 = 0


class WireChange(msgspec.Struct, kw_only=True):
    """A move of the plan: a partition's owner before and after ("" is none), and the reason."""

    topic: str
    partition: Int64
    before: str
    after: str
    reason: str
