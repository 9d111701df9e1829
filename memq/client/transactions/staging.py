"""Puts the large parts of a transaction into the store: an object for each, and their manifest.

No pointer names them before the commit. The sweep deletes those of a transaction that was rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from awscrt.checksums import crc32c

from memq.client.bulk.staged_object import StagedBlocks, staged_object
from memq.client.metadata import ClusterMetadata
from memq.client.stores import OpenStores
from memq.errors import ObjectExistsError, RetryableError, TimedOutError, TooLargeError
from memq.format.blocks.header import Buffer
from memq.format.key import manifest_key, staged_object_key
from memq.format.staged_manifest import TRANSACTIONS_WRITER, Manifest, StagedObject, encode_manifest
from memq.limits import BATCH_ID_END, PRODUCER_ID_END, TRANSACTION_TARGET_BYTES_MAX
from memq.protocol.hold_messages import WireHoldId
from memq.protocol.transaction_messages import WireStagedPart
from memq.runtime.clock import backoff_s
from memq.runtime.runtime import Runtime
from memq.storage_handlers import StorageHandler

RETRY_S_BASE, RETRY_S_MAX = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class StagedTransaction:
    """The manifest of a transaction's large parts, as the coordinator is asked to hold them."""

    writer: str
    batch_id: int
    parts: Sequence[WireStagedPart]


class Stager(Protocol):
    """Puts the large parts of transactions."""

    async def check(self) -> None:
        """Raise TooLargeError if there is no way to the store from here."""
        ...

    async def stage(self, blocks: Sequence[StagedBlocks], timeout_s: float) -> StagedTransaction:
        """Put the parts and their manifest. Raises: TimedOutError, DeniedError, TooLargeError."""
        ...


class PartStager:
    """Puts parts into the cluster's store, where its address can be opened."""

    def __init__(self, metadata: ClusterMetadata, runtime: Runtime) -> None:
        self._metadata = metadata
        self._runtime = runtime
        self._stores = OpenStores(metadata, runtime, patient=True)

    async def check(self) -> None:
        """See `Stager`."""
        self._store()

    async def stage(self, blocks: Sequence[StagedBlocks], timeout_s: float) -> StagedTransaction:
        """See `Stager`."""
        until_s = self._runtime.clock.monotonic() + timeout_s
        objects = [await self._put_part(each, until_s) for each in blocks]
        draw = self._runtime.random
        batch_id = draw.randrange(BATCH_ID_END)
        manifest = Manifest(
            cluster=self._metadata.cluster,
            writer=TRANSACTIONS_WRITER,
            batch_id=batch_id,
            store=self._metadata.stores[0].name,
            created_ms=self._runtime.clock.wall_ms(),
            objects=tuple(objects),
            atomic=True,
        )
        body = encode_manifest(manifest)
        key = manifest_key(self._metadata.cluster, TRANSACTIONS_WRITER, batch_id)
        await self._put(key, [body], crc32c(body), until_s)
        parts = [
            WireStagedPart(
                topic=part.topic.name,
                topic_id=part.topic.id,
                partition=part.partition,
                hold=WireHoldId(
                    producer=f"{draw.randrange(1, PRODUCER_ID_END):016x}", first=part.blocks[0].header.first_sequence
                ),
                records=staged.pieces[0].records,
            )
            for part, staged in zip(blocks, objects, strict=True)
        ]
        return StagedTransaction(TRANSACTIONS_WRITER, batch_id, parts)

    async def close(self) -> None:
        """Disconnect from the store."""
        await self._stores.close()

    async def _put_part(self, part: StagedBlocks, until_s: float) -> StagedObject:
        now_ms, cluster = self._runtime.clock.wall_ms(), self._metadata.cluster
        key = staged_object_key(cluster, TRANSACTIONS_WRITER, self._runtime.random.getrandbits(64), now_ms)
        producer_id = part.blocks[0].header.producer_id
        buffers, checksum, staged = staged_object([part], cluster, TRANSACTIONS_WRITER, key, producer_id, now_ms)
        await self._put(key, buffers, checksum, until_s)
        return staged

    async def _put(self, key: str, buffers: Sequence[Buffer], checksum: int, until_s: float) -> None:
        """Put an object under a new key until that succeeds."""
        tries = 0
        while True:
            try:
                await self._store().put(key, buffers, checksum)
            except ObjectExistsError:
                return  # a try before has landed
            except RetryableError as error:
                tries += 1
                if self._runtime.clock.monotonic() > until_s:
                    raise TimedOutError(f"the store does not take a part of a transaction: {error}") from error
                await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX))
            else:
                return

    def _store(self) -> StorageHandler:
        """Return the store for new objects. Raises: TooLargeError."""
        for known in self._metadata.stores[:1]:
            found = self._stores(known.name)
            if found is not None:
                return found
        raise TooLargeError(
            f"a transaction has over {TRANSACTION_TARGET_BYTES_MAX} bytes in a partition, and the store of the cluster"
            " can't be opened here",
            hint="make transactions smaller, or let this process write to the store",
        )
