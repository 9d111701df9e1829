"""Audits a topic in one process: checks every pointer and batch in order for the `Auditor`."""

from __future__ import annotations

from collections.abc import Callable

from memq.audit.auditor import Auditor
from memq.audit.checks.checker import Checker
from memq.audit.checks.object_reads import ReadObject
from memq.audit.held import AskHeld
from memq.audit.released import AskReleased
from memq.audit.verdict import THROUGH_STORE, Verdict
from memq.errors import MemqError, TooLargeError
from memq.notification import PointerReader, Span
from memq.topic import ReadPartition, Topic, read_partitions


async def audit(
    topic: Topic,
    queue: PointerReader,
    read: ReadObject,
    now_ms: int,
    *,
    ask_held: AskHeld | None = None,
    ask_released: AskReleased | None = None,
    through: str = THROUGH_STORE,
    moved: Callable[[int], None] = lambda count: None,
) -> Verdict:
    """Audit a topic from the beginning of its queue to its present end (`now_ms`, Unix ms).

    `ask_held` asks brokers for missing records; without it, records acked with less than `all` are never reported as
    lost. `ask_released` asks shards for their units; without it, the end of held records is unknown. `through` is the
    text of the coverage for how `read` reads. `moved` is called with numbers of processed pointers. The verdict has
    everything that could not be read; errors of queue or store are not raised.
    Raises: TooLargeError for too many producers or epochs.
    """
    auditor, checker = Auditor(topic, through=through), Checker(queue, read)
    ends: dict[int, int] = {}

    async def read_on(partition: ReadPartition) -> None:
        try:
            span = await checker.span(partition)
            auditor.open_partition(partition.partition, span)
            begin, ends[partition.partition] = ends.get(partition.partition, span.begin), span.end
            async for checked in checker.check(partition, Span(begin, span.end)):
                auditor.take(partition.partition, checked)
                moved(1)
        except TooLargeError:
            raise  # the auditor's own bound
        except MemqError as error:
            auditor.fail_partition(partition.partition, error)

    if ask_released is not None:
        auditor.take_shards(await ask_released(topic))
    for partition in read_partitions(topic):
        await read_on(partition)
    sought = auditor.sought(now_ms)
    if sought and ask_held is not None:
        auditor.take_answer(sought, await ask_held(topic, sought))
        behind = auditor.sought_in(sought)
        for partition in read_partitions(topic):
            if partition.partition in behind:  # what moved from a broker to the queue meanwhile
                await read_on(partition)
    return auditor.verdict(now_ms)
