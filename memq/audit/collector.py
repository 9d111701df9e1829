"""Audits a topic in one process: checks every pointer and batch in order, and feeds the machine."""

from __future__ import annotations

from collections.abc import Callable

from memq.audit.auditor import Auditor
from memq.audit.checks.checker import Checker
from memq.audit.checks.whole_object import ReadObject
from memq.audit.verdict import THROUGH_STORE, Verdict
from memq.errors import MemqError, TooLargeError
from memq.notification import PointerReader
from memq.topic import Topic, read_partitions


async def audit(
    topic: Topic,
    queue: PointerReader,
    read: ReadObject,
    now_ms: int,
    *,
    through: str = THROUGH_STORE,
    moved: Callable[[int], None] = lambda count: None,
) -> Verdict:
    """Audit a topic from the beginning of its queue to its end as it is now (`now_ms`, Unix ms).

    `through` says in the coverage how `read` reads. `moved` is told how many pointers were dealt with.
    What can't be read is in the verdict; no error of queue or store is raised. Raises: TooLargeError for more
    producers or epochs than fit.
    """
    auditor, checker = Auditor(topic, through=through), Checker(queue, read)
    for partition in read_partitions(topic):
        try:
            span = await checker.span(partition)
            auditor.open_partition(partition.partition, span)
            async for checked in checker.check(partition, span):
                auditor.take(partition.partition, checked)
                moved(1)
        except TooLargeError:
            raise  # the auditor's own bound
        except MemqError as error:
            auditor.fail_partition(partition.partition, error)
    return auditor.verdict(now_ms)
