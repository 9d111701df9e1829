"""Records that wait, for the pages: delayed ones, those of open transactions, and dead letters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from memq.audit.dashboard.view import (
    DelayedRow,
    DelayedTopics,
    LetterPage,
    LetterRow,
    OpenTransactions,
    QueueRow,
    Queues,
    TransactionRow,
    preview,
)
from memq.client.listener.dead_letter_queue import AsyncDeadLetterQueue, Letter
from memq.client.topic_admin import DelayedCount
from memq.client.transactions.admin import ShownTransaction
from memq.protocol.queue_messages import WireQueue
from memq.runtime.runtime import Runtime

SHOWN_MAX = 200  # topics with delayed records, transactions, queues
LETTERS_SHOWN_MAX = 100
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Warning)(?=:|$)")  # the class of an exception


def delayed_topics(found: Mapping[str, DelayedCount]) -> DelayedTopics:
    """Return the topics with delayed records, those with the most first."""
    rows = [DelayedRow(topic=topic, records=each.records, next_ms=each.next_ms) for topic, each in found.items()]
    rows.sort(key=lambda row: (-row.records, row.topic))
    return DelayedTopics(total=len(rows), records=sum(row.records for row in rows), shown=tuple(rows[:SHOWN_MAX]))


def queues(found: Mapping[str, WireQueue]) -> Queues:
    """Return the queues: first those with the oldest ready item, then those with dead ones, then by items."""
    rows = [
        QueueRow(
            queue=each.queue,
            ready=each.ready,
            leased=each.leased,
            delayed=each.delayed,
            dead=each.dead,
            oldest_ms=each.oldest_ms or None,
            rates={event: round(rate, 1) for event, rate in each.rates.items() if rate},
        )
        for each in found.values()
    ]
    rows.sort(key=lambda row: (row.oldest_ms or math.inf, -row.dead, -row.leased - row.delayed, row.queue))
    return Queues(
        total=len(rows),
        ready=sum(row.ready for row in rows),
        leased=sum(row.leased for row in rows),
        delayed=sum(row.delayed for row in rows),
        dead=sum(row.dead for row in rows),
        shown=tuple(rows[:SHOWN_MAX]),
    )


def open_transactions(found: Sequence[ShownTransaction]) -> OpenTransactions:
    """Return the undecided transactions, the oldest first."""
    rows = [
        TransactionRow(
            transactional_id=each.transactional_id,
            group=each.group,
            state=each.state,
            tries=each.tries,
            open_s=each.open_ms // 1000,
            timeout_s=each.timeout_ms / 1000,
            blocks=dict(each.blocks),
        )
        for each in sorted(found, key=lambda each: (-each.open_ms, each.transactional_id, each.group))
    ]
    return OpenTransactions(total=len(rows), shown=tuple(rows[:SHOWN_MAX]))


class LetterReader:
    """Reads the dead letters of groups. `contents` lets keys, values and causes be seen."""

    def __init__(self, brokers: str, runtime: Runtime, *, contents: bool) -> None:
        self._brokers = brokers
        self._runtime = runtime
        self._contents = contents

    async def page(self, group: str) -> LetterPage:
        """Return the oldest waiting letters of a group. Raises: NotFoundError, UnreachableError."""
        async with AsyncDeadLetterQueue(self._brokers, group, runtime=self._runtime) as queue:
            found = await queue.letters(LETTERS_SHOWN_MAX + 1)
        letters = tuple(self._row(each) for each in found[:LETTERS_SHOWN_MAX])
        return LetterPage(group=group, letters=letters, complete=len(found) <= LETTERS_SHOWN_MAX)

    def _row(self, letter: Letter) -> LetterRow:
        return LetterRow(
            position=str(letter.position),
            topic=letter.topic,
            origin=str(letter.origin),
            state=letter.state,
            attempts=letter.attempts,
            dead_ms=letter.dead_ms,
            cause=letter.cause if self._contents else _masked(letter.cause),
            tag=letter.tag,
            key=preview(letter.key) if self._contents else None,
            value=preview(letter.value) if self._contents else None,
            key_bytes=None if letter.key is None else len(letter.key),
            value_bytes=None if letter.value is None else len(letter.value),
        )


def _masked(cause: str) -> str | None:
    """Return the class of the exception alone, None without one: its text may have contents of the record."""
    found = _ERROR.match(cause)
    return found[0] if found is not None else None
