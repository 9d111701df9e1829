"""Requests of clients and operators to a broker: `Call` is one of them, on its way to its handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from memq.broker.ingest.connection import Connection
from memq.broker.ingest.quotas import Limiters
from memq.broker.permissions.checks import PrincipalAccess
from memq.errors import MemqError
from memq.format.blocks.header import Buffer
from memq.protocol.connection import Principal

Ask = TypeVar("Ask", bound=msgspec.Struct)
NO_BLOCKS = memoryview(b"")


class WithBlocks(NamedTuple):
    """An answer that the bytes of blocks follow."""

    message: msgspec.Struct
    blocks: Sequence[Buffer]


Answer = msgspec.Struct | bytes | WithBlocks
Reply = Callable[[Answer | MemqError], None]


@dataclass(frozen=True, slots=True)
class Call(Generic[Ask]):
    """A decoded request, and the principal that makes it."""

    connection: Connection
    principal: Principal
    stream: int
    ask: Ask
    attachment: Any = None  # the result of `Operation.prepare`; of a FORWARD: the slab, begin and end of its block
    spare_bytes: int = 0  # of memory that is free for blocks in the answer
    blocks: memoryview = NO_BLOCKS  # that follow the request
    limiters: Limiters = ()  # of the namespaces whose resources the request names
    access: PrincipalAccess = field(kw_only=True)  # the permissions of the principal
