"""Orders of operators to truncate logs: kept with the topic, carried out by retention.

Theory. An order that only one broker knew would be lost with it. So the order is stored at the coordinator, and any
later owner carries it out. Retention removes entries by an order as it removes old ones: in whole batches, never those
that an opening needs, and with the totals of what is left. Two witnesses must agree, offset and queue time
(`Truncation`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memq.errors import InvalidRequestError, NotFoundError
from memq.notification import PointerReader
from memq.notification.log_reader import entries_between, page_before, valid_seek, valid_span
from memq.topic import ReadPartition, Topic, Truncation, read_partitions


async def with_truncations(pointers: PointerReader, topic: Topic, before: Mapping[int, int]) -> Topic:
    """Return the topic with new orders, by read partition. An order never goes back.

    Raises: NotFoundError for a partition that the topic does not have; InvalidRequestError for an offset after the end
    of its log; as `PointerReader`.
    """
    known = {partition.partition: partition for partition in read_partitions(topic)}
    orders = {each.partition: each for each in topic.truncations}
    for number, offset in before.items():
        if number not in known:
            raise NotFoundError(f"topic '{topic.name}' has no partition {number}")
        order = await _order(pointers, known[number], offset, orders.get(number))
        if order is not None:
            orders[number] = order
    return msgspec.structs.replace(topic, truncations=tuple(orders[number] for number in sorted(orders)))


async def _order(
    pointers: PointerReader, partition: ReadPartition, before: int, last: Truncation | None
) -> Truncation | None:
    """Return the order to remove all below `before`; None if it removes nothing more than the last one."""
    span = await valid_span(pointers, partition)
    if before > span.end:
        raise InvalidRequestError(
            f"topic '{partition.topic}' partition {partition.partition} ends at offset {span.end}, before {before}",
            hint="memq consume --json shows positions",
        )
    if before <= span.begin or (last is not None and before <= last.before <= span.end):
        return None
    return Truncation(
        partition=partition.partition, before=before, time_ms=await _newest_ms(pointers, partition, before)
    )


async def _newest_ms(pointers: PointerReader, partition: ReadPartition, end: int) -> int:
    """Return the greatest queue time of the entries below an offset.

    Pointers of several owners are not quite in the order of their times. The queue finds by time the first entry that
    is as young as the last one.
    """
    newest_ms = (await page_before(pointers, partition, end - 1, end))[0].time_ms
    first = min(await valid_seek(pointers, partition, newest_ms), end - 1)
    async for page in entries_between(pointers, partition, first, end):
        newest_ms = max(newest_ms, *(entry.time_ms for entry in page))
    return newest_ms


async def without_lost_orders(queue: PointerReader, topic: Topic) -> Topic:
    """Return the topic without the orders for logs that the queue has lost.

    A restored log has other offsets, and batches have the times of their seals there.
    """
    kept = []
    for order in topic.truncations:
        try:
            end = (await queue.span(ReadPartition(topic.name, topic.id, order.partition))).end
        except NotFoundError:
            continue
        if order.before <= end:
            kept.append(order)
    return msgspec.structs.replace(topic, truncations=tuple(kept))
