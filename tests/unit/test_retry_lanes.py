"""The lane of the retry topic that a retry is sent to, with a producer in memory."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

from memq.client.listener import retry_topics
from memq.client.listener.retry_records import LANES, OriginalRecord, RetryNote, lane_of
from memq.client.listener.retry_topics import RetryTopics
from memq.errors import OutcomeUnknownError
from memq.topic import Position
from tests.skipping_loop import run_skipping, skip, skipping_runtime


class Producer:
    """Notes topic and partition of each record; the next ones fail with `errors`."""

    sent: ClassVar[list[tuple[str, int | None]]] = []
    errors: ClassVar[list[Exception]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    async def send(self, topic: str, value: object, *, partition: int | None, **_: object) -> Any:
        self.sent.append((topic, partition))

        async def stored() -> Any:
            if self.errors:
                raise self.errors.pop()
            return type("Delivery", (), {"position": Position(0, 1)})

        return stored()


@pytest.mark.parametrize("delay_s", [0.04, 0.5, 1, 1.4, 4.6, 5.4, 31, 90_000])
def test_a_retry_waits_in_the_lane_of_its_delay(delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lane of shorter delays it would delay others."""
    monkeypatch.setattr(retry_topics, "AsyncProducer", Producer)
    monkeypatch.setattr(Producer, "sent", [])
    monkeypatch.setattr(Producer, "errors", [OutcomeUnknownError("no broker has answered")])

    async def work() -> None:
        runtime = skipping_runtime()
        topics = RetryTopics("billing", runtime, [], cast(Any, None), audit=False)
        due_ms = runtime.clock.wall_ms() + round(1_000 * delay_s)
        note = RetryNote(OriginalRecord("orders", Position(0, 9, 9), 5), 2, due_ms, "", "ValueError: no")
        await skip(0.03)
        await topics.send_retry(note, b"x", None, (), None)
        assert Producer.sent == [("billing.retry", lane_of(round(delay_s, 1), LANES))] * 2, "sent again"

    run_skipping(work())
