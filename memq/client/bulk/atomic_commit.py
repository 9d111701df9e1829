"""Commits an atomic batch of a writer by one transaction: one decision for all of its partitions.

Theory. The transaction has a staged part for each partition, and each names the manifest. So a commit that is repeated
by another transaction, hours later too, publishes once: partitions remember the writer's last batch. The id of the
transaction is that of the writer. So a second driver fences the first one (T2), and what that one had open is rolled
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memq.client.broker_router import BrokerRouter
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions.core import TransactionalCore
from memq.client.transactions.staging import StagedTransaction
from memq.errors import OutcomeUnknownError, TimedOutError
from memq.format.staged_manifest import Manifest, StagedObject, StagedPartition, StagedPiece
from memq.limits import NAME_CHARS_MAX, PRODUCER_ID_END
from memq.protocol.hold_messages import WireHoldId
from memq.protocol.transaction_messages import WireStagedPart
from memq.runtime.runtime import Runtime
from memq.topic import writer_id

AGAIN_HINT = "commit it again: it is published once"


def transactional_id_of(writer: str) -> str:
    """Return the transactional id of a writer's commits."""
    name = f"staged.{writer}"
    return name if len(name) <= NAME_CHARS_MAX else f"staged.{writer_id(writer):016x}"


async def commit_atomically(
    runtime: Runtime,
    router: BrokerRouter,
    manifest: Manifest,
    parts: Mapping[StagedPartition, Sequence[tuple[StagedObject, StagedPiece]]],
    timeout_s: float,
) -> None:
    """Make these parts of a manifest visible, all or none; return when readers can get them.

    Raises: TransactionAbortedError, ProducerFencedError: no part is visible by this commit. TimedOutError: commit it
    again. InvalidRequestError, NotFoundError, TooOldError, CorruptDataError.
    """
    settings = ProducerSettings(transactional_id=transactional_id_of(manifest.writer), delivery_timeout_s=timeout_s)
    core = TransactionalCore(settings, runtime, router)
    transaction = await core.begin(visible=True)
    try:
        held = [_part_of(runtime, staged, pieces) for staged, pieces in parts.items()]
        await core.hold_parts(transaction, StagedTransaction(manifest.writer, manifest.batch_id, held))
        transaction.blocks = len(held)
        await core.commit(transaction)
    except OutcomeUnknownError as error:
        text = f"no broker said whether batch {manifest.batch_id} of writer '{manifest.writer}' is committed"
        raise TimedOutError(f"{text}: {error}", hint=AGAIN_HINT) from error
    except BaseException as error:
        await core.abort(transaction, after=error)
        raise


def _part_of(
    runtime: Runtime, staged: StagedPartition, pieces: Sequence[tuple[StagedObject, StagedPiece]]
) -> WireStagedPart:
    topic, topic_id, partition = staged
    return WireStagedPart(
        topic=topic,
        topic_id=topic_id,
        partition=partition,
        hold=WireHoldId(producer=f"{runtime.random.randrange(1, PRODUCER_ID_END):016x}", first=0),
        records=sum(piece.records for _, piece in pieces),
    )
