"""Fetches the batch of a finding again and reports its present content, for command and pages."""

from __future__ import annotations

import msgspec

from memq.audit.account import common
from memq.audit.checks.batch_check import BatchCheck, BlockCheck, CheckedEntry
from memq.audit.checks.checker import check_one
from memq.audit.finding import Finding
from memq.audit.opened_topic import opened_topic
from memq.errors import NotFoundError
from memq.format.ranges import RangeSet
from memq.runtime.runtime import Runtime

BLOCKS_MAX = 2_000  # in an answer; first those with records of the finding, and damaged ones


class VerifiedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of the batch: half-open sequences of a producer (16 hex digits).

    `cause`: what is wrong, "" when sound.
    `number` is -1 when only the pointer knows of it; `named` says whether the finding names records of it.
    """

    number: int
    producer: str
    first: int
    next: int
    named: bool
    cause: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The present content at a finding's pointer.

    `says` is one sentence, `through` names the way of reading.
    `object` is "" if the pointer is gone or names no batch. `sound`: the batch exists, and no block of it is damaged.
    `held` counts the finding's records in sound blocks, `damaged` the blocks that can't be delivered.
    """

    topic: str
    partition: int
    offset: int
    through: str
    says: str
    sound: bool = False
    object: str = ""
    object_bytes: int = 0
    held: int = 0
    damaged: int = 0
    blocks: tuple[VerifiedBlock, ...] = ()
    faults: tuple[str, ...] = ()


async def verify_finding(brokers: str, finding: Finding, runtime: Runtime | None = None) -> Verification:
    """Check a finding's batch, straight from its store where that opens here, else through a broker.

    It only reads.

    Raises: NotFoundError when it names no pointer, or its topic is gone; UnreachableError.
    """
    if finding.offset < 0:
        raise NotFoundError(
            f"finding {finding.id} names no object: no pointer has its records",
            hint="memq trace searches all pointers of a topic for a record",
        )
    async with opened_topic(brokers, finding.topic, runtime) as opened:
        if opened.topic.id != finding.topic_id:
            raise NotFoundError(
                f"topic '{finding.topic}' is not that of finding {finding.id} is about",
                hint="the topic was deleted and created again under its name",
            )
        checked = await check_one(opened.topic, opened.queue, opened.read, finding.partition, finding.offset)
        return verification_of(finding, checked, opened.through)


def verification_of(finding: Finding, checked: CheckedEntry, through: str) -> Verification:
    """Return the result of a check of the finding's pointer. Pure."""
    verification = Verification(
        topic=finding.topic, partition=finding.partition, offset=finding.offset, through=through, says=""
    )
    check = checked.check
    if check is None:
        what = checked.error or f"a pointer of kind '{checked.pointer.kind if checked.pointer else ''}' has no batch"
        return msgspec.structs.replace(verification, says=str(what))
    found = [(block, _named(finding, block)) for block in check.blocks]
    held = sum(records for block, records in found if block.cause is None)
    found.sort(key=lambda each: (not each[1], each[0].cause is None, each[0].number))
    return msgspec.structs.replace(
        verification,
        says=_says(finding, check, held),
        sound=not check.damaged,
        object=check.key,
        object_bytes=sum(checked.object_bytes),
        held=held,
        damaged=check.damaged,
        blocks=tuple(_row(block, records) for block, records in found[:BLOCKS_MAX]),
        faults=check.faults[:BLOCKS_MAX],
    )


def _named(finding: Finding, block: BlockCheck) -> int:
    """Return how many records of a block the finding names."""
    if block.producer != finding.producer or block.first >= block.next:
        return 0
    pieces = common(finding.ranges, RangeSet([(block.first, block.next)]))
    return sum(next_ - first for first, next_ in pieces)


def _says(finding: Finding, check: BatchCheck, held: int) -> str:
    damage = f"{check.damaged} of {len(check.blocks)} blocks are damaged" if check.damaged else "every block is sound"
    records = f"; sound blocks hold {held:,} of the {finding.records:,} records that the finding names"
    return f"object {check.key}: {damage}{records if finding.ranges else ''}"


def _row(block: BlockCheck, records: int) -> VerifiedBlock:
    return VerifiedBlock(
        number=block.number,
        producer=f"{block.producer:016x}",
        first=block.first,
        next=block.next,
        named=records > 0,
        cause="" if block.cause is None else str(block.cause),
    )
